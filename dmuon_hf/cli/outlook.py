"""What each way to lay a model out over ranks would keep, send and take, for this optimizer and for AdamW.

Pure functions of a `Census` and a `Request`: no weights, no process group. With P elements in Muon matrices and Q in
other trainable parameters, N ranks as R replicas of G shards of T tensor-parallel ranks, masters in fp32, weights and
gradients on the wire in w and g bytes an element, per rank:

  state      Muon: 8 bytes for each element that the most loaded owner has, and 12 Q/G; HSDP adds w P/G, the published
             weights of its column. DDP: 4 P + 12 Q, and 4 for each element of that owner. AdamW: 12 (P+Q)/G
  passing    gradients, 4 bytes an element of what the rank keeps; whole weights at once: two units under Z3, all under
             Z2; whole gradients of one unit. Units of FSDP2 beside them, activations and buffers are left out
  bytes      Z3 (2 w + g) (G-1)/G, Z2 (w + g) (G-1)/G of P+Q; between replicas Muon (g + w) (R-1)/R P/G and 2 g (R-1)/R
             Q/G, AdamW 2 g (R-1)/R (P+Q)/G; DDP 2 g (N-1)/N (P+Q), and Muon 4 (N-1)/N P. Tensor parallelism adds what
             its activations and, for Muon, directions and updates (2 x 2 (T-1)/T P/N') send, with N' owners
  step       the model of `dmuon_hf.step_model`, with the activations of tensor parallelism added, not hidden

Elements that the model's tensor-parallel plan cuts count 1/T.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from dmuon_hf.cli.census import Census
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan import Plan, make_plan
from dmuon_hf.step_model import Layout, Machine, Method, forward_backward, optimizer_phase

__all__ = ["Mode", "Outlook", "Request", "Rival", "modes_for", "outlook"]

Mode = Literal["one process", "ddp", "z2", "z3", "hsdp"]
_MASTER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is planned for.

    Attributes:
        ranks: N, processes in all.
        replicas: R, copies of the sharded model; None considers one copy, and one for each node.
        tp: T, ranks that share a layer by tensor parallelism.
        mode: the only mode to look at, or None for all.
        dtype: in which weights are gathered and gradients reduced.
        machine: rates for the predicted time.
        tokens, sequence: of one rank and step; tokens that attend to one another.
        overlap: share of communication that computation hides, 0 to 1.
        memory: bytes of a device, None where it does not matter.
    """

    ranks: int
    machine: Machine
    replicas: int | None = None
    tp: int = 1
    mode: Mode | None = None
    dtype: torch.dtype = torch.bfloat16
    tokens: int = 8192
    sequence: int = 8192
    overlap: float = 1.0
    memory: float | None = None


@dataclass(frozen=True, slots=True)
class Rival:
    """Figures of one optimizer in one mode, per rank: bytes it keeps, bytes in passing, bytes sent, seconds a step."""

    state_bytes: float
    passing_bytes: float
    sent_bytes: float
    step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """One mode: `shards` x `replicas` x `tp` ranks, its owners, and both optimizers."""

    mode: Mode
    shards: int
    replicas: int
    tp: int
    owners: int
    imbalance: float
    largest_owner_elements: int
    muon: Rival
    adamw: Rival
    refusal: str | None

    @property
    def fits(self) -> bool:
        """Whether it can be run."""
        return self.refusal is None


def modes_for(request: Request) -> list[tuple[Mode, int]]:
    """The modes to look at, each with its number of replicas.

    Raises:
        ConfigurationError: the ranks cannot be divided as was asked.
    """
    shards_and_replicas = _divided(request)
    if request.mode is not None:
        return [(request.mode, _replicas_of(request.mode, request, shards_and_replicas))]
    if shards_and_replicas == 1 and request.tp == 1:
        return [("one process", 1)]
    if request.replicas not in (None, 1):
        return [("hsdp", _replicas_of("hsdp", request, shards_and_replicas))]
    modes: list[tuple[Mode, int]] = [] if request.tp > 1 else [("ddp", shards_and_replicas)]
    modes += [("z2", 1), ("z3", 1)]
    shards = max(1, request.machine.node_size // request.tp)
    if request.replicas is None and shards > 1 and shards_and_replicas % shards == 0 and shards_and_replicas > shards:
        modes.append(("hsdp", shards_and_replicas // shards))
    return modes


def _divided(request: Request) -> int:
    """Ranks that are left when tensor parallelism has taken its own."""
    if request.ranks < 1 or request.tp < 1 or (request.replicas or 1) < 1:
        raise ConfigurationError("--ranks, --replicas and --tp have to be at least 1")
    inside = request.tp * (request.replicas or 1)
    if request.ranks % inside:
        raise ConfigurationError(
            f"{request.ranks} ranks cannot be {request.replicas or 1} replicas of shards of {request.tp} "
            f"tensor-parallel ranks: {request.ranks} is no multiple of {inside}"
        )
    return request.ranks // request.tp


def _replicas_of(mode: Mode, request: Request, ranks: int) -> int:
    if mode == "one process" and request.ranks > 1:
        raise ConfigurationError(f"one process is not {request.ranks} ranks: leave --mode out, or pass --ranks 1")
    if mode == "ddp":
        if request.tp > 1:
            raise ConfigurationError("under accelerate DDP does not go with tensor parallelism: take --mode z3 or hsdp")
        return ranks
    if mode == "hsdp":
        replicas = request.replicas or max(1, ranks * request.tp // request.machine.node_size)
        if replicas < 2 or ranks % replicas or ranks // replicas < 2:
            raise ConfigurationError(
                f"HSDP needs at least 2 replicas of at least 2 shards, and {ranks} ranks as {replicas} replicas are "
                f"none: choose --replicas, or --mode z3"
            )
        return replicas
    if request.replicas not in (None, 1):
        raise ConfigurationError(f"--mode {mode} has one replica; {request.replicas} of them are --mode hsdp")
    return 1


def outlook(census: Census, request: Request, mode: Mode, replicas: int) -> Outlook:
    """Figures of one mode."""
    whole = mode in ("ddp", "one process")
    shards = 1 if whole else request.ranks // (request.tp * replicas)
    plan = make_plan(census.candidates, units=census.unit_names, shard_size=shards, replicate_size=replicas)
    owned = Counter[int]()
    for entry in plan.entries:
        owned[plan.flat_owner(entry)] += entry.numel
    sizes = _Sizes(census, request, mode, shards, replicas, max(owned.values(), default=0))
    muon, adamw = (
        Rival(sizes.state(method), sizes.passing(method), sizes.sent(method), sizes.seconds(method, plan))
        for method in ("dmuon", "adamw")
    )
    return Outlook(
        mode=mode,
        shards=shards,
        replicas=replicas,
        tp=request.tp,
        owners=len(owned),
        imbalance=plan.imbalance(),
        largest_owner_elements=sizes.most_owned,
        muon=muon,
        adamw=adamw,
        refusal=next(_refusals(census, request, muon), None),
    )


def _refusals(census: Census, request: Request, muon: Rival) -> Iterator[str]:
    if not census.candidates:
        yield f"{census.model_class} has no matrix for Muon: this would be plain AdamW"
    if request.tp > 1 and not census.has_tp_plan:
        yield f"transformers has no tensor-parallel plan for {census.model_class}: leave --tp out"
    needed = muon.state_bytes + muon.passing_bytes
    if request.memory is not None and needed > request.memory:
        yield f"needs {needed / 2**30:.1f} GiB of {request.memory / 2**30:.1f} GiB before any activation"


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes and seconds of one mode; see the module for the formulas."""

    census: Census
    request: Request
    mode: Mode
    shards: int
    replicas: int
    most_owned_whole: int

    @property
    def wire(self) -> int:
        """Bytes of an element that is gathered or reduced."""
        return _MASTER if self._whole else self.request.dtype.itemsize

    @property
    def _whole(self) -> bool:
        return self.mode in ("ddp", "one process")

    @property
    def _cut(self) -> tuple[float, float]:
        """P and Q of one tensor-parallel rank."""
        tp = self.request.tp
        gone = [elements * (tp - 1) / tp for elements in self.census.split_by_tp]
        return self.census.matrix_numel - gone[0], self.census.rest_numel - gone[1]

    @property
    def _share(self) -> float:
        """Of the matrices' elements, those on one tensor-parallel rank."""
        return self._cut[0] / max(1, self.census.matrix_numel)

    @property
    def most_owned(self) -> int:
        """Elements of the matrices of the rank that owns most."""
        return math.ceil(self.most_owned_whole * self._share)

    def state(self, method: Method) -> float:
        matrices, rest = self._cut
        if method == "adamw":
            return 12 * (matrices + rest) / self.shards
        if self._whole:
            return _MASTER * matrices + _MASTER * self.most_owned + 12 * rest
        column = self.wire * matrices / self.shards if self.mode == "hsdp" else 0
        return 8 * self.most_owned + 12 * rest / self.shards + column

    def passing(self, method: Method) -> float:
        matrices, rest = self._cut
        if self._whole:
            return _MASTER * (matrices + rest)
        unit = self.census.largest_unit * self._share
        gathered = matrices if self.mode == "z2" else min(matrices, 2 * unit)
        kept = (matrices + rest) / self.shards if method == "adamw" else self.most_owned + rest / self.shards
        return _MASTER * kept + self.wire * (gathered + unit)

    def sent(self, method: Method) -> float:
        matrices, rest = self._cut
        both = matrices + rest
        between = (self.replicas - 1) / self.replicas
        if self._whole:
            return between * (2 * self.wire * both + (_MASTER * matrices if method == "dmuon" else 0))
        inside = (self.shards - 1) / self.shards
        transfers = 2 if self.mode == "z2" else 3
        within = transfers * self.wire * inside * both + self._activation_bytes()
        if method == "adamw":
            return within + 2 * self.wire * between * both / self.shards
        column = 2 * self.wire * between * both / self.shards
        return within + column + self._direction_bytes()

    def seconds(self, method: Method, plan: Plan) -> float:
        request = self.request
        layout = Layout(
            self.shards,
            self.replicas,
            reshard=self.mode != "z2",
            gather_bytes=self.wire,
            reduce_bytes=self.wire,
        )
        # Under DDP gradients are averaged on every rank, as for AdamW.
        of_pass: Method = "adamw" if self._whole else method
        part = forward_backward(
            self.census, plan, of_pass, layout, request.machine, tokens=request.tokens, sequence=request.sequence
        )
        step = optimizer_phase(self.census, plan, method, layout, request.machine)
        # A layer's flops, weights and updates are shared by the ranks of tensor parallelism.
        shared = (part.total(request.overlap) + step.total) / request.tp
        beside = self._activation_bytes() + (self._direction_bytes() if method == "dmuon" else 0)
        return shared + beside / request.machine.link(request.tp, request.tp).bandwidth

    def _activation_bytes(self) -> float:
        """Of tensor parallelism: two all-reduces of a layer's output in forward and two in backward, as rings."""
        tp, census = self.request.tp, self.census
        if tp == 1 or not (census.layers and census.hidden):
            return 0.0
        return 4 * census.layers * 2 * (tp - 1) / tp * self.request.tokens * census.hidden * self.request.dtype.itemsize

    def _direction_bytes(self) -> float:
        tp = self.request.tp
        return 2 * 2 * (tp - 1) / tp * self.census.matrix_numel / (self.shards * self.replicas)
