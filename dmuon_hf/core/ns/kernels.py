"""Which kernel forms the symmetric products of Newton-Schulz, chosen once per ``NewtonSchulz`` and passed along.

``cublas`` names the library matrix product of the device: cuBLAS on NVIDIA GPUs, MKL or oneDNN on a CPU.
"""

from __future__ import annotations

import os
import warnings
from typing import Any, Protocol

import torch
from torch import Tensor

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns.library import LibraryKernel

__all__ = ["ENVIRONMENT_VARIABLE", "KERNELS", "Kernel", "get_backend_status", "get_ns_backend", "resolve_kernel"]

ENVIRONMENT_VARIABLE = "DMUON_NS_KERNEL"
KERNELS = ("auto", "quack", "cute_sm80", "cublas")

_NOT_BUILT = {
    "quack": "the adapter to Tri Dao's quack GEMM for SM90 and newer",
    "cute_sm80": "the CuTe DSL kernel for SM80 and SM87",
}
_DETAILS = {"cublas": "universal fallback"}


class Kernel(Protocol):
    """The operations a kernel gives to the iteration. Implementations are immutable, picklable values."""

    @property
    def name(self) -> str:
        """The name under which ``kernel=`` selects it."""

    def symmetric(
        self, A: Tensor, B: Tensor, C: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        """A new tensor ``alpha * A @ B + beta * C``, ``(m, m)`` or ``(B, m, m)``, where both terms are symmetric."""

    def one_by_one(self, rows: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether a batch of matrices with short side ``rows`` is faster as a loop over its matrices."""

    def symmetric_share(self, rows: int, dtype: torch.dtype, device: torch.device) -> float:
        """The share of a full product's multiplications that ``symmetric`` spends, 0.5 to 1."""


def resolve_kernel(kernel: str = "auto", *, deterministic: bool = False) -> Kernel:
    """The kernel that ``kernel`` names on this machine.

    ``"auto"`` becomes ``"cublas"`` when ``deterministic``, else what the environment variable ``DMUON_NS_KERNEL``
    names, else the best kernel that exists. An explicit name wins over both; if it disagrees with ``deterministic``,
    a warning says so.

    Raises:
        ConfigurationError: a name that is none of ``KERNELS``.
        NotImplementedError: a kernel that this version does not contain.
    """
    asked_by = f"kernel={kernel!r}"
    _check_name(kernel, asked_by)
    name = kernel
    if deterministic and kernel not in ("auto", "cublas"):
        warnings.warn(f"{asked_by} and deterministic=True disagree: the kernel wins.", UserWarning, stacklevel=4)
    elif deterministic:
        name = "cublas"
    elif kernel == "auto" and os.environ.get(ENVIRONMENT_VARIABLE):
        name = os.environ[ENVIRONMENT_VARIABLE]
        asked_by = f"{ENVIRONMENT_VARIABLE}={name}"
        _check_name(name, asked_by)
    if name in _NOT_BUILT:
        raise NotImplementedError(
            f"{asked_by}: {_NOT_BUILT[name]} is not part of this version of dmuon_hf. "
            f"Use 'cublas', which runs on every device, or 'auto'."
        )
    return LibraryKernel()


def _check_name(name: str, asked_by: str) -> None:
    if name not in KERNELS:
        raise ConfigurationError(
            f"{asked_by} is no Newton-Schulz kernel; choose one of {', '.join(repr(choice) for choice in KERNELS)}."
        )


def get_ns_backend() -> str:
    """One line for a start-up log that names the kernel ``"auto"`` resolves to on this machine.

    Example: ``Gram NS · kernel=cublas (SM80, universal fallback)``; SM0 stands for a machine without an NVIDIA GPU.
    Raises what ``resolve_kernel`` raises.
    """
    name = resolve_kernel().name
    return f"Gram NS · kernel={name} (SM{_sm_version()}, {_DETAILS[name]})"


def get_backend_status() -> dict[str, Any]:
    """What the choice of a kernel on this machine rests on, for bug reports.

    ``sm_version`` (int, 0 without an NVIDIA GPU), ``auto_choice`` (the kernel ``"auto"`` resolves to), and per kernel
    whether this version can run it here. Raises what ``resolve_kernel`` raises.
    """
    return {
        "sm_version": _sm_version(),
        "auto_choice": resolve_kernel().name,
        "quack_available": False,
        "cute_sm80_available": False,
        "cublas_always_available": True,
    }


def _sm_version() -> int:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != "cuda" or torch.version.cuda is None:
        return 0
    major, minor = torch.get_device_module("cuda").get_device_capability()
    return int(major) * 10 + int(minor)
