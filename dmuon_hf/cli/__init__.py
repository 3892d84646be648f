"""The command line `dmuon-hf`: what would happen to a model, its files brought into other forms, and the machine.

`parser` has the arguments; each command is in a module that is imported when it runs: `plan`, `routes`, `export` (which
imports as well), `rates`, `doctor` (and the version). Results go to stdout, everything else to stderr. Exit status: 0,
1 where a check found something wrong (`doctor`), 2 for a request that cannot be done, with the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dmuon_hf.cli.parser import make_parser
from dmuon_hf.core.errors import DMuonError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = make_parser().parse_args(argv)
    try:
        status: int = options.run(options)
    except (DMuonError, NotImplementedError) as error:
        sys.stderr.write(f"dmuon-hf {options.command}: {error}\n")
        return 2
    except ModuleNotFoundError as error:
        sys.stderr.write(f"dmuon-hf {options.command} needs {error.name}: pip install 'dmuon_hf[hf]'\n")
        return 2
    except BrokenPipeError:  # `dmuon-hf routes MODEL | head`
        sys.stderr.close()
        return 0
    return status
