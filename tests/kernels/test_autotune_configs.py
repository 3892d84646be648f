"""Every tile size that autotuning may choose, compiled: it fits a multiprocessor everywhere and keeps its registers."""

from __future__ import annotations

import pytest
import torch

from dmuon_hf.core.ns.autotune.candidates import CONFIGS
from dmuon_hf.core.ns.backends import cute_config, cute_sm80, triton_syrk
from tests.kernels.cute_programs import needs_cutlass
from tests.kernels.resources import assemble, newest_ptxas

pytestmark = pytest.mark.skipif(newest_ptxas() is None, reason="no ptxas on this machine")


@needs_cutlass
@pytest.mark.parametrize("config", CONFIGS["cute_sm80"], ids=str)
@pytest.mark.parametrize(("capability", "architecture"), [(86, "sm_86"), (90, "sm_90a")])
def test_cute_configuration_fits_without_spilling(capability, architecture, config, tmp_path, record_resources):
    tiles = cute_config.TileConfig(*config)
    compiled = cute_sm80.compile_ahead_of_time(architecture, cute_config.Variant(torch.float16, tiles))
    resources = assemble(compiled.ptx, tmp_path, threads=tiles.threads, dynamic_shared_bytes=tiles.shared_bytes)
    record_resources(f"cute fp16 autotuned {config}", resources)
    resources.check(capability)


@pytest.mark.parametrize("config", CONFIGS["triton"], ids=str)
@pytest.mark.parametrize("capability", [86, 90, 120])
def test_triton_configuration_fits_without_spilling(capability, config, tmp_path, record_resources):
    pytest.importorskip("triton", reason="the package triton is not installed")
    tiles = triton_syrk.TileConfig(*config)
    kernel = triton_syrk.compile_ahead_of_time(capability, torch.float16, tiles)
    resources = assemble(
        kernel.asm["ptx"], tmp_path, threads=32 * tiles.warps, dynamic_shared_bytes=kernel.metadata.shared
    )
    record_resources(f"triton fp16 autotuned {config}", resources)
    resources.check(capability)
