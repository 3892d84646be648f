"""Run a function on fresh processes of this machine that form one gloo group on the loopback interface."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["ROOT", "run_ranks"]

ROOT = Path(__file__).resolve().parents[1]

# Imported once, by the process that all ranks are forked from.
_PRELOAD = ["torch.distributed.fsdp", "torch.distributed.tensor", "transformers.models.llama.modeling_llama"]
_LOOPBACK = "lo" if any(name == "lo" for _, name in socket.if_nameindex()) else "lo0"


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 1800.0) -> list[Any]:
    """Call ``fn(rank, world, *args)`` on ``world`` processes with one compute thread each; results in rank order.

    ``fn`` is a module-level function, pickled with its arguments. The default process group exists when it starts.

    Raises:
        RuntimeError: A rank raised (with its traceback) or died; the others are ended.
        TimeoutError: ``timeout`` seconds passed without every rank's result.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="dmuon_bench_") as directory:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(target=_rank_main, args=(rank, world, directory, pipes[rank][1], fn, args), daemon=True)
            for rank in range(world)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                # This process's copy, so that the death of the rank closes the pipe.
                sender.close()
            return _collect([receiver for receiver, _ in pipes], timeout)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join(10)


def _collect(receivers: Sequence[Connection], timeout: float) -> list[Any]:
    """The ranks' results; the first failure counts, since those of other ranks mostly follow from it."""
    results: list[Any] = [None] * len(receivers)
    missing = {receiver: rank for rank, receiver in enumerate(receivers)}
    deadline = time.monotonic() + timeout
    while missing:
        ready = connection.wait(list(missing), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(missing.values())} gave no result within {timeout:.0f} s")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = missing.pop(receiver)
            try:
                failure, results[rank] = receiver.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a result") from None
            if failure is not None:
                raise RuntimeError(f"rank {rank} failed:\n{failure}")
    return results


def _rank_main(
    rank: int, world: int, directory: str, sender: Connection, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world, timeout=timedelta(seconds=300)
        )
        sender.send((None, fn(rank, world, *args)))
        # A rank that left early would break the last collective of a slower one.
        dist.barrier()
    except BaseException:
        sender.send((traceback.format_exc(), None))
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's teardown, which gloo's threads do not always survive.
    os._exit(0)
