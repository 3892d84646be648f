"""A single-process stand-in for the runtime, which records calls and can play the part of other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from dmuon_hf.core.optim import Muon, binding
from dmuon_hf.core.plan import MatrixSpec

T = TypeVar("T")


class Net(nn.Module):
    """Five matrices of three shapes, one of them a fused pair, beside a norm, biases and a frozen matrix."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a_proj = nn.Linear(12, 20)
        self.b_proj = nn.Linear(20, 12, bias=False)
        self.c_proj = nn.Linear(12, 20, bias=False)
        self.fused_proj = nn.Linear(20, 18, bias=False)
        self.norm = nn.LayerNorm(18)
        self.head = nn.Linear(18, 3)
        self.frozen_proj = nn.Linear(4, 4)
        self.frozen_proj.requires_grad_(False)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.c_proj(self.b_proj(torch.tanh(self.a_proj(x))))
        return self.head(self.norm(self.fused_proj(y)))


FUSED = MatrixSpec(sections=(10, 8))
MATRICES = ("a_proj.weight", "b_proj.weight", "c_proj.weight", "fused_proj.weight")


def is_dedicated(name: str) -> bool:
    return name.endswith("_proj.weight")


@dataclass
class FakeMatrix:
    name: str
    param: nn.Parameter
    spec: MatrixSpec
    is_owner: bool = True
    owner: tuple[int, int] = (0, 0)
    route: str = "muon"
    optim_dtype: torch.dtype | None = None
    part: None = None
    is_sharded: bool = False
    updates: int = 0

    @property
    def state_like(self) -> Tensor:
        return self.param

    @property
    def held_grad(self) -> Tensor | None:
        return self.param.grad

    def mark_updated(self) -> None:
        self.updates += 1


@dataclass
class FakeUnit:
    name: str
    matrices: list[FakeMatrix]
    calls: list[str]

    def publish(self) -> None:
        self.calls.append(f"publish {self.name}")


class FakeRuntime:
    """`OptimizerRuntime` in one process; `others` maps this rank's agreement vector to that of the other ranks."""

    def __init__(self, model: nn.Module, specs: dict[str, MatrixSpec] | None = None) -> None:
        specs = {"fused_proj.weight": FUSED} if specs is None else specs
        self.topology = SimpleNamespace(
            device=torch.device("cpu"),
            slot=(0, 0),
            ranks=None,
            compares_replicas=True,
            keeps_whole=False,
            replica_distance=1,
            tensor=None,
        )
        self.dedicated = {
            name: FakeMatrix(name, param, specs.get(name, MatrixSpec()))
            for name, param in model.named_parameters()
            if is_dedicated(name)
        }
        self.backward_count = 1
        self.reused_buffers: tuple[Any, ...] = ()
        self.left_frozen: frozenset[str] = frozenset()
        self.stacks: dict[str, MatrixSpec] = {}
        self.calls: list[str] = []
        self.prefetch_depth: int | None = None
        self.others: Callable[[Tensor], Tensor] = lambda values: values

    def prepare_grads(self) -> None:
        self.calls.append("prepare")

    def grad_flags(self) -> list[bool]:
        return [matrix.param.grad is not None for matrix in self.dedicated.values()]

    def maximum(self, values: Tensor) -> Tensor:
        self.calls.append("maximum")
        return values.clone()

    def from_first(self, value: Any) -> Any:
        return value

    def misplaced(self, model: nn.Module) -> dict[str, str]:
        return {}

    def unsynchronised(self, param: nn.Parameter) -> str | None:
        return None

    def any_rank(self, condition: bool) -> bool:
        return condition

    def exchange(self, value: T) -> list[T]:
        return [value]

    def agree(self, values: Tensor) -> Tensor:
        self.calls.append("agree")
        return torch.maximum(values, self.others(values.clone()))

    def reduce_sum(self, values: Tensor) -> Tensor:
        self.calls.append("sum")
        return values

    def discard_grads(self) -> None:
        self.calls.append("discard")

    @property
    def matrix_units(self) -> list[FakeUnit]:
        """Two units: the first two matrices, and the others."""
        matrices = list(self.dedicated.values())
        return [FakeUnit("first", matrices[:2], self.calls), FakeUnit("second", matrices[2:], self.calls)]

    def finish_publish(self) -> None:
        self.calls.append("finish publish")

    def prefetch_first(self, count: int) -> None:
        self.calls.append(f"prefetch {count}")

    def prefetch_sharded(self) -> None:
        self.calls.append("prefetch sharded")

    def separate_row_stream(self, separate: bool) -> None:
        self.row_stream = separate

    def fence(self) -> None:
        self.calls.append("fence")

    def set_forward_prefetch_depth(self, depth: int) -> None:
        self.prefetch_depth = depth


def use(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    """Make `runtime` the runtime of every model."""
    monkeypatch.setattr(binding, "require_runtime", lambda model: runtime)


@dataclass
class Setup:
    model: Net
    runtime: FakeRuntime
    optimizer: Muon


def build(monkeypatch: pytest.MonkeyPatch, *, dtype: torch.dtype = torch.float32, **arguments: object) -> Setup:
    model = Net(dtype)
    runtime = FakeRuntime(model)
    use(monkeypatch, runtime)
    return Setup(model, runtime, Muon(model, **arguments))  # type: ignore[arg-type]


def backward(model: nn.Module, seed: int) -> None:
    """Leave the gradients of one seeded batch on `model`."""
    generator = torch.Generator().manual_seed(seed)
    weight = next(model.parameters())
    x = torch.randn(8, 12, generator=generator).to(weight.dtype)
    y = torch.randn(8, 3, generator=generator).to(weight.dtype)
    (model(x) - y).square().mean().backward()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}
