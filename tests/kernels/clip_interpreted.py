"""Runs the clip kernels on CPU tensors in Triton's own interpreter and prints the failures as JSON.

A program of its own, because the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from dmuon_hf.core.optim.clip_kernels import CHUNK, scale_in_place_, sum_of_squares


def gradients(dtype: torch.dtype, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(1,), (0, 4), (3, 7), (CHUNK,), (2, CHUNK + 5), (100,)]
    return [(torch.randn(size, generator=generator) * scale).to(dtype) for size in sizes]


def norm_of(tensors: list[torch.Tensor]) -> str:
    want = sum(float(tensor.double().square().sum()) for tensor in tensors)
    got, again = sum_of_squares(tensors), sum_of_squares(tensors)
    right = abs(float(got) - want) < 1e-5 * want and got.dtype is torch.float64
    return "" if right and torch.equal(got, again) else f"{float(got)} and {float(again)}, not {want}"


def scaled(tensors: list[torch.Tensor]) -> str:
    want = [(tensor.float() * torch.tensor(0.3)).to(tensor.dtype) for tensor in tensors]
    scale_in_place_(tensors, 0.3)
    return "" if all(map(torch.equal, tensors, want)) else "differs"


def main() -> None:
    failures = {}
    for dtype in (torch.float16, torch.float32):
        failures[f"norm {dtype}"] = norm_of(gradients(dtype))
        # Squares of these overflow in half precision.
        failures[f"large {dtype}"] = norm_of(gradients(dtype, scale=1e4))
        failures[f"scale {dtype}"] = scaled(gradients(dtype))
    for value in (float("nan"), float("inf")):
        tensors = gradients(torch.float32)
        tensors[4][1, 9] = value
        failures[f"{value}"] = "" if not torch.isfinite(sum_of_squares(tensors)) else "lost"
    failures["nothing"] = "" if sum_of_squares([torch.empty(0)]).item() == 0.0 else "not zero"
    json.dump(failures, sys.stdout)


if __name__ == "__main__":
    main()
