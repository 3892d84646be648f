"""PEFT adapters: which parameters are factors of LoRA, as which matrices Muon may take them, and how files name them.

A LoRA layer adds `scaling * B A` to a frozen weight, `A` `(rank, in)` and `B` `(out, rank)`. DoRA and rsLoRA have the
same factors; DoRA's magnitude is a vector. Nothing is imported from peft unless a model has adapters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan import MatrixSpec, canonical_name

__all__ = [
    "Factor",
    "LoraPolicy",
    "active_adapter",
    "check_lora",
    "has_adapters",
    "lora_factors",
    "renamed",
    "trained_aliases",
    "trained_factors",
]

LoraPolicy = Literal["adamw", "muon_b", "muon"]
_ON_MUON: Mapping[str, str] = {"adamw": "", "muon_b": "B", "muon": "AB"}


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of a LoRA layer. `side` is `"A"` or `"B"`; `spec` says its logical matrices."""

    side: Literal["A", "B"]
    spec: MatrixSpec

    @property
    def reason(self) -> str:
        """Its role in one clause for people."""
        return f"factor {self.side} of LoRA"

    def is_on_muon(self, policy: LoraPolicy) -> bool:
        """Whether a policy gives the factor to Muon."""
        return self.side in _ON_MUON[policy]


def has_adapters(model: nn.Module) -> bool:
    """Whether a model was given adapters, as a PeftModel or by `model.add_adapter`."""
    return bool(getattr(model, "peft_config", None))


def lora_factors(model: nn.Module) -> dict[str, Factor]:
    """The matrices of LoRA by canonical name. Local.

    Without those of convolutions and embeddings, which AdamW trains.
    """
    found: dict[str, Factor] = {}
    if not has_adapters(model):
        return found
    for module_name, module in model.named_modules():
        for side, leaf in (("A", "lora_A"), ("B", "lora_B")):
            factors = getattr(module, leaf, None)
            if not isinstance(factors, nn.ModuleDict):
                continue
            for adapter, factor in factors.items():
                weight = getattr(factor, "weight", None)
                if isinstance(weight, nn.Parameter) and weight.ndim == 2 and min(weight.shape) > 1:
                    name = canonical_name(f"{module_name}.{leaf}.{adapter}.weight", model)
                    experts = getattr(module, "num_experts", 1) or 1
                    found[name] = Factor("A" if side == "A" else "B", _spec(side, tuple(weight.shape), experts))
    return found


def _spec(side: str, shape: tuple[int, ...], experts: int) -> MatrixSpec:
    """Every expert's factor for itself.

    peft keeps those of a stack in one matrix: the rows of `A` one expert after the other, the columns of `B` in turn. A
    factor `B` of an expert is then seen transposed, which orthogonalises it alike.
    """
    if experts == 1:
        return MatrixSpec()
    if side == "A":
        return MatrixSpec(sections=(shape[0] // experts,) * experts)
    return MatrixSpec(groups=shape[1] // experts, sections=(1,) * experts, transposed=True)


def trained_factors(model: nn.Module) -> dict[str, MatrixSpec]:
    """Layouts of the factors of LoRA that train, by canonical name."""
    trained = {canonical_name(name, model) for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: factor.spec for name, factor in lora_factors(model).items() if name in trained}


def check_lora(policy: str, factors: Collection[str]) -> None:
    """Refuse a policy that does not exist, or that would have no effect.

    Raises:
        ConfigurationError: as said.
    """
    if policy not in _ON_MUON:
        raise ConfigurationError(f"lora={policy!r} is no policy for adapters: choose from {sorted(_ON_MUON)}")
    if policy != "adamw" and not factors:
        raise ConfigurationError(f"lora={policy!r} has no effect: the model has no LoRA adapters; leave it out")


def active_adapter(model: nn.Module) -> str | None:
    """The adapter that is trained and saved, the first of several that are active; None without any."""
    if not has_adapters(model):
        return None
    active: Any = getattr(model, "active_adapters", None)
    names: list[str] = list((active() if callable(active) else active) or cast(Any, model.peft_config))
    return names[0]


def trained_aliases(model: nn.Module) -> dict[str, str]:
    """Canonical names of what trains, adapters and `modules_to_save`, -> their names in the files of peft.

    peft leaves out the name of the adapter, by rules that differ between its methods; so it is asked. Local.
    """
    from peft import get_peft_model_state_dict

    names = [canonical_name(name, model) for name in model.state_dict(keep_vars=True)]
    marked = {name: torch.tensor(index) for index, name in enumerate(names)}
    adapter = active_adapter(model)
    assert adapter is not None
    saved = get_peft_model_state_dict(model, marked, adapter_name=adapter, save_embedding_layers=False)
    aliases = {names[int(index)]: name for name, index in saved.items()}
    trained = (canonical_name(name, model) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {name: aliases.get(name, name) for name in trained}


def renamed(entries: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Those of `entries` that have a name or an alias in `aliases`, by name."""
    names = {alias: name for name, alias in aliases.items()}
    return {names.get(key, key): value for key, value in entries.items() if key in names or key in aliases}
