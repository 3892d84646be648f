"""Print the accuracy table of docs/newton_schulz.md: ``python -m tests.unit.ns_accuracy_table``."""

from __future__ import annotations

import sys

import torch

from dmuon_hf.core.ns import NewtonSchulz
from tests.unit.ns_reference import HalfProducts, exact, relative_error, spectrum

COLUMNS = {
    "Gram float32": NewtonSchulz(dtype=torch.float32),
    "direct float32": NewtonSchulz("direct", dtype=torch.float32),
    "Gram float16": NewtonSchulz(dtype=torch.float16),
    "Gram float16, no restart": NewtonSchulz(dtype=torch.float16, restart_iterations=[]),
    "Gram float16, mixed": NewtonSchulz(dtype=torch.float16, gram_dtype=torch.float32),
    "direct float16": NewtonSchulz("direct", dtype=torch.float16),
    "Gram bfloat16": NewtonSchulz(dtype=torch.bfloat16),
    "Gram bfloat16, restart [2]": NewtonSchulz(dtype=torch.bfloat16, restart_iterations=[2]),
    "Gram bfloat16, mixed": NewtonSchulz(dtype=torch.bfloat16, gram_dtype=torch.float32),
    "direct bfloat16": NewtonSchulz("direct", dtype=torch.bfloat16),
}


def main() -> None:
    lines = ["| condition | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for condition in (1e1, 1e3, 1e5, 1e9):
        G = spectrum(256, 1024, condition)
        with HalfProducts():
            errors = [relative_error(ns(G), exact(G)) for ns in COLUMNS.values()]
        lines.append(f"| {condition:.0e} | " + " | ".join(f"{error:.1e}" for error in errors) + " |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
