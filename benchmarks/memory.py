"""Count the memory of a rank from the live tensors, next to the formulas, and measure what saving adds.

    python benchmarks/memory.py --ranks 4

Bytes per rank, with P elements in Muon matrices and Q in other parameters, all in fp32, on R replicas of G ranks
(N = R G), L units of equal size:

  matrices     owned: 4 P/N on average, whole matrices, each on its owner; sharded: 4 P/G; DDP: 4 P, the parameters
  momentum     owned and DDP: 4 P/N on average; sharded: 4 P/G
  others       4 Q/G, FSDP2's shards; DDP: 4 Q
  AdamW state  8 Q/G (DDP: 8 Q), and a 4-byte step count per parameter
  columns      4 P/G under HSDP: published weights of a rank's column, in the dtype that weights are gathered in
  in all       the sum of these; `alive` are all tensors that exist, however they are kept: no second copy of anything
  gradients    as large as matrices and others, when backward() has returned
  packed       whole weights, most at once: z3 the unit in use and the one gathered ahead, 8 P/L; z2 all, 4 P
  whole grads  autograd's gradients of whole weights, most at once: one unit, 4 P/L
  step()       what `step()` makes, at most at once. Sharded matrices travel in buckets of 2^18 elements of a worker
               here, instead of 2^24, so that there are several
  peak         in all, gradients and step(); the goal for sharded matrices is AdamW's and two buckets in fp32

AdamW modes have P = 0. Not counted: activations, FSDP2's own buffers, reductions in flight, memory inside of operators.
`packed` and `whole grads` are looked at after every operator of forward and backward.

Saving: the model and its optimizer state (8 P + 12 Q bytes) as a distributed checkpoint that every rank writes its own
part of, and as one file with whole tensors written by rank 0. The rise is the peak of the resident set during the call,
reset right before it, over what was resident then. Linux with glibc only.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import math
import statistics
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from bench_models import batch_of
from contenders import EXPERTS, MODES, OURS, REPLICATED, Contender, Mode, build, choose_modes
from launch import run_ranks
from report import machine, print_header, print_table, write_json
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dmuon_hf.core as dmuon
from dmuon_hf.core.optim import selection
from dmuon_hf.core.runtime import runtime_of
from dmuon_hf.core.runtime.placement import OwnerBroadcast
from dmuon_hf.core.runtime.states import WeightState
from dmuon_hf.core.runtime.unit import Unit
from dmuon_hf.core.sharded import ShardedSource

RESTING = ("matrices", "momentum", "others", "AdamW state", "columns")
"""Summed up as `in all`."""
PASSING = ("gradients", "packed", "whole grads", "step()")
BUCKET_NUMEL = 1 << 18
SAVES = ("distributed", "one file")
_M_MMAP_THRESHOLD = -3
COUNTED = MODES | REPLICATED | EXPERTS
"""Modes that the formulas are about."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Elements and parameters of the model: matrices for Muon, those with owners among them, and others."""

    matrices: int
    owned: int
    others: int
    matrix_params: int
    other_params: int
    units: int


class _Sampler(TorchDispatchMode):
    """Notes the most whole weights and whole gradients that the units hold after any operator."""

    def __init__(self, units: list[Unit]) -> None:
        super().__init__()
        self._units = units
        self.packed = 0
        self.whole_grads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packed = sum(unit.gather_bytes for unit in self._units if unit.weights.state is not WeightState.SHARDED)
        grads = [param.grad for unit in self._units for param in unit.weights.unsharded if param.grad is not None]
        self.packed = max(self.packed, packed)
        self.whole_grads = max(self.whole_grads, sum(grad.nbytes for grad in grads))
        return result


class _Made(TorchDispatchMode):
    """The most bytes at once in tensors that operators have made since this is on."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(storage) for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if id(storage) not in self._sizes and id(storage) not in given:
                self._sizes[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, id(storage))
        self.most = max(self.most, sum(self._sizes.values()))
        return result


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in tree_leaves(values):
        if isinstance(value, Tensor):
            yield _local(value).untyped_storage()


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def count(rank: int, world: int, modes: list[str]) -> dict[str, dict[str, int]]:
    """On each rank: bytes by kind for every mode, after a step and during the next one."""
    small = functools.partial(ShardedSource, bucket_numel=BUCKET_NUMEL)
    result = {}
    with mock.patch.object(selection, "ShardedSource", small):
        for name in modes:
            gc.collect()
            before = _alive()
            result[name] = _count(build(name, world, clock=time.perf_counter), rank, before)
    return result


def _count(contender: Contender, rank: int, before: int) -> dict[str, int]:
    contender.loss(batch_of(rank, 0)).backward()
    contender.update()
    if contender.probe is not None:
        contender.probe.reset()
    gc.collect()
    alive = _alive() - before
    runtime = runtime_of(contender.model)
    sampler = _Sampler([] if runtime is None else runtime.units)
    with sampler:
        contender.loss(batch_of(rank, 1)).backward()
    gradients = _bytes(*(param.grad for param in contender.model.parameters() if param.grad is not None))
    made = _Made()
    with made:
        contender.update()
    return {
        **_resting(contender),
        "alive": alive,
        "gradients": gradients,
        "packed": sampler.packed,
        "whole grads": sampler.whole_grads,
        "step()": made.most,
    }


def _alive() -> int:
    """Bytes of all tensors that Python knows of, each memory once."""
    with warnings.catch_warnings():
        # Looking at some objects of torch is deprecated.
        warnings.simplefilter("ignore")
        tensors = [found for found in gc.get_objects() if isinstance(found, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in _storages(tensors)}.values())


def _resting(contender: Contender) -> dict[str, int]:
    """What a rank keeps between steps."""
    runtime = runtime_of(contender.model)
    sources = contender.optimizer.sources if isinstance(contender.optimizer, dmuon.Muon) else ()
    matrices = [param for source in sources for param in source.params.values()]
    on_muon = {id(param) for param in matrices}
    others = [param for param in contender.model.parameters() if id(param) not in on_muon]
    columns = (
        unit.weights.placement._column
        for unit in ([] if runtime is None else runtime.units)
        if isinstance(unit.weights.placement, OwnerBroadcast)
    )
    return {
        "matrices": _bytes(*matrices),
        "momentum": _bytes(*_state(contender.optimizer, matrices)),
        "others": _bytes(*others),
        "AdamW state": _bytes(*_state(contender.optimizer, others)),
        "columns": sum(column.buffer.nbytes for column in columns if column is not None),
    }


def _state(optimizer: Any, params: list[nn.Parameter]) -> Iterator[Tensor]:
    for param in params:
        yield from (value for value in optimizer.state[param].values() if isinstance(value, Tensor))


def _bytes(*tensors: Tensor) -> int:
    """Bytes that this rank holds of some tensors."""
    return sum(int(_local(tensor).nbytes) for tensor in tensors)


def formulas(mode: Mode, world: int, sizes: Sizes) -> dict[str, float]:
    """Mean bytes per rank by kind, see the module; for equal units, and shards without padding."""
    replicas = 2 if mode.hsdp else 1
    shard = world // replicas
    muon, owned = mode.optimizer in OURS, mode.optimizer == "dmuon"
    matrices = sizes.matrices if muon else 0
    others = sizes.others if muon else sizes.others + sizes.matrices
    params = sizes.other_params if muon else sizes.other_params + sizes.matrix_params
    held = {"dmuon": world, "sharded": shard}.get(mode.optimizer, 1)
    spread = 1 if mode.replicated else shard
    in_units = sizes.owned if owned else 0
    resting = {
        "matrices": 4 * matrices / held,
        "momentum": 4 * matrices / (world if mode.replicated else held),
        "others": 4 * others / spread,
        "AdamW state": 8 * others / spread + 4 * params,
        "columns": 4 * matrices / shard if mode.hsdp and owned else 0.0,
    }
    return {
        **resting,
        "alive": sum(resting.values()),
        "gradients": 4 * matrices / held + 4 * others / spread,
        "packed": 8 * in_units / sizes.units if mode.reshard else 4.0 * in_units,
        "whole grads": 4 * in_units / sizes.units,
        "step()": math.nan,
    }


def _sizes(rank: int, world: int, mode: str) -> Sizes:
    contender = build(mode, world, clock=time.perf_counter)
    runtime = runtime_of(contender.model)
    assert runtime is not None and isinstance(contender.optimizer, dmuon.Muon)
    params = list(contender.model.parameters())
    muon = [param for source in contender.optimizer.sources for param in source.params.values()]
    return Sizes(
        matrices=sum(param.numel() for param in muon),
        owned=sum(param.numel for param in runtime.dedicated.values()),
        others=sum(param.numel() for param in params) - sum(param.numel() for param in muon),
        matrix_params=len(muon),
        other_params=len(params) - len(muon),
        units=len(runtime.units),
    )


class _Stack(nn.Module):
    """Square layers large enough for saving them to show in the resident set."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(depth)])
        self.head = nn.Linear(width, 64)

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = layer(values)
        result: Tensor = self.head(values)
        return result


def save(rank: int, world: int, how: str, width: int, depth: int, directory: str) -> dict[str, int]:
    """On each rank: bytes that saving adds to the resident set, and what this rank keeps of the state."""
    # The C library gives every large block back at once: kept ones would hide a rise, or look like one.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    model = _Stack(width, depth)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    dmuon.dedicate_params(model, mesh, lambda name, _: name.startswith("layers"))
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=1e-3, first_step_progress_log=False)
    model(torch.randn(2, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    # What a first save imports and starts is not part of its peak.
    state_dict_saver.save({"nothing": torch.zeros(1)}, checkpoint_id=f"{directory}/warm_up")
    gc.collect()
    dist.barrier()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    if how == "distributed":
        weights, state = get_state_dict(model, optimizer)
        state_dict_saver.save({"model": weights, "optimizer": state}, checkpoint_id=f"{directory}/checkpoint")
    else:
        whole = {
            "model": dmuon.get_model_state_dict(model),
            "optimizer": dmuon.get_optimizer_state_dict(model, optimizer),
        }
        if rank == 0:
            torch.save(whole, f"{directory}/whole.pt")
    rise = _resident("VmHWM") - before
    params = list(model.parameters())
    return {"rise": rise, "kept": _bytes(*params, *_state(optimizer, params))}


def _resident(field: str) -> int:
    """A field of this process's memory status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def _show_counts(ranks: list[dict[str, dict[str, int]]], expected: dict[str, dict[str, float]]) -> None:
    world = len(ranks)
    for title, kinds in (("between steps", (*RESTING, "in all", "alive")), ("during a step", (*PASSING, "peak"))):
        rows = []
        for name, figures in expected.items():
            of_ranks = [_with_sums(rank[name]) for rank in ranks]
            mean = {kind: statistics.fmean(rank[kind] for rank in of_ranks) for kind in kinds}
            most = {kind: max(rank[kind] for rank in of_ranks) for kind in kinds}
            for label, values in ((name, mean), ("  formula", _with_sums(figures)), ("  most loaded rank", most)):
                rows.append([label, *(_mib(values[kind]) for kind in kinds)])
        print_table(f"MiB of one of {world} ranks {title}", ["mean of the ranks", *kinds], rows)


def _with_sums(values: Mapping[str, float]) -> dict[str, float]:
    """What a rank keeps in all, and with the gradients of a step and what it makes."""
    resting = sum(values[kind] for kind in RESTING)
    return {**values, "in all": resting, "peak": resting + values["gradients"] + values["step()"]}


def _mib(value: float) -> str:
    return f"{value / 2**20:.3f}" if value and not math.isnan(value) else "-"


def _measure_saves(world: int, width: int, depth: int) -> dict[str, list[dict[str, int]]]:
    saves = {}
    for how in SAVES:
        with tempfile.TemporaryDirectory(prefix="dmuon_save_") as directory:
            saves[how] = run_ranks(save, world, how, width, depth, directory)
    return saves


def _show_saves(saves: dict[str, list[dict[str, int]]]) -> None:
    rows = []
    for how, ranks in saves.items():
        rises = [rank["rise"] for rank in ranks]
        kept = [rank["kept"] for rank in ranks]
        row = [how, _mib(rises[0]), _mib(max(rises[1:], default=0)), _mib(kept[0]), _mib(sum(kept))]
        rows.append(row)
    columns = ["checkpoint", "rise on rank 0", "most on another", "kept by rank 0", "kept by all"]
    print_table("Saving: MiB that the resident set rises above what is kept anyway", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: %(default)s)")
    parser.add_argument("--modes", nargs="+", choices=list(COUNTED), help="default: all that can run here")
    parser.add_argument("--width", type=int, default=1024, help="of the model that is saved (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=16, help="of the model that is saved (default: %(default)s)")
    parser.add_argument("--no-saving", action="store_true", help="count only")
    parser.add_argument("--json", metavar="PATH", help="write the result here")
    options = parser.parse_args()
    if not options.no_saving and not Path("/proc/self/clear_refs").exists():
        parser.error("the peak of saving is read from Linux's /proc: pass --no-saving elsewhere")
    where = machine()
    print_header(where)
    chosen = choose_modes(options.modes, options.ranks, COUNTED)
    # Of two dtypes one, where both are there.
    modes = [name for name in chosen if options.modes or "bf16" not in name or COUNTED[name].experts]
    sizes = {
        experts: run_ranks(_sizes, options.ranks, "moe-dmuon-z3-bf16" if experts else "dmuon-z3")[0]
        for experts in {COUNTED[name].experts for name in modes}
    }
    ranks = run_ranks(count, options.ranks, modes)
    expected = {name: formulas(COUNTED[name], options.ranks, sizes[COUNTED[name].experts]) for name in modes}
    _show_counts(ranks, expected)
    saves = {} if options.no_saving else _measure_saves(options.ranks, options.width, options.depth)
    if saves:
        _show_saves(saves)
    counted = {name: [rank[name] for rank in ranks] for name in modes}
    result = {"machine": where, "ranks": options.ranks, "counted": counted, "formulas": expected, "saving": saves}
    write_json(options.json, result)


if __name__ == "__main__":
    main()
