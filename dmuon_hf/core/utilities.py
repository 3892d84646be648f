"""Calls on a dedicated model outside of the usual step: accumulation, waiting, publishing, looking things up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from dmuon_hf.core.runtime import DedicatedCommContext, DedicatedParam, Runtime, require_runtime, runtime_of

__all__ = [
    "broadcast_all_updates",
    "broadcast_all_updates_async",
    "get_comm_ctx",
    "get_dedicated_params",
    "get_owned_params",
    "no_sync",
    "prepare_muon_grads",
    "wait_all_post_step_broadcasts",
    "wait_all_reduces",
    "wait_all_replicate_broadcasts",
]


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients on each rank, without communication, in backward passes inside the block.

    The next backward outside of it reduces the sum. Covers dedicated parameters and those of FSDP2, ``replicate`` and
    ``DistributedDataParallel``, which takes forward into the block as well. Every rank enters it for the same passes;
    not a collective itself.
    """
    runtime = require_runtime(model)
    fsdp: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    wrappers = () if runtime.averaging is None else runtime.averaging.wrappers
    _set_sync(runtime, fsdp, False)
    try:
        with ExitStack() as stack:
            for wrapper in wrappers:
                stack.enter_context(wrapper.no_sync())
            yield
    finally:
        _set_sync(runtime, fsdp, True)


def _set_sync(runtime: Runtime, fsdp: list[FSDPModule], requires_sync: bool) -> None:
    for module in fsdp:
        module.set_requires_gradient_sync(requires_sync, recurse=False)
    runtime.set_requires_sync(requires_sync)


def prepare_muon_grads(model: nn.Module, *, use_reduce_stream: bool = False, coalesce_wait: bool = False) -> None:
    """Make every pending gradient of a dedicated parameter final on its owner.

    Gradients are final when ``backward()`` returns, so this checks that the pass has finished; ``Muon.step()`` calls
    it.

    Args:
        model: A model that ``dedicate_params`` was called on.
        use_reduce_stream: A way to wait for gradients that are still on their way. None are here: it changes nothing.
        coalesce_wait: As ``use_reduce_stream``.

    Raises:
        ConfigurationError: The model has no dedicated parameters.
        DMuonError: The last backward pass ended with an exception.
    """
    require_runtime(model).prepare_grads()


def wait_all_reduces(model: nn.Module) -> None:
    """Older name of :func:`prepare_muon_grads`."""
    prepare_muon_grads(model)


def broadcast_all_updates(model: nn.Module) -> None:
    """Publish updated weights to the other replicas and wait. Collective under HSDP; nothing on a 1-D mesh."""
    require_runtime(model).publish(asynchronous=False)


def broadcast_all_updates_async(model: nn.Module) -> None:
    """Publish updated weights; the next forward of each unit waits for its own. Collective under HSDP."""
    require_runtime(model).publish(asynchronous=True)


def wait_all_replicate_broadcasts(model: nn.Module) -> None:
    """Wait for every publish in flight. Each rank waits for its own part."""
    require_runtime(model).finish_publish()


def wait_all_post_step_broadcasts(model: nn.Module) -> None:
    """Other name of :func:`wait_all_replicate_broadcasts`."""
    wait_all_replicate_broadcasts(model)


def get_dedicated_params(model: nn.Module) -> list[DedicatedParam]:
    """Every dedicated parameter of a model, in plan order; empty for a model without any. Local to the rank."""
    runtime = runtime_of(model)
    return [] if runtime is None else list(runtime.dedicated.values())


def get_owned_params(model: nn.Module, rank: int | tuple[int, int]) -> list[DedicatedParam]:
    """The dedicated parameters that one rank owns.

    Args:
        model: A model that ``dedicate_params`` was called on.
        rank: Rank in the shard mesh (matches that coordinate in every replica), or ``(shard, replicate)``.
    """
    params = [param for param in get_dedicated_params(model) if not param.is_sharded]
    if isinstance(rank, tuple):
        return [param for param in params if param.owner == rank]
    return [param for param in params if param.owner_shard == rank]


def get_comm_ctx(model: nn.Module) -> DedicatedCommContext | None:
    """The streams and groups of a model's runtime, ``None`` for a model without one."""
    runtime = runtime_of(model)
    return None if runtime is None else runtime.context
