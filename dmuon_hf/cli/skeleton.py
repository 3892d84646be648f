"""A model without values, from a configuration alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["load_config", "skeleton"]

_AUTO_CLASSES = (
    "AutoModelForImageTextToText",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModel",
)
_ENCODER_DECODERS = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")


def load_config(model: str) -> Any:
    """The configuration of a hub name, a directory with a `config.json`, or such a file.

    Raises:
        ConfigurationError: there is none, or transformers does not know its model type.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        where = "no configuration file" if Path(model).exists() else "neither a path nor a name that the hub answers to"
        reason = " ".join(str(error).split())
        raise ConfigurationError(
            f"{model!r} is {where} that transformers can read: {reason[:300]}. MODEL is a hub name, a directory with a "
            "config.json, or the path of a config.json"
        ) from error


def skeleton(model: str) -> nn.Module:
    """The model on the meta device: names and shapes, no values; needs its configuration alone.

    The class is the one that `architectures` names, which every saved model does; else the first of the Auto classes
    that takes the configuration, encoder-decoders before vision-language, masked and causal language models.

    Raises:
        ConfigurationError: there is no such configuration, it is that of a quantised model, or no class can be made
            of it.
    """
    config = load_config(model)
    if getattr(config, "quantization_config", None):
        raise ConfigurationError(
            f"{model!r} is quantised: its weights cannot take Muon updates. Take the model that it was made from"
        )
    with _quiet(), torch.device("meta"):
        try:
            return _build(config)
        except Exception as error:
            raise ConfigurationError(
                f"no model can be made of the configuration of {model!r} ({type(error).__name__}: {error})"
            ) from error


def _build(config: Any) -> nn.Module:
    import transformers

    for name in getattr(config, "architectures", None) or ():
        model_class = getattr(transformers, name, None)
        if model_class is not None:
            built: nn.Module = model_class(config)
            return built
    first = _ENCODER_DECODERS if getattr(config, "is_encoder_decoder", False) else ()
    for name in (*first, *_AUTO_CLASSES):
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            made: nn.Module = auto.from_config(config)
            return made
    raise ValueError(f"transformers has no class for model type {config.model_type!r}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' remarks about a model that will never run."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
