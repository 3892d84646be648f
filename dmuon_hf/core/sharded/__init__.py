"""Muon on parameters that stay where they are: DTensors of any layout on any mesh.

``runs`` and ``layout`` say which indices a rank holds; ``plan`` who orthogonalises what, purely; ``ranks`` lets the
ranks agree on that; ``itinerary`` is the plan as one rank sees it; ``wire`` and ``exchange`` carry parts; ``bucket``
and ``step`` are one optimizer step; ``source`` is what the optimizer holds. Later ones know earlier ones.
"""

from __future__ import annotations

from dmuon_hf.core.sharded.plan import ShardedEntry, ShardedPlan, Task, make_sharded_plan
from dmuon_hf.core.sharded.ranks import Team, join
from dmuon_hf.core.sharded.source import ShardedMatrix, ShardedSource
from dmuon_hf.core.sharded.surroundings import Surroundings

__all__ = [
    "ShardedEntry",
    "ShardedMatrix",
    "ShardedPlan",
    "ShardedSource",
    "Surroundings",
    "Task",
    "Team",
    "join",
    "make_sharded_plan",
]
