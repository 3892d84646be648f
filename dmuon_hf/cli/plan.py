"""`dmuon-hf plan`: routes, owners, memory, traffic and a predicted step of a model, from its configuration alone."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch

from dmuon_hf.cli.census import Census, take_census
from dmuon_hf.cli.outlook import Mode, Outlook, Request, modes_for, outlook
from dmuon_hf.cli.routes import overrides_of
from dmuon_hf.cli.skeleton import skeleton
from dmuon_hf.cli.tables import console, print_json, print_table, size
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.step_model import Link, Machine

__all__ = ["run"]

_CONFIGS: dict[Mode, str] = {
    "z2": "accelerate_configs/dmuon_fsdp2.yaml with fsdp_reshard_after_forward: false",
    "z3": "accelerate_configs/dmuon_fsdp2.yaml",
    "hsdp": "accelerate_configs/dmuon_hsdp.yaml",
}


def run(options: argparse.Namespace) -> int:
    """Print the plan; status 2 where no mode that was asked for fits."""
    request = _request(options)
    modes = modes_for(request)
    census = take_census(skeleton(options.model), overrides_of(options))
    outlooks = [outlook(census, request, mode, replicas) for mode, replicas in modes]
    best = _best(outlooks)
    if options.json:
        print_json(_as_json(options.model, census, request, outlooks, best))
    else:
        _show(options.model, census, request, outlooks, best)
    if best is None:
        reasons = "; ".join(f"{_name(found)}: {found.refusal}" for found in outlooks)
        raise ConfigurationError(f"no mode fits {options.model} on {request.ranks} ranks: {reasons}")
    return 0


def _best(outlooks: list[Outlook]) -> Outlook | None:
    """The fastest mode that fits; of those within a hundredth of it, the one that needs least memory."""
    fitting = [found for found in outlooks if found.fits]
    fastest = min((found.muon.step_seconds for found in fitting), default=0.0)
    near = [found for found in fitting if found.muon.step_seconds <= 1.01 * fastest]
    return min(near, key=lambda found: found.muon.state_bytes + found.muon.passing_bytes, default=None)


def _request(options: argparse.Namespace) -> Request:
    machine = Machine(
        ns_rate=options.ns_rate,
        compute_rate=options.compute_rate,
        memory_bandwidth=options.memory_bandwidth,
        network=Link(options.network_bandwidth, 5e-6),
        node=Link(options.node_bandwidth, 2e-6),
        node_size=options.node_size,
    )
    return Request(
        ranks=options.ranks,
        replicas=options.replicas,
        tp=options.tp,
        mode=options.mode,
        dtype=getattr(torch, options.dtype),
        machine=machine,
        tokens=options.tokens,
        sequence=options.sequence,
        memory=None if options.memory is None else options.memory * 2**30,
    )


def _show(model: str, census: Census, request: Request, outlooks: list[Outlook], best: Outlook | None) -> None:
    total = sum(share.elements for share in census.shares)
    print_table(
        f"{census.model_class} ({model}): {total / 1e6:,.1f} M elements, {census.units} hook boundaries",
        ("route", "parameters", "elements", "percent"),
        (
            (share.route, f"{share.parameters:,}", f"{share.elements:,}", f"{100 * share.elements / total:.1f} %")
            for share in census.shares
        ),
    )
    out = console()
    out.print()
    print_table(
        f"{request.ranks} ranks, each of them: this optimizer / AdamW",
        ("mode", "owners", "imbalance", "state", "passing", "sent a step", "step (MODEL)", "fits"),
        map(_row, outlooks),
    )
    for found in outlooks:
        if not found.fits:
            out.print(f"{_name(found)} does not fit: {found.refusal}")
    out.print()
    out.print(_assumptions(request))
    if best is not None:
        out.print(f"\nTake: {_launch(best, request)}")


def _row(found: Outlook) -> tuple[str, ...]:
    muon, adamw = found.muon, found.adamw
    return (
        _name(found),
        f"{found.owners}",
        f"{100 * found.imbalance:.1f} %",
        f"{size(muon.state_bytes)} / {size(adamw.state_bytes)}",
        f"{size(muon.passing_bytes)} / {size(adamw.passing_bytes)}",
        f"{size(muon.sent_bytes)} / {size(adamw.sent_bytes)}",
        f"{1e3 * muon.step_seconds:.1f} / {1e3 * adamw.step_seconds:.1f} ms",
        "yes" if found.fits else "no",
    )


def _name(found: Outlook) -> str:
    tp = f", TP {found.tp}" if found.tp > 1 else ""
    if found.mode == "hsdp":
        return f"HSDP {found.replicas} x {found.shards}{tp}"
    return {"one process": "one process", "ddp": "DDP", "z2": "FSDP2 Z2", "z3": "FSDP2 Z3"}[found.mode] + tp


def _assumptions(request: Request) -> str:
    machine = request.machine
    return (
        "State: fp32 masters and momentum or AdamW moments, on the most loaded rank. Passing: gradients, whole weights "
        "and whole gradients at once; activations and buffers come on top. Imbalance: most loaded owner over the mean "
        "of all ranks.\n"
        f"The step is a MODEL, nothing in it was measured: {request.tokens} tokens a rank, sequences of "
        f"{request.sequence}, {str(request.dtype).removeprefix('torch.')} on the wire, {machine.compute_rate:g} flop/s "
        f"in forward and backward, {machine.ns_rate:g} in Newton-Schulz, {machine.memory_bandwidth:g} B/s of memory, "
        f"{machine.node.bandwidth:g} in a node of {machine.node_size} and {machine.network.bandwidth:g} beyond, "
        "and communication hidden as far as computation reaches."
    )


def _launch(best: Outlook, request: Request) -> str:
    if best.mode == "one process":
        return "python train.py"
    if best.mode == "ddp":
        return f"accelerate launch --multi_gpu --num_processes {request.ranks} train.py"
    machines = -(-request.ranks // request.machine.node_size)
    config = _CONFIGS[best.mode]
    sizes = f"dp_replicate_size {best.replicas}, dp_shard_size {best.shards}, tp_size {best.tp}"
    return f"{config}, num_processes {request.ranks}, num_machines {machines}, {sizes}"


def _as_json(
    model: str, census: Census, request: Request, outlooks: list[Outlook], best: Outlook | None
) -> dict[str, Any]:
    total = sum(share.elements for share in census.shares)
    return {
        "model": model,
        "class": census.model_class,
        "elements": total,
        "routes": {
            share.route: {
                "parameters": share.parameters,
                "elements": share.elements,
                "percent": 100 * share.elements / total,
            }
            for share in census.shares
        },
        "units": census.units,
        "assumptions": asdict(request) | {"dtype": str(request.dtype).removeprefix("torch.")},
        "modes": [asdict(found) | {"name": _name(found), "fits": found.fits} for found in outlooks],
        "take": None if best is None else {"mode": _name(best), "launch": _launch(best, request)},
    }
