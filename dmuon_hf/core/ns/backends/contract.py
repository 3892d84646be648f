"""What every symmetric-product kernel computes, and the checks all of them share.

``syrk(A, B, C, alpha=, beta=, diag=)`` is ``alpha * A @ B^T + beta * C + diag * I`` where the result is symmetric:

- ``A`` is ``(M, K)`` or a batch ``(L, M, K)``, in float16 or bfloat16, with any strides.
- ``B`` has the shape of ``A``; ``None`` means ``A`` itself, which makes a Gram matrix. Two operands must have
  a symmetric ``A @ B^T``: for two symmetric matrices that commute, this is ``A @ B``.
- ``C`` is symmetric, ``(M, M)`` or ``(L, M, M)``, in the dtype of ``A``. ``None`` means no such term, and so
  does ``beta == 0``: what ``C`` holds, NaN included, then does not matter.
- Products and sums are formed in float32 and rounded once, to nearest even, to the dtype of ``A``.
- The result depends on the lower triangles of ``A @ B^T`` and ``C`` alone; both triangles are written, so that it is
  symmetric to the bit even where the operands are so only up to rounding.
- No element outside the given tensors is read or written, for any ``M`` and ``K``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["DTYPES", "Syrk", "SyrkOperands", "syrk_operands"]

DTYPES = (torch.float16, torch.bfloat16)


class Syrk(Protocol):
    """The call that every backend module offers under the name ``syrk``."""

    def __call__(
        self,
        A: Tensor,
        B: Tensor | None = None,
        C: Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        diag: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """``alpha * A @ B^T + beta * C + diag * I``, ``(M, M)`` or ``(L, M, M)``; ``out`` if it is given.

        Raises:
            ConfigurationError: operands that ``syrk_operands`` refuses.
            NotImplementedError: the backend does not run on this device, or its compiler is not installed.
        """


@dataclass(frozen=True, slots=True)
class SyrkOperands:
    """Checked operands, all with a batch dimension: ``A`` and ``B`` ``(L, M, K)``, ``C`` and ``out`` ``(L, M, M)``."""

    A: Tensor
    B: Tensor
    C: Tensor | None
    out: Tensor
    batched: bool

    @property
    def gram(self) -> bool:
        """Whether both factors are the same tensor."""
        return self.A is self.B

    @property
    def batch(self) -> int:
        return self.A.shape[0]

    @property
    def rows(self) -> int:
        """``M``."""
        return self.A.shape[1]

    @property
    def depth(self) -> int:
        """``K``."""
        return self.A.shape[2]

    def result(self) -> Tensor:
        """``out`` in the form of the caller's ``A``: without the batch dimension if that had none."""
        return self.out if self.batched else self.out[0]


def syrk_operands(
    A: Tensor, B: Tensor | None = None, C: Tensor | None = None, *, out: Tensor | None = None
) -> SyrkOperands:
    """Check the operands of one call, give them a batch dimension, and allocate ``out`` if there is none.

    Raises:
        ConfigurationError: a wrong rank, shape, dtype or device, an operand that requires grad, or an ``out`` that
            shares memory with an operand.
    """
    if A.ndim not in (2, 3):
        raise ConfigurationError(f"syrk: A must be (M, K) or (L, M, K); got shape {tuple(A.shape)}.")
    if A.dtype not in DTYPES:
        raise ConfigurationError(f"syrk: A must be float16 or bfloat16; got {A.dtype}.")
    square = (*A.shape[:-1], A.shape[-2])
    for name, operand, shape in (("B", B, tuple(A.shape)), ("C", C, square), ("out", out, square)):
        if operand is not None:
            _check_like(name, operand, A, shape)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (A, B, C, out)):
        raise ConfigurationError("syrk has no backward: call it under torch.no_grad().")
    if out is None:
        out = torch.empty(square, dtype=A.dtype, device=A.device)
    else:
        _check_output(out, {"A": A, "B": B, "C": C})
    first = _batch(A)
    return SyrkOperands(
        A=first,
        B=first if B is None or B is A else _batch(B),
        C=None if C is None else _batch(C),
        out=_batch(out),
        batched=A.ndim == 3,
    )


def _check_like(name: str, operand: Tensor, A: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(operand.shape) != shape:
        raise ConfigurationError(
            f"syrk: with A of shape {tuple(A.shape)}, {name} must be {shape}; got {tuple(operand.shape)}."
        )
    if operand.dtype != A.dtype:
        raise ConfigurationError(f"syrk: {name} must have the dtype of A, {A.dtype}; got {operand.dtype}.")
    if operand.device != A.device:
        raise ConfigurationError(f"syrk: {name} must be on the device of A, {A.device}; got {operand.device}.")


def _check_output(out: Tensor, operands: dict[str, Tensor | None]) -> None:
    """Tiles are written while others are still read, and each element is written once: neither may overlap."""
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ConfigurationError("syrk: out repeats elements (a stride is 0); give it memory of its own.")
    start, stop = _extent(out)
    for name, operand in operands.items():
        if operand is not None:
            low, high = _extent(operand)
            if low < stop and start < high:
                raise ConfigurationError(f"syrk: out and {name} share memory; give out memory of its own.")


def _extent(x: Tensor) -> tuple[int, int]:
    """First address of ``x`` and the one after its last; equal if ``x`` is empty."""
    start = x.data_ptr()
    if x.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * x.element_size()


def _batch(x: Tensor) -> Tensor:
    return x if x.ndim == 3 else x[None]
