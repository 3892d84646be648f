"""The runtime of a model whose parameters every rank keeps whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dmuon_hf.core.mesh import Topology
from dmuon_hf.core.plan import Plan
from dmuon_hf.core.replicated.averaging import GradientAveraging
from dmuon_hf.core.replicated.bucket import GradBucket, bucket_name
from dmuon_hf.core.replicated.params import ReplicatedParam
from dmuon_hf.core.replicated.publish import UnitPublish
from dmuon_hf.core.runtime.comm_context import DedicatedCommContext
from dmuon_hf.core.runtime.comm_groups import CommGroup, ListedParam, listed
from dmuon_hf.core.runtime.matrix_units import OwnedUnit, owned_units
from dmuon_hf.core.runtime.runtime import Runtime

__all__ = ["ReplicatedRuntime"]


class ReplicatedRuntime(Runtime):
    """Owners compute the updates of their matrices and publish them; gradients are averaged on every rank."""

    def __init__(
        self,
        *,
        topology: Topology,
        plan: Plan,
        params: Sequence[ReplicatedParam],
        publishes: Sequence[UnitPublish],
        averaging: GradientAveraging,
        context: DedicatedCommContext,
    ) -> None:
        super().__init__(
            topology=topology, plan=plan, params=params, units=[], context=context, delay_second_stage=True
        )
        self.averaging = averaging
        self._publishes = list(publishes)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A deep copy of the model, as averages of weights make one, is a plain model without owners."""
        return

    @property
    def backward_count(self) -> int:
        assert self.averaging is not None
        return self.averaging.synchronised

    @property
    def comm_groups(self) -> list[CommGroup]:
        """The units, in plan order, and then what has no owner and is averaged here; nothing is gathered."""
        assert self.averaging is not None
        averages = {bucket.name: bucket for bucket in self.averaging.buckets}
        groups = []
        for publish in self._publishes:
            owned = publish.nbytes_by_owner
            groups.append(
                CommGroup(
                    name=publish.name,
                    params=[listed(param) for param in publish.params],
                    reshard_after_forward=False,
                    gather_bytes=0,
                    reduce_bytes=averages.pop(bucket_name(publish.name)).nbytes,
                    publish_bytes=sum(owned.values()),
                    buckets={(owner, 0): nbytes for owner, nbytes in owned.items()},
                )
            )
        return groups + [_without_owner(bucket) for bucket in averages.values()]

    @property
    def matrix_units(self) -> list[OwnedUnit]:
        publishes = {publish.name: publish.issue for publish in self._publishes}
        return owned_units(list(self.dedicated.values()), self.plan.units, publishes)

    def publish(self, *, asynchronous: bool) -> None:
        """Send every matrix from its owner to all ranks, in plan order. Collective."""
        for param in self.dedicated.values():
            param.mark_updated()
        for publish in self._publishes:
            publish.issue()
        if not asynchronous:
            self.finish_publish()

    def finish_publish(self) -> None:
        for publish in self._publishes:
            publish.wait()


def _without_owner(bucket: GradBucket) -> CommGroup:
    """What :func:`replicate` averages, which every rank updates alike."""
    return CommGroup(
        name=bucket.name,
        params=[ListedParam(name, tuple(param.shape), None, "adamw") for name, param in bucket.params],
        reshard_after_forward=False,
        gather_bytes=0,
        reduce_bytes=bucket.nbytes,
        publish_bytes=0,
        buckets={},
    )
