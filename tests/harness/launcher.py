"""Run a function on several fresh processes that talk over gloo on the loopback interface.

Each run forks its ranks from one server process which has torch and transformers imported already, so a
run costs a fraction of a second. The launcher hosts the key-value store, collects one outcome per rank, and on a hang
collects the Python stacks of all ranks before it kills them.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.harness.child import RankSpec, rank_main
from tests.harness.outcome import RankOutcome, RanksFailedError

RankEnv = Mapping[str, str | None] | Sequence[Mapping[str, str | None]] | None

_ROOT = Path(__file__).resolve().parents[2]
_LOOPBACK = "lo" if any(name == "lo" for _, name in socket.if_nameindex()) else "lo0"
# Time that a loaded machine may take to fork and connect the ranks; `timeout` counts from when all have started.
_START_SECONDS = 60.0
_server_started = False


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 60.0,
    expect_failure: bool = False,
    env: RankEnv = None,
    init: bool = True,
    grace: float = 10.0,
    group_timeout: float = 1800.0,
    linger: float = 0.0,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(rank, world, *args, **kwargs)` on `world` fresh processes and return the results in rank order.

    `fn` is a module-level function; arguments and results are pickled (tensors are copied, not shared). With `init` the
    default gloo group exists when `fn` starts. Without it the ranks see the environment of a launcher (`RANK`,
    `MASTER_ADDR`, ...), so `init_process_group()` or an `Accelerator` works; one rank without `init` is a plain process
    with none of that. `env` is one mapping for all ranks or one per rank. When a rank fails the others have `grace`
    seconds to end by themselves. With `linger` a rank that raised stays until all others have ended too, at most that
    long, so that its end does not break the connections of those that are about to raise the same.

    `timeout` and `grace` only guard against hangs: they are seconds of a machine with a processor for every busy
    process, and last longer on a loaded one.

    Raises `RanksFailedError` with the traceback of every rank that raised and the Python stacks of every rank that was
    still running after `timeout` seconds. With `expect_failure` it returns the `RankOutcome` list instead and raises if
    no rank failed.
    """
    outcomes = run_ranks_outcomes(
        fn,
        world,
        *args,
        timeout=timeout,
        env=env,
        init=init,
        grace=grace,
        group_timeout=group_timeout,
        linger=linger,
        **kwargs,
    )
    failed = [o for o in outcomes if o.status != "returned"]
    if expect_failure:
        if not failed:
            raise RanksFailedError(f"{fn.__qualname__}: every rank returned, a failure was expected", outcomes)
        return outcomes
    if failed:
        raise RanksFailedError(f"{fn.__qualname__}: {len(failed)} of {world} ranks failed", outcomes)
    return [o.result for o in outcomes]


def run_ranks_outcomes(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 60.0,
    env: RankEnv = None,
    init: bool = True,
    grace: float | None = None,
    group_timeout: float = 1800.0,
    linger: float = 0.0,
    **kwargs: Any,
) -> list[RankOutcome]:
    """Like `run_ranks`, but returns what became of each rank and never raises for it.

    `grace=None` lets the surviving ranks run until `timeout` after another has failed.
    """
    if world < 1:
        raise ValueError(f"world must be at least 1, got {world}")
    _start_server()
    directory = Path(tempfile.mkdtemp(prefix="dmuon_ranks_"))
    store = host_store()
    specs = [
        RankSpec(
            rank=rank,
            world=world,
            port=store.port,
            directory=str(directory),
            call=pickle.dumps((fn, args, kwargs)),
            env=_rank_env(rank, world, store.port, init, env),
            init=init,
            group_timeout=group_timeout,
            timeout=timeout,
            linger=linger,
        )
        for rank in range(world)
    ]
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=rank_main, args=(spec,), daemon=True) for spec in specs]
    started = time.monotonic()
    try:
        for process in processes:
            process.start()
        hung = _wait(processes, specs, store, timeout=timeout, grace=grace)
        ended = time.monotonic() - started
        return [
            _outcome(spec, process, spec.rank in hung, ended) for spec, process in zip(specs, processes, strict=True)
        ]
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                process.kill()
            if process.pid is not None:
                process.join(10)
        shutil.rmtree(directory, ignore_errors=True)


def _start_server() -> None:
    """Start the fork server with the repository on its path, once per test session."""
    global _server_started
    if _server_started:
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.harness.preload"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), before]))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    _server_started = True


def host_store() -> dist.TCPStore:
    """Key-value store on a free port of the loopback address, held open from the start so that nobody else takes the
    port."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )


def _rank_env(rank: int, world: int, port: int, init: bool, extra: RankEnv) -> dict[str, str | None]:
    env: dict[str, str | None] = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": _LOOPBACK}
    if init or world > 1:
        env |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    if extra is not None:
        env |= dict(extra if isinstance(extra, Mapping) else extra[rank])
    return env


class _Guard:
    """A limit in seconds of a machine that is not overloaded: with twice as many busy processes as processors it lasts
    twice as long."""

    def __init__(self, seconds: float) -> None:
        self._since = time.monotonic()
        self._seconds = seconds

    @property
    def expired(self) -> bool:
        slowdown = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        return time.monotonic() - self._since > self._seconds * slowdown


def _wait(
    processes: list[Any], specs: list[RankSpec], store: dist.TCPStore, *, timeout: float, grace: float | None
) -> set[int]:
    """Wait until every rank has ended or time is up; return the ranks that had to be stopped."""
    guards = [_Guard(timeout + _START_SECONDS)]
    started = released = failed = False
    silent: set[int] = set()
    while True:
        alive = [p for p in processes if p.is_alive()]
        if not alive:
            return set()
        for spec, process in zip(specs, processes, strict=True):
            # A rank that was killed cannot say so to those that linger.
            if spec.rank not in silent and not process.is_alive() and not spec.path("outcome").exists():
                silent.add(spec.rank)
                store.add("ended", 1)
        if not (started or failed) and store.add("started", 0) == len(processes):
            guards = [_Guard(timeout)]
            started = True
        if not released and store.add("finished", 0) + len(processes) - len(alive) >= len(processes):
            store.set("release", "1")
            released = True
        if not failed and grace is not None and any(p.exitcode not in (None, 0) for p in processes):
            failed = True
            guards.append(_Guard(grace))
        if any(guard.expired for guard in guards):
            break
        connection.wait([p.sentinel for p in alive], timeout=0.02)
    hung = {s.rank for s, p in zip(specs, processes, strict=True) if p.is_alive() and not s.path("outcome").exists()}
    _dump_stacks([processes[rank] for rank in hung], [specs[rank] for rank in hung])
    return hung


def _dump_stacks(processes: list[Any], specs: list[RankSpec]) -> None:
    """Ask every process for its Python stacks and wait until they are on disk."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
    until = time.monotonic() + 30
    sizes: list[int] = []
    while time.monotonic() < until:
        before, sizes = sizes, [s.path("stacks").stat().st_size if s.path("stacks").exists() else 0 for s in specs]
        if sizes and all(sizes) and sizes == before:
            return
        time.sleep(0.1)


def _outcome(spec: RankSpec, process: Any, hung: bool, ended: float) -> RankOutcome:
    log = _read(spec.path("log"))
    stacks = _read(spec.path("stacks"))
    if spec.path("outcome").exists():
        status, value, seconds = pickle.loads(spec.path("outcome").read_bytes())
        if status == "raised":
            return RankOutcome(spec.rank, "raised", seconds, exception=value, exit_code=1, log=log, stacks=stacks)
        return RankOutcome(spec.rank, "returned", seconds, result=value, exit_code=0, log=log, stacks=stacks)
    if hung:
        return RankOutcome(spec.rank, "hung", ended, log=log, stacks=stacks)
    process.join(10)
    return RankOutcome(spec.rank, "died", ended, exit_code=process.exitcode, log=log, stacks=stacks)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
