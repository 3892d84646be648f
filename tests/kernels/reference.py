"""What a symmetric-product kernel must give: computed in float64, one triangle from the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Case", "make_case", "syrk_reference", "tolerance"]


def syrk_reference(
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    diag: float = 0.0,
) -> Tensor:
    """``alpha * A @ B^T + beta * C + diag * I`` in float64, its upper triangle mirrored from the lower one."""
    total = alpha * (A.double() @ (A if B is None else B).double().mT)
    if C is not None:
        total += beta * C.double()
    total += diag * torch.eye(A.shape[-2], dtype=torch.float64)
    lower = total.tril()
    return lower + lower.tril(-1).mT


def tolerance(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to ``dtype``, twice: results are sums of terms of size one."""
    return 2 * torch.finfo(dtype).eps


@dataclass(frozen=True)
class Case:
    """Operands and scalars of one call, and what it must give."""

    A: Tensor
    B: Tensor | None
    C: Tensor | None
    alpha: float
    beta: float
    diag: float
    expected: Tensor

    def check(self, out: Tensor) -> None:
        """Assert that ``out`` is the expected matrix to rounding, and symmetric to the bit."""
        assert torch.equal(out, out.mT), "the result is not symmetric"
        scale = self.expected.abs().amax().clamp(min=1.0)
        error = ((out.double() - self.expected).abs().amax() / scale).item()
        assert error <= tolerance(out.dtype), f"relative error {error:.2e}"


def make_case(
    M: int,
    K: int,
    dtype: torch.dtype,
    *,
    batch: int | None = None,
    product: bool = False,
    has_C: bool = True,
    alpha: float = 0.75,
    beta: float = -0.5,
    diag: float = 1.5,
) -> Case:
    """A Gram matrix of ``A``, or with ``product`` of two symmetric matrices that commute (``K`` is ``M`` then).

    ``C`` is not symmetric, and the product of the rounded ``A`` and ``B`` only nearly: the lower triangle must count.
    """
    generator = torch.Generator().manual_seed(100 * M + K)
    lead = () if batch is None else (batch,)
    A = torch.randn(*lead, M, K, generator=generator) / max(K, 1) ** 0.5
    B = None
    if product:
        S = torch.randn(*lead, M, M, generator=generator) / M**0.5
        S = (S + S.mT) / 2
        A, B = S.to(dtype), (S @ S / 2).to(dtype)
    A = A.to(dtype)
    C = torch.randn(*lead, M, M, generator=generator).to(dtype) if has_C else None
    expected = syrk_reference(A, B, C, alpha=alpha, beta=beta, diag=diag)
    return Case(A, B, C, alpha, beta, diag, expected)
