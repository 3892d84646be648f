from __future__ import annotations

import json
import logging
import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from dmuon_hf.core.ns.autotune import Autotuner, Choice, cache, tuner
from dmuon_hf.core.ns.autotune.cache import ChoiceCache, cache_folder, machine
from dmuon_hf.core.ns.library import LibraryKernel
from tests.unit.ns_autotune_fakes import CPU, Bench, product

MACHINE = {"device": "NVIDIA H100 80GB", "sm": 90, "torch": "2.13.0"}
CHOICES = {"auto: gram 512x512": Choice("triton", (128, 64, 3, 8)), "auto: gram 64x64": Choice("cublas")}


@pytest.fixture
def bench(monkeypatch, tmp_path):
    return Bench(monkeypatch, tmp_path)


def test_choices_come_back_as_they_were_stored(tmp_path):
    ChoiceCache(MACHINE, tmp_path).store(CHOICES)
    assert ChoiceCache(MACHINE, tmp_path).load() == CHOICES


def test_stored_choices_join_those_of_others(tmp_path):
    ours, theirs = ChoiceCache(MACHINE, tmp_path), ChoiceCache(MACHINE, tmp_path)
    ours.store({"a": Choice("cublas", (2,)), "b": Choice("cublas", (2,))})
    theirs.store({"b": Choice("cublas", (4,)), "c": Choice("cublas", (4,))})
    assert ours.load() == {"a": Choice("cublas", (2,)), "b": Choice("cublas", (4,)), "c": Choice("cublas", (4,))}


def test_each_machine_has_a_file_of_its_own(tmp_path):
    for field, value in {"device": "NVIDIA A100", "sm": 80, "torch": "2.13.1", "triton": "3.7.1"}.items():
        ChoiceCache({**MACHINE, field: value}, tmp_path).store(CHOICES)
    assert ChoiceCache(MACHINE, tmp_path).load() == {}
    assert len(list(tmp_path.glob("*.json"))) == 4


def test_only_the_file_and_its_lock_are_left(tmp_path):
    file = ChoiceCache(MACHINE, tmp_path)
    file.store(CHOICES)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".lock"]
    assert file.path.name.startswith("nvidia-h100-80gb-")


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    file = ChoiceCache(MACHINE, tmp_path)
    before = os.umask(0o022)
    try:
        file.store(CHOICES)
    finally:
        os.umask(before)
    assert file.path.stat().st_mode & 0o777 == 0o644


def test_nothing_found_writes_nothing(tmp_path):
    ChoiceCache(MACHINE, tmp_path / "new").store({})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"format": 2, "machine": MACHINE, "choices": {}}',
        '{"format": 1, "machine": {"device": "another"}, "choices": {}}',
        '{"format": 1, "machine": MACHINE, "choices": {"a": ["fastest"]}}',
        '{"format": 1, "machine": MACHINE, "choices": {"a": []}}',
        '{"format": 1, "machine": MACHINE, "choices": {"a": ["cublas", "2"]}}',
        '{"format": 1, "machine": MACHINE, "choices": ["a"]}',
    ],
)
def test_unusable_file_is_reported_and_replaced(tmp_path, caplog, content):
    file = ChoiceCache(MACHINE, tmp_path)
    file.path.write_text(content.replace("MACHINE", json.dumps(MACHINE)))
    with caplog.at_level(logging.WARNING, logger="dmuon_hf"):
        assert file.load() == {}
    assert f"{file.path} cannot be used" in caplog.text
    file.store(CHOICES)
    assert file.load() == CHOICES


def test_binary_file_is_reported(tmp_path, caplog):
    file = ChoiceCache(MACHINE, tmp_path)
    file.path.write_bytes(b"\xff\xfe\x00")
    assert file.load() == {}
    assert "cannot be used" in caplog.text


def test_folder_that_cannot_be_made_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    ChoiceCache(MACHINE, tmp_path / "file").store(CHOICES)
    assert "cannot be written" in caplog.text


def test_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch, caplog):
    file = ChoiceCache(MACHINE, tmp_path)
    file.store(CHOICES)

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full)
    file.store({"auto: new": Choice("cublas")})
    assert "No space left" in caplog.text
    assert file.load() == CHOICES
    assert not list(tmp_path.glob("*.tmp"))


def write_many(folder: Path, name: str, barrier: multiprocessing.synchronize.Barrier) -> None:
    file = ChoiceCache(MACHINE, folder)
    barrier.wait()
    for number in range(20):
        file.store({f"{name} {number}": Choice("cublas", (number,))})


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_processes_that_write_at_once_keep_all_entries(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    writers = [context.Process(target=write_many, args=(tmp_path, name, barrier)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert set(ChoiceCache(MACHINE, tmp_path).load()) == {f"{name} {n}" for name in "abc" for n in range(20)}


def test_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("DMUON_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/dmuon_hf/newton_schulz")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/dmuon_hf/newton_schulz")
    monkeypatch.setenv("DMUON_CACHE_DIR", "~/own")
    assert cache_folder() == Path("/home/someone/own/newton_schulz")


def test_machine_of_a_cpu_counts_its_threads(monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    found = machine(CPU)
    assert found["threads"] == 3
    assert found["torch"] == torch.__version__
    assert found["device"]


def test_machine_changes_with_the_source_of_the_kernels(monkeypatch):
    def digest() -> object:
        cache._digest_of_kernels.cache_clear()
        return machine(CPU)["kernels"]

    read = Path.read_bytes
    before = digest()
    assert digest() == before
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == "triton_syrk.py"))
    assert digest() != before
    monkeypatch.undo()
    assert digest() == before


def tune(*products: object, request: str = "auto") -> Autotuner:
    made = Autotuner(LibraryKernel(), request)
    made.tune(products, CPU)  # type: ignore[arg-type]
    return made


def test_second_process_takes_the_choice_without_timing(bench, monkeypatch):
    bench.seconds = {Choice("cublas", (2,)): 0.5}
    assert tune(product()).choices == {product(): Choice("cublas", (2,))}
    monkeypatch.setattr(tuner, "fastest", None)
    assert tune(product()).choices == {product(): Choice("cublas", (2,))}


def test_only_what_is_not_cached_is_timed(bench):
    tune(product())
    calls = bench.total
    tune(product())
    assert bench.total == calls
    tune(product(), product(depth=32))
    assert bench.total > calls


def test_cached_choice_that_cannot_run_here_is_tuned_anew(bench):
    key = f"auto: {product()}"
    file = ChoiceCache(machine(CPU))
    file.store({key: Choice("triton", (128, 64, 3, 8))})
    bench.seconds = {Choice("cublas", (2,)): 0.5}
    assert tune(product()).choices == {product(): Choice("cublas", (2,))}
    assert file.load()[key] == Choice("cublas", (2,))


def test_another_request_has_choices_of_its_own(bench):
    bench.seconds = {Choice("cublas", (2,)): 0.5}
    tune(product())
    bench.seconds = {Choice("cublas", (4,)): 0.5}
    assert tune(product(), request="cublas").choices == {product(): Choice("cublas", (4,))}


def test_unsound_choice_is_not_cached(bench, caplog):
    wrong = Choice("cublas", (2,))
    bench.seconds, bench.spoils = {wrong: 0.01}, {wrong: lambda result: 2.0 * result}
    assert tune(product()).choices == {product(): Choice("cublas")}
    assert set(ChoiceCache(machine(CPU)).load().values()) == {Choice("cublas")}
    assert "kernel cublas(2) is refused for gram 64x96 float32 on cpu: its result is off by" in caplog.text


def test_what_was_found_before_a_failure_is_cached(bench, monkeypatch):
    find, found = tuner.fastest, []

    def fail_at_the_second(*arguments, **options):
        if found:
            raise RuntimeError("out of memory")
        found.append(find(*arguments, **options))
        return found[0]

    monkeypatch.setattr(tuner, "fastest", fail_at_the_second)
    with pytest.raises(RuntimeError, match="out of memory"):
        tune(product(), product(depth=32))
    assert len(ChoiceCache(machine(CPU)).load()) == 1


def test_tuning_goes_on_without_a_cache(bench, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DMUON_CACHE_DIR", str(tmp_path / "file"))
    bench.seconds = {Choice("cublas", (2,)): 0.5}
    assert tune(product()).choices == {product(): Choice("cublas", (2,))}
    assert "cannot be written" in caplog.text
