"""Symmetric products by ``gemm_symmetric`` of quack-kernels, on SM90 and newer.

quack computes ``alpha * A @ B + beta * C`` by tiles of one triangle and mirrors them; the diagonal is added afterwards,
which rounds it once more than ``contract`` asks for. Its loads need unit strides of one dimension and, in all others,
multiples of 16 bytes: what does not meet that is computed by the library product, which is logged once per shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from dmuon_hf.core.ns.backends.contract import SyrkOperands, syrk_operands
from dmuon_hf.core.ns.library import LibraryKernel
from dmuon_hf.core.ns.support import log_once

__all__ = ["refusal", "syrk"]

_BYTES = 16


def syrk(
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    diag: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """``alpha * A @ B^T + beta * C + diag * I``, on the current stream of the device of ``A``.

    Deterministic: the same operands give the same bits. The first call of a kind compiles for seconds.

    Raises:
        ConfigurationError: operands that the contract refuses.
        NotImplementedError: quack-kernels cannot be imported.
    """
    operands = syrk_operands(A, B, None if beta == 0 else C, out=out)
    reason = refusal(operands)
    if reason is None:
        gemm_symmetric = _gemm_symmetric()
        scalars = {"alpha": float(alpha), "beta": float(beta)}
        gemm_symmetric(operands.A, operands.B.mT, C=operands.C, out=operands.out, **scalars)
        if diag != 0.0:
            operands.out.diagonal(dim1=-2, dim2=-1).add_(diag)
    else:
        log_once(f"Newton-Schulz kernel quack: {tuple(A.shape)} is computed by the library product, since {reason}")
        whole = LibraryKernel().symmetric(operands.A, operands.B.mT, operands.C, alpha=alpha, beta=beta, diag=diag)
        operands.out.copy_(whole)
    return operands.result()


def refusal(operands: SyrkOperands) -> str | None:
    """Why quack cannot load or store these operands, as the end of a sentence; ``None`` if it can."""
    if operands.out.numel() == 0 or operands.depth == 0:
        return "nothing is to be multiplied"
    named = {"A": operands.A, "B": operands.B, "C": operands.C, "the result": operands.out}
    for name, operand in named.items():
        if operand is not None and not _loads_whole_vectors(operand):
            return (
                f"{name} has strides {operand.stride()}: rows or columns must be contiguous and begin and end on "
                f"{_BYTES} bytes"
            )
    return None


def _loads_whole_vectors(x: Tensor) -> bool:
    batch, rows, columns = x.stride()
    if columns == 1:
        apart, along = rows, x.shape[2]
    elif rows == 1:
        apart, along = columns, x.shape[1]
    else:
        return False
    vector = _BYTES // x.element_size()
    strides = (apart, along) if x.shape[0] == 1 else (apart, along, batch)
    return x.data_ptr() % _BYTES == 0 and all(stride % vector == 0 for stride in strides)


@functools.cache
def _gemm_symmetric() -> Callable[..., Tensor]:
    try:
        from quack.gemm_interface import gemm_symmetric
    except Exception as error:
        # Its compiler fails in ways of its own without a driver.
        raise NotImplementedError(
            f"The 'quack' kernel needs the package quack-kernels, which cannot be imported here ({error}). Install it, "
            f"or choose kernel='cublas'."
        ) from error
    function: Callable[..., Tensor] = gemm_symmetric
    return function
