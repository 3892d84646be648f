from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys

import pytest
import torch

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns import (
    YOU_COEFFICIENTS,
    NewtonSchulz,
    get_backend_status,
    get_ns_backend,
    support,
    syrk_kernel,
)
from dmuon_hf.core.ns.autotune import candidates
from dmuon_hf.core.ns.autotune.product import Product
from dmuon_hf.core.ns.kernels import resolve_kernel
from dmuon_hf.core.ns.library import LibraryKernel
from dmuon_hf.core.ns.support import CANDIDATES
from dmuon_hf.core.ns.syrk_kernel import SyrkKernel
from tests.unit.ns_reference import HalfProducts, exact, gaussian, relative_error, spectrum

VERSIONS = {"nvidia-cutlass-dsl": "4.8.1", "quack-kernels": "0.6.5", "triton": "3.7.1"}


class Machine:
    """Stands for the GPU and the packages of another machine; by default an H100 with everything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sm = 90
        self.versions = dict(VERSIONS)
        self.broken: set[str] = set()
        monkeypatch.setattr("dmuon_hf.core.ns.kernels.sm_version", lambda: self.sm)
        monkeypatch.setattr(support, "_version", lambda package: self.versions.get(package, ""))
        monkeypatch.setattr(support, "import_module", self._import)
        monkeypatch.setattr(support, "_import_problem", support._import_problem.__wrapped__)

    def _import(self, module: str) -> None:
        if module in self.broken:
            raise OSError("libcuda.so.1: cannot open shared object file")


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.delenv("DMUON_NS_KERNEL", raising=False)
    support.log_once.cache_clear()
    return Machine(monkeypatch)


@pytest.mark.parametrize(
    ("sm", "name"),
    [
        (0, "cublas"),
        (70, "cublas"),
        (75, "cublas"),
        (80, "cute_sm80"),
        (86, "cute_sm80"),
        (87, "cute_sm80"),
        (89, "cute_sm80"),
        (90, "quack"),
        (100, "quack"),
        (103, "quack"),
        (120, "quack"),
    ],
)
def test_auto_follows_the_gpu_where_everything_is_installed(machine, sm, name):
    machine.sm = sm
    assert NewtonSchulz().kernel_name == name


@pytest.mark.parametrize("sm", [80, 90, 120])
@pytest.mark.parametrize("package", ["triton", "pytorch-triton"])
def test_auto_takes_triton_by_timing_alone(machine, monkeypatch, sm, package):
    machine.sm = sm
    monkeypatch.setattr(candidates, "sm_version", lambda: sm)
    machine.versions = {package: "3.7.1"}
    assert NewtonSchulz().kernel_name == "cublas"
    assert NewtonSchulz(kernel="triton").kernel_name == "triton"
    product = Product(True, 512, 512, None, torch.bfloat16, "cuda", True, False)
    assert "triton" in {choice.kernel for choice in candidates.choices(product, "cublas", "auto")}


@pytest.mark.parametrize("sm", [80, 90])
def test_auto_takes_the_library_without_any_package(machine, sm):
    machine.sm = sm
    machine.versions = {}
    assert NewtonSchulz().kernel_name == "cublas"


def test_auto_passes_over_a_package_that_fails_to_import(machine):
    machine.broken = {"quack.gemm_interface"}
    assert NewtonSchulz().kernel_name == "cublas"


@pytest.mark.parametrize(("version", "name"), [("0.3.10", "cublas"), ("0.3.11", "quack"), ("0.7.0", "cublas")])
def test_auto_takes_only_tested_versions_of_quack(machine, version, name):
    machine.versions["quack-kernels"] = version
    assert NewtonSchulz().kernel_name == name


def test_the_choice_is_logged_once_with_what_was_passed_over(machine, caplog):
    del machine.versions["quack-kernels"]
    with caplog.at_level(logging.INFO, logger="dmuon_hf"):
        NewtonSchulz(), NewtonSchulz()
    (record,) = caplog.records
    choice, passed_over = record.getMessage().split("; ")
    assert choice == "Newton-Schulz kernel on this machine: cublas (SM90)"
    assert passed_over == "not quack, since the package quack-kernels is not installed"


def test_nothing_is_said_of_kernels_without_a_gpu(machine, caplog):
    machine.sm = 0
    with caplog.at_level(logging.INFO, logger="dmuon_hf"):
        assert NewtonSchulz().kernel_name == "cublas"
    assert caplog.records == []


@pytest.mark.parametrize("name", ["quack", "cute_sm80", "triton"])
def test_kernel_without_its_package_raises_with_the_package(machine, name):
    machine.versions = {}
    package = next(candidate.packages[0] for candidate in CANDIDATES if candidate.name == name)
    with pytest.raises(NotImplementedError, match=rf"kernel='{name}' cannot run.*{package} is not installed.*'cublas'"):
        NewtonSchulz(kernel=name)


def test_kernel_that_cannot_be_imported_raises_with_the_cause(machine):
    machine.broken = {"quack.gemm_interface"}
    with pytest.raises(NotImplementedError, match=r"quack\.gemm_interface cannot be imported \(OSError: libcuda"):
        NewtonSchulz(kernel="quack")


@pytest.mark.parametrize(
    ("kernel", "package", "version", "message"),
    [
        (
            "quack",
            "quack-kernels",
            "0.7.0",
            r"quack-kernels 0\.7\.0 is installed; it needs 0\.3\.11 or newer, below 0\.7\.",
        ),
        (
            "cute_sm80",
            "nvidia-cutlass-dsl",
            "4.3.5",
            r"nvidia-cutlass-dsl 4\.3\.5 is installed; it needs 4\.4 or newer\.",
        ),
    ],
)
def test_untested_version_raises_with_the_range(machine, kernel, package, version, message):
    machine.versions[package] = version
    with pytest.raises(NotImplementedError, match=message):
        NewtonSchulz(kernel=kernel)


def test_kernel_for_newer_gpus_raises_with_both(machine):
    machine.sm = 80
    with pytest.raises(NotImplementedError, match="an NVIDIA GPU of SM90 or newer; this one is SM80"):
        NewtonSchulz(kernel="quack")


@pytest.mark.parametrize("name", ["quack", "cute_sm80", "triton"])
def test_gpu_kernel_without_a_gpu_raises_at_construction(machine, monkeypatch, name):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    machine.sm = 0
    with pytest.raises(NotImplementedError, match=rf"kernel='{name}'.*this machine has none"):
        NewtonSchulz(kernel=name)


def test_environment_and_deterministic_choose_among_all_kernels(machine, monkeypatch):
    monkeypatch.setenv("DMUON_NS_KERNEL", "triton")
    assert NewtonSchulz().kernel_name == "triton"
    assert NewtonSchulz(kernel="cute_sm80").kernel_name == "cute_sm80"
    assert NewtonSchulz(deterministic=True).kernel_name == "cublas"


def test_ns_backend_line_names_kernel_gpu_and_detail(machine):
    assert get_ns_backend() == "Gram NS · kernel=quack (SM90, Tri Dao quack)"
    machine.sm = 80
    assert get_ns_backend() == "Gram NS · kernel=cute_sm80 (SM80, DMuon internal)"


def test_backend_status_tells_what_is_missing(machine):
    machine.sm = 80
    del machine.versions["nvidia-cutlass-dsl"]
    status = get_backend_status()
    assert status.pop("missing") == {
        "cute_sm80": "the package nvidia-cutlass-dsl is not installed",
        "quack": "it needs an NVIDIA GPU of SM90 or newer; this one is SM80",
    }
    assert status == {
        "sm_version": 80,
        "auto_choice": "cublas",
        "cute_sm80_available": False,
        "quack_available": False,
        "triton_available": True,
        "cublas_always_available": True,
    }


def test_copy_resolves_its_kernel_on_its_own_machine(machine):
    data = pickle.dumps(NewtonSchulz())
    machine.sm = 0
    assert pickle.loads(data).kernel_name == "cublas"


def test_fingerprint_names_the_kernel_and_every_setting(machine):
    settings = [
        {},
        {"backend": "direct"},
        {"kernel": "triton"},
        {"coefficients": YOU_COEFFICIENTS},
        {"restart_iterations": [1]},
        {"dtype": torch.float32},
    ]
    assert len({NewtonSchulz(**options).fingerprint for options in settings}) == len(settings)


def test_fingerprint_is_that_of_what_runs(machine):
    machine.sm = 80
    on_ampere = NewtonSchulz().fingerprint
    assert on_ampere == NewtonSchulz(kernel="cute_sm80").fingerprint
    machine.sm = 90
    assert on_ampere != NewtonSchulz().fingerprint


class LowerTriangle:
    """A SYRK backend in float64 that reads what the contract lets it read, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, A, B=None, C=None, *, alpha=1.0, beta=1.0, diag=0.0, out=None):
        self.calls += 1
        product = alpha * (A.double() @ (A if B is None else B).double().mT)
        if C is not None:
            product += beta * C.double()
        product += diag * torch.eye(A.shape[-2], dtype=torch.float64)
        lower = product.tril()
        return (lower + product.tril(-1).mT).to(A.dtype)


@pytest.fixture
def backend(monkeypatch):
    """Every kernel is this backend, and takes CPU tensors."""
    stand_in = LowerTriangle()
    monkeypatch.setattr(syrk_kernel, "_load", lambda module: stand_in)
    monkeypatch.setattr(SyrkKernel, "_interpreted", lambda self: True)
    return stand_in


@pytest.mark.parametrize("algorithm", ["gram", "direct"])
@pytest.mark.parametrize("shape", [(140, 300), (300, 140), (2, 140, 150)], ids=str)
def test_either_algorithm_on_a_kernel_orthogonalises_any_shape(machine, backend, algorithm, shape):
    machine.sm = 80
    G = gaussian(*shape)
    result = NewtonSchulz(algorithm, dtype=torch.bfloat16)(G)
    expected = exact(G) if G.ndim == 2 else torch.stack([exact(matrix) for matrix in G])
    assert relative_error(result, expected) < 3e-2
    assert backend.calls > 0


@pytest.mark.parametrize("algorithm", ["gram", "direct"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 5e-2), (torch.bfloat16, 2e-1)], ids=str)
@pytest.mark.parametrize("condition", [1e1, 1e3, 1e5, 1e9])
def test_mirrored_triangles_keep_the_bound_of_the_dtype(machine, backend, algorithm, dtype, bound, condition):
    machine.sm = 80
    G = spectrum(200, 600, condition)
    with HalfProducts():
        result = NewtonSchulz(algorithm, dtype=dtype)(G)
    assert relative_error(result, exact(G)) < bound
    assert backend.calls > 0


def test_kernel_forms_every_symmetric_product(machine, backend):
    machine.sm = 80
    NewtonSchulz("gram", restart_iterations=[2, 4], dtype=torch.bfloat16)(gaussian(140, 300))
    # Three Gram matrices; five squares; R advanced by two products in two steps; Q extended in two.
    assert backend.calls == 3 + 5 + 2 * 2 + 2


def test_matrices_of_one_tile_go_to_the_library(machine, backend):
    machine.sm = 80
    NewtonSchulz(dtype=torch.bfloat16)(gaussian(128, 300))
    assert backend.calls == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_types_go_to_the_library_and_are_logged_once(machine, backend, caplog, dtype):
    machine.sm = 80
    G = gaussian(140, 300)
    ns = NewtonSchulz(dtype=dtype)
    with caplog.at_level(logging.INFO, logger="dmuon_hf"):
        result = ns(G)
        ns(G)
    assert torch.equal(result, NewtonSchulz(kernel="cublas", dtype=dtype)(G))
    assert backend.calls == 0
    assert [str(dtype) in record.getMessage() for record in caplog.records].count(True) == 1


def test_symmetric_share_counts_tiles_and_follows_the_library_elsewhere(machine):
    machine.sm = 80
    kernel, cuda = resolve_kernel(), torch.device("cuda")
    assert kernel.symmetric_share(128, 512, torch.float16, cuda) == 1.0
    assert kernel.symmetric_share(512, 128, torch.float16, cuda) == 10 / 16
    assert kernel.symmetric_share(500, 128, torch.bfloat16, cuda) == 10 / 16
    assert kernel.symmetric_share(512, 512, torch.float32, cuda) == 1.0
    shape = (4096, 4096, torch.bfloat16, torch.device("cpu"))
    assert kernel.symmetric_share(*shape) == LibraryKernel().symmetric_share(*shape) < 1.0


def test_importing_the_package_imports_no_compiler():
    script = (
        "import sys; from dmuon_hf.core import ns; ns.NewtonSchulz(); "
        "assert not {'cutlass', 'quack', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600)


def test_triton_in_its_interpreter_orthogonalises():
    pytest.importorskip("triton", reason="triton is not installed")
    script = (
        "import torch; from dmuon_hf.core.ns import NewtonSchulz; from tests.unit.ns_reference import *; "
        "G = gaussian(130, 200); ns = NewtonSchulz(kernel='triton', dtype=torch.float16); "
        "assert ns.kernel_name == 'triton'; assert relative_error(ns(G), exact(G)) < 1e-2"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600, env=environment)


def test_unknown_kernel_names_the_choices():
    with pytest.raises(ConfigurationError, match="'auto', 'quack', 'cute_sm80', 'triton', 'cublas'"):
        NewtonSchulz(kernel="cutlass")
