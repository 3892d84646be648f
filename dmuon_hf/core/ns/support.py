"""What this machine has for each kernel: its GPU, the packages, their versions. Looked up when a kernel is resolved."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import re
from dataclasses import dataclass
from importlib import import_module

import torch

__all__ = ["CANDIDATES", "Candidate", "installed_version", "kernel_packages", "log_once", "missing", "sm_version"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel that needs more than PyTorch.

    Attributes:
        name: What ``kernel=`` calls it.
        detail: The same in words.
        module: Its module in ``dmuon_hf.core.ns.backends``, which offers ``syrk``.
        packages: The package to install, and others that bring the same module.
        imports: The module that has to be importable.
        majors: Compute capabilities it runs on, without the minor number.
        preferred: Those on which ``"auto"`` takes it untimed. Without any it is taken by name, or where autotuning
            found it fastest on the GPU at hand: the library product beats an untuned portable kernel on some.
        tile: Rows of the largest tile: products of fewer rows have no tile to save.
        least, below: Bounds of the versions it was tested with; ``below`` is exclusive.
    """

    name: str
    detail: str
    module: str
    packages: tuple[str, ...]
    imports: str
    majors: tuple[int, ...]
    preferred: tuple[int, ...]
    tile: int = 128
    least: tuple[int, ...] = ()
    below: tuple[int, ...] | None = None


# In the order in which "auto" tries those that it takes untimed.
CANDIDATES = (
    Candidate(
        name="cute_sm80",
        detail="DMuon internal",
        module="cute_sm80",
        packages=("nvidia-cutlass-dsl",),
        imports="cutlass.cute",
        majors=(8, 9, 10, 11, 12),
        preferred=(8,),
        least=(4, 4),
    ),
    Candidate(
        name="quack",
        detail="Tri Dao quack",
        module="quack",
        packages=("quack-kernels",),
        imports="quack.gemm_interface",
        majors=(9, 10, 11, 12),
        preferred=(9, 10, 11, 12),
        tile=256,
        least=(0, 3, 11),
        below=(0, 7),
    ),
    Candidate(
        name="triton",
        detail="portable Triton",
        module="triton_syrk",
        packages=("triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu"),
        imports="triton.language",
        majors=(8, 9, 10, 11, 12),
        preferred=(),
    ),
)


def sm_version() -> int:
    """Compute capability of the current NVIDIA GPU, major times ten plus minor; 0 without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != "cuda" or torch.version.cuda is None:
        return 0
    major, minor = torch.get_device_module("cuda").get_device_capability()
    return int(major) * 10 + int(minor)


def missing(candidate: Candidate, sm: int) -> str | None:
    """What keeps ``candidate`` from running here, as the end of a sentence; ``None`` if it can.

    Packages are imported only on a GPU that the kernel runs on.
    """
    if sm // 10 not in candidate.majors and not _other_device(candidate, sm):
        here = f"this one is SM{sm}" if sm else "this machine has none"
        return f"it needs an NVIDIA GPU of SM{candidate.majors[0]}0 or newer; {here}"
    return _version_problem(candidate) or _import_problem(candidate.imports)


def kernel_packages() -> list[str]:
    """Every package that one of the kernels may come from."""
    return [package for candidate in CANDIDATES for package in candidate.packages]


def installed_version(package: str) -> str:
    """The version of ``package``; empty if it is not installed."""
    return _version(package)


def _other_device(candidate: Candidate, sm: int) -> bool:
    """Triton also serves the GPUs of other vendors, and its interpreter CPUs, for tests."""
    if candidate.name != "triton" or sm:
        return False
    return torch.accelerator.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


def _version_problem(candidate: Candidate) -> str | None:
    """Of a version that is missing, too old or too new."""
    installed = {package: _version(package) for package in candidate.packages}
    package, text = next(((name, version) for name, version in installed.items() if version), ("", ""))
    if not text:
        return f"the package {candidate.packages[0]} is not installed"
    found = tuple(map(int, re.findall(r"\d+", text)[:3]))
    if candidate.least <= found and (candidate.below is None or found < candidate.below):
        return None
    least, below = (".".join(map(str, bound or ())) for bound in (candidate.least, candidate.below))
    return f"{package} {text} is installed; it needs {least} or newer{below and f', below {below}'}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _import_problem(module: str) -> str | None:
    try:
        import_module(module)
    except Exception as error:
        # Compilers for GPUs fail in their own ways without a driver: any failure means the same to the caller.
        return f"{module} cannot be imported ({type(error).__name__}: {error})"
    return None


@functools.cache
def log_once(message: str) -> None:
    """Log ``message`` at level INFO unless this process already did."""
    logger.info("%s", message)
