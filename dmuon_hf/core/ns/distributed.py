"""Newton-Schulz on a matrix that several ranks hold the columns of: its Gram matrix travels, the matrix does not.

The Gram matrix of the short side is a sum over columns, ``X X^T = sum_r X_r X_r^T``. So ranks that each hold some
columns ``X_r`` agree on it by one all-reduce of ``(k, k)``, form the same factors of it, each for itself, and apply
them to what they hold. Every restart forms it anew: one all-reduce for each segment, and one small exchange of norms
before the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns.coefficients import Coefficients, Row, rows_of_call
from dmuon_hf.core.ns.gram import segment_factor
from dmuon_hf.core.ns.inputs import DEFAULT_EPS, check_eps, check_matrix, compute_dtype, normalizer, supported_dtype
from dmuon_hf.core.ns.kernels import Kernel, resolve_kernel
from dmuon_hf.core.ns.restarts import segments

__all__ = [
    "gram_newton_schulz_distributed_local",
    "gram_newton_schulz_distributed_local_batched",
    "iterate_columns",
    "normalized_columns",
    "orthogonal_columns",
]


def gram_newton_schulz_distributed_local(
    G_local: Tensor,
    group: ProcessGroup | None,
    *,
    transposed: bool,
    steps: int = 5,
    eps: float = DEFAULT_EPS,
    coefficients: Coefficients | None = None,
    restart_iterations: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """This rank's part of ``gram_newton_schulz`` of a matrix whose columns the ranks of ``group`` hold.

    Collective over ``group``: every member calls it, with the same arguments but for its part. What travels is a Gram
    matrix of ``rows x rows`` of the oriented matrix per segment between restarts, in fp32 (fp64 for fp64), whatever the
    number of columns. So choose the orientation whose rows are the short side, if the matrix is cut that way.

    Args:
        G_local: ``(rows, columns)`` of this rank: all rows, some columns, of the whole ``(rows, n)``; with
            ``transposed`` some rows and all columns. Ranks may hold different numbers of them, also none. float16,
            bfloat16, float32 or float64.
        group: The ranks that hold the matrix together; ``None`` where this rank has all of it.
        transposed: Whether ``G_local.T`` is the column shard.
        steps, eps, coefficients, restart_iterations, dtype: As ``gram_newton_schulz`` takes them.

    Returns:
        A new tensor of the shape and dtype of ``G_local``. A zero matrix gives exactly zero; a non-finite entry on any
        rank makes the matrix non-finite on all.

    Raises:
        ConfigurationError: An argument outside of the above.
    """
    if G_local.ndim != 2:
        raise ConfigurationError(
            f"gram_newton_schulz_distributed_local takes one part (rows, columns), got shape {tuple(G_local.shape)}; "
            "the batched variant takes (batch, rows, columns)"
        )
    return gram_newton_schulz_distributed_local_batched(
        G_local.unsqueeze(0),
        group,
        transposed=transposed,
        steps=steps,
        eps=eps,
        coefficients=coefficients,
        restart_iterations=restart_iterations,
        dtype=dtype,
    ).squeeze(0)


@torch.no_grad()
def gram_newton_schulz_distributed_local_batched(
    G_local: Tensor,
    group: ProcessGroup | None,
    *,
    transposed: bool,
    steps: int = 5,
    eps: float = DEFAULT_EPS,
    coefficients: Coefficients | None = None,
    restart_iterations: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`gram_newton_schulz_distributed_local` of ``(batch, rows, columns)``: as many exchanges as for one matrix.

    The number of matrices is the same on all ranks; see there for everything else.
    """
    if G_local.ndim != 3:
        raise ConfigurationError(
            "gram_newton_schulz_distributed_local_batched takes parts (batch, rows, columns), got shape "
            f"{tuple(G_local.shape)}"
        )
    check_matrix(G_local)
    check_eps(eps)
    rows, compute = rows_of_call(coefficients, steps), compute_dtype(G_local, supported_dtype(dtype))
    parts = segments(rows, restart_iterations, compute)
    return orthogonal_columns(
        G_local, group, transposed=transposed, eps=eps, dtype=compute, segments=parts, kernel=resolve_kernel()
    )


def orthogonal_columns(
    G: Tensor,
    group: ProcessGroup | None,
    *,
    transposed: bool,
    eps: float,
    dtype: torch.dtype,
    segments: tuple[tuple[Row, ...], ...],
    kernel: Kernel,
    gram_dtype: torch.dtype | None = None,
) -> Tensor:
    """Normalise a batch of parts, run ``segments`` in ``dtype`` and cast back. Collective."""
    X = normalized_columns(G.mT if transposed else G, group, eps).to(dtype)
    X = iterate_columns(X, segments, kernel, group, gram_dtype)
    return (X.mT if transposed else X).to(G.dtype).contiguous()


def normalized_columns(G: Tensor, group: ProcessGroup | None, eps: float) -> Tensor:
    """This rank's columns of the whole matrices divided by their norms, ``(B, m, n_local)`` in fp32 (fp64 for fp64).

    As :func:`~dmuon_hf.core.ns.inputs.normalizer` of the whole. Collective: one exchange of two numbers per matrix.
    """
    wide = torch.float64 if G.dtype == torch.float64 else torch.float32
    if G.numel() > 0:
        X, scale, norm = normalizer(G, 0.0)
    else:
        # No columns: below what any rank that has some can find.
        X = G.to(wide)
        scale, norm = (G.new_full((G.shape[0], 1, 1), value, dtype=wide) for value in (torch.finfo(wide).tiny / 4, 0.0))
    mine = torch.stack([scale, norm])
    found = [mine]
    if group is not None:
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, mine, group=group)
    scales, norms = torch.stack(found).unbind(1)
    largest = scales.amax(dim=0)
    # Powers of two: exact, but for columns so small beside others that they vanish in the norm.
    total = torch.linalg.vector_norm(norms * (scales / largest), dim=0) + eps
    return X.mul_(norm).mul_(scale / largest).div_(total)


def iterate_columns(
    X: Tensor,
    segments: tuple[tuple[Row, ...], ...],
    kernel: Kernel,
    group: ProcessGroup | None,
    gram_dtype: torch.dtype | None = None,
) -> Tensor:
    """Run ``segments`` on this rank's columns of normalised matrices, ``(B, m, n_local)``. Collective.

    As :func:`~dmuon_hf.core.ns.gram.iterate_gram` of the whole, with sums over ranks in fp32 at least.
    """
    for rows in segments:
        wide = X.to(gram_dtype or X.dtype)
        gram = kernel.gram(wide) if X.shape[-1] > 0 else X.new_zeros((*X.shape[:-1], X.shape[-2]), dtype=wide.dtype)
        if group is not None:
            summed = gram.to(torch.promote_types(gram.dtype, torch.float32)).contiguous()
            dist.all_reduce(summed, group=group)
            gram = summed.to(gram.dtype)
        X = segment_factor(gram, rows, kernel).to(X.dtype) @ X
    return X
