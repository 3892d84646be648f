"""What could compute a product on this machine: kernels with their tile sizes, library products with their blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dmuon_hf.core.ns.autotune.product import Product
from dmuon_hf.core.ns.backends import cute_config, triton_syrk
from dmuon_hf.core.ns.backends.contract import DTYPES
from dmuon_hf.core.ns.kernels import Kernel
from dmuon_hf.core.ns.library import LibraryKernel, row_blocks
from dmuon_hf.core.ns.support import CANDIDATES, missing, sm_version
from dmuon_hf.core.ns.syrk_kernel import SyrkKernel, TileRows

__all__ = ["CONFIGS", "Choice", "build", "choices"]

_BLOCKS = (1, 2, 4, 6, 8, 12, 16)
_LEAST_BLOCK_ROWS = 16
_BLOCKED_DTYPES = (torch.bfloat16, torch.float32, torch.float64)

# Tile sizes by kernel: the fields of its `TileConfig`. All fit into the 99 KiB of shared memory of SM86, SM89, SM120.
CONFIGS: dict[str, tuple[tuple[int, ...], ...]] = {
    "cute_sm80": ((128, 32, 3), (128, 32, 4), (64, 32, 4), (64, 64, 3), (32, 32, 3)),
    "quack": (),  # It has no sizes to choose.
    "triton": ((128, 64, 3, 8), (128, 32, 4, 8), (64, 64, 3, 4), (64, 32, 4, 4), (32, 64, 3, 4)),
}


class Choice(NamedTuple):
    """A way to compute a product, as a value that can be stored and sent.

    Attributes:
        kernel: One of ``KERNELS``.
        config: Its tile sizes, or the number of row blocks of the library product; empty: the kernel's own choice.
    """

    kernel: str
    config: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.kernel}({', '.join(map(str, self.config))})" if self.config else self.kernel


def build(choice: Choice) -> Kernel:
    """The kernel that ``choice`` stands for."""
    if choice.kernel == "cublas":
        return LibraryKernel(*choice.config)
    candidate = next(candidate for candidate in CANDIDATES if candidate.name == choice.kernel)
    return SyrkKernel(candidate, _tiles(choice))


def choices(product: Product, default: str, request: str) -> list[Choice]:
    """All that can compute ``product`` here; first what is taken if nothing is clearly faster.

    Args:
        product: What is to be computed.
        default: Name of the kernel that runs where nothing is tuned.
        request: The kernel that was asked for: another one than ``"auto"`` leaves only its own configurations.
    """
    first = Choice(default)
    if product.device == "cpu":
        return [first, *(_blocked(product) if request in ("auto", "cublas") else ())]
    found = [choice for choice in _tiled(product, request) if choice != first]
    if request == "auto" and not _is_library(default, product):
        found.append(Choice("cublas"))
    return [first, *found]


def _is_library(kernel: str, product: Product) -> bool:
    """Whether ``kernel`` leaves ``product`` to the library."""
    tiles = {candidate.name: candidate.tile for candidate in CANDIDATES}
    return kernel not in tiles or product.dtype not in DTYPES or product.rows <= tiles[kernel]


def _blocked(product: Product) -> list[Choice]:
    if product.batch is not None or product.dtype not in _BLOCKED_DTYPES:
        return []
    own = row_blocks(product.rows, product.depth, product.dtype, torch.device(product.device))
    most = max(1, product.rows // _LEAST_BLOCK_ROWS)
    return [Choice("cublas", (blocks,)) for blocks in _BLOCKS if blocks != own and blocks <= most]


def _tiled(product: Product, request: str) -> list[Choice]:
    if product.dtype not in DTYPES:
        return []
    sm = sm_version()
    found: list[Choice] = []
    for candidate in CANDIDATES:
        if request in ("auto", candidate.name) and missing(candidate, sm) is None:
            configs = CONFIGS[candidate.name] or ((),)
            found += [Choice(candidate.name, c) for c in configs if product.rows > (c[0] if c else candidate.tile)]
    return found


def _tiles(choice: Choice) -> TileRows | None:
    if not choice.config:
        return None
    config_type = {"cute_sm80": cute_config.TileConfig, "triton": triton_syrk.TileConfig}[choice.kernel]
    tiles: TileRows = config_type(*choice.config)
    return tiles
