"""What learning-rate schedules of torch and transformers read from an optimizer, and what they write into its groups.

Schedules that cycle momentum beside the rate (``OneCycleLR``, ``CyclicLR``) look into ``optimizer.defaults`` once and
then write one key into every group: ``momentum`` where the defaults have no ``betas``. Here that means the coefficient
of the first moment, on both routes: ``momentum`` of a muon group, ``betas[0]`` of an adamw group.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

from torch import Tensor

from dmuon_hf.core.optim.groups import scalar

__all__ = ["schedule_defaults", "take_cycled_momentum"]


def schedule_defaults(*, lr: float | Tensor, momentum: float, weight_decay: float) -> dict[str, float]:
    """``optimizer.defaults``: the values of the muon route, as plain numbers.

    Schedules divide by ``defaults["lr"]`` to turn an absolute bound into a factor on every group's own rate, so it must
    not follow a rate that is a tensor and written in place. ``betas`` are left out: with them a schedule would write
    ``betas`` into muon groups, which have none.
    """
    return {"lr": scalar(lr), "momentum": momentum, "weight_decay": weight_decay}


def take_cycled_momentum(groups: Iterable[MutableMapping[str, Any]]) -> None:
    """Move a ``momentum`` that a schedule wrote into an adamw group to ``betas[0]``; other groups stay as they are."""
    for group in groups:
        if group["route"] == "adamw" and "momentum" in group:
            group["betas"] = (group.pop("momentum"), *group["betas"][1:])
