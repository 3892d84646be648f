"""Newton-Schulz implementations that are timed against each other, and the exact result that they are measured by."""

from __future__ import annotations

import importlib
import math
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode

import dmuon_hf.core as dmuon

__all__ = ["Contender", "counted_flops", "exact", "gram_peers", "ours", "relative_error", "spectrum", "torch_muon"]

Rows = Sequence[Sequence[float]]
STEPS = 5
TORCH_ROWS = [(DEFAULT_A, DEFAULT_B, DEFAULT_C)] * STEPS


@dataclass(frozen=True, slots=True)
class Contender:
    """One implementation.

    Attributes:
        name: What the tables call it; ours start with ``dmuon``.
        run: One matrix in, the orthogonalised one out; may overwrite its argument.
        rows: The polynomial that it computes.
        ns: Ours, for its flop count.
    """

    name: str
    run: Callable[[Tensor], Tensor]
    rows: Rows
    ns: dmuon.NewtonSchulz | None = None

    @property
    def mine(self) -> bool:
        return self.ns is not None

    def on_a_copy(self, G: Tensor) -> Tensor:
        """``run``, with ``G`` left as it is."""
        return self.run(G.clone())


def ours(
    dtype: torch.dtype, *, backends: Sequence[str] = ("direct", "gram", "auto"), **options: Any
) -> list[Contender]:
    """This package in ``dtype``, once per backend; ``options`` are those of ``NewtonSchulz``."""
    suffix = "".join(f" {name}={value}" for name, value in options.items())
    found = []
    for backend in backends:
        ns = dmuon.NewtonSchulz(backend, dtype=dtype, **options)
        found.append(Contender(f"dmuon {backend}{suffix}", ns, dmuon.DEFAULT_COEFFICIENTS, ns))
    return found


def torch_muon() -> Contender:
    """The Newton-Schulz of ``torch.optim.Muon``, which iterates in bfloat16 whatever it is given."""
    return Contender("torch.optim.Muon", _torch_muon, TORCH_ROWS)


def gram_peers(dtype: torch.dtype, *, kernels: bool = False) -> list[Contender]:
    """gram-newton-schulz in ``dtype``, direct and Gram; nothing, with a line that says so, if it is not installed.

    It iterates in float16 whatever it is given; for another ``dtype`` the name float16 means that one in its module.
    ``kernels`` lets it use quack.
    """
    module = _gram_newton_schulz()
    if module is None:
        return []
    options = {"ns_use_kernels": kernels, "compile_kwargs": None}
    suffix = " quack" if kernels else ""
    found = []
    for name, cls in (("direct", module.StandardNewtonSchulz), ("gram", module.GramNewtonSchulz)):
        run = _in_dtype(cls(**options), dtype)
        found.append(Contender(f"gram-newton-schulz {name}{suffix}", run, module.POLAR_EXPRESS_COEFFICIENTS))
    return found


def _torch_muon(G: Tensor) -> Tensor:
    return _zeropower_via_newtonschulz(G, TORCH_ROWS[0], STEPS, EPS)


def _gram_newton_schulz() -> Any:
    try:
        return importlib.import_module("gram_newton_schulz")
    except Exception as error:
        print(f"left out: gram-newton-schulz cannot be imported ({error}); pip install --no-deps gram-newton-schulz")
        return None


def _in_dtype(peer: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    module: Any = sys.modules["gram_newton_schulz.gram_newton_schulz"]
    rebound = types.ModuleType("torch")
    rebound.__dict__.update(torch.__dict__)
    rebound.float16 = dtype  # type: ignore[attr-defined]

    def run(G: Tensor) -> Tensor:
        module.torch = rebound
        try:
            return peer(G)
        finally:
            module.torch = torch

    return run


def counted_flops(contender: Contender, G: Tensor, dtype: torch.dtype) -> float:
    """What one call spends in matrix products: computed parts of symmetric products for ours, whole ones for peers."""
    if contender.ns is not None:
        return contender.ns.flops(*G.shape, dtype=dtype, device=G.device)
    with FlopCounterMode(display=False) as counter:
        contender.on_a_copy(G)
    return float(counter.get_total_flops())


def spectrum(m: int, n: int, condition: float, *, device: torch.device, seed: int = 0) -> Tensor:
    """A float32 ``(m, n)`` matrix with singular values evenly spaced in logarithm, from 1 to ``1 / condition``.

    The singular vectors are those of Gaussian matrices, up to an orthogonalisation in float32.
    """
    generator = torch.Generator().manual_seed(seed)
    k = min(m, n)
    left = torch.linalg.qr(torch.randn(m, k, generator=generator).to(device)).Q
    right = torch.linalg.qr(torch.randn(n, k, generator=generator).to(device)).Q
    values = torch.logspace(0.0, -math.log10(condition), k, device=device)
    result: Tensor = (left * values) @ right.T
    return result


def exact(G: Tensor, rows: Rows) -> Tensor:
    """The polynomial of ``rows`` on ``G`` over its Frobenius norm, in float64."""
    X = G.double()
    tall = X.shape[0] > X.shape[1]
    X = X.T if tall else X
    X = X / X.norm()
    for a, b, c in rows:
        R = X @ X.T
        X = a * X + (b * R + c * (R @ R)) @ X
    result: Tensor = X.T if tall else X
    return result


def relative_error(result: Tensor, reference: Tensor) -> float:
    return float((result.double() - reference).norm() / reference.norm())
