"""What FSDP2 keeps of backward passes where no ``zero_grad`` of torch finds it.

``Optimizer.zero_grad`` clears ``.grad`` of the sharded parameters and ``Module.zero_grad`` that of the parameters which
the module holds at the moment. FSDP2 (torch 2.13, with any optimizer) keeps more than that:

- A backward pass without gradient synchronisation leaves whole gradients on the unsharded parameters, or beside them in
  the dtype of the reduction; under HSDP one without all-reduce leaves the output of the reduce-scatter. The next
  synchronised pass adds all of them to its own gradients.
- While a module is unsharded, as the root is after a forward that no backward followed, it does not hold its sharded
  parameters, so that ``Module.zero_grad`` passes over their gradients and the next step applies them.
- A pass that an exception ended leaves the record of a pass under way: the next one reduces no gradient of the root's
  own parameters.

The fields are private to torch; nothing else of dmuon_hf touches them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from dmuon_hf.core.errors import ConfigurationError

__all__ = [
    "discard_unreduced_grads",
    "end_interrupted_pass",
    "follow_requires_grad",
    "refuse_converted",
    "zero_sharded_grads",
]


def discard_unreduced_grads(module: FSDPModule) -> None:
    """Drop the gradients of earlier backward passes that have not reached the ``.grad`` of a sharded parameter.

    Not recursive, no collective. Not to be called inside a backward pass.
    """
    for group in _param_groups(module):
        group._partial_reduce_output = None
        for param in group.fsdp_params:
            param.unsharded_accumulated_grad = None
            # Made by the first gather.
            unsharded = getattr(param, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None


def follow_requires_grad(param: Any) -> None:
    """Take over what was frozen or unfrozen while an FSDP parameter was unsharded.

    The tensor that its module shows then is not the one that it holds otherwise, and torch copies ``requires_grad`` in
    the other direction only. To be called while it is unsharded.
    """
    shown = getattr(param, "_unsharded_param", None)
    if shown is not None and shown.requires_grad != param.sharded_param.requires_grad:
        param.sharded_param.requires_grad_(shown.requires_grad)


def end_interrupted_pass(module: FSDPModule) -> None:
    """Make FSDP2 ready for another forward after an exception in backward; no collective.

    Does nothing unless ``module`` is a root of FSDP2. Modules at or below it give up their whole weights.
    """
    if module._get_fsdp_state()._is_root:
        module.reset_iter_state()


def refuse_converted(fsdp_params: Iterable[Any]) -> None:
    """Refuse parameters that ``module.to(...)`` changed after FSDP2 had begun to gather them.

    It gathers into buffers of the old dtype, or from the storage that they had before, which no update reaches. The
    second happens also where two groups of FSDP2 hold one parameter, tied after it was sharded, that does not divide
    evenly over the ranks: each group pads it into a storage of its own, and the last one wins.

    Raises:
        ConfigurationError: One was cast or moved; it is named.
    """
    for param in fsdp_params:
        shard = param.sharded_param._local_tensor
        moved = shard.untyped_storage().data_ptr() != param._sharded_param_data.untyped_storage().data_ptr()
        if moved or shard.dtype is not param.orig_dtype:
            name = getattr(param, "_param_fqn", None) or f"a parameter of shape {tuple(param.sharded_param.shape)}"
            raise ConfigurationError(
                f"{name} was cast or moved (it is {param.sharded_param.dtype} now) after its first forward, which "
                "FSDP2 does not follow. Cast the model before dedicate_params() and fully_shard(). If nobody cast it, "
                "it is tied to a weight of another FSDP2 group and does not divide evenly over the ranks, so that one "
                "of the two would see no update: make its first dimension (the vocabulary) a multiple of the ranks"
            )


def zero_sharded_grads(module: FSDPModule, *, set_to_none: bool) -> None:
    """``Module.zero_grad`` for the sharded parameters, whether the module holds them now or not. Not recursive."""
    for group in _param_groups(module):
        for param in group.fsdp_params:
            grad: Tensor | None = param.sharded_param.grad
            if grad is None:
                continue
            if set_to_none:
                param.sharded_param.grad = None
            else:
                grad.zero_()


def _param_groups(module: FSDPModule) -> Iterator[Any]:
    yield from module._get_fsdp_state()._fsdp_param_groups
