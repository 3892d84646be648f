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

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

__all__ = ["discard_unreduced_grads", "end_interrupted_pass", "zero_sharded_grads"]


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


def end_interrupted_pass(module: FSDPModule) -> None:
    """Make FSDP2 ready for another forward after an exception in backward; no collective.

    Does nothing unless ``module`` is a root of FSDP2. Modules at or below it give up their whole weights.
    """
    if module._get_fsdp_state()._is_root:
        module.reset_iter_state()


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
