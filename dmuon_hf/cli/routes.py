"""`dmuon-hf routes`: what `describe` prints, without training."""

from __future__ import annotations

import argparse
import sys

from dmuon_hf.cli.skeleton import skeleton
from dmuon_hf.cli.tables import print_json
from dmuon_hf.description import describe
from dmuon_hf.presets import routes

__all__ = ["overrides_of", "run"]


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    model = skeleton(options.model)
    overrides = overrides_of(options)
    if options.json:
        parameters = dict(model.named_parameters())
        print_json(
            {
                name: {
                    "shape": list(parameters[name].shape),
                    "route": route.route,
                    "layout": None if route.spec is None else route.spec.to_json(),
                    "reason": route.reason,
                }
                for name, route in routes(model, overrides=overrides).items()
            }
        )
        return 0
    sys.stdout.write(describe(model, overrides=overrides) + "\n")
    return 0


def overrides_of(options: argparse.Namespace) -> dict[str, str]:
    """Exceptions to the presets, as `routes=` of `dmuon_hf.create`."""
    return dict.fromkeys(options.adamw, "adamw") | dict.fromkeys(options.muon, "muon")
