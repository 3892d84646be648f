"""The runtime of one model: its topology, plan, units, and what the optimizer asks of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dmuon_hf.core.device import host_to_device
from dmuon_hf.core.errors import ConfigurationError, DMuonError
from dmuon_hf.core.lockstep import Channel, LockstepMonitor
from dmuon_hf.core.mesh import Topology
from dmuon_hf.core.plan import MatrixSpec, Plan
from dmuon_hf.core.runtime.comm_context import DedicatedCommContext
from dmuon_hf.core.runtime.comm_groups import CommGroup, group_of_unit
from dmuon_hf.core.runtime.dedicated import DedicatedParam
from dmuon_hf.core.runtime.fsdp_grads import (
    discard_unreduced_grads,
    end_interrupted_pass,
    zero_sharded_grads,
)
from dmuon_hf.core.runtime.fsdp_units import note_root
from dmuon_hf.core.runtime.hooks import register_root_hooks, register_unit_hooks
from dmuon_hf.core.runtime.integrity import misplaced, unsynchronised
from dmuon_hf.core.runtime.matrix_units import OwnedUnit, owned_units
from dmuon_hf.core.runtime.schedule import BackwardPass, Prefetcher, graph_task
from dmuon_hf.core.runtime.unit import NO_COPY, Unit
from dmuon_hf.core.scratch import Way

if TYPE_CHECKING:
    from dmuon_hf.core.replicated.averaging import GradientAveraging

__all__ = ["Runtime", "attach", "attached", "hidden", "require_runtime", "runtime_of"]

_ATTRIBUTE = "_dmuon_runtime"

T = TypeVar("T")


class Runtime:
    """State of dedicated ownership on one model.

    In a single process without a process group there are no units: parameters and gradients are plain, and the methods
    below do what is left to do, which mostly is nothing.
    """

    def __init__(
        self,
        *,
        topology: Topology,
        plan: Plan,
        params: Sequence[DedicatedParam],
        units: Sequence[Unit],
        context: DedicatedCommContext,
        delay_second_stage: bool,
    ) -> None:
        self.topology = topology
        self.plan = plan
        self.dedicated: dict[str, DedicatedParam] = {param.name: param for param in params}
        self.units = list(units)
        self.context = context
        self.backward = BackwardPass(self.units, delay_second_stage=delay_second_stage)
        self.prefetcher = Prefetcher(self.units)
        self._root: nn.Module | None = None
        self.is_hidden = False
        self.left_frozen: frozenset[str] = frozenset()
        """Canonical names of what the predicate selected and was frozen then, so that it has no owner."""
        self.stacks: dict[str, MatrixSpec] = {}
        """Stacks of matrices that the predicate selected, which have no owner and stay where they are."""
        self.averaging: GradientAveraging | None = None
        """What averages the gradients of parameters that every rank keeps whole, if there are any."""
        self._fsdp_modules: list[FSDPModule] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime | None:
        """The runtime of a deep copy of the model, in one process; a model on a mesh is not copied (nor is FSDP2's)."""
        if self.topology.is_distributed:
            raise ConfigurationError(NO_COPY)
        copied = Runtime(
            topology=self.topology,
            plan=self.plan,
            params=[copy.deepcopy(param, memo) for param in self.dedicated.values()],
            units=[],
            context=DedicatedCommContext(self.topology.device),
            delay_second_stage=True,
        )
        copied._root = copy.deepcopy(self._root, memo)
        copied.left_frozen = self.left_frozen
        copied.stacks = self.stacks
        return copied

    @property
    def reused_buffers(self) -> frozenset[Way]:
        """See :class:`DedicatedCommContext`."""
        return self.context.reused_buffers

    @property
    def comm_groups(self) -> list[CommGroup]:
        """What travels together, in plan order."""
        return [group_of_unit(unit) for unit in self.units]

    # -- hooks --------------------------------------------------------------------------------------------------------

    def register_hooks(self, root: nn.Module) -> None:
        self._root = root
        for unit in self.units:
            register_unit_hooks(unit, self.backward, self.prefetcher)
        if self.units:
            register_root_hooks(root, self.backward, self.prefetcher)
            note_root(root, self)

    # -- gradients ----------------------------------------------------------------------------------------------------

    @property
    def backward_count(self) -> int:
        """Synchronised backward passes since gradients were last zeroed."""
        return self.backward.synchronised

    def set_requires_sync(self, requires_sync: bool) -> None:
        """Reduce gradients at the end of a backward pass, or accumulate them on this rank."""
        for unit in self.units:
            unit.requires_sync = requires_sync
        if self.averaging is not None:
            self.averaging.requires_sync = requires_sync

    @property
    def requires_sync(self) -> bool:
        averages = self.averaging is None or self.averaging.requires_sync
        return averages and all(unit.requires_sync for unit in self.units)

    def prepare_grads(self) -> None:
        """Make parameters and gradients ready for an update: every ``.grad`` final, every parameter sharded.

        Dedicated gradients are final when ``backward()`` has returned. FSDP2 keeps its root's whole weights after a
        forward that no backward followed, and would use them again after the step: it is told to give them up.

        Raises:
            DMuonError: A backward pass since gradients were zeroed ended with an exception, or gradients of passes
                under ``no_sync`` were never reduced.
        """
        passes: list[BackwardPass | GradientAveraging] = [self.backward, *filter(None, [self.averaging])]
        if graph_task() != -1 and any(each.active for each in passes):
            raise DMuonError(
                "optimizer.step() was called inside of a backward pass, from a hook: a step takes the gradients of all "
                "matrices, so call it when backward() has returned"
            )
        if any(each.active or each.interrupted for each in passes):
            raise DMuonError(
                "a backward pass did not finish, so the gradients are incomplete: call optimizer.zero_grad() and run "
                "the batch again before optimizer.step()"
            )
        for module in self._fsdp():
            module.reshard()
        waiting = next((unit.name for unit in self.units if unit.grads.has_unreduced_passes), None)
        if waiting is None and self.averaging is not None and self.averaging.has_unreduced_passes:
            waiting = "whole parameters"
        if waiting is not None:
            raise DMuonError(
                f"gradients of {waiting!r} were accumulated under no_sync and never reduced to their owners: run the "
                "last micro-batch outside of no_sync, or call optimizer.zero_grad() to drop them"
            )

    def _fsdp(self) -> list[FSDPModule]:
        # Looked up late, and again while there is none: fully_shard comes after dedicate_params.
        if not self._fsdp_modules:
            modules = self._root.modules() if self._root is not None else ()
            self._fsdp_modules = [module for module in modules if isinstance(module, FSDPModule)]
        return self._fsdp_modules

    def grad_flags(self) -> list[bool]:
        """Per dedicated parameter, in plan order: whether this rank has seen a gradient since gradients were zeroed."""
        if not self.units:
            return [param.param.grad is not None for param in self.dedicated.values()]
        seen = {param.name: unit.grads.has_grad(i) for unit in self.units for i, param in enumerate(unit.params)}
        return [seen[name] for name in self.dedicated]

    def discard_grads(self) -> None:
        """Drop gradients that are accumulated on this rank or in flight, and those of an unfinished pass.

        Of dedicated parameters and of those of FSDP2 alike; what is on a ``.grad`` that the caller can reach stays.
        """
        self.backward.abandon()
        for unit in self.units:
            unit.discard_grads()
        if self.averaging is not None:
            self.averaging.reset()
        for module in self._fsdp():
            if self.backward.interrupted:
                end_interrupted_pass(module)
            discard_unreduced_grads(module)
        self.backward.reset()

    def on_module_zeroed(self, set_to_none: bool) -> None:
        """After ``zero_grad`` of the model, which reached the parameters that its modules hold at the moment."""
        for param in self.dedicated.values():
            param.param.grad = None
        for module in self._fsdp():
            zero_sharded_grads(module, set_to_none=set_to_none)
        self.discard_grads()

    # -- what the model uses ------------------------------------------------------------------------------------------

    def misplaced(self, model: nn.Module) -> dict[str, str]:
        """See :func:`~dmuon_hf.core.runtime.integrity.misplaced`."""
        return misplaced(self, model)

    def unsynchronised(self, param: nn.Parameter) -> str | None:
        """See :func:`~dmuon_hf.core.runtime.integrity.unsynchronised`."""
        return unsynchronised(self, param)

    # -- agreement ----------------------------------------------------------------------------------------------------

    def agree(self, values: Tensor) -> Tensor:
        """:meth:`maximum` once per optimizer step, which also compares what the ranks have gathered. Collective.

        Returns:
            The agreed values on the host, which waits for the device here and nowhere else in a step.
        """
        monitor = self.context.monitor
        what = "optimizer agreement"
        digests = host_to_device(monitor.digests(), values.device)
        with monitor.at(what):
            agreed = self._all_reduce(torch.cat([values, digests]), dist.ReduceOp.MAX, what).cpu()
        monitor.compare(agreed[values.numel() :])
        return agreed[: values.numel()]

    def maximum(self, values: Tensor) -> Tensor:
        """Elementwise maximum of a small vector over all ranks of the model, outside of a step. Collective."""
        return self._all_reduce(values, dist.ReduceOp.MAX, "agreement of the ranks")

    def any_rank(self, condition: bool) -> bool:
        """Whether ``condition`` holds on some rank of the model. Collective."""
        if self.topology.grid is None or self.topology.grid.size == 1:
            return condition
        return bool(self.maximum(torch.tensor([float(condition)])).cpu()[0])

    def exchange(self, value: T) -> list[T]:
        """What each rank of the model passes, by flat rank; small and picklable. Collective."""
        grid, what = self.topology.grid, "exchange between the ranks"
        if grid is None or not grid.talks:
            return [value]
        self.context.monitor.issue(Channel.CONTROL, what)
        with self.context.monitor.at(what):
            return grid.all_gather_object(value)

    def reduce_sum(self, values: Tensor) -> Tensor:
        """Elementwise sum of a small vector over all ranks of the model. Collective."""
        return self._all_reduce(values, dist.ReduceOp.SUM, "sum over all ranks")

    def _all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> Tensor:
        if self.topology.grid is None or self.topology.grid.size == 1:
            return values
        result = values.detach().to(self.topology.device, copy=True)
        self.context.monitor.issue(Channel.CONTROL, what)
        with self.context.monitor.at(what):
            self.topology.grid.all_reduce(result, op, wait=self.context.device.host_wait)
        return result

    def from_first(self, value: Any) -> Any:
        """What the first rank passes, on all; it has to be picklable. Collective, outside of a step."""
        grid, what = self.topology.grid, "a value of the first rank"
        if grid is None or not grid.talks:
            return value
        # The first rank may be long in making it. The others wait here, where they can be woken, not in a broadcast.
        self._all_reduce(torch.zeros(1), dist.ReduceOp.MAX, what)
        with self.context.monitor.at(what):
            return grid.broadcast_object(value)

    # -- weights ------------------------------------------------------------------------------------------------------

    def owned_behind(self) -> dict[int, nn.Parameter]:
        """The owned parameter behind each whole one that a module may hold at the moment, by the ``id`` of that."""
        return {
            id(whole): param.param
            for unit in self.units
            for param, whole in zip(unit.params, unit.weights.unsharded, strict=True)
        }

    def set_forward_prefetch_depth(self, depth: int) -> None:
        """How many units are gathered ahead of the one that runs; 0 gathers each where it is needed."""
        if depth < 0:
            raise ConfigurationError(f"forward_prefetch_depth must be 0 or more, got {depth}")
        self.prefetcher.forward_depth = depth

    def prefetch_first(self, count: int) -> None:
        """Issue the gathers of the units that the next forward begins with. Collective (shard group)."""
        self.prefetcher.begin_forward_with(count)

    def prefetch_sharded(self) -> None:
        """Issue the gathers of all parameters on the route ``"sharded_adamw"``. Collective (shard group)."""
        for unit in self.units:
            if unit.params[0].is_sharded:
                unit.weights.gather()

    def separate_row_stream(self, separate: bool) -> None:
        """Whether gathers of those parameters run on a side stream of their own, or on that of the others."""
        self.context.separate_row_stream = separate

    def fence(self) -> None:
        """Wait until every rank has come here and what is published has arrived; nothing on the caller's own groups.

        A diagnosis of suspected mix-ups between communicators: it takes the overlap of steps away. Collective.
        """
        self.finish_publish()
        if self.topology.owns_groups:
            self._all_reduce(torch.zeros(1), dist.ReduceOp.MAX, "fence after the step").cpu()

    def watch_also(self, monitor: LockstepMonitor) -> None:
        """Let waits here end when ``monitor``, of more ranks, proves that they are in vain."""
        self.context.monitor.follow(monitor)

    @property
    def matrix_units(self) -> list[OwnedUnit]:
        """The dedicated parameters by unit, in plan order, for an update that publishes each unit when it is done."""
        publishes = {unit.name: partial(_publish, unit) for unit in self.units}
        return owned_units(list(self.dedicated.values()), self.plan.units, publishes)

    def publish(self, *, asynchronous: bool) -> None:
        """Bring updated weights to the other replicas, in plan order. Collective under HSDP, nothing on a 1-D mesh."""
        for unit in self.units:
            _publish(unit)
        if not asynchronous:
            self.finish_publish()

    def finish_publish(self) -> None:
        """Order the caller after every publish in flight."""
        for unit in self.units:
            unit.weights.placement.finish_publish()


def _publish(unit: Unit) -> None:
    unit.weights.placement.publish()


def attach(model: nn.Module, runtime: Runtime) -> None:
    """Make ``runtime`` the runtime of ``model``."""
    if runtime_of(model) is not None:
        raise ConfigurationError(
            "dedicate_params was already called on this model (or on a part of it): pass everything that is to be "
            "owned in one call"
        )
    model.__dict__[_ATTRIBUTE] = runtime


def runtime_of(model: nn.Module) -> Runtime | None:
    """The runtime of a model, also through wrappers (DDP, torch.compile, PEFT) and when a wrapper's child holds it."""
    return attached(model, _ATTRIBUTE, Runtime)


def attached(model: nn.Module, attribute: str, kind: type[T]) -> T | None:
    """What was put on a model as an attribute, also through wrappers; ``None`` without one of that kind."""
    found = (module.__dict__.get(attribute) for module in model.modules())
    return next((value for value in found if isinstance(value, kind)), None)


def require_runtime(model: nn.Module) -> Runtime:
    """The runtime of a model, or an error that says what to call."""
    runtime = runtime_of(model)
    if runtime is None:
        raise ConfigurationError(
            "this model has no dedicated parameters: call dedicate_params(model, mesh, predicate=...) first"
        )
    return runtime


@contextmanager
def hidden(model: nn.Module) -> Iterator[None]:
    """Take the dedicated parameters out of their modules, for code that treats every parameter it finds."""
    runtime = runtime_of(model)
    places = [
        (module, attribute, param)
        for param in (runtime.dedicated.values() if runtime is not None else ())
        for module, attribute in param.places
    ]
    orders = {module: list(module._parameters) for module, _, _ in places}
    for module, attribute, _ in places:
        del module._parameters[attribute]
    if runtime is not None:
        runtime.is_hidden = True
    try:
        yield
    finally:
        if runtime is not None:
            runtime.is_hidden = False
        for module, attribute, param in places:
            module._parameters[attribute] = param.param
        for module, order in orders.items():
            present = dict(module._parameters)
            module._parameters.clear()
            for name in [*(n for n in order if n in present), *(n for n in present if n not in order)]:
                module._parameters[name] = present[name]
