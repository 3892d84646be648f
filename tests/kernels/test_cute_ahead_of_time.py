"""The CuTe DSL kernel compiled ahead of time for every architecture that the project names."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dmuon_hf.core.ns.backends.cute_config import TileConfig, Variant, choose_config
from dmuon_hf.core.ns.backends.cute_sm80 import compile_ahead_of_time
from tests.kernels.cute_programs import needs_cutlass
from tests.kernels.resources import ARCHITECTURES, Resources, assemble, newest_ptxas

pytestmark = needs_cutlass
needs_ptxas = pytest.mark.skipif(newest_ptxas() is None, reason="no ptxas on this machine")

SMALL = TileConfig(rows=64, depth=32, stages=4)
NARROW = [
    Variant(torch.bfloat16, TileConfig(rows=128, depth=32, stages=4), load_width=2, store_width=2),
    Variant(torch.bfloat16, TileConfig(rows=128, depth=32, stages=4), load_width=8, store_width=1),
    Variant(torch.bfloat16, SMALL, load_width=1, store_width=1),
]


def name_of(variant: Variant) -> str:
    config = variant.config
    width = f"{2 * variant.load_width}/{2 * variant.store_width}-byte rows"
    return f"cute {variant.dtype} {config.rows}x{config.rows}x{config.depth} {width}".replace("torch.", "")


def large_variant(capability: int) -> Variant:
    return Variant(torch.float16, choose_config(8192, capability=divmod(capability, 10)))


@functools.cache
def measured(variant: Variant, architecture: str) -> Resources:
    compiled = compile_ahead_of_time(architecture, variant)
    assert compiled.cubin.startswith(b"\x7fELF")
    config = variant.config
    with tempfile.TemporaryDirectory() as folder:
        shared = config.shared_bytes
        return assemble(compiled.ptx, Path(folder), threads=config.threads, dynamic_shared_bytes=shared)


@needs_ptxas
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_large_tiles_fit_without_spilling(capability: int, record_resources: Callable[[str, Resources], None]) -> None:
    architecture = f"sm_{capability}{'a' if capability >= 90 else ''}"
    variant = large_variant(capability)
    resources = measured(variant, architecture)
    record_resources(name_of(variant), resources)
    assert resources.target == architecture
    resources.check(capability)


@needs_ptxas
@pytest.mark.parametrize("capability", [80, 86])
def test_large_tiles_leave_room_for_a_second_block(capability: int) -> None:
    """One block multiplies while the other waits at a barrier."""
    resources = measured(large_variant(capability), f"sm_{capability}")
    reserved = 1024
    assert 2 * (resources.shared + reserved) <= ARCHITECTURES[capability] + reserved
    assert 2 * resources.registers * resources.threads <= 65536


@needs_ptxas
@pytest.mark.parametrize("variant", [Variant(torch.float16, SMALL), *NARROW], ids=name_of)
def test_other_variants_fit_without_spilling(
    variant: Variant, record_resources: Callable[[str, Resources], None]
) -> None:
    resources = measured(variant, "sm_80")
    record_resources(name_of(variant), resources)
    resources.check(80)


@pytest.mark.parametrize(
    ("dtype", "instruction"), [(torch.float16, "f32.f16.f16.f32"), (torch.bfloat16, "f32.bf16.bf16.f32")], ids=str
)
def test_aligned_kernel_uses_tensor_cores_and_16_byte_accesses_only(dtype: torch.dtype, instruction: str) -> None:
    ptx = compile_ahead_of_time("sm_80", Variant(dtype, SMALL)).ptx
    assert f"mma.sync.aligned.m16n8k16.row.col.{instruction}" in ptx
    assert "ldmatrix.sync.aligned.m8n8.x4" in ptx
    assert "cp.async.cg.shared.global" in ptx and "cp.async.ca" not in ptx
    assert "st.global.v4" in ptx
    assert "st.global.b16" not in ptx and "ld.global" not in ptx
