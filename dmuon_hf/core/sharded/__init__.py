"""Muon on parameters that stay where they are: DTensors of any layout on any mesh.

``runs`` and ``layout`` say which indices a rank holds; ``plan`` who orthogonalises what, purely; ``ranks`` lets the
ranks agree on that; ``itinerary`` is the plan as one rank sees it; ``wire`` and ``exchange`` carry parts; ``bucket``
and ``step`` are one optimizer step; ``source`` is what the optimizer holds. Later ones know earlier ones.
"""

from __future__ import annotations

from dmuon_hf.core.sharded.plan import ShardedEntry, ShardedPlan, Task, make_sharded_plan
from dmuon_hf.core.sharded.source import Hand, ShardedMatrix, ShardedSource

__all__ = ["Hand", "ShardedEntry", "ShardedMatrix", "ShardedPlan", "ShardedSource", "Task", "make_sharded_plan"]
