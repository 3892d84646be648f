"""How a process with a monitor ends: it tells the others, whose exit handlers all run, and it does end."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.distributed.lockstep_setup import run_script

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import threading, time
from datetime import timedelta
import torch.distributed as dist
from dmuon_hf.core.lockstep.farewell import guard_exit

store = dist.TCPStore("127.0.0.1", 0, 1, True)

class Watch:
    stopped = threading.Event()
    def leave(self, what, *, raised):
        self.stopped.set()
        return False

def talk(watch):
    while not watch.stopped.is_set():
        try:
            store.wait(["never"], timedelta(seconds=1))
        except Exception:
            pass

watch = Watch()
thread = threading.Thread(target=talk, args=(watch,), daemon=True)
thread.start()
guard_exit(watch, thread)
time.sleep(0.3)
"""


def test_exit_waits_for_a_monitor_inside_the_store() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


# Rank 1 leaves with a collective in flight, which blocks its exit, and rank 0 stands in FSDP2's collective. A handler
# registered before the monitor's runs after it, and takes longer than the exit may once no Python runs any more.
BLOCKED = """
import atexit, sys, time

def upload():
    time.sleep(4)
    sys.stderr.write("upload ran to its end\\n")

atexit.register(upload)
import torch, torch.distributed as dist
from dmuon_hf.core.lockstep import farewell
from tests.distributed.lockstep_setup import part_of, prepare
farewell._EXIT_GRACE = int(sys.argv[1])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), 2
model, optimizer = prepare(world, "z3", norm=True)
loss = model(part_of(0, rank, world))
if rank == 1:
    works = [dist.broadcast(torch.ones(3), 0, group=group, async_op=True) for group in (dist.new_group([0, 1]),)]
    raise ValueError("boom on rank 1")
dist.new_group([0, 1])
loss.backward()
"""


def test_uncaught_exception_is_named_on_the_rank_that_waits_and_runs_its_exit_handlers() -> None:
    env = {"DMUON_HANG_SECONDS": "1", "DMUON_HANG_ABORT_SECONDS": "1"}
    (code, error), (_, raised) = run_script(BLOCKED, "300", **env)
    assert "boom on rank 1" in raised
    assert "rank 1 ended with ValueError: boom on rank 1" in error
    assert "rank 0 waits in FSDP2 all-gather of layers.3" in error
    assert code == 1
    assert "upload ran to its end" in error


def test_exit_that_a_collective_blocks_ends_after_its_handlers_although_the_peer_stays() -> None:
    env = {"DMUON_HANG_SECONDS": "1", "DMUON_HANG_ABORT_SECONDS": "0"}
    (code, _), (ended, raised) = run_script(BLOCKED, "1", **env)
    assert "boom on rank 1" in raised
    assert "upload ran to its end" in raised
    assert ended == -signal.SIGALRM
    assert code != 0
