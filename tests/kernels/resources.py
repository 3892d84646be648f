"""What a kernel takes of a multiprocessor, as ptxas says."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ARCHITECTURES", "Resources", "assemble", "newest_ptxas", "shared_limit"]

# Compute capability -> bytes of shared memory that one thread block may have.
_KIB = 1024
ARCHITECTURES = {80: 163 * _KIB, 86: 99 * _KIB, 89: 99 * _KIB, 90: 227 * _KIB, 100: 227 * _KIB, 120: 99 * _KIB}


def shared_limit(capability: int) -> int:
    return ARCHITECTURES[capability]


@dataclass(frozen=True)
class Resources:
    """Of one thread block; ``spilled`` are bytes of registers that went to memory."""

    target: str
    registers: int
    spilled: int
    shared: int
    threads: int

    def check(self, capability: int) -> None:
        """Assert that a block fits a multiprocessor and keeps its registers."""
        assert self.spilled == 0, f"{self.target}: {self.spilled} bytes spilled"
        assert self.registers * self.threads <= 65536, f"{self.target}: {self.registers} registers a thread"
        assert self.shared <= shared_limit(capability), f"{self.target}: {self.shared} bytes of shared memory"

    def row(self, name: str) -> str:
        """A line of the table that the test run prints."""
        occupied = (
            f"{self.registers:>4} registers {self.spilled:>5} spilled {self.shared:>7} shared {self.threads:>4} threads"
        )
        return f"{name:<52} {self.target:<8} {occupied}"


@functools.cache
def newest_ptxas() -> Path | None:
    """Of the toolkit on the path and those inside Triton; a newer one assembles what an older one does."""
    found = [Path(path) for path in [shutil.which("ptxas")] if path]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        found += sorted(Path(triton.origin).parent.glob("backends/nvidia/bin/ptxas*"))
    versions = {path: _version(path) for path in found}
    return max(found, key=versions.__getitem__, default=None)


def _version(path: Path) -> tuple[int, ...]:
    text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=600, check=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", text)
    assert found is not None, text
    return tuple(map(int, found.groups()))


def assemble(ptx: str, directory: Path, *, threads: int, dynamic_shared_bytes: int) -> Resources:
    """Assemble a program of one kernel for its own target."""
    ptxas = newest_ptxas()
    assert ptxas is not None
    target = re.search(r"^\.target (\w+)", ptx, flags=re.MULTILINE)
    assert target is not None
    source = directory / "kernel.ptx"
    source.write_text(ptx)
    command = [ptxas, "-v", f"-arch={target[1]}", source, "-o", directory / "kernel.cubin"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    report = done.stderr + done.stdout
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report)))
    static = sum(map(int, re.findall(r"(\d+) bytes smem", report)))
    (registers,) = map(int, re.findall(r"Used (\d+) registers", report))
    return Resources(target[1], registers, spilled, static + dynamic_shared_bytes, threads)
