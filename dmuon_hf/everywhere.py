"""Muon for every Trainer of a process that comes without an optimizer of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from dmuon_hf.factory import DMuonOptimizers

__all__ = ["Everywhere", "everywhere", "tell", "train_everywhere"]

_OWN_WAY = "adamw_torch", "adamw_torch_fused"


class Everywhere:
    """What Trainers without an optimizer are given, and what became of each Trainer that was made.

    Args:
        description: what `create` returned.
        said: the options in words, for messages.
    """

    def __init__(self, description: DMuonOptimizers, said: str) -> None:
        self.description = description
        self._said = said
        self.taken = 0

    def offered_to(self, trainer: Any, arguments: Mapping[str, Any]) -> DMuonOptimizers | None:
        """The description for a Trainer that is being made with `arguments`, None for one that has an optimizer."""
        name = type(trainer).__name__
        own = _own_optimizer(trainer, arguments)
        if own is not None:
            tell(f"{name} keeps its own optimizer ({own})")
            return None
        self.taken += 1
        tell(f"{name} trains with Muon; options: {self._said}")
        return self.description


def _own_optimizer(trainer: Any, arguments: Mapping[str, Any]) -> str | None:
    """What says that a Trainer has an optimizer of its own."""
    from transformers import Trainer

    if any(item is not None for item in arguments.get("optimizers") or ()):
        return "optimizers="
    if arguments.get("optimizer_cls_and_kwargs") is not None:
        return "optimizer_cls_and_kwargs="
    optim = getattr(arguments.get("args"), "optim", None)
    kind = str(getattr(optim, "value", optim))
    if optim is not None and kind not in _OWN_WAY:
        return f"optim={kind!r}"
    makers = [cls for cls in type(trainer).__mro__ if "create_optimizer" in vars(cls)]
    return None if makers[0] is Trainer else f"{makers[0].__name__}.create_optimizer"


_active: list[Everywhere] = []


def train_everywhere(description: DMuonOptimizers, said: str) -> Everywhere:
    """Give `description` to every Trainer made from now on in this process."""
    _active[:] = [Everywhere(description, said)]
    return _active[0]


def everywhere() -> Everywhere | None:
    """What Trainers without an optimizer are given in this process, if anything."""
    return _active[0] if _active else None


def tell(text: str) -> None:
    """Say it on the first rank, whatever the script does to logging."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"dmuon_hf: {text}\n")
        sys.stderr.flush()
