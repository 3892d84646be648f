"""The arguments of `dmuon-hf`. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["make_parser"]

_MODEL = "a hub name, a directory or a config file"
_RULES = ("match_rms_adamw", "original", "spectral", "none")
_DTYPES = ("float32", "bfloat16", "float16")


def make_parser() -> argparse.ArgumentParser:
    """The parser; what it returns has `run`, which takes the options and returns the exit status."""
    parser = argparse.ArgumentParser(prog="dmuon-hf", description="Distributed Muon for Hugging Face models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_plan(_command(commands, "plan", "plan.run", "owners, memory, traffic and a predicted step of a model"))
    _add_routes(_command(commands, "routes", "routes.run", "which optimizer updates which parameter, and why"))
    _add_export(_command(commands, "export", "export.run_export", "a checkpoint -> what from_pretrained opens"))
    _add_import(_command(commands, "import", "export.run_import", "safetensors -> a distributed checkpoint (DCP)"))
    _add_convert(_command(commands, "convert-lr", "rates.run", "a learning rate under another rule of scaling"))
    _add_doctor(_command(commands, "doctor", "doctor.run", "versions, devices, kernels, and a two-rank self-test"))
    _command(commands, "version", "doctor.run_version", "the version of this package")
    return parser


def _command(commands: Any, name: str, target: str, summary: str) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:]
    )
    added.set_defaults(run=_later(target))
    return added


def _later(target: str) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        module, function = target.split(".")
        result: int = getattr(importlib.import_module(f"dmuon_hf.cli.{module}"), function)(options)
        return result

    return run


def _add_routing(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--adamw", action="append", default=[], metavar="PATTERN", help="names to leave to AdamW; may be repeated")
    add("--muon", action="append", default=[], metavar="PATTERN", help="names to give to Muon; may be repeated")
    add("--json", action="store_true", help="print JSON")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=_MODEL)
    add("--ranks", type=int, default=8, metavar="N", help="processes in all (default: %(default)s)")
    add("--replicas", type=int, metavar="R", help="replicas of HSDP (default: look at one, and one per node)")
    add("--tp", type=int, default=1, metavar="T", help="tensor-parallel ranks (default: %(default)s)")
    add("--mode", choices=("ddp", "z2", "z3", "hsdp"), help="look at this mode only")
    add("--memory", type=float, metavar="GIB", help="of a device: modes that need more do not fit")
    add("--dtype", choices=_DTYPES, default="bfloat16", help="on the wire (default: %(default)s)")
    _add_routing(parser)
    rates = parser.add_argument_group(
        "rates of one device, given and not measured (defaults: round numbers of an H100)"
    )
    for flag, default, unit in (
        ("--compute-rate", 4e14, "FLOPS"),
        ("--ns-rate", 3e14, "FLOPS"),
        ("--memory-bandwidth", 2.5e12, "BYTES"),
        ("--node-bandwidth", 3e11, "BYTES"),
        ("--network-bandwidth", 4e10, "BYTES"),
    ):
        rates.add_argument(flag, type=float, default=default, metavar=unit, help="per second (default: %(default)g)")
    rates.add_argument("--node-size", type=int, default=8, metavar="N", help="devices of a node (default: %(default)s)")
    rates.add_argument("--tokens", type=int, default=8192, help="of one rank and step (default: %(default)s)")
    rates.add_argument(
        "--sequence", type=int, default=8192, help="tokens that meet in attention (default: %(default)s)"
    )


def _add_routes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    _add_routing(parser)


def _add_export(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="of the Trainer, accelerate, DCP or torch.save: a directory or a file")
    add("out", metavar="OUT", help="directory to write, which must not be there yet")
    add("--model", metavar="MODEL", help=f"{_MODEL}, where no config.json lies in or above CHECKPOINT")
    add("--dtype", choices=_DTYPES, help="of floating-point weights (default: as they are)")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default: %(default)s)")


def _add_import(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="MODEL_DIR", help="directory or file with the weights, as from_pretrained opens it")
    add("out", metavar="OUT", help="directory to write, which must not be there yet")
    add("--model", metavar="MODEL", help=f"{_MODEL}, where no config.json lies in or above MODEL_DIR")


def _add_convert(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("lr", type=float, metavar="LR", help="the learning rate")
    add("--from", dest="source", choices=_RULES, required=True, help="rule that it was chosen for")
    add("--to", dest="target", choices=_RULES, default="match_rms_adamw", help="other rule (default: %(default)s)")
    add("--shape", type=_shape, action="append", default=[], metavar="OUTxIN", help="of a matrix; may be repeated")
    add("--model", metavar="MODEL", help=f"{_MODEL}: every shape of its matrices")
    add("--json", action="store_true", help="print JSON")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-self-test", action="store_true", help="start no processes")


def _shape(text: str) -> tuple[int, int]:
    out, _, inner = text.lower().partition("x")
    if not (out.isdigit() and inner.isdigit() and int(out) and int(inner)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape such as 4096x1024")
    return int(out), int(inner)
