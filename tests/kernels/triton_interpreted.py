"""Runs Triton's SYRK on CPU tensors in Triton's own interpreter and prints the failures as JSON.

A program of its own, because the interpreter is chosen when Triton is imported. Of bfloat16 that interpreter keeps bit
patterns in integers: it would multiply those, and truncate where a GPU rounds. Both are put right here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from dmuon_hf.core.ns import NewtonSchulz
from dmuon_hf.core.ns.backends import triton_syrk
from dmuon_hf.core.ns.backends.triton_syrk import TileConfig, syrk
from tests.kernels.reference import Case, make_case
from tests.ptx.values import bfloat16_bits, bfloat16_values

CONFIG = TileConfig(rows=16, depth=16, stages=1, warps=1)


def _values(handle: Any) -> np.ndarray:
    return bfloat16_values(handle.data) if handle.dtype.scalar == tl.bfloat16 else handle.data


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    product = np.matmul(_values(a), _values(b), dtype=d.data.dtype) + d.data
    return interpreter.TensorHandle(product, d.dtype.scalar)


def _repair_bfloat16() -> None:
    original = interpreter.InterpreterBuilder.create_fp_trunc

    def truncate(self: Any, source: Any, target: Any) -> Any:
        if target.scalar == tl.bfloat16:
            return interpreter.TensorHandle(bfloat16_bits(source.data), target.scalar)
        return original(self, source, target)

    interpreter.InterpreterBuilder.create_fp_trunc = truncate
    interpreter.InterpreterBuilder.create_dot = _dot


def _run(case: Case, out: torch.Tensor | None = None) -> str:
    """What is wrong with the result, or nothing."""
    result = syrk(case.A, case.B, case.C, alpha=case.alpha, beta=case.beta, diag=case.diag, out=out, config=CONFIG)
    try:
        case.check(result)
    except AssertionError as error:
        return str(error)
    return "" if out is None or result.data_ptr() == out.data_ptr() else "the result is not in out"


def _iterate(backend: str, dtype: torch.dtype) -> str:
    """What is wrong with a whole Newton-Schulz iteration on the kernel, compared with float64, or nothing."""
    X = torch.randn(136, 200, generator=torch.Generator().manual_seed(0))
    exact = NewtonSchulz(backend=backend, kernel="cublas", dtype=torch.float64)(X.double())
    errors = {}
    with mock.patch.object(triton_syrk, "_launch", wraps=triton_syrk._launch) as launches:
        for kernel in ("cublas", "triton"):
            result = NewtonSchulz(backend=backend, kernel=kernel, dtype=dtype)(X)
            errors[kernel] = ((result.double() - exact).norm() / exact.norm()).item()
    # Five steps of two products or more each.
    if launches.call_count < 10:
        return f"the kernel was launched {launches.call_count} times"
    return "" if errors["triton"] < 1.25 * errors["cublas"] else f"relative errors {errors}"


def main() -> None:
    _repair_bfloat16()
    failures = {}
    for dtype in (torch.float16, torch.bfloat16):
        for name, case in {
            "odd shape": make_case(37, 45, dtype),
            "one element": make_case(1, 7, dtype),
            "batch": make_case(33, 20, dtype, batch=2),
            "product": make_case(24, 24, dtype, product=True),
            "no C": make_case(17, 33, dtype, has_C=False),
            "empty product": make_case(20, 0, dtype),
        }.items():
            failures[f"{name} {dtype}"] = _run(case)
        # A factor of 0 stands for no C at all, whatever that holds.
        case = make_case(17, 33, dtype, beta=0.0)
        failures[f"no factor {dtype}"] = _run(dataclasses.replace(case, C=torch.full_like(case.C, float("nan"))))
        # Every second column of a wider matrix: no stride of `out` is 1.
        case = make_case(20, 24, dtype)
        failures[f"strided out {dtype}"] = _run(case, torch.zeros(20, 40, dtype=dtype)[:, ::2])
        for backend in ("direct", "gram"):
            failures[f"{backend} iteration {dtype}"] = _iterate(backend, dtype)
    json.dump(failures, sys.stdout)


if __name__ == "__main__":
    main()
