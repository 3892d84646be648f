"""`dmuon-hf convert-lr`: a learning rate from one rule of scaling to another."""

from __future__ import annotations

import argparse

from dmuon_hf.cli.census import take_census
from dmuon_hf.cli.skeleton import skeleton
from dmuon_hf.cli.tables import print_json, print_table
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.optim import convert_lr

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Print the rate for each shape: that of `--shape`, or those of the model's matrices."""
    counts: dict[tuple[int, int], int] = {}
    for shape in options.shape:
        counts[shape] = counts.get(shape, 0) + 1
    if options.model is not None:
        for candidate in take_census(skeleton(options.model)).candidates:
            for logical in candidate.spec.logical_shapes(candidate.shape):
                counts[logical] = counts.get(logical, 0) + 1
    if not counts:
        raise ConfigurationError("the rate depends on the shape of the matrix: pass --shape OUTxIN or --model MODEL")
    converted = {shape: convert_lr(options.lr, shape, options.source, options.target) for shape in counts}
    if options.json:
        print_json([{"shape": list(shape), "matrices": counts[shape], "lr": lr} for shape, lr in converted.items()])
        return 0
    print_table(
        f"{options.lr:g} under {options.source!r} is, under {options.target!r},",
        ("matrix (out x in)", "matrices", "learning rate"),
        ((f"{out} x {inner}", f"{counts[out, inner]}", f"{lr:.4g}") for (out, inner), lr in converted.items()),
    )
    return 0
