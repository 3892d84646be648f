"""``torch.compile`` around units: dynamo never traces the hooks, and CUDA graphs are refused."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["refuse_cuda_graphs", "untraced", "untraced_once_called"]

F = TypeVar("F", bound=Callable[..., Any])


def untraced(hook: F) -> F:
    """``hook`` as dynamo leaves it alone: neither traced nor compiled, nor anything that it calls.

    Module hooks run inside compiled regions, and hooks of autograd where ``backward()`` is called from compiled code.
    """
    disabled: F = torch.compiler.disable(hook, reason="hooks of dmuon_hf move storage and communicate")
    return disabled


def untraced_once_called(function: F) -> F:
    """As :func:`untraced`, for what is made on import: a call imports dynamo, and with it the compilers it knows."""
    return cast(F, _disable_dynamo(function))


def refuse_cuda_graphs(module: str) -> None:
    """Raise if the caller was compiled for CUDA graphs: a graph replays the addresses that it was captured with.

    Looks at the stack, since a compiled wrapper around a model leaves no mark on it. Cheap while nothing is compiled.

    Raises:
        ConfigurationError: Names ``module`` and what to use instead.
    """
    if "torch._inductor" not in sys.modules and "torch._dynamo" not in sys.modules:
        return
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and _uses_cuda_graphs(frame.f_locals.get("self")):
            raise ConfigurationError(
                f"{module!r} runs under torch.compile with CUDA graphs (mode='reduce-overhead', mode='max-autotune', "
                "backend='cudagraphs' or triton.cudagraphs), which replay fixed addresses, while the storage of whole "
                "weights is freed and allocated anew: compile with mode='default' or 'max-autotune-no-cudagraphs'"
            )
        frame = frame.f_back


def _uses_cuda_graphs(context: Any) -> bool:
    config = getattr(context, "compiler_config", None)
    if isinstance(config, dict) and config.get("triton.cudagraphs", False):
        return True
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return getattr(backend, "compiler_name", None) == "cudagraphs"
