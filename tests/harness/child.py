"""What a rank runs: set up the process, call the test's function, write what became of it, leave with `os._exit`."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from tests.harness.outcome import RaisedException, qualified_name

_LONG = timedelta(hours=1)


@dataclass(frozen=True)
class RankSpec:
    """Everything a rank is told. `call` is a pickle of `(fn, args, kwargs)`; `env` values of None unset a variable."""

    rank: int
    world: int
    port: int
    directory: str
    call: bytes
    env: dict[str, str | None]
    init: bool
    group_timeout: float
    timeout: float
    linger: float

    def path(self, kind: str) -> Path:
        return Path(self.directory) / f"rank{self.rank}.{kind}"


_spec: RankSpec | None = None


def init_gloo(tag: str = "main", *, timeout: float | None = None) -> None:
    """Make the default gloo group of this run. After `destroy_process_group`, call it again with another `tag`."""
    if _spec is None:
        raise RuntimeError("init_gloo works only inside a rank started by run_ranks")
    seconds = _spec.group_timeout if timeout is None else timeout
    store = dist.PrefixStore(f"{tag}/", _store(_spec, timedelta(seconds=seconds)))
    dist.init_process_group(
        "gloo", store=store, rank=_spec.rank, world_size=_spec.world, timeout=timedelta(seconds=seconds)
    )


def rank_main(spec: RankSpec) -> NoReturn:
    """Entry of the forked process; never returns."""
    global _spec
    started = time.monotonic()
    _spec = spec
    _redirect_output(spec)
    _install_stack_dump(spec)
    _apply_env(spec.env)
    _import_again()
    _make_deterministic()
    store = _store(spec, _LONG)
    try:
        fn, args, kwargs = pickle.loads(spec.call)
        if spec.init:
            init_gloo()
        store.add("started", 1)
        result = _detached(fn(spec.rank, spec.world, *args, **kwargs))
        body = pickle.dumps(("returned", result, time.monotonic() - started))
        code = 0
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        bases = tuple(qualified_name(base) for base in type(error).__mro__)
        raised = RaisedException(type(error).__name__, str(error), text, bases)
        body = pickle.dumps(("raised", raised, time.monotonic() - started))
        code = 1
    _write_atomically(spec.path("outcome"), body)
    sys.stdout.flush()
    sys.stderr.flush()
    store.add("ended", 1)
    if code == 1:
        _linger(store, spec)
    if code == 0:
        # A rank that closed its sockets early would break the last collective of a slower one.
        store.add("finished", 1)
        store.wait(["release"], _LONG)
    os._exit(code)


def _linger(store: dist.TCPStore, spec: RankSpec) -> None:
    """Let a rank that raised stay until all others have ended too, at most `linger` seconds."""
    deadline = time.monotonic() + spec.linger
    while time.monotonic() < deadline and store.add("ended", 0) < spec.world:
        time.sleep(0.02)


def _store(spec: RankSpec, timeout: timedelta) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", spec.port, is_master=False, timeout=timeout, wait_for_workers=False)


def _redirect_output(spec: RankSpec) -> None:
    log = os.open(spec.path("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _install_stack_dump(spec: RankSpec) -> None:
    stacks = spec.path("stacks").open("w")
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True, chain=False)
    # If the launcher is killed nobody ends this process; it ends itself, long after the launcher would have.
    faulthandler.dump_traceback_later(spec.timeout + 1800, exit=True, file=stacks)


def _apply_env(env: dict[str, str | None]) -> None:
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _import_again() -> None:
    """Let the package look at the environment of this rank, as its import does: the fork server had another one."""
    if "dmuon_hf" in sys.modules:
        importlib.reload(sys.modules["dmuon_hf"])


def _make_deterministic() -> None:
    warnings.simplefilter("default")
    for category in (DeprecationWarning, FutureWarning, PendingDeprecationWarning):
        warnings.filterwarnings("error", category=category, module=r"dmuon_hf(\..*)?$")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global generator is what libraries use


def _detached(value: Any) -> Any:
    """Copy of a result in which tensors are plain CPU leaves that own their memory."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "device_mesh"):
            raise TypeError("a rank returned a DTensor; return value.full_tensor() or value.to_local() instead")
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_detached(item) for item in value]
        if isinstance(value, tuple):
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return items
    return value


def _write_atomically(path: Path, body: bytes) -> None:
    scratch = path.with_suffix(".part")
    scratch.write_bytes(body)
    scratch.rename(path)
