"""What the host does around the CuTe DSL kernel: checks, copies, the choice of a variant, compiling once."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns.backends import cute_sm80
from dmuon_hf.core.ns.backends.contract import SyrkOperands
from dmuon_hf.core.ns.backends.cute_config import TileConfig, Variant, choose_config, common_width
from tests.kernels.cute_programs import SMALLEST, compiled, interpret, needs_cutlass, operands_of
from tests.kernels.reference import Case, make_case

HALF = torch.float16
VARIANT = Variant(HALF, SMALLEST)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Variant]]:
    """Launches go to the interpreter, as if the CPU were an SM80 with one multiprocessor."""
    calls: list[tuple[str, Variant]] = []

    def launch(
        architecture: str, variant: Variant, operands: SyrkOperands, scalars: tuple[float, float, float]
    ) -> None:
        calls.append((architecture, variant))
        assert interpret(compiled(variant), variant, operands, scalars).clean

    monkeypatch.setattr(cute_sm80, "_check_device", lambda device: ((8, 0), 1))
    monkeypatch.setattr(cute_sm80, "_launch", launch)
    return calls


def run(case: Case, **options: Any) -> Tensor:
    scalars = {"alpha": case.alpha, "beta": case.beta, "diag": case.diag}
    return cute_sm80.syrk(case.A, case.B, case.C, **scalars, **options)


@needs_cutlass
def test_matrix_gives_float64_result_in_the_widest_variant(launched: list[tuple[str, Variant]]) -> None:
    case = make_case(40, 24, HALF)
    case.check(run(case, config=SMALLEST))
    assert launched == [("sm_80", VARIANT)]


@needs_cutlass
def test_batch_of_products_gives_float64_result(launched: list[tuple[str, Variant]]) -> None:
    case = make_case(24, 24, HALF, batch=2, product=True)
    result = run(case, config=SMALLEST)
    assert result.shape == (2, 24, 24)
    case.check(result)


@needs_cutlass
def test_transposed_operands_give_float64_result(launched: list[tuple[str, Variant]]) -> None:
    case = make_case(40, 24, HALF)
    assert case.C is not None
    A, C = case.A.mT.contiguous().mT, case.C.mT.contiguous().mT
    assert A.stride(-1) != 1
    case.check(run(Case(A, None, C, case.alpha, case.beta, case.diag, case.expected), config=SMALLEST))


@needs_cutlass
def test_odd_sizes_take_the_variants_of_single_elements(launched: list[tuple[str, Variant]]) -> None:
    case = make_case(33, 17, HALF)
    case.check(run(case, config=SMALLEST))
    assert [(variant.load_width, variant.store_width) for _, variant in launched] == [(1, 1)]


@needs_cutlass
def test_given_out_is_written_and_returned(launched: list[tuple[str, Variant]]) -> None:
    case = make_case(40, 24, HALF)
    out = torch.empty(40, 40, dtype=HALF)
    assert run(case, out=out, config=SMALLEST).data_ptr() == out.data_ptr()
    case.check(out)


@needs_cutlass
def test_beta_of_zero_does_not_read_C(launched: list[tuple[str, Variant]]) -> None:
    case = make_case(40, 24, HALF, beta=0.0)
    assert case.C is not None
    case.C.fill_(float("nan"))
    result = run(case, config=SMALLEST)
    assert result.isfinite().all()
    assert not launched[0][1].has_c


@needs_cutlass
def test_launch_passes_the_bytes_that_the_compiler_makes_of_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernel cannot run here, but it says what it would pass on, and wants every argument."""
    compiled_kernel = cute_sm80._compile(VARIANT, "--gpu-arch sm_80")
    passed: list[Any] = []
    monkeypatch.setattr(cute_sm80, "_kernel", lambda architecture, variant: lambda *arguments: passed.extend(arguments))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    operands = operands_of(make_case(40, 24, HALF, batch=3))
    assert operands.C is not None
    cute_sm80._launch("sm_80", VARIANT, operands, (0.7, -0.25, 2.0))

    modules = cute_sm80._load()
    pointers = [
        modules.make_ptr(modules.kernel.ELEMENT_TYPES[HALF], x.data_ptr(), modules.cute.AddressSpace.gmem, 16)
        for x in (operands.A, operands.A, operands.C, operands.out)
    ]
    numbers = (3, 40, 24, 0.7, -0.25, 2.0, 960, 24, 960, 24, 1600, 40, 1600, 40)
    plain = (*pointers, *numbers, modules.driver.CUstream(7))
    sizes = [8] * 4 + [4] * 6 + [8] * 9
    assert bytes_of(compiled_kernel, passed, sizes) == bytes_of(compiled_kernel, plain, sizes)


def bytes_of(kernel: Any, arguments: Sequence[Any], sizes: list[int]) -> list[bytes]:
    addresses, _kept = kernel.generate_execution_args(*arguments)
    return [
        ctypes.string_at(getattr(address, "value", address), size)
        for address, size in zip(addresses, sizes, strict=True)
    ]


@pytest.mark.parametrize("shape", [(0, 8), (0, 4, 8)], ids=str)
def test_nothing_to_compute_launches_nothing(launched: list[tuple[str, Variant]], shape: tuple[int, ...]) -> None:
    result = cute_sm80.syrk(torch.empty(shape, dtype=HALF))
    assert result.shape == (*shape[:-1], shape[-2])
    assert launched == []


def test_out_without_contiguous_rows_is_refused(launched: list[tuple[str, Variant]]) -> None:
    with pytest.raises(ConfigurationError, match="rows of out must be contiguous"):
        cute_sm80.syrk(torch.zeros(8, 16, dtype=HALF), out=torch.empty(8, 16, dtype=HALF)[:, ::2])


def test_more_matrices_than_a_launch_takes_are_refused(launched: list[tuple[str, Variant]]) -> None:
    with pytest.raises(ConfigurationError, match="at most 65535 matrices"):
        cute_sm80.syrk(torch.zeros(65_536, 1, 1, dtype=HALF))


def test_operand_on_a_cpu_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="NVIDIA GPUs; the operands are on cpu"):
        cute_sm80.syrk(torch.zeros(8, 16, dtype=HALF))


def test_gpu_before_sm80_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cute_sm80, "_properties", lambda device: ((7, 5), 40))
    with pytest.raises(NotImplementedError, match="from SM80 on; cuda:0 is SM75"):
        cute_sm80._check_device(torch.device("cuda:0"))


@pytest.mark.parametrize(
    ("capability", "architecture"), [((8, 0), "sm_80"), ((8, 7), "sm_87"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a")]
)
def test_architecture_is_named_as_the_compiler_does(capability: tuple[int, int], architecture: str) -> None:
    assert cute_sm80._architecture(capability) == architecture


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(package: str) -> NoReturn:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", not_found)
    with pytest.raises(NotImplementedError, match=r"nvidia-cutlass-dsl, which is not installed.*'cublas'"):
        cute_sm80._load.__wrapped__()


def test_old_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "4.1.0")
    with pytest.raises(NotImplementedError, match=r"does not run with nvidia-cutlass-dsl 4\.1\.0"):
        cute_sm80._load.__wrapped__()


def test_import_needs_no_compiler() -> None:
    code = "import sys, dmuon_hf.core.ns.backends.cute_sm80; sys.exit('cutlass' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600, check=False).returncode == 0


def test_variant_is_compiled_once_per_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    compilations: list[tuple[Variant, str]] = []
    monkeypatch.setattr(cute_sm80, "_compiled", {})
    monkeypatch.setattr(cute_sm80, "_compile", lambda *arguments: compilations.append(arguments) or object())
    first = cute_sm80._kernel("sm_80", VARIANT)
    assert cute_sm80._kernel("sm_80", Variant(HALF, SMALLEST)) is first
    assert cute_sm80._kernel("sm_86", VARIANT) is not first
    assert cute_sm80._kernel("sm_80", Variant(HALF, SMALLEST, has_c=False)) is not first
    assert [options for _, options in compilations] == ["--gpu-arch sm_80", "--gpu-arch sm_86", "--gpu-arch sm_80"]


@pytest.mark.parametrize(
    ("M", "options", "expected"),
    [
        (4096, {}, TileConfig(128, 32, 4)),
        (4096, {"capability": (8, 6)}, TileConfig(128, 32, 3)),
        (4096, {"capability": (12, 0)}, TileConfig(128, 32, 3)),
        (4096, {"load_width": 1}, TileConfig(64, 32, 4)),
        (1024, {}, TileConfig(64, 32, 4)),
        (1024, {"multiprocessors": 36}, TileConfig(128, 32, 4)),
        (1024, {"batch": 3}, TileConfig(128, 32, 4)),
    ],
    ids=str,
)
def test_largest_tiles_that_occupy_the_gpu_are_chosen(M: int, options: dict[str, Any], expected: TileConfig) -> None:
    assert choose_config(M, **options) == expected


@pytest.mark.parametrize(
    ("shape", "start", "stop", "width"),
    [((4, 64), 0, 64, 8), ((4, 64), 8, 48, 8), ((4, 64), 8, 50, 2), ((4, 64), 2, 34, 2), ((4, 63), 0, 56, 1)],
    ids=str,
)
def test_width_divides_address_stride_and_length(shape: tuple[int, int], start: int, stop: int, width: int) -> None:
    aligned = torch.zeros(1, 4, 64, dtype=HALF)
    assert aligned.data_ptr() % 16 == 0
    assert common_width(aligned, torch.zeros(1, *shape, dtype=HALF)[..., start:stop]) == width


def test_stride_of_a_single_row_does_not_narrow_the_copies() -> None:
    assert common_width(torch.zeros(3, 1, 65, dtype=HALF)[:1, :, :64]) == 8


@pytest.mark.parametrize("options", [{"rows": 96}, {"depth": 16}, {"stages": 1}], ids=str)
def test_tiles_the_kernel_is_not_written_for_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="TileConfig"):
        TileConfig(**options)


@pytest.mark.parametrize("options", [{"dtype": torch.float32}, {"dtype": HALF, "load_width": 4}], ids=str)
def test_variant_the_kernel_is_not_written_for_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"dtype|width"):
        Variant(config=SMALLEST, **options)
