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
from dmuon_hf.core.ns.support import CANDIDATES, log_once, missing, sm_version
from dmuon_hf.core.ns.syrk_kernel import SyrkKernel

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "KERNELS",
    "Kernel",
    "get_backend_status",
    "get_ns_backend",
    "requested_kernel",
    "resolve_kernel",
]

ENVIRONMENT_VARIABLE = "DMUON_NS_KERNEL"
KERNELS = ("auto", "quack", "cute_sm80", "triton", "cublas")

_DETAILS = {"cublas": "universal fallback"} | {candidate.name: candidate.detail for candidate in CANDIDATES}


class Kernel(Protocol):
    """The operations a kernel gives to the iteration. Implementations are immutable, picklable values."""

    @property
    def name(self) -> str:
        """The name under which ``kernel=`` selects it."""

    def gram(self, X: Tensor) -> Tensor:
        """A new tensor ``X @ X^T``, ``(m, m)`` or ``(B, m, m)``, for ``X`` of any strides."""

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
        """A new tensor ``alpha * A @ B + beta * C + diag * I``, ``(m, m)`` or ``(B, m, m)``.

        ``A``, ``B`` and ``C`` are symmetric, and ``A`` and ``B`` commute.
        """

    def one_by_one(self, rows: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether a batch of matrices with short side ``rows`` is faster as a loop over its matrices."""

    def symmetric_share(self, rows: int, depth: int, dtype: torch.dtype, device: torch.device) -> float:
        """The share of the multiplications of a full ``rows x depth`` by ``depth x rows`` product that are done."""


def resolve_kernel(kernel: str = "auto", *, deterministic: bool = False) -> Kernel:
    """The kernel that ``kernel`` names on this machine.

    ``"auto"`` becomes ``"cublas"`` when ``deterministic``, else what the environment variable ``DMUON_NS_KERNEL``
    names, else the first of the table in ``support`` that the current GPU prefers and whose packages can be imported,
    else ``"cublas"``; so Triton only by name, or by the timing of an ``autotune``. An explicit name wins over both; if
    it disagrees with ``deterministic``, a warning says so. The choice depends on nothing but the GPU and what is
    installed: equal machines choose alike.

    Raises:
        ConfigurationError: a name that is none of ``KERNELS``.
        NotImplementedError: a kernel asked for by name that cannot run here; the message says what is missing.
    """
    name, asked_by = _requested(kernel, deterministic)
    if name == "auto":
        return _best_kernel()
    if name == "cublas":
        return LibraryKernel()
    candidate = next(candidate for candidate in CANDIDATES if candidate.name == name)
    reason = missing(candidate, sm_version())
    if reason is not None:
        raise NotImplementedError(
            f"{asked_by} cannot run on this machine: {reason}. Use 'cublas', which runs on every device, or 'auto'."
        )
    return SyrkKernel(candidate)


def requested_kernel(kernel: str) -> str:
    """``kernel``, or what ``DMUON_NS_KERNEL`` names in place of ``"auto"``."""
    return os.environ.get(ENVIRONMENT_VARIABLE) or kernel if kernel == "auto" else kernel


def _requested(kernel: str, deterministic: bool) -> tuple[str, str]:
    """The kernel asked for, and the words in which it was."""
    asked_by = f"kernel={kernel!r}"
    _check_name(kernel, asked_by)
    if deterministic and kernel not in ("auto", "cublas"):
        warnings.warn(f"{asked_by} and deterministic=True disagree: the kernel wins.", UserWarning, stacklevel=5)
    elif deterministic:
        return "cublas", asked_by
    elif kernel == "auto" and os.environ.get(ENVIRONMENT_VARIABLE):
        kernel = os.environ[ENVIRONMENT_VARIABLE]
        asked_by = f"{ENVIRONMENT_VARIABLE}={kernel}"
        _check_name(kernel, asked_by)
    return kernel, asked_by


def _best_kernel() -> Kernel:
    sm = sm_version()
    kernel: Kernel = LibraryKernel()
    passed_over = []
    for candidate in CANDIDATES:
        if sm // 10 in candidate.preferred:
            reason = missing(candidate, sm)
            if reason is None:
                kernel = SyrkKernel(candidate)
                break
            passed_over.append(f"; not {candidate.name}, since {reason}")
    if sm:  # Without an NVIDIA GPU there was nothing to choose from.
        log_once(f"Newton-Schulz kernel on this machine: {kernel.name} (SM{sm}){''.join(passed_over)}")
    return kernel


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
    return f"Gram NS · kernel={name} (SM{sm_version()}, {_DETAILS[name]})"


def get_backend_status() -> dict[str, Any]:
    """What the choice of a kernel on this machine rests on, for bug reports.

    ``sm_version`` (int, 0 without an NVIDIA GPU), ``auto_choice`` (the kernel ``"auto"`` resolves to), per kernel
    whether it can run here, and under ``missing`` why not. Raises what ``resolve_kernel`` raises.
    """
    sm = sm_version()
    reasons = {candidate.name: missing(candidate, sm) for candidate in CANDIDATES}
    status: dict[str, Any] = {"sm_version": sm, "auto_choice": resolve_kernel().name}
    status |= {f"{name}_available": reason is None for name, reason in reasons.items()}
    status["cublas_always_available"] = True
    status["missing"] = {name: reason for name, reason in reasons.items() if reason is not None}
    return status
