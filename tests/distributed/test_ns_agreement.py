"""All ranks orthogonalise alike, or the optimizer is not built."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh

import dmuon_hf.core as dmuon
from tests.harness import run_ranks
from tests.harness.models import tiny_mlp


def build(rank: int, world: int, differ: bool) -> str:
    model = tiny_mlp()
    dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), lambda name, param: "proj" in name)
    backend = "direct" if differ and rank == 1 else "gram"
    if not differ:
        dmuon.Muon(model, ns_backend=backend)
        return ""
    with pytest.raises(dmuon.LockstepError) as error:
        dmuon.Muon(model, ns_backend=backend)
    return str(error.value)


def test_different_newton_schulz_on_one_rank_is_refused_on_all() -> None:
    for message in run_ranks(build, 2, True):
        assert "run Newton-Schulz differently" in message


def test_equal_newton_schulz_is_accepted() -> None:
    assert run_ranks(build, 2, False) == ["", ""]
