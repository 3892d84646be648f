"""One rank tunes Newton-Schulz, all run what it found."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon_hf.core as dmuon
from dmuon_hf.core.ns.autotune import Choice, tuner
from tests.harness import run_ranks
from tests.harness.models import TinyMLP
from tests.unit.ns_autotune_fakes import Bench


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []
        logger = logging.getLogger("dmuon_hf")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def dedicated(world: int, replicas: int) -> TinyMLP:
    torch.manual_seed(0)
    # One matrix per owner: batches of small ones are not split, and have nothing to choose.
    model = TinyMLP(d=48, ff=64, n_layers=1)
    if replicas == 1:
        mesh = init_device_mesh("cpu", (world,))
        dmuon.dedicate_params(model, mesh, lambda name, param: "proj" in name)
    else:
        mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
        dmuon.dedicate_params(
            model, mesh["shard"], lambda name, param: "proj" in name, replicate_mesh=mesh["replicate"]
        )
    fully_shard(model, mesh=mesh)
    return model


def train(rank: int, world: int, folder: str, replicas: int, autotune: bool) -> dict[str, Any]:
    """One step, on ranks that would each find another number of blocks to be the fastest."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        bench = Bench(monkeypatch, Path(folder))
        bench.seconds = {Choice("cublas", (2,) if rank == 0 else (1,)): 0.5}
        messages = Messages()
        model = dedicated(world, replicas)
        ns = dmuon.NewtonSchulz(autotune=autotune)
        optimizer = dmuon.Muon(model, ns_backend=ns)
        timed = bench.total
        model(torch.full((2, 48), 0.1 * (rank + 1))).backward()
        optimizer.step()
        optimizer.rebind(model)
        state = dmuon.get_model_state_dict(model)
        return {
            "choices": {} if ns.tuner is None else set(ns.tuner.choices.values()),
            "fingerprint": ns.fingerprint,
            "timed": timed,
            "untuned": [text for text in messages.texts if "was not tuned" in text],
            "matrices": optimizer.ns_matrices,
            "state": {name: value for name, value in state.items() if "proj" in name},
        }


@pytest.mark.parametrize(("world", "replicas"), [(3, 1), (4, 2)])
def test_all_ranks_run_what_the_first_one_chose(tmp_path: Path, world: int, replicas: int) -> None:
    results = run_ranks(train, world, str(tmp_path), replicas, True)
    assert [result["choices"] for result in results] == [{Choice("cublas", (2,))}] * world
    assert len({result["fingerprint"] for result in results}) == 1
    assert [result["timed"] > 0 for result in results] == [True] + [False] * (world - 1)
    assert sum(result["matrices"] for result in results) == 3
    assert [result["untuned"] for result in results] == [[]] * world


def test_tuned_weights_are_the_untuned_ones_up_to_rounding(tmp_path: Path) -> None:
    tuned, plain = (run_ranks(train, 2, str(tmp_path), 1, autotune)[0] for autotune in (True, False))
    assert plain["choices"] == {}
    for name, weight in plain["state"].items():
        torch.testing.assert_close(tuned["state"][name], weight, rtol=0.0, atol=1e-5)


def fail(rank: int, world: int, folder: str) -> str:
    with pytest.MonkeyPatch.context() as monkeypatch:
        Bench(monkeypatch, Path(folder))

        def out_of_memory(*_: object) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(tuner, "fastest", out_of_memory)
        model = dedicated(world, 1)
        with pytest.raises(RuntimeError) as error:
            dmuon.Muon(model, ns_backend=dmuon.NewtonSchulz(autotune=True))
        return f"{type(error.value).__name__}: {error.value}"


def test_failure_on_the_first_rank_ends_all(tmp_path: Path) -> None:
    first, *others = run_ranks(fail, 3, str(tmp_path))
    assert first == "RuntimeError: out of memory"
    expected = (
        "DMuonError: autotuning Newton-Schulz failed on the first data-parallel rank: RuntimeError: out of memory"
    )
    assert others == [expected] * 2


def differ(rank: int, world: int, folder: str, what: str) -> str:
    with pytest.MonkeyPatch.context() as monkeypatch:
        Bench(monkeypatch, Path(folder))
        monkeypatch.setenv("DMUON_NS_AUTOTUNE", "0" if what == "environment" and rank == 1 else "1")
        if what == "threads":
            torch.set_num_threads(1 + rank)
        model = dedicated(world, 1)
        with pytest.raises(dmuon.DMuonError) as error:
            dmuon.Muon(model)
        return f"{type(error.value).__name__}: {error.value}"


def test_rank_that_does_not_tune_is_refused_on_all(tmp_path: Path) -> None:
    for message in run_ranks(differ, 2, str(tmp_path), "environment"):
        assert message.startswith("LockstepError: the ranks would run Newton-Schulz differently")


def test_ranks_with_different_numbers_of_threads_are_refused_on_all(tmp_path: Path) -> None:
    for message in run_ranks(differ, 2, str(tmp_path), "threads"):
        assert message.startswith("ConfigurationError: autotune needs equal machines")
