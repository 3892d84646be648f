"""What a run says when it starts: one line of what is trained how, and warnings for what its user may not expect."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from weakref import WeakSet

import torch
from torch import nn

import dmuon_hf.core as dmuon
from dmuon_hf.adapters import has_adapters
from dmuon_hf.core.ns.inputs import compute_dtype
from dmuon_hf.core.plan import MatrixSpec, canonical_name, stored_matrices
from dmuon_hf.core.plan.partition import imbalance
from dmuon_hf.presets import routes

__all__ = ["announce", "announce_at_first_step", "summary_line", "unexpected"]

logger = logging.getLogger(__name__)

_LITTLE, _UNEVEN, _HIGH_RATE = 0.5, 0.25, 0.01
_RULE_NAMES = {"muon": "Muon", "normuon": "NorMuon"}
_announced: WeakSet[torch.optim.Optimizer] = WeakSet()


def announce_at_first_step(model: nn.Module, optimizer: dmuon.Muon) -> None:
    """Let the first step of `optimizer` announce the run, unless something did before.

    The hook stays: torch walks through the hooks while they run, so none can remove itself.
    """
    optimizer.register_step_pre_hook(lambda *_: announce(model, optimizer))


def announce(model: nn.Module, optimizer: dmuon.Muon, *, silent: bool = False) -> None:
    """Log the summary of a run and its warnings, once per optimizer and on the first rank. No communication.

    Args:
        model: the model of the optimizer, prepared.
        silent: count as announced without a word.
    """
    if optimizer in _announced:
        return
    _announced.add(optimizer)
    if silent or (torch.distributed.is_initialized() and torch.distributed.get_rank() != 0):
        return
    _say(summary_line(model, optimizer))
    for warning in unexpected(model, optimizer):
        logger.warning(warning)


def _say(line: str) -> None:
    """Log at INFO; where nobody has set up logging, which would swallow it, write it where warnings go."""
    if logger.hasHandlers() or logger.isEnabledFor(logging.INFO):
        logger.info(line)
    else:
        sys.stderr.write(f"{line}\n")


def summary_line(model: nn.Module, optimizer: dmuon.Muon) -> str:
    """`Muon: 210 matrices, 106.2 M elements (79 %); AdamW: 63 tensors, 28.3 M; 4 owners, imbalance 0.3 %; ...`.

    Matrices are logical ones: a fused weight counts once for each of its parts, a stack of experts for each expert. The
    percentage is of what is trained.
    """
    sizes = _sizes(optimizer)
    specs = _specs(optimizer)
    matrices = sum(
        stored_matrices(param.shape, specs[name])[0] * specs[name].count
        for source in optimizer.sources
        for name, param in source.params.items()
        if param.requires_grad
    )
    share = 100 * sizes["muon"] / max(1, sizes["muon"] + sizes["adamw"])
    others = sum(len(group["params"]) for group in optimizer.param_groups if group["route"] == "adamw")
    parts = [f"{_rules_of(optimizer)}: {matrices} matrices, {_short(sizes['muon'])} elements ({share:.0f} %)"]
    if others:
        parts.append(f"AdamW: {others} tensors, {_short(sizes['adamw'])}")
    frozen = [parameter.numel() for parameter in model.parameters() if not parameter.requires_grad]
    if frozen:
        parts.append(f"frozen: {len(frozen)} tensors, {_short(sum(frozen))}")
    loads = _loads(optimizer)
    if len(loads) > 1:
        parts.append(f"{sum(map(bool, loads))} owners, imbalance {100 * imbalance(loads):.1f} %")
    parts.append(_newton_schulz(optimizer))
    return "; ".join(parts)


def unexpected(model: nn.Module, optimizer: dmuon.Muon) -> Iterator[str]:
    """What a user of Muon would not expect of this run, a sentence each."""
    sizes = _sizes(optimizer)
    share = sizes["muon"] / max(1, sizes["muon"] + sizes["adamw"])
    # Half of LoRA is factors A, which its policy leaves to AdamW.
    if share < (0.0 if sizes["muon"] and has_adapters(model) else _LITTLE):
        reason, elements = _most_of_the_rest(model, optimizer)
        yield (
            f"Muon updates only {100 * share:.0f} % of the trainable elements: {_short(elements)} are {reason}, on "
            "AdamW. dmuon_hf.describe(model, optimizer) shows all, routes= changes it"
        )
    loads = _loads(optimizer)
    if any(loads) and not all(loads):
        yield (
            f"{loads.count(0)} of {len(loads)} ranks own no matrix, so they wait in every step: the model has too few, "
            "or too few large ones"
        )
    elif imbalance(loads) > _UNEVEN:
        yield (
            f"the busiest owner computes {100 * imbalance(loads):.0f} % more than the average: the matrices are too "
            "few, or too unequal, for so many ranks"
        )
    high = {
        group["group_name"]: float(group.get("initial_lr", group["lr"]))
        for group in optimizer.param_groups
        if group["route"] == "muon" and group["lr_scale"] == "match_rms_adamw"
    }
    name = max(high, key=lambda name: high[name], default=None)
    if name is not None and high[name] > _HIGH_RATE:
        yield (
            f"group {name!r} has the learning rate {high[name]:g}; with lr_scale='match_rms_adamw' Muon takes the "
            "rates of AdamW. Rates such as 0.02 belong to lr_scale='original' or 'spectral'"
        )


def _rules_of(optimizer: dmuon.Muon) -> str:
    """`Muon`, `NorMuon`, or both."""
    rules = {group["update_rule"] for group in optimizer.param_groups if group["route"] == "muon"}
    return " and ".join(_RULE_NAMES[rule] for rule in sorted(rules)) or _RULE_NAMES["muon"]


def _sizes(optimizer: dmuon.Muon) -> dict[str, int]:
    """Trained elements by route."""
    sizes = {"muon": 0, "adamw": 0}
    for group in optimizer.param_groups:
        sizes[group["route"]] += sum(parameter.numel() for parameter in group["params"] if parameter.requires_grad)
    return sizes


def _specs(optimizer: dmuon.Muon) -> Mapping[str, MatrixSpec]:
    specs = {name: matrix.spec for name, matrix in optimizer.runtime.dedicated.items()}
    for source in optimizer.sources:
        specs |= {name: matrix.spec for name, matrix in getattr(source, "matrices", {}).items()}
    return specs


def _loads(optimizer: dmuon.Muon) -> list[int]:
    """Cost of Newton-Schulz per rank; one number, or none, where a single process does everything."""
    plans = [getattr(optimizer.runtime, "plan", None), *(getattr(s, "plan", None) for s in optimizer.sources)]
    loads = [list(plan.loads() if callable(plan.loads) else plan.loads) for plan in plans if plan is not None]
    busiest: list[int] = max(loads, key=sum, default=[])
    return busiest


def _newton_schulz(optimizer: dmuon.Muon) -> str:
    ns = optimizer.newton_schulz
    dtype = compute_dtype(torch.empty((), device=optimizer.runtime.topology.device), ns.dtype)
    return f"Newton-Schulz {str(dtype).removeprefix('torch.')}, kernel {ns.kernel_name}"


def _most_of_the_rest(model: nn.Module, optimizer: dmuon.Muon) -> tuple[str, int]:
    """Why most elements on AdamW are there, and how many."""
    table = routes(model)
    on_adamw = {id(p) for group in optimizer.param_groups if group["route"] == "adamw" for p in group["params"]}
    counts: dict[str, int] = {}
    for raw_name, parameter in model.named_parameters():
        if id(parameter) in on_adamw and parameter.requires_grad:
            route = table[canonical_name(raw_name, model)]
            reason = f"{route.reason!r}" if route.route == "adamw" else "chosen by the caller"
            counts[reason] = counts.get(reason, 0) + parameter.numel()
    return max(counts.items(), key=lambda item: item[1])


def _short(elements: int) -> str:
    """`106.2 M`."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if elements >= size:
            return f"{elements / size:.1f} {unit}"
    return str(elements)
