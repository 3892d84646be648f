"""A process whose monitor talks to the store while Python ends still ends cleanly."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import threading, time
from datetime import timedelta
import torch.distributed as dist
from dmuon_hf.core.runtime.lockstep_exit import guard_exit

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
