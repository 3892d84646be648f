"""Triton, imported late and with an error that says what is missing, and the targets that it compiles for."""

from __future__ import annotations

from typing import Any, Final

import torch

__all__ = ["TYPE_NAMES", "import_triton", "target_of"]

TYPE_NAMES: Final = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
"""What Triton calls a dtype."""


def import_triton(what: str, instead: str) -> Any:
    """The package, with what compiles ahead of time.

    Raises:
        NotImplementedError: It cannot be imported; ``what`` needs it, and ``instead`` says what to do without.
    """
    try:
        import triton
        import triton.backends.compiler
        import triton.compiler
        import triton.language
    except ImportError as error:
        raise NotImplementedError(
            f"{what} needs the package triton, which cannot be imported here ({error}). Install the "
            f"version that belongs to this PyTorch, or {instead}."
        ) from error
    return triton


def target_of(triton: Any, architecture: int | str) -> Any:
    """The target of an architecture of NVIDIA (80, 86, 90, ...) or AMD (``"gfx942"``, ...)."""
    GPUTarget = triton.backends.compiler.GPUTarget
    if isinstance(architecture, int):
        return GPUTarget("cuda", architecture, 32)
    # Compute GPUs have waves of 64 lanes, others of 32.
    return GPUTarget("hip", architecture, 64 if architecture.startswith("gfx9") else 32)
