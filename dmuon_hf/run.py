"""Run a training script that knows nothing of Muon with Muon: `accelerate launch -m dmuon_hf.run train.py --its args`.

Every `transformers.Trainer` in it, and every class made from it, that comes without an optimizer of its own trains with
Muon; see `script_options` for how options are given. The script sees its own arguments, name and directory.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.everywhere import tell, train_everywhere
from dmuon_hf.factory import create
from dmuon_hf.script_options import CONFIG_VARIABLE, script_options

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a script as `python script.py ...` would, or with `-m` a module.

    Raises:
        ConfigurationError: an option that does not exist, before the script runs.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dmuon_hf.run",
        description="Run a training script with Muon in every Trainer that has no optimizer of its own. Options of "
        "dmuon_hf.create come from the environment, DMUON_HF_<OPTION>=value, or from a YAML file.",
    )
    parser.add_argument("--dmuon-config", metavar="FILE", help=f"YAML file of options; also {CONFIG_VARIABLE}")
    parser.add_argument("-m", action="store_true", dest="as_module", help="the script is the name of a module")
    parser.add_argument("script", help="the script, with its own arguments behind it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    options = script_options(given.dmuon_config)
    if not given.as_module and not Path(given.script).is_file():
        raise ConfigurationError(f"there is no script {given.script!r}; for a module write -m before its name")
    everywhere = train_everywhere(create(**options.values), str(options))
    sys.argv = [given.script, *given.arguments]
    if given.as_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(given.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(given.script).resolve().parent)
        runpy.run_path(given.script, run_name="__main__")
    if not everywhere.taken:
        tell("no Trainer of the script took Muon: a loop of its own needs dmuon_hf.create_optimizer")


if __name__ == "__main__":
    main()
