"""A MODEL of the training step on clusters: formulas and stated assumptions, nothing that was measured.

Everything here is a pure function of shapes, a plan and the rates of a machine. With P elements in Muon matrices and
Q in other parameters, on R replicas of G ranks (N = R G):

  ring       a collective of B bytes on n ranks takes (n-1) (B / (n bandwidth) + calls latency): n-1 hops that carry
             B/n each, in as many launches as there are calls; an all-reduce takes twice that (Thakur et al. 2005)
  link       a group with k ranks in each node has k network cards for its rings, up to the bandwidth inside a node,
             and one of k hops crosses the network
  agreement  a small all-reduce takes 2 ceil(log2 n) latency
  compute    6 (P + Q) + 6 layers hidden sequence flops per token, the attention term for causal attention (PaLM,
             arXiv 2204.02311, appendix B, halved)
  gather     weights travel in bfloat16, once (Z2) or twice (Z3) per step, gradients once in float32, one
             call per unit; under HSDP the 1/G of a rank's column is then reduced over the replicas
  optimizer  the slowest rank's Newton-Schulz flops / ns_rate, plus bytes of the elementwise part / memory bandwidth,
             plus what `step()` communicates:
                 dmuon     flops and elements of the rank's own matrices in the plan; the agreement; under HSDP the
                           publish of P/G elements over the replicas, counted as if nothing hid it
                 gathered  all flops on every rank, after an all-gather of the directions, a call per matrix;
                           momentum and update stay sharded
                 adamw     1/G of all elements, no communication
  overlap    compute + communication - overlap * min(compute, communication) for forward and backward: 1 hides all that
             can be hidden, 0 nothing

Left out: gradient clipping, data loading, launch overheads, stragglers, contention, and whether it fits into memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from dmuon_hf.core.plan import ParamEntry, Plan, newton_schulz_flops

__all__ = [
    "ADAMW_BYTES",
    "GATHER_BYTES",
    "MUON_BYTES",
    "REDUCE_BYTES",
    "Layout",
    "Link",
    "Machine",
    "Method",
    "ModelSize",
    "OptimizerTime",
    "OwnerWork",
    "PassTime",
    "entry_flops",
    "forward_backward",
    "largest_matrix_flops",
    "optimizer_phase",
    "owner_work",
    "ring_seconds",
    "small_all_reduce_seconds",
]

GATHER_BYTES = 2
"""bfloat16: weights, what HSDP publishes, and the directions of the gathered variant. See `Layout.gather_bytes`."""
REDUCE_BYTES = 4
"""Gradients in float32. See `Layout.reduce_bytes`."""
MUON_BYTES = 60
"""Read and written per element of a matrix beside Newton-Schulz, float32: momentum 20, Nesterov 12, the batch 8, the
scale 8, the update 12."""
ADAMW_BYTES = 28
"""Read and written per element by a fused AdamW, float32: four tensors read, three written."""

Method = Literal["dmuon", "gathered", "adamw"]


class ModelSize(Protocol):
    """What the model has to say of itself.

    `matrix_numel` is P, the elements of the matrices for Muon, `rest_numel` Q, those of all other parameters, and
    `units` the number of hook boundaries, which each gather and reduce at once.
    """

    @property
    def matrix_numel(self) -> int: ...

    @property
    def rest_numel(self) -> int: ...

    @property
    def units(self) -> int: ...

    def flops_per_token(self, sequence: int) -> float:
        """Forward and backward, without recomputation."""
        ...


@dataclass(frozen=True, slots=True)
class Link:
    """What connects a rank to its neighbour in a ring: bytes per second, seconds per hop."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates of one rank.

    Attributes:
        ns_rate: Newton-Schulz, flop/s, in the flops of ``newton_schulz_flops`` (no credit for symmetric products).
        compute_rate: forward and backward, flop/s.
        memory_bandwidth: elementwise updates, bytes/s.
        network: of one rank's network card.
        node: inside a node of ``node_size`` ranks.
        fused_buckets: The broadcasts of one unit, one per owner, share the latency of one collective. Otherwise each
            pays its own.
    """

    ns_rate: float
    compute_rate: float
    memory_bandwidth: float
    network: Link
    node: Link
    node_size: int = 8
    fused_buckets: bool = True

    def link(self, ranks: int, span: int) -> Link:
        """A hop of the rings of a group: ``ranks`` of them, evenly spread over ``span`` consecutive ranks.

        Inside a node it is ``node``. Beyond, the k ranks that the group has in each node drive k cards at once, and one
        of k hops crosses the network.
        """
        if span <= self.node_size:
            return self.node
        k = max(1, self.node_size * ranks // span)
        return Link(
            min(self.node.bandwidth, k * self.network.bandwidth),
            (self.network.latency + (k - 1) * self.node.latency) / k,
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """How the ranks share the work: ``shard`` G, ``replicate`` R, Z3 (``reshard``) or Z2, bytes per element sent."""

    shard: int
    replicate: int = 1
    reshard: bool = True
    gather_bytes: int = GATHER_BYTES
    reduce_bytes: int = REDUCE_BYTES

    @property
    def size(self) -> int:
        return self.shard * self.replicate


@dataclass(frozen=True, slots=True)
class OwnerWork:
    """What one rank's matrices cost it: Newton-Schulz flops and elements."""

    flops: int
    numel: int

    def seconds(self, machine: Machine) -> float:
        return self.flops / machine.ns_rate + MUON_BYTES * self.numel / machine.memory_bandwidth


@dataclass(frozen=True, slots=True)
class OptimizerTime:
    """``optimizer.step()`` in seconds, on the slowest rank."""

    newton_schulz: float
    elementwise: float
    communication: float

    @property
    def total(self) -> float:
        return self.newton_schulz + self.elementwise + self.communication


@dataclass(frozen=True, slots=True)
class PassTime:
    """Forward and backward in seconds, before anything overlaps."""

    compute: float
    communication: float

    def total(self, overlap: float) -> float:
        """``overlap`` 1 hides the shorter part behind the longer, 0 adds them up."""
        if not 0.0 <= overlap <= 1.0:
            raise ValueError(f"overlap is a share from 0 to 1, got {overlap}")
        return self.compute + self.communication - overlap * min(self.compute, self.communication)


def entry_flops(entry: ParamEntry) -> int:
    """Newton-Schulz of one parameter, each logical matrix by the cheaper algorithm, as the plan's cost counts it."""
    return sum(
        min(newton_schulz_flops(shape, algorithm="direct"), newton_schulz_flops(shape, algorithm="gram"))
        for shape in entry.logical_shapes
    )


def owner_work(plan: Plan) -> list[OwnerWork]:
    """The work of every rank, by flat rank; zero for a rank that owns nothing."""
    flops, numel = [0] * (plan.shard_size * plan.replicate_size), [0] * (plan.shard_size * plan.replicate_size)
    for entry in plan.entries:
        rank = plan.flat_owner(entry)
        flops[rank] += entry_flops(entry)
        numel[rank] += entry.numel
    return [OwnerWork(*work) for work in zip(flops, numel, strict=True)]


def ring_seconds(payload: float, ranks: int, link: Link, *, calls: int = 1) -> float:
    """``calls`` ring collectives that move ``payload`` bytes together: gather, broadcast, reduce or reduce-scatter."""
    return (ranks - 1) * (payload / (ranks * link.bandwidth) + calls * link.latency)


def small_all_reduce_seconds(ranks: int, link: Link) -> float:
    """A few numbers up and down a binary tree."""
    return 2 * math.ceil(math.log2(ranks)) * link.latency


def forward_backward(
    shape: ModelSize, plan: Plan, method: Method, layout: Layout, machine: Machine, *, tokens: int, sequence: int
) -> PassTime:
    """Compute of ``tokens`` tokens per rank, and the gathers and reductions of one synchronised pass."""
    if method == "dmuon":
        matrices = _weights_and_gradients(
            shape.matrix_numel, layout, machine, calls=_shard_calls(plan, machine), all_reduce=False
        )
        # Norms travel with embedding and head, in the group of the root.
        rest = _weights_and_gradients(shape.rest_numel, layout, machine, calls=1, all_reduce=True)
        communication = matrices + rest
    else:
        numel = shape.matrix_numel + shape.rest_numel
        communication = _weights_and_gradients(numel, layout, machine, calls=shape.units + 1, all_reduce=True)
    compute = tokens * shape.flops_per_token(sequence) / machine.compute_rate
    return PassTime(compute, communication)


def _weights_and_gradients(numel: int, layout: Layout, machine: Machine, *, calls: int, all_reduce: bool) -> float:
    """Seconds to gather weights and reduce gradients; between replicas to an owner, or to all of them."""
    inside, between = _links(layout, machine)
    gathers = 2 if layout.reshard else 1
    seconds = gathers * ring_seconds(layout.gather_bytes * numel, layout.shard, inside, calls=calls)
    seconds += ring_seconds(layout.reduce_bytes * numel, layout.shard, inside, calls=calls)
    column = ring_seconds(layout.reduce_bytes * numel / layout.shard, layout.replicate, between, calls=calls)
    return seconds + (2 if all_reduce else 1) * column


def _links(layout: Layout, machine: Machine) -> tuple[Link, Link]:
    """Of a shard group, whose ranks are neighbours, and of a replicate group, with one rank in each of them."""
    return machine.link(layout.shard, layout.shard), machine.link(layout.replicate, layout.size)


def _shard_calls(plan: Plan, machine: Machine) -> int:
    if machine.fused_buckets:
        return len(plan.units)
    return len({(entry.unit, entry.owner[0]) for entry in plan.entries})


def optimizer_phase(shape: ModelSize, plan: Plan, method: Method, layout: Layout, machine: Machine) -> OptimizerTime:
    """``step()`` of one method on the slowest rank."""
    numel = shape.matrix_numel + shape.rest_numel
    if method == "adamw":
        return OptimizerTime(0.0, _elementwise(ADAMW_BYTES, numel / layout.shard, machine), 0.0)
    rest = _elementwise(ADAMW_BYTES, shape.rest_numel / layout.shard, machine)
    work = owner_work(plan)
    inside, between = _links(layout, machine)
    if method == "gathered":
        gather = ring_seconds(layout.gather_bytes * shape.matrix_numel, layout.shard, inside, calls=len(plan.entries))
        sharded = _elementwise(MUON_BYTES, shape.matrix_numel / layout.shard, machine)
        return OptimizerTime(sum(owner.flops for owner in work) / machine.ns_rate, sharded + rest, gather)
    slowest = max(work, key=lambda owner: owner.seconds(machine))
    publish = ring_seconds(
        layout.gather_bytes * shape.matrix_numel / layout.shard, layout.replicate, between, calls=len(plan.units)
    )
    return OptimizerTime(
        slowest.flops / machine.ns_rate,
        _elementwise(MUON_BYTES, slowest.numel, machine) + rest,
        publish + small_all_reduce_seconds(layout.size, machine.link(layout.size, layout.size)),
    )


def _elementwise(bytes_per_element: int, numel: float, machine: Machine) -> float:
    return bytes_per_element * numel / machine.memory_bandwidth


def largest_matrix_flops(plan: Plan) -> int:
    """What the slowest rank's flops cannot fall below, however many ranks there are."""
    return max(entry_flops(entry) for entry in plan.entries)
