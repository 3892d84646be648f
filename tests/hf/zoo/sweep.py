"""Examines every class of transformers' Auto mappings and writes `docs/families.md`: `make sweep`."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import transformers

from dmuon_hf.families import FUSED
from dmuon_hf.stacks import STACKS
from tests.hf.zoo.build import MAPPINGS, NotBuildableError, entries
from tests.hf.zoo.examine import COMPUTED, Finding, examine
from tests.hf.zoo.prepared import refusals

__all__ = ["Sweep", "sweep"]

PAGE = Path(__file__).resolve().parents[3] / "docs" / "families.md"


@dataclass(slots=True)
class Sweep:
    """Findings by `(mapping, model type, class)`, why the others cannot be built, and the layers that were followed.

    `unprepared`: why accelerate cannot prepare a class for FSDP2, empty where it can.
    """

    findings: dict[tuple[str, str, str], Finding] = field(default_factory=dict)
    refused: dict[tuple[str, str, str], str] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    unprepared: dict[str, str] = field(default_factory=dict)


def sweep(chosen: list[tuple[str, str, str]]) -> Sweep:
    """Examine entries of the mappings, a class that stands in several mappings once."""
    result = Sweep()
    by_class: dict[tuple[str, str], Finding | str] = {}
    for number, entry in enumerate(chosen, 1):
        key = entry[1:]
        if key not in by_class:
            try:
                by_class[key] = examine(*key, result.known)
            except NotBuildableError as error:
                by_class[key] = str(error)
        found = by_class[key]
        if isinstance(found, Finding):
            result.findings[entry] = found
        else:
            result.refused[entry] = found
        if number % 50 == 0:
            logging.getLogger(__name__).info("%d of %d", number, len(chosen))
    return result


def page(result: Sweep) -> str:
    """The text of `docs/families.md`."""
    fused = {layer for finding in result.findings.values() for layer in finding.fused}
    followed = fused & result.known
    adamw_experts = set().union(*(finding.adamw_experts for finding in result.findings.values()))
    lines = [
        "# Model families",
        "",
        f"Every entry of six Auto mappings of transformers {transformers.__version__}, built from its default",
        "configuration with few layers. `make sweep` writes this page. Right means that every weight has the route of",
        "its role, that no layer of a repeated block is left outside, that the logical matrices of each fused weight",
        "are the rows that arrive together in the model's own forward. Experts are on Muon, each by itself; on AdamW,",
        f"as the log says: {_listed(adamw_experts)}.",
        "",
        "| Mapping | Entries | Built | Right | With expert stacks |",
        "|---|---|---|---|---|",
        *_counts(result),
        "",
        "Not built, each for what its configuration or this machine lacks:",
        "",
        *(f"- `{key[2]}`: {reason}" for key, reason in sorted(result.refused.items())),
        "",
        "## Prepared for FSDP2",
        "",
        *_prepared(result.unprepared),
        "",
        "## Fused layers",
        "",
        f"{len(fused)} layers hold several matrices. {len(followed)} of them were followed through a forward, which",
        f"proves their layouts, or computed from their matrices ({_listed(COMPUTED)}); read from source alone:",
        f"{_listed(fused - followed)}.",
        "",
        "| Layer | Layout | Followed |",
        "|---|---|---|",
        *(f"| `{layer}` | {_layout(layer)} | {'yes' if layer in followed else 'no'} |" for layer in sorted(fused)),
        "",
        "## Classes",
        "",
        "| Class | Blocks | Elements on Muon | Elements in expert stacks | Faults |",
        "|---|---|---|---|---|",
        *_classes(result.findings),
    ]
    return "\n".join(lines) + "\n"


def _listed(layers: Collection[str]) -> str:
    return ", ".join(f"`{layer}`" for layer in sorted(layers)) or "none"


def _prepared(refusals: Mapping[str, str]) -> list[str]:
    refused = {name: reason for name, reason in sorted(refusals.items()) if reason}
    return [
        f"`accelerator.prepare` takes {len(refusals) - len(refused)} of {len(refusals)} classes (over two ranks,",
        "without memory). The others are refused:",
        "",
        *(f"- `{name}`: {reason}" for name, reason in refused.items()),
    ]


def _counts(result: Sweep) -> list[str]:
    rows = []
    totals = [0, 0, 0, 0]
    for mapping in MAPPINGS:
        findings = [finding for key, finding in result.findings.items() if key[0] == mapping]
        refused = sum(key[0] == mapping for key in result.refused)
        right = [finding for finding in findings if not finding.faults]
        numbers = [len(findings) + refused, len(findings), len(right), sum(finding.experts > 0 for finding in right)]
        totals = [total + number for total, number in zip(totals, numbers, strict=True)]
        rows.append(f"| {mapping} | " + " | ".join(map(str, numbers)) + " |")
    return [*rows, "| all | " + " | ".join(map(str, totals)) + " |"]


def _classes(findings: Mapping[tuple[str, str, str], Finding]) -> list[str]:
    unique = {finding.class_name: finding for finding in findings.values()}
    return [
        f"| `{name}` | {', '.join(finding.blocks) or 'none'} | {_percent(finding.muon, finding.elements)} | "
        f"{_percent(finding.experts, finding.elements)} | {'; '.join(finding.faults[:3])} |"
        for name, finding in sorted(unique.items())
    ]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if part else ""


def _layout(layer: str) -> str:
    layout = FUSED.get(layer) or STACKS.get(layer)
    text = "As its class of experts declares." if layout is None else (layout.__doc__ or "").splitlines()[0]
    return text.replace("|", "\\|")


def main() -> int:
    """Examine all, print how many are right, and write the page."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("dmuon_hf").setLevel(logging.ERROR)
    result = sweep(list(entries()))
    result.unprepared = refusals(dict.fromkeys(key[1:] for key in result.findings))
    PAGE.write_text(page(result))
    for row in _counts(result):
        sys.stdout.write(row + "\n")
    wrong = {finding.class_name: finding.faults for finding in result.findings.values() if finding.faults}
    for name, faults in sorted(wrong.items()):
        sys.stdout.write(f"{name}: {faults[0]} ({len(faults)})\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
