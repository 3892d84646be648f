"""Choices kept for other processes: one file per machine, written atomically."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import platform
import re
import uuid
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dmuon_hf.core.ns.autotune.candidates import Choice
from dmuon_hf.core.ns.kernels import KERNELS
from dmuon_hf.core.ns.support import installed_version, kernel_packages, sm_version

__all__ = ["FOLDER_VARIABLE", "ChoiceCache", "cache_folder", "machine"]

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "DMUON_CACHE_DIR"
_FORMAT = 1


def machine(device: torch.device) -> dict[str, str | int]:
    """Everything that a choice depends on beside the product: equal machines would find the same.

    The GPU with its compute capability, or the CPU with the number of threads; the source of this package's kernels;
    the versions of PyTorch and of the packages that kernels need; what float32 products are rounded to.
    """
    found: dict[str, str | int] = {
        "device": _device_name(device),
        "kernels": _digest_of_kernels(),
        "torch": torch.__version__,
        "float32": torch.get_float32_matmul_precision(),
    }
    if device.type == "cpu":
        return found | {"threads": torch.get_num_threads()}
    versions = {package: installed_version(package) for package in kernel_packages()}
    return found | {"sm": sm_version()} | {package: version for package, version in versions.items() if version}


@functools.cache
def _digest_of_kernels() -> str:
    folder = Path(__file__).parents[1]
    digest = 0
    for path in sorted([*folder.glob("backends/*.py"), folder / "library.py", folder / "syrk_kernel.py"]):
        with contextlib.suppress(OSError):
            digest = zlib.crc32(path.read_bytes(), digest)
    return f"{digest:08x}"


def _device_name(device: torch.device) -> str:
    if device.type != "cpu":
        # Where the module of the device type has no names, the type has to do.
        name_of = getattr(torch.get_device_module(device), "get_device_name", None)
        return device.type if name_of is None else str(name_of(device))
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine()


def cache_folder() -> Path:
    """``newton_schulz`` in ``DMUON_CACHE_DIR``, else in ``dmuon_hf`` in ``XDG_CACHE_HOME``, else in ``~/.cache``."""
    if own := os.environ.get(FOLDER_VARIABLE):
        return Path(own).expanduser() / "newton_schulz"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "dmuon_hf" / "newton_schulz"


class ChoiceCache:
    """The file of one machine. Whatever is wrong with it costs tuning anew, and never an exception."""

    def __init__(self, machine: Mapping[str, str | int], folder: Path | None = None) -> None:
        self._machine = dict(machine)
        text = json.dumps(self._machine, sort_keys=True)
        name = re.sub(r"[^a-z0-9]+", "-", str(machine.get("device", "")).lower()).strip("-")[:60]
        self.path = (folder or cache_folder()) / f"{name}-{zlib.crc32(text.encode()):08x}.json"

    def load(self) -> dict[str, Choice]:
        """What is stored, by the caller's keys; nothing, and a line in the log, if the file cannot be used."""
        try:
            return self._parse(json.loads(self.path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            logger.warning("Newton-Schulz: the autotune cache %s cannot be used, tuning anew (%s)", self.path, error)
            return {}

    def store(self, found: Mapping[str, Choice]) -> None:
        """Add ``found`` to the file, beside what others have written in the meantime; a warning if that fails."""
        if not found:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                self._replace({**self.load(), **found})
        except OSError as error:
            logger.warning("Newton-Schulz: the autotune cache %s cannot be written (%s)", self.path, error)

    def _parse(self, content: Any) -> dict[str, Choice]:
        if content["format"] != _FORMAT or content["machine"] != self._machine:
            raise ValueError(f"it is of format {content['format']}, for {content['machine']}")
        return {str(key): _choice(*value) for key, value in content["choices"].items()}

    def _replace(self, choices: Mapping[str, Choice]) -> None:
        stored = {key: [choice.kernel, *choice.config] for key, choice in sorted(choices.items())}
        content = {"format": _FORMAT, "machine": self._machine, "choices": stored}
        # Not of `tempfile`, whose files nobody else may read: a folder may be shared.
        part = self.path.with_suffix(f".{uuid.uuid4().hex}.tmp")
        try:
            with part.open("x", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _choice(kernel: str, *config: int) -> Choice:
    if kernel not in KERNELS or not all(isinstance(number, int) for number in config):
        raise ValueError(f"{[kernel, *config]} is no choice of a kernel")
    return Choice(kernel, config)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes out of the block where the system has advisory locks; elsewhere the last writer wins."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
