"""Symmetric products as values that a table can be kept over: recorded from an iteration, looked up by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dmuon_hf.core.ns.kernels import Kernel
from dmuon_hf.core.ns.support import log_once

__all__ = ["Product", "ProductRecorder", "TunedKernel"]


class Product(NamedTuple):
    """One symmetric product, by everything that decides which kernel is fastest for it.

    Attributes:
        gram: ``X @ X^T`` of one operand; else ``A @ B`` of two symmetric ones.
        rows: Of the result.
        depth: What is summed over.
        batch: Number of matrices in a batch; ``None`` for one matrix without a batch dimension.
        dtype: Of the operands.
        device: Type of the device.
        row_major: Whether the rows of the first operand are contiguous; those of a transposed view are not.
        fused: Whether a third matrix is added.
    """

    gram: bool
    rows: int
    depth: int
    batch: int | None
    dtype: torch.dtype
    device: str
    row_major: bool
    fused: bool

    @classmethod
    def of(cls, A: Tensor, C: Tensor | None = None, *, gram: bool, device: str | None = None) -> Product:
        """The product with ``A`` and ``C`` as first and third operand; ``device`` replaces theirs."""
        batch = A.shape[0] if A.ndim == 3 else None
        device = device or A.device.type
        return cls(gram, A.shape[-2], A.shape[-1], batch, A.dtype, device, A.stride(-1) == 1, C is not None)

    def __str__(self) -> str:
        words = [
            "gram" if self.gram else "symmetric",
            f"{'' if self.batch is None else f'{self.batch}x'}{self.rows}x{self.depth}",
            str(self.dtype).removeprefix("torch."),
            f"on {self.device}",
            *(() if self.row_major else ("of columns",)),
            *(("plus C",) if self.fused else ()),
        ]
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class ProductRecorder:
    """A kernel that computes nothing and notes what was asked of it: for iterations on tensors of the meta device.

    It answers questions about costs as ``model`` does on ``device``: the iteration takes the path that it takes there.
    """

    model: Kernel
    device: torch.device
    products: set[Product] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.model.name

    def gram(self, X: Tensor) -> Tensor:
        self.products.add(Product.of(X, gram=True, device=self.device.type))
        return X.new_empty((*X.shape[:-1], X.shape[-2]))

    def symmetric(
        self,
        A: Tensor,
        B: Tensor,
        C: Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        diag: float = 0.0,
    ) -> Tensor:
        self.products.add(Product.of(A, C, gram=False, device=self.device.type))
        return A.new_empty((*A.shape[:-1], A.shape[-2]))

    def one_by_one(self, rows: int, dtype: torch.dtype, device: torch.device) -> bool:
        return self.model.one_by_one(rows, dtype, self.device)

    def symmetric_share(self, rows: int, depth: int, dtype: torch.dtype, device: torch.device) -> float:
        return self.model.symmetric_share(rows, depth, dtype, self.device)


@dataclass(frozen=True, slots=True)
class TunedKernel:
    """The kernel that ``table`` has for each product, and ``default`` for what it does not hold.

    Which algorithm runs, and whether a batch is split, stays with ``default``: the products do not depend on the table.
    """

    default: Kernel
    table: Mapping[Product, Kernel]

    @property
    def name(self) -> str:
        return self.default.name

    def gram(self, X: Tensor) -> Tensor:
        return self._kernel_of(Product.of(X, gram=True)).gram(X)

    def symmetric(
        self,
        A: Tensor,
        B: Tensor,
        C: Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        diag: float = 0.0,
    ) -> Tensor:
        kernel = self._kernel_of(Product.of(A, C, gram=False))
        return kernel.symmetric(A, B, C, alpha=alpha, beta=beta, diag=diag)

    def one_by_one(self, rows: int, dtype: torch.dtype, device: torch.device) -> bool:
        return self.default.one_by_one(rows, dtype, device)

    def symmetric_share(self, rows: int, depth: int, dtype: torch.dtype, device: torch.device) -> float:
        return self.default.symmetric_share(rows, depth, dtype, device)

    def _kernel_of(self, product: Product) -> Kernel:
        kernel = self.table.get(product)
        if kernel is None:
            log_once(f"Newton-Schulz: {product} was not tuned and runs on the default kernel, {self.name}")
            return self.default
        return kernel
