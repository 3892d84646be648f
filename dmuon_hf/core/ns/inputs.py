"""What every Newton-Schulz does to its argument first: check it, choose the dtype to iterate in, normalise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["DEFAULT_EPS", "check_eps", "check_matrix", "compute_dtype", "is_tall", "normalizer", "supported_dtype"]

DEFAULT_EPS = 1e-7

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CACHED_NUMEL = 1 << 16
# The keys of `torch.cpu.get_capabilities()` under which a CPU multiplies bfloat16 natively (x86 AMX and AVX-512, ARM).
_NATIVE_BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16")


def check_matrix(G: Tensor) -> None:
    """Raise unless ``G`` is one floating-point matrix ``(m, n)`` or a batch ``(B, m, n)`` of them."""
    if G.ndim not in (2, 3):
        raise ConfigurationError(
            f"Newton-Schulz takes a matrix (m, n) or a batch of matrices (B, m, n); got shape {tuple(G.shape)}. "
            f"Reshape the tensor, or leave it to AdamW."
        )
    if G.dtype not in _DTYPES:
        raise ConfigurationError(f"Newton-Schulz takes real floating-point matrices; got {G.dtype}.")


def check_eps(eps: float) -> None:
    if not (math.isfinite(eps) and eps >= 0.0):
        raise ConfigurationError(f"eps is added to a norm: give a finite number of at least 0; got {eps!r}.")


def supported_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """``dtype``, if the iteration can run in it.

    Raises:
        ConfigurationError: anything but float16, bfloat16, float32, float64 or None.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigurationError(f"Newton-Schulz iterates in {', '.join(map(str, _DTYPES))} or None; got {dtype!r}.")
    return dtype


def compute_dtype(G: Tensor, dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype that the matrix products of ``G`` run in: ``dtype`` if given, else by device and input.

    float64 stays float64. Accelerators use float16, which is as fast as bfloat16 there and three bits finer. A CPU uses
    float32, and bfloat16 for bfloat16 input where it multiplies that natively. It never chooses float16, whose matrix
    product has no fast CPU implementation.
    """
    if dtype is not None:
        return dtype
    if G.dtype == torch.float64:
        return torch.float64
    if G.device.type != "cpu":
        return torch.float16
    if G.dtype == torch.bfloat16 and _cpu_multiplies_bfloat16():
        return torch.bfloat16
    return torch.float32


def _cpu_multiplies_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(key, False)) for key in _NATIVE_BFLOAT16)


def is_tall(G: Tensor) -> bool:
    """Whether the iteration runs on the transpose, so that the Gram matrix is formed on the short side."""
    return G.shape[-2] > G.shape[-1]


def normalizer(G: Tensor, eps: float, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(X, scale, norm)`` with ``X = G / scale / norm``, contiguous, in float32 (float64 for float64 ``G``).

    ``scale`` is the power of two that brings the largest magnitude of each matrix into [1, 2), so dividing by it is
    exact and the squares in the norm can neither overflow nor vanish. ``norm`` is the Frobenius norm of ``G / scale``
    plus ``eps``, hence relative: it does not break ``NS(c * G) == NS(G)``. Both have shape ``(..., 1, 1)``. A matrix
    whose entries are all subnormal is divided by the smallest normal number; a zero matrix stays zero.

    ``X`` is rounded to ``dtype`` in the end if that is given.
    """
    wide = torch.float64 if G.dtype == torch.float64 else torch.float32
    sides = (-2, -1)
    # `aminmax` is the faster reduction, but only over whole tensors.
    low, high = G.aminmax() if G.ndim == 2 else (G.amin(dim=sides, keepdim=True), G.amax(dim=sides, keepdim=True))
    peak = torch.maximum(high, -low).to(wide).clamp_min(torch.finfo(wide).tiny).reshape(*G.shape[:-2], 1, 1)
    scale = peak / (2.0 * torch.frexp(peak).mantissa)
    X = torch.empty(G.shape, dtype=dtype or wide, device=G.device)
    # Rows at a time that stay in the cache of a CPU, through one buffer.
    height = G.shape[-2] if G.device.type != "cpu" else max(1, _CACHED_NUMEL * G.shape[-2] // max(1, G.numel()))
    parts = G.split(height, dim=-2)
    buffer = torch.empty_like(parts[0], dtype=wide, memory_format=torch.contiguous_format)

    def scaled(part: Tensor) -> Tensor:
        values = buffer[..., : part.shape[-2], :]
        # A division that also converts is not vectorised on a CPU: two passes are faster.
        return torch.div(part, scale, out=values) if part.dtype == wide else values.copy_(part).div_(scale)

    # Row by row: one reduction over a large matrix loses three digits in float32.
    norms = [torch.linalg.vector_norm(scaled(part), dim=-1, keepdim=True) for part in parts]
    rows = norms[0] if len(norms) == 1 else torch.cat(norms, dim=-2)
    norm = torch.linalg.vector_norm(rows, dim=-2, keepdim=True).clamp_min(torch.finfo(wide).tiny) + eps
    for part, target in zip(parts, X.split(height, dim=-2), strict=True):
        # A single part is still in the buffer.
        values = buffer if len(parts) == 1 else scaled(part)
        target.copy_(values.div_(norm))
    return X, scale, norm
