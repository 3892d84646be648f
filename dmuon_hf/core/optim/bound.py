"""What one ``Muon`` holds of one model: the sources of its matrices, its groups, and what their state looks like."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns import NewtonSchulz
from dmuon_hf.core.ns.agreement import Call, RankGroup, autotune_on_first_rank
from dmuon_hf.core.optim.binding import Binding
from dmuon_hf.core.optim.groups import Defaults, LoweredGroup, frozen_parameters, lower_groups, trainable_parameters
from dmuon_hf.core.optim.managed import ManagedAdamW
from dmuon_hf.core.optim.selection import Selection, names_of, sources_of
from dmuon_hf.core.optim.state import fresh_state
from dmuon_hf.core.optim.step import muon_rules
from dmuon_hf.core.optim.update import Orthogonalize
from dmuon_hf.core.plan import MatrixSpec

__all__ = ["BoundModel"]

logger = logging.getLogger(__name__)

Group = Mapping[str, Any]
State = MutableMapping[Tensor, Any]


class BoundModel:
    """A model as an optimizer sees it. Making one is a collective where something is selected.

    Args:
        model: With dedicated parameters, or matrices that the selection finds.
        selection: What is updated beside those that have owners.

    Raises:
        ConfigurationError, LockstepError, NotImplementedError: As :func:`sources_of`.
    """

    def __init__(self, model: nn.Module, selection: Selection) -> None:
        self.model = model
        self.runtime, self.sources = sources_of(model, selection)
        self.managed = ManagedAdamW(self.runtime, selection.forced)
        self._predicate = selection.predicate
        self._forced = selection.forced

    @property
    def muon_params(self) -> list[nn.Parameter]:
        """The parameters of the muon route."""
        return [param for source in self.sources for param in source.params.values()]

    @property
    def ranks(self) -> RankGroup:
        """The ranks that step together."""
        topology = self.runtime.topology
        return RankGroup(
            self.runtime.maximum, self.runtime.from_first, topology.device, is_first=topology.slot == (0, 0)
        )

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the ranks that step together, which says what is the same on all."""
        if not dist.is_initialized():
            return True
        ranks = self.runtime.topology.ranks
        return dist.get_rank() == (0 if ranks is None else ranks[0])

    def trainable(self) -> tuple[dict[str, nn.Parameter], set[str]]:
        """The trainable parameters by canonical name, and which of them are on the muon route."""
        by_name = trainable_parameters(self.model)
        return by_name, names_of(self.sources, by_name)

    def lower(self, user_groups: Sequence[Group] | None, defaults: Defaults) -> list[LoweredGroup]:
        """The caller's groups by route.

        Raises:
            ConfigurationError: They do not fit the model, or no matrix of it trains and the groups do not say so.
        """
        lowered = lower_groups(*self.trainable(), user_groups, defaults, frozen_parameters(self.model))
        if not any(group.options["route"] == "muon" for group in lowered) and not self._is_forced_off_muon():
            raise ConfigurationError(
                "every dedicated matrix of the model is frozen, so Muon would update none: unfreeze them, widen the "
                "predicate of dedicate_params(), or leave some on the muon route"
            )
        return lowered

    def _is_forced_off_muon(self) -> bool:
        """Whether the caller's groups put all that trains of the dedicated parameters on the adamw route, by name."""
        trained = [name for name, matrix in self.runtime.dedicated.items() if matrix.param.requires_grad]
        return bool(trained) and all(self._forced.get(name) == "adamw" for name in trained)

    def binding(self, waiting: Sequence[Collection[str]]) -> Binding:
        """The model as it is now, to be compared with in every step; ``waiting`` are frozen members of the groups."""
        muon = {id(param) for param in self.muon_params}
        return Binding(self.model, self.runtime, waiting, muon, self._predicate)

    def autotune(self, orthogonalize: Orthogonalize, groups: Iterable[Group]) -> None:
        """Let the first rank time kernels for what any rank will run, if the user asked for that. Collective then."""
        if isinstance(orthogonalize, NewtonSchulz) and orthogonalize.tuner is not None:
            rules = muon_rules(groups)
            calls = set[Call]().union(*(source.newton_schulz_calls(rules, orthogonalize) for source in self.sources))
            autotune_on_first_rank(orthogonalize, calls, self.ranks)

    def state_layouts(self) -> dict[int, Tensor]:
        """What the state of dedicated parameters is laid out like, by their identity; of all others it is like them."""
        return {id(matrix.param): matrix.state_like for matrix in self.runtime.dedicated.values()}

    def state_dtypes(self) -> dict[int, torch.dtype]:
        """By the identity of the parameter, where its policy says."""
        matrices = self.runtime.dedicated.values()
        return {id(matrix.param): matrix.optim_dtype for matrix in matrices if matrix.optim_dtype is not None}

    def normalised(self, groups: Iterable[Group]) -> dict[int, MatrixSpec]:
        """The logical matrices of what has an update rule that normalises rows, by the identity of the parameter."""
        members = {id(param) for group in groups if group.get("update_rule") == "normuon" for param in group["params"]}
        params = ((id(param), source.specs[name]) for source in self.sources for name, param in source.params.items())
        return {key: spec for key, spec in params if key in members} if members else {}

    def add_state(self, state: State, groups: Iterable[Group], only: Collection[int] | None = None) -> None:
        """Give the parameters of the groups, those among ``only`` by identity, the fresh state of their route."""
        groups = list(groups)
        layouts, dtypes, normalised = self.state_layouts(), self.state_dtypes(), self.normalised(groups)
        for group in groups:
            for param in group["params"]:
                key = id(param)
                if only is None or key in only:
                    layout = layouts.get(key, param)
                    state[param] = fresh_state(layout, group["route"], dtypes.get(key), normalised=normalised.get(key))

    def warn_of_narrow_matrices(self) -> None:
        """Say on the first rank that matrices are kept in half precision."""
        dtypes = {str(param.dtype) for param in self.muon_params if param.dtype.itemsize < 4}
        if dtypes and self.is_first:
            logger.warning(
                "matrices are kept in %s: each update is computed in fp32 and rounded, so small ones are "
                "lost. Load the model in float32 and use mixed precision for the computation.",
                ", ".join(sorted(dtypes)),
            )
