"""The Newton-Schulz polynomial in float64 straight from its definition, and matrices to try it on.

Shares nothing with the package: its own coefficients, normalisation and order of products.
"""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

POLAR_EXPRESS = [
    (8.28721201814563 / 1.05, -23.595886519098837 / 1.05**3, 17.300387312530933 / 1.05**5),
    (4.107059111542203 / 1.05, -2.9478499167379106 / 1.05**3, 0.5448431082926601 / 1.05**5),
    (3.9486908534822946 / 1.05, -2.908902115962949 / 1.05**3, 0.5518191394370137 / 1.05**5),
    (3.3184196573706015 / 1.05, -2.488488024314874 / 1.05**3, 0.51004894012372 / 1.05**5),
    (2.300652019954817 / 1.05, -1.6689039845747493 / 1.05**3, 0.4188073119525673 / 1.05**5),
]
YOU = [
    (4.0848, -6.8946, 2.927),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
JORDAN = [(3.4445, -4.7750, 2.0315)] * 5


def normalized(G: Tensor) -> Tensor:
    X = G.double()
    X = X / X.abs().max()
    return X / X.norm()


def polynomial(X: Tensor, rows: list[tuple[float, float, float]] = POLAR_EXPRESS) -> Tensor:
    """The polynomial of ``rows`` on the singular values of ``X`` as it stands, in float64."""
    X = X.double()
    for a, b, c in rows:
        outer = X @ X.T if X.shape[0] <= X.shape[1] else X.T @ X
        inner = b * outer + c * (outer @ outer)
        X = a * X + (inner @ X if X.shape[0] <= X.shape[1] else X @ inner)
    return X


def exact(G: Tensor, rows: list[tuple[float, float, float]] = POLAR_EXPRESS) -> Tensor:
    """What Newton-Schulz of one matrix ``G`` is without rounding."""
    return polynomial(normalized(G), rows)


def relative_error(result: Tensor, reference: Tensor) -> float:
    return float((result.double() - reference.double()).norm() / reference.double().norm())


def spectrum(m: int, n: int, condition: float, seed: int = 0) -> Tensor:
    """An ``(m, n)`` float32 matrix with random singular vectors and singular values spaced evenly in logarithm."""
    generator = torch.Generator().manual_seed(seed)
    k = min(m, n)
    left = torch.linalg.qr(torch.randn(m, k, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(n, k, generator=generator, dtype=torch.float64)).Q
    values = torch.logspace(0.0, -math.log10(condition), k, dtype=torch.float64)
    return ((left * values) @ right.T).float()


def low_rank(m: int, n: int, rank: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, rank, generator=generator) @ torch.randn(rank, n, generator=generator)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sampled_shapes(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Edge shapes, then ``count`` shapes with a short side of 1 to 257 and an aspect of up to 1:64, either way up."""
    draw = random.Random(seed)
    shapes = [(1, 1), (1, 64), (64, 1), (2, 128), (3, 3), (4, 256), (256, 4), (160, 161), (257, 257), (1024, 16)]
    for _ in range(count):
        short = round(257 ** draw.random())
        long = min(round(short * 2 ** draw.uniform(0, 6)), 1024)
        shapes.append((short, long) if draw.random() < 0.5 else (long, short))
    return shapes


class HalfProducts(TorchDispatchMode):
    """Matrix products of float16 tensors as a GPU does them: exact inputs, float32 sums, one rounding of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "baddbmm") and args[0].dtype == torch.float16:
            assert "out" not in kwargs
            self.products += 1
            return func(*(arg.float() for arg in args), **kwargs).half()
        return func(*args, **kwargs)
