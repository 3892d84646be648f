"""Which candidate is fastest for a product, among those that compute it right."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from dmuon_hf.core.errors import DMuonError
from dmuon_hf.core.ns.autotune.candidates import Choice
from dmuon_hf.core.ns.autotune.product import Product
from dmuon_hf.core.ns.kernels import Kernel

__all__ = ["MARGIN", "Clock", "Finding", "Operands", "clock_of", "fastest"]

# Another candidate has to be this much faster than the default, so that noise does not decide.
MARGIN = 0.03
_ROUNDS = 7
# Long products are timed in fewer rounds: none starts after this many seconds, but there are at least three.
_LEAST_ROUNDS, _BUDGET_SECONDS = 3, 30.0
# A sample lasts this long, so that neither the resolution of the clock nor the start of a kernel counts for much.
_SAMPLE_SECONDS = 2e-3
# Candidates that take so many times as long as the best one in the first two rounds are out.
_HOPELESS = 2.0
_ALPHA, _BETA, _DIAG = 0.75, 1.5, 2.0
# Roundings to the dtype of the result that a kernel may make: of the product, alpha, beta and the diagonal.
_ROUNDINGS = 4
# What float32 products are rounded to, by `torch.get_float32_matmul_precision()`.
_FLOAT32_EPS = {"highest": torch.finfo(torch.float32).eps, "high": 2.0**-10, "medium": 2.0**-7}


class Clock(Protocol):
    """How long something takes."""

    def __call__(self, run: Callable[[], object], repeat: int) -> float:
        """Seconds per call of ``run``, called ``repeat`` times."""


def clock_of(device: torch.device) -> Clock:
    """Device events on an accelerator; on a CPU processor time of all threads, which other processes change least."""
    return _host_seconds if device.type == "cpu" else partial(_device_seconds, device)


def _host_seconds(run: Callable[[], object], repeat: int) -> float:
    start = time.process_time()
    for _ in range(repeat):
        run()
    return (time.process_time() - start) / repeat


def _device_seconds(device: torch.device, run: Callable[[], object], repeat: int) -> float:
    module = torch.get_device_module(device)
    with torch.accelerator.device_index(device.index):
        start, stop = (module.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeat):
            run()
        stop.record()
        stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / repeat


@dataclass(frozen=True, slots=True)
class Operands:
    """Random operands of one product, its exact result, and how far each element may be from that.

    The tolerance of an element is four roundings of what is summed in it, and of the sum a typical element has where
    its own cancels, plus the error of a sum of ``depth`` products: ``|a| |b| sqrt(depth)`` times the rounding of the
    accumulator. A wrong element is off by the sum itself, which is 30 times more in bfloat16, the coarsest dtype.
    """

    product: Product
    A: Tensor
    B: Tensor
    C: Tensor | None
    expected: Tensor
    tolerance: Tensor

    @classmethod
    def of(cls, product: Product, device: torch.device) -> Operands:
        generator = torch.Generator(device).manual_seed(0)
        batch = () if product.batch is None else (product.batch,)
        square = (*batch, product.rows, product.rows)

        def draw(*shape: int) -> Tensor:
            wide = torch.float64 if product.dtype == torch.float64 else torch.float32
            return torch.randn(*shape, generator=generator, dtype=wide, device=device)

        def symmetric() -> Tensor:
            lower = draw(*square).tril()
            return lower + lower.tril(-1).mT

        C = symmetric().to(product.dtype) if product.fused else None
        if product.gram:
            sides = (product.rows, product.depth) if product.row_major else (product.depth, product.rows)
            A = draw(*batch, *sides).div_(math.sqrt(product.depth)).to(product.dtype)
            A = A if product.row_major else A.mT
            return cls(product, A, A.mT, C, *_exact(A, A.mT, None, (1.0, 0.0, 0.0)))
        A = symmetric().div_(math.sqrt(product.depth)).to(product.dtype)
        # Twice the first operand commutes with it to the bit.
        B = A * 2
        A = A if product.row_major else A.mT
        return cls(product, A, B, C, *_exact(A, B, C, (_ALPHA, _BETA if product.fused else 0.0, _DIAG)))

    def run(self, kernel: Kernel) -> Tensor:
        if self.product.gram:
            return kernel.gram(self.A)
        return kernel.symmetric(self.A, self.B, self.C, alpha=_ALPHA, beta=_BETA, diag=_DIAG)

    def problem(self, kernel: Kernel) -> str | None:
        """What is wrong with the result of ``kernel``, or how it failed; ``None`` if it is sound."""
        try:
            result = self.run(kernel)
            if result.shape != self.expected.shape or result.dtype != self.product.dtype:
                return f"its result is {tuple(result.shape)} in {result.dtype}"
            excess = float(((result.to(self.expected.dtype) - self.expected).abs() / self.tolerance).amax())
        except Exception as error:
            # Compilers and launches fail in ways of their own.
            return f"{type(error).__name__}: {error}"
        # Not greater would let NaN pass.
        return None if excess <= 1.0 else f"its result is off by {excess:.3g} times what rounding allows"


def _exact(A: Tensor, B: Tensor, C: Tensor | None, scalars: tuple[float, float, float]) -> tuple[Tensor, Tensor]:
    """``alpha * A @ B + beta * C + diag * I`` in float64, where the device has it, and the tolerance."""
    alpha, beta, diag = scalars
    wide = torch.float32 if A.device.type == "mps" else torch.float64
    eps = _FLOAT32_EPS[torch.get_float32_matmul_precision()] if A.dtype == torch.float32 else torch.finfo(A.dtype).eps
    accumulator = torch.finfo(torch.float64 if A.dtype == torch.float64 else torch.float32).eps
    depth = A.shape[-1]
    left, right = A.to(wide), B.to(wide)
    expected = (left @ right).mul_(alpha)
    norms = left.norm(dim=-1, keepdim=True) @ right.norm(dim=-2, keepdim=True) * alpha
    summed = expected.abs() + norms / math.sqrt(depth)
    if C is not None:
        expected += beta * C.to(wide)
        summed += beta * C.to(wide).abs()
    expected.diagonal(dim1=-2, dim2=-1).add_(diag)
    summed.diagonal(dim1=-2, dim2=-1).add_(diag)
    return expected, summed.mul_(_ROUNDINGS * eps).add_(norms, alpha=(8 + math.sqrt(depth)) * accumulator)


@dataclass(frozen=True, slots=True)
class Finding:
    """What ``fastest`` found.

    Attributes:
        product: What was computed.
        choice: The candidate to take.
        speeds: How many times as fast as the first sound candidate each one is that was timed to the end, that first
            one included.
        refused: Why others may not be taken.
    """

    product: Product
    choice: Choice
    speeds: Mapping[Choice, float]
    refused: Mapping[Choice, str]

    def __str__(self) -> str:
        base = next(iter(self.speeds))
        others = ", ".join(f"{choice} {speed:.2f}" for choice, speed in self.speeds.items() if choice != base)
        return f"{self.product}: {self.choice}; speed relative to {base}: {others or 'no other candidate'}"


def fastest(operands: Operands, kernels: Mapping[Choice, Kernel], clock: Clock, *, margin: float = MARGIN) -> Finding:
    """Check every candidate on ``operands``, time the sound ones in turns, and choose.

    The first sound one stays unless another is faster by ``margin``, both in the median over the rounds and in the
    best times, and not slower in more than one round.

    Raises:
        DMuonError: no candidate is sound.
    """
    refused: dict[Choice, str] = {}
    for choice, kernel in kernels.items():
        reason = operands.problem(kernel)
        if reason is not None:
            refused[choice] = reason
    times = _times(operands, {c: k for c, k in kernels.items() if c not in refused}, clock, refused)
    if not times:
        reasons = "; ".join(f"{choice}: {reason}" for choice, reason in refused.items())
        raise DMuonError(
            f"no kernel computes the Newton-Schulz product {operands.product} right on this machine ({reasons}). "
            f"Leave autotune out to run the default kernel unchecked."
        )
    base = next(iter(times))
    speeds = {
        choice: statistics.median(a / max(b, 1e-12) for a, b in zip(times[base], seconds, strict=True))
        for choice, seconds in times.items()
    }
    clear = [choice for choice in times if _is_clearly_faster(times[choice], times[base], margin)]
    best = max(clear, key=lambda choice: speeds[choice], default=base)
    return Finding(operands.product, best, speeds, refused)


def _is_clearly_faster(seconds: list[float], base: list[float], margin: float) -> bool:
    limit = 1.0 - margin
    ratios = [mine / max(theirs, 1e-12) for mine, theirs in zip(seconds, base, strict=True)]
    slower = sum(ratio >= 1.0 for ratio in ratios)
    return statistics.median(ratios) < limit and min(seconds) < limit * min(base) and slower <= 1


def _times(
    operands: Operands, kernels: Mapping[Choice, Kernel], clock: Clock, refused: dict[Choice, str]
) -> dict[Choice, list[float]]:
    """Seconds per call and round of each candidate that survives all rounds; one alone is not timed.

    Neighbours in time share what else the machine does, so candidates take turns, each round from another start.
    """
    times: dict[Choice, list[float]] = {choice: [] for choice in kernels}
    repeats: dict[Choice, int] = {}
    spent = 0.0
    if len(times) == 1:
        return {choice: [1.0] for choice in times}
    for turn in range(_ROUNDS):
        if turn >= _LEAST_ROUNDS and spent > _BUDGET_SECONDS:
            break
        order = list(times)
        shift = turn % max(1, len(order))
        for choice in order[shift:] + order[:shift]:
            run = partial(operands.run, kernels[choice])
            try:
                seconds = clock(run, repeats.get(choice, 1))
                if turn == 0:
                    repeats[choice] = max(1, math.ceil(_SAMPLE_SECONDS / max(seconds, 1e-6)))
                    seconds = seconds if repeats[choice] == 1 else clock(run, repeats[choice])
                times[choice].append(seconds)
                spent += seconds * repeats[choice]
            except Exception as error:
                refused[choice] = f"{type(error).__name__}: {error}"
                del times[choice]
        if turn == 1 and times:
            limit = _HOPELESS * min(map(min, times.values()))
            first = next(iter(times))
            times = {choice: seconds for choice, seconds in times.items() if choice == first or min(seconds) <= limit}
    return times
