"""Symmetric products by a kernel that computes one triangle; by the library where that kernel does not go."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dmuon_hf.core.ns.backends.contract import DTYPES
from dmuon_hf.core.ns.library import LibraryKernel
from dmuon_hf.core.ns.support import Candidate, log_once

__all__ = ["SyrkKernel", "TileRows"]

_LIBRARY = LibraryKernel()


class TileRows(Protocol):
    """Tile sizes of a kernel: a value of its ``TileConfig``."""

    @property
    def rows(self) -> int:
        """Rows of a tile."""


@dataclass(frozen=True, slots=True)
class SyrkKernel:
    """``kernel="cute_sm80"``, ``"quack"`` or ``"triton"``.

    The same operands give the same bits. Matrices of no more rows than one tile go to the library product, which costs
    no more there; float32, float64 and, for a GPU kernel, tensors on a CPU go there too, which is logged once.

    Attributes:
        candidate: The kernel.
        tiles: Its tile sizes; ``None`` leaves them to the kernel, by the shape of each product.
    """

    candidate: Candidate
    tiles: TileRows | None = None

    @property
    def name(self) -> str:
        return self.candidate.name

    def gram(self, X: Tensor) -> Tensor:
        if self._takes(X.shape[-2], X.dtype, X.device):
            return self._syrk()(X)
        return _LIBRARY.gram(X)

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
        if self._takes(A.shape[-2], A.dtype, A.device):
            # `B` is symmetric, so that A @ B^T, which the contract computes, is A @ B.
            return self._syrk()(A, B, C, alpha=alpha, beta=beta, diag=diag)
        return _LIBRARY.symmetric(A, B, C, alpha=alpha, beta=beta, diag=diag)

    def one_by_one(self, rows: int, dtype: torch.dtype, device: torch.device) -> bool:
        return not self._takes(rows, dtype, device) and _LIBRARY.one_by_one(rows, dtype, device)

    def symmetric_share(self, rows: int, depth: int, dtype: torch.dtype, device: torch.device) -> float:
        if not self._takes(rows, dtype, device):
            return _LIBRARY.symmetric_share(rows, depth, dtype, device)
        side = -(-rows // self._tile)
        return (side + 1) / (2 * side)

    @property
    def _tile(self) -> int:
        return self.candidate.tile if self.tiles is None else self.tiles.rows

    def _syrk(self) -> Callable[..., Tensor]:
        """The function of the backend, which takes ``config`` beside what the contract has."""
        syrk = _load(self.candidate.module)
        return syrk if self.tiles is None else functools.partial(syrk, config=self.tiles)

    def _takes(self, rows: int, dtype: torch.dtype, device: torch.device) -> bool:
        if rows <= self._tile:
            return False
        if dtype not in DTYPES or (device.type == "cpu" and not self._interpreted()):
            log_once(
                f"Newton-Schulz kernel {self.name}: {dtype} on {device.type} is computed by the library product instead"
            )
            return False
        return True

    def _interpreted(self) -> bool:
        return self.name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _load(module: str) -> Callable[..., Tensor]:
    backend: Callable[..., Tensor] = importlib.import_module(f"dmuon_hf.core.ns.backends.{module}").syrk
    return backend
