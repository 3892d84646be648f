"""Newton-Schulz where the parts of a matrix lie: of a tensor-parallel matrix only its Gram matrix travels.

That works where the axis cuts the long side: the Gram matrix of the short side is then a sum over the parts. It is sent
once per segment between restarts, and pays where the short side is much the shorter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns import NewtonSchulz
from dmuon_hf.core.optim.normuon import advance_second_moment, squared_rows
from dmuon_hf.core.optim.scaling import lr_scale_factor
from dmuon_hf.core.optim.update import (
    MAX_BATCH_NUMEL,
    MuonRule,
    Orthogonalize,
    OwnedMatrix,
    advance_momentum,
    apply_updates,
    second_moments,
)
from dmuon_hf.core.sharded.plan import ShardedEntry
from dmuon_hf.core.sharded.wire import wire_dtype

__all__ = ["ColumnPolicy", "require_gram", "update_columns"]

_POLICIES: Final = ("beneficial", "always")
_GRAM_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class ColumnPolicy:
    """Which tensor-parallel matrices are orthogonalised in parts.

    Attributes:
        policy: ``"beneficial"`` takes those whose Gram matrices are small beside their updates, ``"always"`` all whose
            long side is cut.
        most: Largest ratio of the bytes of the Gram matrices to those of one whole update, for ``"beneficial"``.
    """

    policy: str = "beneficial"
    most: float = 0.5

    def __post_init__(self) -> None:
        if self.policy not in _POLICIES:
            raise ConfigurationError(f"tp_distributed_gram_policy must be one of {_POLICIES}, got {self.policy!r}")
        if not (math.isfinite(self.most) and self.most > 0.0):
            raise ConfigurationError(
                f"tp_distributed_gram_max_factor_to_scatter_ratio must be above 0, got {self.most!r}"
            )

    def takes(self, entry: ShardedEntry, rule: MuonRule, ns: NewtonSchulz, device: torch.device) -> bool:
        """Whether a matrix stays in its parts; the same on all ranks."""
        (cut,) = entry.layout.cuts
        rows, columns = entry.stored
        whole = entry.spec.sections is None
        if cut is None or entry.layout.mesh_shape == (1,) or not whole or cut.dim != (0 if rows > columns else 1):
            return False
        if self.policy == "always":
            return True
        dtype = entry.momentum_dtype
        sent = ns.segment_count(dtype, device, steps=rule.ns_steps) * min(rows, columns) ** 2 * _GRAM_BYTES
        return sent <= self.most * rows * columns * wire_dtype(ns, dtype, device).itemsize


@torch.no_grad()
def update_columns(
    matrices: Sequence[tuple[ShardedEntry, OwnedMatrix, MuonRule]], group: ProcessGroup, ns: NewtonSchulz
) -> int:
    """Update this rank's parts of matrices that are cut along their long side; returns how many. Collective.

    Args:
        matrices: All that take part in this step, in the order of the plan: what every rank of ``group`` has alike, and
            this rank's part.
        group: Who has the other parts.
        ns: Newton-Schulz.
    """
    alike: dict[tuple[tuple[int, int], torch.dtype, bool, int], list[tuple[ShardedEntry, OwnedMatrix, MuonRule]]] = {}
    rules: dict[MuonRule, int] = {}
    for entry, part, rule in matrices:
        key = (entry.stored, entry.dtype, entry.spec.transposed, rules.setdefault(rule, len(rules)))
        alike.setdefault(key, []).append((entry, part, rule))
    for ((rows, columns), _, stored_transposed, _), members in alike.items():
        size = max(1, MAX_BATCH_NUMEL // (rows * columns))
        shape = (columns, rows) if stored_transposed else (rows, columns)
        for start in range(0, len(members), size):
            entry, _, rule = members[start]
            batch = [part for _, part, _ in members[start : start + size]]
            directions = torch.stack(list(advance_momentum(batch, rule)))
            updates = ns.columns(directions, group, transposed=rows > columns, steps=rule.ns_steps)
            scale = lr_scale_factor(shape, rule.lr_scale)
            if rule.normalises_rows:
                _normalise_rows(updates, batch, entry, rule, scale, group)
            else:
                updates.mul_(scale)
            apply_updates(batch, updates.unbind(0), rule)
    return len(matrices)


def _normalise_rows(
    updates: Tensor,
    batch: Sequence[OwnedMatrix],
    entry: ShardedEntry,
    rule: MuonRule,
    scale: float,
    group: ProcessGroup,
) -> None:
    """What :func:`~dmuon_hf.core.optim.normuon.normalise_rows` does to whole matrices, on parts. Collective.

    The sums of squares of rows are summed up over the group, with zeros for rows that lie elsewhere, so that every rank
    of it moves all second moments on alike.
    """
    (cut,) = entry.layout.cuts
    logical = updates.mT if entry.spec.transposed else updates
    rows, columns = entry.spec.logical_shapes(entry.stored)[0]
    second_moment = torch.stack(second_moments(batch))
    mine = slice(0, rows)
    if cut is not None and cut.dim == (1 if entry.spec.transposed else 0):
        held = entry.layout.held((entry.layout.ranks.index(dist.get_rank()),))[cut.dim]
        mine = slice(held[0][0], held[-1][1]) if held else slice(0, 0)
    squares = torch.zeros_like(second_moment)
    squares[:, mine] = squared_rows(logical, second_moment.dtype)
    dist.all_reduce(squares, group=group)
    factors = advance_second_moment(second_moment, squares, columns=columns, beta2=rule.normuon_beta2)
    logical.mul_(factors[:, mine].unsqueeze(-1).mul(scale * math.sqrt(min(rows, columns))))
    torch._foreach_copy_(second_moments(batch), list(second_moment.unbind()))


def require_gram(orthogonalize: Orthogonalize) -> NewtonSchulz:
    """The Newton-Schulz that works on parts, or an error that says why not.

    Raises:
        ConfigurationError: It does not iterate on the Gram matrix.
    """
    if isinstance(orthogonalize, NewtonSchulz) and orthogonalize.backend != "direct":
        return orthogonalize
    raise ConfigurationError(
        "tp_distributed_gram needs a Newton-Schulz on Gram matrices: leave ns_backend at 'gram', or leave "
        "tp_distributed_gram out"
    )
