"""The formulas of the step model: limits, monotonicity, and the loads of real plans."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dmuon_hf.core.plan.cost import FOOTPRINT_FLOPS
from dmuon_hf.step_model import (
    ADAMW_BYTES,
    GATHER_BYTES,
    MUON_BYTES,
    Layout,
    Link,
    Machine,
    PassTime,
    forward_backward,
    largest_matrix_flops,
    optimizer_phase,
    owner_work,
    ring_seconds,
    small_all_reduce_seconds,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from bench_models import make_llama
from contenders import MODES as BENCHMARK_MODES
from llama_shapes import MODELS, plan_for
from traffic import formula as counted_bytes

SMALL = MODELS["benchmark"]
LARGE = MODELS["llama-3-8b"]
METHODS = ("dmuon", "gathered", "adamw")
MACHINE = Machine(
    ns_rate=3e14,
    compute_rate=4e14,
    memory_bandwidth=2e12,
    network=Link(40e9, 5e-6),
    node=Link(300e9, 2e-6),
)
INSTANT = Link(math.inf, 0.0)


def phase(shape, method, layout, machine=MACHINE):
    return optimizer_phase(shape, plan_for(shape, layout), method, layout, machine)


def passes(shape, method, layout, machine=MACHINE):
    plan = plan_for(shape, layout)
    return forward_backward(shape, plan, method, layout, machine, tokens=4096, sequence=4096)


def test_ring_without_latency_takes_the_bytes_of_the_ring_model():
    assert ring_seconds(8e9, 4, Link(1e9, 0.0)) == pytest.approx(3 / 4 * 8)


def test_ring_without_payload_takes_the_latency_of_every_hop_and_call():
    assert ring_seconds(0, 5, Link(1e9, 1e-3), calls=7) == pytest.approx(4 * 7 * 1e-3)


@pytest.mark.parametrize(("ranks", "hops"), [(1, 0), (2, 2), (8, 6), (9, 8), (1024, 20)])
def test_agreement_takes_two_hops_per_level_of_the_tree(ranks, hops):
    assert small_all_reduce_seconds(ranks, Link(1e9, 1.0)) == hops


@pytest.mark.parametrize("method", METHODS)
def test_one_rank_communicates_nothing(method):
    assert phase(SMALL, method, Layout(1)).communication == 0.0
    assert passes(SMALL, method, Layout(1)).communication == 0.0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", [Layout(16), Layout(8, 4)])
def test_instant_links_leave_the_computation_alone(method, layout):
    instant = replace(MACHINE, network=INSTANT, node=INSTANT)
    assert phase(SMALL, method, layout, instant).communication == 0.0
    assert passes(SMALL, method, layout, instant).communication == 0.0
    assert phase(SMALL, method, layout, instant).newton_schulz == phase(SMALL, method, layout).newton_schulz


def test_one_rank_spends_the_same_on_newton_schulz_with_and_without_owners():
    assert phase(SMALL, "dmuon", Layout(1)).newton_schulz == phase(SMALL, "gathered", Layout(1)).newton_schulz > 0


@pytest.mark.parametrize("world", [2, 8, 64])
def test_newton_schulz_of_owners_is_the_gathered_one_over_the_ranks_times_the_imbalance(world):
    plan = plan_for(LARGE, Layout(world))
    flops = [work.flops for work in owner_work(plan)]
    excess = max(flops) * world / sum(flops)
    machine = replace(MACHINE, memory_bandwidth=math.inf)
    ours, gathered = (phase(LARGE, method, Layout(world), machine) for method in ("dmuon", "gathered"))
    assert ours.newton_schulz == pytest.approx(gathered.newton_schulz / world * excess)
    assert 1.0 <= excess < 1.2


@pytest.mark.parametrize("layout", [Layout(4), Layout(256), Layout(8, 16)])
def test_work_of_owners_adds_up_to_the_loads_of_the_plan(layout):
    plan = plan_for(LARGE, layout)
    work = owner_work(plan)
    assert [owner.flops + FOOTPRINT_FLOPS * owner.numel for owner in work] == plan.loads()
    assert sum(owner.numel for owner in work) == LARGE.matrix_numel


def test_more_ranks_than_matrices_leave_the_time_of_the_largest_matrix():
    plan = plan_for(LARGE, Layout(1024))
    ours = phase(LARGE, "dmuon", Layout(1024)).newton_schulz
    assert ours == largest_matrix_flops(plan) / MACHINE.ns_rate
    assert sum(work.numel == 0 for work in owner_work(plan)) == 1024 - len(plan.entries)


def test_newton_schulz_counts_the_cheaper_algorithm():
    # 4096 x 4096 by the direct iteration, 1024 x 4096 by the Gram iteration.
    flops = [work.flops for work in owner_work(plan_for(replace(LARGE, layers=1, intermediate=4096), Layout(7)))]
    square, wide = 30 * 4096**3, 8 * 1024**2 * 4096 + 28 * 1024**3
    assert sorted(flops) == [wide, wide, square, square, square, square, square]


@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        ("dmuon-z3", Layout(4, gather_bytes=4)),
        ("dmuon-z2", Layout(4, reshard=False, gather_bytes=4)),
        ("dmuon-hsdp", Layout(2, 2, gather_bytes=4)),
    ],
)
def test_bytes_of_owned_matrices_are_those_of_the_traffic_benchmark(mode, layout):
    link = Link(1.0, 0.0)
    machine = replace(MACHINE, network=link, node=link)
    moved = passes(SMALL, "dmuon", layout, machine).communication + phase(SMALL, "dmuon", layout, machine).communication
    # FSDP2's part: gathers and reduce-scatter inside a replica, an all-reduce of the shard between replicas.
    transfers = (3 if layout.reshard else 2) * (layout.shard - 1) / layout.shard
    transfers += 2 * (layout.replicate - 1) / layout.replicate / layout.shard
    moved -= transfers * 4 * SMALL.rest_numel
    assert moved == pytest.approx(counted_bytes(BENCHMARK_MODES[mode], 4, 4 * SMALL.matrix_numel))


def test_owned_and_sharded_matrices_move_the_same_bytes_on_one_replica():
    free = replace(MACHINE, network=Link(40e9, 0.0), node=Link(300e9, 0.0))
    ours, theirs = passes(LARGE, "dmuon", Layout(64), free), passes(LARGE, "adamw", Layout(64), free)
    assert ours.communication == pytest.approx(theirs.communication)


def test_keeping_whole_weights_saves_one_gather():
    free = replace(MACHINE, network=Link(40e9, 0.0), node=Link(300e9, 0.0))
    z3, z2 = passes(LARGE, "dmuon", Layout(64), free), passes(LARGE, "dmuon", Layout(64, reshard=False), free)
    gather = ring_seconds(GATHER_BYTES * (LARGE.matrix_numel + LARGE.rest_numel), 64, free.node)
    assert z3.communication - z2.communication == pytest.approx(gather)


def test_only_replicas_publish_in_the_step():
    free = replace(MACHINE, network=Link(40e9, 0.0), node=Link(300e9, 0.0))
    assert phase(LARGE, "dmuon", Layout(64), free).communication == 0.0
    published = phase(LARGE, "dmuon", Layout(8, 8), free).communication
    assert published == pytest.approx(7 / 8 * GATHER_BYTES * LARGE.matrix_numel / 8 / 40e9)


def test_gathered_variant_pays_an_all_gather_in_the_step():
    free = replace(MACHINE, network=Link(40e9, 0.0), node=Link(300e9, 0.0))
    gathered = phase(LARGE, "gathered", Layout(64), free).communication
    assert gathered == pytest.approx(63 / 64 * GATHER_BYTES * LARGE.matrix_numel / 300e9)


def test_adamw_step_is_its_bytes_over_the_memory_bandwidth():
    numel = LARGE.matrix_numel + LARGE.rest_numel
    assert phase(LARGE, "adamw", Layout(32)).total == pytest.approx(ADAMW_BYTES * numel / 32 / 2e12)


def test_owner_step_takes_as_long_as_that_of_the_slowest_owner():
    ours = phase(LARGE, "dmuon", Layout(32))
    owners = [work.flops / 3e14 + MUON_BYTES * work.numel / 2e12 for work in owner_work(plan_for(LARGE, Layout(32)))]
    rest = ADAMW_BYTES * LARGE.rest_numel / 32 / 2e12
    assert ours.newton_schulz + ours.elementwise == pytest.approx(max(owners) + rest)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ns_rate", 1e14),
        ("memory_bandwidth", 1e12),
        ("network", Link(20e9, 5e-6)),
        ("network", Link(40e9, 1e-5)),
        ("compute_rate", 2e14),
        ("fused_buckets", False),
    ],
)
def test_slower_machine_is_never_predicted_faster(method, field, value):
    slower = replace(MACHINE, **{field: value})
    layout = Layout(8, 16)

    def step(machine):
        return phase(LARGE, method, layout, machine).total + passes(LARGE, method, layout, machine).total(1.0)

    assert step(slower) >= step(MACHINE)
    if method == "dmuon":
        assert step(slower) > step(MACHINE) or field == "fused_buckets"


def test_separate_buckets_cost_latency_for_every_owner_of_a_unit():
    separate = replace(MACHINE, fused_buckets=False)
    fused, unfused = passes(LARGE, "dmuon", Layout(1024)), passes(LARGE, "dmuon", Layout(1024), separate)
    hop = (5e-6 + 7 * 2e-6) / 8
    # Seven matrices of each of 32 layers, each with its own owner; gathered twice and reduced once.
    assert unfused.communication - fused.communication == pytest.approx(3 * 1023 * (7 - 1) * 32 * hop)


def test_newton_schulz_of_owners_never_grows_with_the_ranks():
    machine = replace(MACHINE, memory_bandwidth=math.inf)
    times = [phase(LARGE, "dmuon", Layout(2**k), machine).newton_schulz for k in range(11)]
    assert times == sorted(times, reverse=True)


def test_group_inside_a_node_uses_its_links():
    assert MACHINE.link(8, 8) == MACHINE.node
    assert MACHINE.link(2, 8) == MACHINE.node


def test_group_with_one_rank_per_node_has_one_network_card():
    assert MACHINE.link(16, 128) == MACHINE.network
    assert MACHINE.link(2, 128) == MACHINE.network


def test_group_with_several_ranks_per_node_has_their_network_cards_up_to_the_node_bandwidth():
    assert MACHINE.link(64, 128) == Link(4 * 40e9, pytest.approx((5e-6 + 3 * 2e-6) / 4))
    assert MACHINE.link(128, 128).bandwidth == 300e9


def test_overlap_hides_the_shorter_part_in_full_or_not_at_all():
    assert PassTime(3.0, 2.0).total(1.0) == 3.0
    assert PassTime(2.0, 3.0).total(1.0) == 3.0
    assert PassTime(3.0, 2.0).total(0.0) == 5.0
    with pytest.raises(ValueError, match="share"):
        PassTime(1.0, 1.0).total(1.5)


def test_shapes_of_the_benchmark_are_those_of_its_model():
    with torch.device("meta"):
        model = make_llama()
    matrices = {name: tuple(p.shape) for name, p in model.named_parameters() if "layers." in name and p.ndim == 2}
    assert {candidate.name: candidate.shape for candidate in SMALL.candidates()} == matrices
    assert sum(p.numel() for p in model.parameters()) == SMALL.matrix_numel + SMALL.rest_numel


def test_sizes_are_the_published_parameter_counts():
    assert LARGE.matrix_numel + LARGE.rest_numel == 8_030_261_248
    large = MODELS["llama-3-70b"]
    assert large.matrix_numel + large.rest_numel == 70_553_706_496
