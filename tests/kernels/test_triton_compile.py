"""Triton's SYRK compiled ahead of time for every architecture that the project names."""

from __future__ import annotations

import re

import pytest
import torch

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns.backends.triton_syrk import TileConfig, choose_config, compile_ahead_of_time
from tests.kernels.resources import ARCHITECTURES, assemble, newest_ptxas

pytest.importorskip("triton", reason="the package triton is not installed")

CONFIGS = {M: choose_config(M) for M in (4096, 1024, 64)}
TARGETS = {80: "sm_80", 86: "sm_86", 89: "sm_89", 90: "sm_90a", 100: "sm_100a", 120: "sm_120a"}


def test_sizes_use_different_tiles():
    assert [config.rows for config in CONFIGS.values()] == [128, 64, 32]


@pytest.mark.skipif(newest_ptxas() is None, reason="no ptxas on this machine")
@pytest.mark.parametrize("M", CONFIGS)
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_kernel_fits_a_multiprocessor_without_spilling(capability, M, tmp_path, record_resources):
    config = CONFIGS[M]
    kernel = compile_ahead_of_time(capability, torch.bfloat16, config)
    assert kernel.asm["cubin"]
    resources = assemble(
        kernel.asm["ptx"], tmp_path, threads=32 * config.warps, dynamic_shared_bytes=kernel.metadata.shared
    )
    record_resources(f"triton bf16 {config.rows}x{config.rows}x{config.depth}", resources)
    assert resources.target == TARGETS[capability]
    resources.check(capability)


@pytest.mark.parametrize(
    ("capability", "instruction"), [(80, "mma.sync"), (90, "wgmma.mma_async"), (100, "tcgen05.mma")]
)
def test_kernel_uses_the_tensor_cores_of_the_architecture(capability, instruction):
    assert instruction in compile_ahead_of_time(capability, torch.bfloat16, TileConfig()).asm["ptx"]


@pytest.mark.parametrize("M", CONFIGS)
def test_kernel_compiles_for_another_vendor_without_spilling(M):
    kernel = compile_ahead_of_time("gfx942", torch.bfloat16, CONFIGS[M])
    assembly = kernel.asm["amdgcn"]
    assert kernel.asm["hsaco"]
    assert "v_mfma" in assembly
    assert re.findall(r"vgpr_spill_count:\s*(\d+)", assembly) == ["0"]
    assert kernel.metadata.shared <= 64 * 1024


def test_full_tiles_are_stored_in_vectors_where_operands_are_aligned():
    def wide_stores(aligned: bool) -> int:
        ptx = compile_ahead_of_time(80, torch.float16, TileConfig(rows=64, warps=4), aligned=aligned).asm["ptx"]
        return ptx.count("st.global.v4.b32")

    assert wide_stores(aligned=True) > 0
    assert wide_stores(aligned=False) == 0


def test_other_dtype_is_refused():
    with pytest.raises(ConfigurationError, match="float16 or bfloat16"):
        compile_ahead_of_time(80, torch.float32)
