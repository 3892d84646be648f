"""Version gates for the libraries that `dmuon_hf` attaches to, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["SUPPORTED", "VersionRange", "check_versions"]


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Releases of `package` from `minimum` (included) up to `below` (excluded) that the hooks were written for."""

    package: str
    minimum: str
    below: str

    def __str__(self) -> str:
        return f"{self.package}>={self.minimum},<{self.below}"


SUPPORTED: tuple[VersionRange, ...] = (
    VersionRange("torch", "2.13", "2.14"),
    VersionRange("transformers", "5.20", "6"),
    VersionRange("accelerate", "1.15", "2"),
)


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `2.13.0+cpu` -> `(2, 13, 0)`, `5.24.0.dev0` -> `(5, 24, 0)`."""
    numbers: list[int] = []
    for part in version.split("+", 1)[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def check_versions(supported: tuple[VersionRange, ...] = SUPPORTED) -> None:
    """Raise `ConfigurationError` unless every package is installed in its tested range.

    The hooks replace methods of accelerate and transformers, whose bodies differ between releases: an untested release
    is refused, because a hook that no longer fits would train wrongly instead of failing.
    """
    problems = []
    for item in supported:
        try:
            installed = metadata.version(item.package)
        except metadata.PackageNotFoundError:
            problems.append(f"{item.package} is not installed (needs {item})")
            continue
        if not _release(item.minimum) <= _release(installed) < _release(item.below):
            problems.append(f"{item.package} {installed} is installed (needs {item})")
    if problems:
        raise ConfigurationError(
            "dmuon_hf hooks into these packages and was not tested with what is installed: "
            + "; ".join(problems)
            + ". Install matching versions, for example `pip install '"
            + "' '".join(str(item) for item in supported)
            + "'`. `dmuon_hf.core` alone needs torch only."
        )
