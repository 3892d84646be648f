"""Ranks that do different things end with an error that says who waits where, instead of hanging.

[Note: what proves that ranks diverged] in :mod:`.positions` is the idea; :mod:`.monitor` is what the runtime tells,
:mod:`.watch` the thread that compares ranks, :mod:`.stack` what a thread stands in, :mod:`.farewell` how a process that
leaves says so, and :mod:`.meeting` the place where all ranks meet before a call that may stand under ``if rank == 0``.
"""

from dmuon_hf.core.lockstep.meeting import meet
from dmuon_hf.core.lockstep.monitor import (
    Channel,
    LockstepMonitor,
    monitor_in,
    monitor_of,
    monitor_on,
    note_foreign,
)

__all__ = ["Channel", "LockstepMonitor", "meet", "monitor_in", "monitor_of", "monitor_on", "note_foreign"]
