"""``NewtonSchulz``: algorithm, kernel and coefficients as one value that the optimizer is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns.coefficients import Coefficients, Row, schedule
from dmuon_hf.core.ns.direct import iterate_direct
from dmuon_hf.core.ns.flops import direct_flops, gram_flops
from dmuon_hf.core.ns.gram import iterate_gram
from dmuon_hf.core.ns.inputs import DEFAULT_EPS, supported_dtype
from dmuon_hf.core.ns.iteration import orthogonalize
from dmuon_hf.core.ns.kernels import Kernel, resolve_kernel
from dmuon_hf.core.ns.restarts import check_restarts, segments

__all__ = ["NewtonSchulz"]

BACKENDS = ("gram", "direct", "auto")


@dataclass(frozen=True)
class NewtonSchulz:
    """A configured Newton-Schulz orthogonalisation: immutable, comparable, picklable.

    Calling it is local to the caller, no collective.

    Args:
        backend: ``"gram"`` iterates on the Gram matrix, ``"direct"`` on the matrix itself, ``"auto"`` on whichever
            takes fewer multiplications for the shape, dtype and kernel at hand.
        kernel: What forms the symmetric products: ``"auto"``, ``"quack"``, ``"cute_sm80"`` or ``"cublas"``. The
            environment variable ``DMUON_NS_KERNEL`` counts only when this is ``"auto"``. Resolved at construction. So
            far ``"cublas"`` exists.
        coefficients: ``(a, b, c)`` per step; ``None`` means ``POLAR_EXPRESS_COEFFICIENTS``.
        restart_iterations: Iterations, counted from 0, before which the Gram matrix is formed anew. ``None`` chooses by
            coefficients and dtype: ``[2]`` for five steps of either table, ``[2, 4]`` when they run in bfloat16.
        deterministic: The same as ``kernel="cublas"`` when ``kernel`` is ``"auto"``; an explicit kernel wins, with a
            warning.
        dtype: What to iterate in. ``None``: float16 on accelerators; on a CPU float32, or bfloat16 for bfloat16 input
            where the CPU multiplies it natively; always float64 for float64 input. float16 on a CPU works and is very
            slow.

    Raises:
        ConfigurationError: an unknown name, a malformed table, or restarts for ``"direct"``, which has none.
        NotImplementedError: a kernel that this version does not contain.
    """

    backend: str = "gram"
    kernel: str = "auto"
    coefficients: Coefficients | None = None
    restart_iterations: Sequence[int] | None = None
    deterministic: bool = False
    _: KW_ONLY
    dtype: torch.dtype | None = None
    _kernel: Kernel = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            choices = ", ".join(repr(name) for name in BACKENDS)
            raise ConfigurationError(f"backend={self.backend!r} is no Newton-Schulz algorithm: choose from {choices}.")
        if self.backend == "direct" and self.restart_iterations is not None:
            raise ConfigurationError(
                "restart_iterations has no effect with backend='direct', which forms the Gram matrix anew in every "
                "step; leave it at None or use backend='gram'."
            )
        supported_dtype(self.dtype)
        # Stored as tuples: equality and the hash do not depend on whether lists or tuples were given.
        if self.coefficients is not None:
            object.__setattr__(self, "coefficients", schedule(self.coefficients))
        if self.restart_iterations is not None:
            object.__setattr__(self, "restart_iterations", check_restarts(self.restart_iterations))
        object.__setattr__(self, "_kernel", resolve_kernel(self.kernel, deterministic=self.deterministic))

    @property
    def kernel_name(self) -> str:
        """The kernel that ``kernel`` was resolved to."""
        return self._kernel.name

    def __call__(self, G: Tensor, *, steps: int | None = None) -> Tensor:
        """Orthogonalise ``G``, ``(m, n)`` or a batch ``(B, m, n)``; a new tensor of its shape and dtype.

        A batch gives, up to rounding, what its matrices give one by one.
        ``steps`` takes that many rows of the coefficients, the last one repeated beyond the end; ``None`` takes each
        row once.

        Raises:
            ConfigurationError: another shape or dtype, ``steps`` below 1, or a restart that ``steps`` never reaches.
        """
        rows = schedule(self.coefficients, steps)
        return orthogonalize(
            G, lambda X: self._iterate(X, rows), eps=DEFAULT_EPS, dtype=self.dtype, kernel=self._kernel
        )

    def local(self, G: Tensor, *, steps: int | None = None) -> Tensor:
        """Orthogonalise one whole matrix ``(m, n)``; as calling the object, but a batch is an error."""
        if G.ndim != 2:
            raise ConfigurationError(f"local() takes one matrix (m, n); got shape {tuple(G.shape)}.")
        return self(G, steps=steps)

    def _iterate(self, X: Tensor, rows: tuple[Row, ...]) -> Tensor:
        if self.backend == "direct":
            return iterate_direct(X, rows, self._kernel)
        parts = segments(rows, self.restart_iterations, X.dtype)
        if self.backend == "auto" and _direct_is_cheaper(X, parts, self._kernel):
            return iterate_direct(X, rows, self._kernel)
        return iterate_gram(X, parts, self._kernel)


def _direct_is_cheaper(X: Tensor, parts: tuple[tuple[Row, ...], ...], kernel: Kernel) -> bool:
    m, n = sorted(X.shape[-2:])
    lengths = tuple(map(len, parts))
    share = kernel.symmetric_share(m, X.dtype, X.device)
    gram = gram_flops(m, n, segment_lengths=lengths, share=share)
    return direct_flops(m, n, steps=sum(lengths), share=share) < gram
