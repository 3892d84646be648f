"""What ``DistributedDataParallel`` must know about dedicated parameters. Tested with torch 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import _JoinConfig
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.replicated.averaging import GradientAveraging
from dmuon_hf.core.runtime.pipelining import averagings_of
from dmuon_hf.core.runtime.runtime import Runtime, runtime_of

__all__ = ["install_ddp_patch", "uninstall_ddp_patch"]

_IGNORED = "_ddp_params_and_buffers_to_ignore"

_originals: dict[str, Callable[..., None]] = {}


def install_ddp_patch() -> None:
    """Keep matrices with an owner out of the reducer of ``DistributedDataParallel``, and follow its ``no_sync``.

    Runs on import of :mod:`dmuon_hf.core`; safe to repeat. Models without dedicated parameters are wrapped as ever.
    """
    if _originals:
        return
    original = DistributedDataParallel.__init__

    def init(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        runtime = runtime_of(module)
        if runtime is None and averagings_of(module):
            raise ConfigurationError(
                "DistributedDataParallel got a part of the model that dedicate_params_ddp() was called on, whose "
                "gradients are averaged already: wrap that whole model, or call dmuon.replicate(model, mesh) instead, "
                "which also takes several pipeline stages in one ModuleList"
            )
        if runtime is None or not runtime.topology.is_distributed:
            original(self, module, *args, **kwargs)
            return
        averaging = _averaging_of(runtime)
        _check_plain(module, averaging)
        ignored = dict.fromkeys([*getattr(module, _IGNORED, ()), *_names(module, averaging)])
        setattr(module, _IGNORED, list(ignored))
        if any(param.requires_grad for name, param in module.named_parameters() if name not in ignored):
            original(self, module, *args, **kwargs)
        else:
            _wrap_without_reducer(self, module, kwargs.get("process_group"))
        _check_ranks(self, runtime)
        averaging.follow(self)

    _originals["init"] = original
    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def uninstall_ddp_patch() -> None:
    """Put torch's own constructor back; safe to repeat."""
    if _originals:
        DistributedDataParallel.__init__ = _originals.pop("init")  # type: ignore[method-assign]


class _WithoutReducer(DistributedDataParallel):
    """The wrapper of a model whose every trainable parameter is averaged elsewhere, which torch refuses to make.

    Frozen parameters and buffers take the values of the first rank when it is made; buffers are each rank's own then.
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


def _wrap_without_reducer(
    wrapper: DistributedDataParallel, module: nn.Module, process_group: dist.ProcessGroup | None
) -> None:
    """Make the wrapper, whose constructor is running. Collective."""
    nn.Module.__init__(wrapper)
    wrapper.__class__ = _WithoutReducer
    wrapper.module = module
    wrapper.process_group = dist.distributed_c10d._get_default_group() if process_group is None else process_group
    wrapper.require_backward_grad_sync = True
    wrapper._module_parameters = []
    wrapper._join_config = _JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)
    for tensor in [*(p for p in module.parameters() if not p.requires_grad), *module.buffers()]:
        dist.broadcast(tensor.detach(), group=wrapper.process_group, group_src=0)


def _averaging_of(runtime: Runtime) -> GradientAveraging:
    if runtime.averaging is None:
        raise ConfigurationError(
            "dedicate_params() spreads matrices over the ranks, which DistributedDataParallel cannot wrap: use "
            "dedicate_params_ddp(), which keeps them whole, or fully_shard() instead of DistributedDataParallel"
        )
    return runtime.averaging


def _names(module: nn.Module, averaging: GradientAveraging) -> list[str]:
    """All names of what is averaged elsewhere, as ``DistributedDataParallel`` spells them in its several places."""
    averaged = {id(param) for _, param in averaging.params()}
    names = [name for name, param in module.named_parameters(remove_duplicate=False) if id(param) in averaged]
    # Parameters of the module itself are looked up with an empty path before the dot.
    return [*names, *(f".{name}" for name in names if "." not in name)]


def _check_plain(module: nn.Module, averaging: GradientAveraging) -> None:
    averaged = {id(param) for _, param in averaging.params()}
    for name, param in module.named_parameters():
        if isinstance(param, DTensor) and id(param) not in averaged:
            raise ConfigurationError(
                f"{name} is a DTensor, which DistributedDataParallel does not take: do not wrap the model, and call "
                "replicate_tp() after dedicate_params_ddp_tp(), which averages plain parameters too"
            )


def _check_ranks(wrapper: DistributedDataParallel, runtime: Runtime) -> None:
    ranks = dist.get_process_group_ranks(wrapper.process_group)
    data = runtime.topology.data
    owners = [] if data is None else list(data.ranks)
    if sorted(ranks) != sorted(owners):
        raise ConfigurationError(
            f"DistributedDataParallel averages over the ranks {ranks}, but the owners are spread over {owners}: give "
            "both the same"
        )
