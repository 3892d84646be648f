"""What every benchmark prints and writes: where it ran, a table, JSON."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["machine", "print_header", "print_table", "write_json"]


def machine() -> dict[str, Any]:
    """The hardware, the software and the command of this run."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": shlex.join(["python", *sys.argv]),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                family = torch.cpu.get_capabilities().get("architecture", platform.machine())
                return f"{line.split(':', 1)[1].strip()} ({family})"
    return platform.processor() or platform.machine()


def print_header(where: dict[str, Any]) -> None:
    print(f"{where['cpu']}, {where['cores']} cores, load {where['load']:.1f} at the start")
    print(f"Python {where['python']}, torch {where['torch']}")
    print(f"$ {where['command']}")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Left-align the first column and right-align the others; with rich where it is installed."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _print_plain(title, columns, rows)
        return
    table = Table(box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    print(f"\n{title}")
    # A pipe has no width; the table keeps its own there.
    console = Console(markup=False) if sys.stdout.isatty() else Console(width=160, markup=False)
    console.print(table)


def _print_plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    print(f"\n{title}")
    for row in [columns, ["-" * width for width in widths], *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())


def write_json(path: str | None, result: dict[str, Any]) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(result, indent=2) + "\n")
        print(f"written to {path}")
