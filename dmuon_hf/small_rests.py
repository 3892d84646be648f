"""Blocks that keep next to nothing beside their owned Muon weights are sharded with the root of the model.

FSDP2 gathers and reduces once per wrapped module. Of a transformer block whose matrices have owners only norms and
biases are left to it: two gathers and a reduction of a few kilobytes per block and step, whose latency is all they
cost. Left to the root's group they travel together, once per pass, and stay whole in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from dmuon_hf.core.runtime import runtime_of
from dmuon_hf.root_group import left_to_root

__all__ = ["SMALL_REST", "small_rests_left_to_root"]

SMALL_REST = 1 << 18
"""Most elements of a block's rest that is left to the root: 1 MiB in fp32, above the norms and biases of a block of
any size and below adapters, routers and experts, whose gathers are worth hiding behind computation."""


@contextmanager
def small_rests_left_to_root(model: nn.Module) -> Iterator[None]:
    """Inside the block ``fully_shard`` passes by blocks of ``model`` with owned weights and a small rest.

    To be entered while the owned weights are hidden. A model whose trainable rest has several dtypes stays as it is,
    since one FSDP2 group must have one. Which blocks are passed follows from shapes, so it is the same on every rank.
    """
    runtime = runtime_of(model)
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if runtime is None or len(dtypes) > 1:
        yield
        return
    holders = {module for param in runtime.dedicated.values() for module, _ in param.places}

    def leaves(group: Sequence[nn.Module]) -> Sequence[nn.Module]:
        return [module for module in group if len(group) == 1 and _has_small_rest(module, holders)]

    with left_to_root(model, leaves):
        yield


def _has_small_rest(module: nn.Module, holders: set[nn.Module]) -> bool:
    if not any(child in holders for child in module.modules()):
        return False
    return sum(parameter.numel() for parameter in module.parameters()) <= SMALL_REST
