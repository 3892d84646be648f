"""``NewtonSchulz``: algorithm, kernel and coefficients as one value that the optimizer is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns.autotune import Autotuner, Choice, Product, ProductRecorder, wants_autotune
from dmuon_hf.core.ns.coefficients import Coefficients, Row, schedule
from dmuon_hf.core.ns.direct import iterate_direct
from dmuon_hf.core.ns.distributed import orthogonal_columns
from dmuon_hf.core.ns.flops import direct_flops, gram_flops
from dmuon_hf.core.ns.gram import iterate_gram
from dmuon_hf.core.ns.graph import GraphReplay, wants_graphs
from dmuon_hf.core.ns.inputs import DEFAULT_EPS, check_matrix, compute_dtype, supported_dtype
from dmuon_hf.core.ns.iteration import orthogonalize
from dmuon_hf.core.ns.kernels import Kernel, requested_kernel, resolve_kernel
from dmuon_hf.core.ns.restarts import check_restarts, segments

__all__ = ["NewtonSchulz"]

BACKENDS = ("gram", "direct", "auto")


@dataclass(frozen=True)
class NewtonSchulz:
    """A configured Newton-Schulz orthogonalisation: immutable, comparable, picklable.

    Calling it is local to the caller, no collective. A copy, on this machine or another, resolves its kernel anew.

    Args:
        backend: ``"gram"`` iterates on the Gram matrix, ``"direct"`` on the matrix itself, ``"auto"`` on whichever
            takes fewer multiplications for the shape, dtype and kernel at hand.
        kernel: What forms the symmetric products: ``"auto"``, ``"quack"``, ``"cute_sm80"``, ``"triton"`` or
            ``"cublas"``. The environment variable ``DMUON_NS_KERNEL`` counts only when this is ``"auto"``. Resolved at
            construction, for the current device.
        coefficients: ``(a, b, c)`` per step, or the name of a table, ``"polar_express"``, ``"you"`` or ``"quintic"``;
            ``None`` means ``POLAR_EXPRESS_COEFFICIENTS``.
        restart_iterations: Iterations, counted from 0, before which the Gram matrix is formed anew. ``None`` chooses by
            coefficients and dtype: ``[2]`` for five steps of either table, ``[2, 4]`` when they run in bfloat16. Says
            nothing to ``"direct"``, which forms the Gram matrix anew in every step.
        deterministic: The same as ``kernel="cublas"`` when ``kernel`` is ``"auto"``; an explicit kernel wins, with a
            warning.
        dtype: What to iterate in. ``None``: float16 on accelerators; on a CPU float32, or bfloat16 for bfloat16 input
            where the CPU multiplies it natively; always float64 for float64 input. float16 on a CPU works and is very
            slow.
        gram_dtype: Mixed precision, for ``backend="gram"`` and a 16-bit ``dtype``: float32 or float64 for the products
            of the short side, in which most of the rounding error arises, while those with the long side stay in
            ``dtype``. ``None`` means ``dtype``.
        cuda_graph: Replay each shape as a CUDA graph from its second call on. ``None`` follows the environment variable
            ``DMUON_NS_CUDA_GRAPH``, 0 or 1, and means no without it.
        autotune: Time what could form each symmetric product, check it against float64, and keep the fastest: at the
            first call of a shape, or for all shapes when a ``Muon`` is built. An explicit ``kernel`` leaves only its
            own configurations. ``None`` follows the environment variable ``DMUON_NS_AUTOTUNE``, 0 or 1, and means no
            without it or with ``deterministic``.

    Raises:
        ConfigurationError: an unknown name, a malformed table, a ``gram_dtype`` that is not wider than ``dtype``, CUDA
            graphs on a machine without CUDA, or ``autotune=True`` together with ``deterministic=True``.
        NotImplementedError: a kernel that cannot run on this machine; the message says what is missing.
    """

    backend: str = "gram"
    kernel: str = "auto"
    coefficients: Coefficients | None = None
    restart_iterations: Sequence[int] | None = None
    deterministic: bool = False
    _: KW_ONLY
    dtype: torch.dtype | None = None
    gram_dtype: torch.dtype | None = None
    cuda_graph: bool | None = None
    autotune: bool | None = None
    _kernel: Kernel = field(init=False, repr=False, compare=False)
    _graphs: GraphReplay | None = field(init=False, repr=False, compare=False)
    _tuner: Autotuner | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            choices = ", ".join(repr(name) for name in BACKENDS)
            raise ConfigurationError(f"backend={self.backend!r} is no Newton-Schulz algorithm: choose from {choices}.")
        supported_dtype(self.dtype)
        self._check_gram_dtype()
        # Stored as tuples: equality and the hash do not depend on whether lists or tuples were given.
        if self.coefficients is not None:
            object.__setattr__(self, "coefficients", schedule(self.coefficients))
        if self.restart_iterations is not None:
            object.__setattr__(self, "restart_iterations", check_restarts(self.restart_iterations))
        kernel = resolve_kernel(self.kernel, deterministic=self.deterministic)
        tunes = wants_autotune(self.autotune, deterministic=self.deterministic)
        tuner = Autotuner(kernel, requested_kernel(self.kernel)) if tunes else None
        object.__setattr__(self, "_tuner", tuner)
        object.__setattr__(self, "_kernel", kernel if tuner is None else tuner.kernel)
        object.__setattr__(self, "_graphs", GraphReplay() if wants_graphs(self.cuda_graph) else None)

    def _check_gram_dtype(self) -> None:
        if self.gram_dtype is None:
            return
        if self.backend != "gram":
            raise ConfigurationError(
                f"gram_dtype={self.gram_dtype} has no effect with backend={self.backend!r}: leave it out or use 'gram'."
            )
        if self.gram_dtype not in (torch.float32, torch.float64) or self.dtype not in (torch.float16, torch.bfloat16):
            raise ConfigurationError(
                "gram_dtype is float32 or float64, beside an explicit dtype of float16 or bfloat16; got "
                f"gram_dtype={self.gram_dtype}, dtype={self.dtype}."
            )

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], NewtonSchulz], tuple[dict[str, Any]]]:
        return _rebuild, ({f.name: getattr(self, f.name) for f in fields(self) if f.init},)

    @property
    def kernel_name(self) -> str:
        """The kernel that ``kernel`` was resolved to."""
        return self._kernel.name

    @property
    def graphs(self) -> GraphReplay | None:
        """The CUDA graphs captured so far; ``None`` where none are to be."""
        return self._graphs

    @property
    def tuner(self) -> Autotuner | None:
        """What was chosen for each product so far; ``None`` without ``autotune``."""
        return self._tuner

    @property
    def settings(self) -> str:
        """``fingerprint`` without what was found by timing."""
        text = (
            f"backend={self.backend!r}, kernel={self.kernel_name!r}, coefficients={schedule(self.coefficients)}, "
            f"restart_iterations={self.restart_iterations}, dtype={self.dtype}, gram_dtype={self.gram_dtype}"
        )
        return text if self._tuner is None else f"{text}, autotune=True"

    @property
    def fingerprint(self) -> str:
        """All that the result depends on, with the kernels that run: ranks that update alike have the same one."""
        return self.settings if self._tuner is None else f"{self.settings}, {self._tuner}"

    def __call__(self, G: Tensor, *, steps: int | None = None) -> Tensor:
        """Orthogonalise ``G``, ``(m, n)`` or a batch ``(B, m, n)``; a new tensor of its shape and dtype.

        A batch gives, up to rounding, what its matrices give one by one.
        ``steps`` takes that many rows of the coefficients, the last one repeated beyond the end; ``None`` takes each
        row once.

        Raises:
            ConfigurationError: another shape or dtype, ``steps`` below 1, or a restart that ``steps`` never reaches.
        """
        rows = schedule(self.coefficients, steps)
        if self._tuner is not None:
            check_matrix(G)
            self._tuner.tune_once(
                (G.shape, G.dtype, G.device, rows),
                lambda: self.products(G.shape, dtype=G.dtype, device=G.device, steps=steps),
                G.device,
            )
        if self._graphs is None:
            return self._orthogonalize(G, rows)
        check_matrix(G)
        return self._graphs(lambda static: self._orthogonalize(static, rows), G, rows)

    def local(self, G: Tensor, *, steps: int | None = None) -> Tensor:
        """Orthogonalise one whole matrix ``(m, n)``; as calling the object, but a batch is an error."""
        if G.ndim != 2:
            raise ConfigurationError(f"local() takes one matrix (m, n); got shape {tuple(G.shape)}.")
        return self(G, steps=steps)

    def computes_in(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """What matrices of ``dtype`` on ``device`` are iterated in."""
        return compute_dtype(torch.empty(0, dtype=dtype, device=device), self.dtype)

    @torch.no_grad()
    def columns(self, G: Tensor, group: ProcessGroup, *, transposed: bool, steps: int | None = None) -> Tensor:
        """This rank's parts of whole matrices, ``(B, m, n)``, orthogonalised by Gram matrices. Collective.

        As :func:`~dmuon_hf.core.ns.distributed.gram_newton_schulz_distributed_local_batched`, configured like this
        object. Neither tuned nor replayed as a graph.
        """
        check_matrix(G)
        dtype = compute_dtype(G, self.dtype)
        return orthogonal_columns(
            G,
            group,
            transposed=transposed,
            eps=DEFAULT_EPS,
            dtype=dtype,
            segments=self._segments(schedule(self.coefficients, steps), dtype),
            kernel=self._kernel if self._tuner is None else self._tuner.default,
            gram_dtype=self.gram_dtype,
        )

    def segment_count(self, dtype: torch.dtype, device: torch.device, *, steps: int | None = None) -> int:
        """How many Gram matrices :meth:`columns` forms for matrices of ``dtype``."""
        compute = compute_dtype(torch.empty(0, dtype=dtype, device=device), self.dtype)
        return len(self._segments(schedule(self.coefficients, steps), compute))

    def products(
        self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device, steps: int | None = None
    ) -> set[Product]:
        """The symmetric products of a call with a tensor like this, found by running it on a tensor without data."""
        recorder = ProductRecorder(self._kernel if self._tuner is None else self._tuner.default, device)
        compute = self.computes_in(dtype, device)
        twin = object.__new__(NewtonSchulz)
        twin.__dict__.update(self.__dict__, dtype=compute, _kernel=recorder, _graphs=None, _tuner=None)
        twin(torch.empty(shape, dtype=dtype, device="meta"), steps=steps)
        return recorder.products

    def adopt(self, choices: Mapping[Product, Choice]) -> None:
        """Replace what was found by timing by ``choices``, which all ranks have alike, and tune nothing any more."""
        if self._tuner is None:
            raise ConfigurationError("this NewtonSchulz does not tune: give it autotune=True.")
        self._tuner.adopt(choices)
        if self._graphs is not None:
            # Graphs that were captured run the kernels of before.
            object.__setattr__(self, "_graphs", GraphReplay())

    def _orthogonalize(self, G: Tensor, rows: tuple[Row, ...]) -> Tensor:
        return orthogonalize(
            G, lambda X: self._iterate(X, rows), eps=DEFAULT_EPS, dtype=self.dtype, kernel=self._kernel
        )

    def flops(
        self, m: int, n: int, *, dtype: torch.dtype, device: torch.device | str = "cpu", steps: int | None = None
    ) -> float:
        """Multiplications and additions in the matrix products of one ``(m, n)`` matrix iterated in ``dtype``.

        A symmetric product counts for the part of it that the kernel computes.
        """
        rows = schedule(self.coefficients, steps)
        cost = {"direct": self._direct_flops, "gram": self._gram_flops}
        shape = (m, n, rows, dtype, torch.device(device))
        return cost[self._algorithm(*shape)](*shape)

    def _iterate(self, X: Tensor, rows: tuple[Row, ...]) -> Tensor:
        m, n = X.shape[-2:]
        if self._algorithm(m, n, rows, X.dtype, X.device) == "direct":
            return iterate_direct(X, rows, self._kernel)
        return iterate_gram(X, self._segments(rows, X.dtype), self._kernel, self.gram_dtype)

    def _segments(self, rows: tuple[Row, ...], dtype: torch.dtype) -> tuple[tuple[Row, ...], ...]:
        return segments(rows, self.restart_iterations, self.gram_dtype or dtype)

    def _algorithm(self, m: int, n: int, rows: tuple[Row, ...], dtype: torch.dtype, device: torch.device) -> str:
        if self.backend != "auto":
            return self.backend
        shape = (m, n, rows, dtype, device)
        return "direct" if self._direct_flops(*shape) < self._gram_flops(*shape) else "gram"

    def _direct_flops(self, m: int, n: int, rows: tuple[Row, ...], dtype: torch.dtype, device: torch.device) -> float:
        m, n = sorted((m, n))
        return direct_flops(m, n, steps=len(rows), **self._shares(m, n, dtype, device))

    def _gram_flops(self, m: int, n: int, rows: tuple[Row, ...], dtype: torch.dtype, device: torch.device) -> float:
        m, n = sorted((m, n))
        lengths = tuple(map(len, self._segments(rows, dtype)))
        return gram_flops(m, n, segment_lengths=lengths, **self._shares(m, n, dtype, device))

    def _shares(self, m: int, n: int, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
        share, dtype = self._kernel.symmetric_share, self.gram_dtype or dtype
        return {"share": share(m, n, dtype, device), "short_share": share(m, m, dtype, device)}


def _rebuild(arguments: dict[str, Any]) -> NewtonSchulz:
    return NewtonSchulz(**arguments)
