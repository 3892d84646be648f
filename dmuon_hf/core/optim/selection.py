"""From a model to what ``Muon`` steps: its sources of matrices, and the runtime or surroundings they share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuon_hf.core.covering import ranks_of
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.lockstep import monitor_of
from dmuon_hf.core.optim.binding import is_dedicated, runtime_with_matrices
from dmuon_hf.core.optim.columns import ColumnPolicy
from dmuon_hf.core.optim.groups import trainable_parameters
from dmuon_hf.core.optim.interfaces import MatrixSource, OptimizerRuntime
from dmuon_hf.core.optim.owned import OwnedSource
from dmuon_hf.core.plan import MatrixSpec, canonical_name
from dmuon_hf.core.selection import MatrixSpecFn, Predicate
from dmuon_hf.core.sharded import ShardedMatrix, ShardedSource, Surroundings, join

__all__ = ["Selection", "names_of", "sources_of"]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which parameters without an owner are matrices, and how they decompose; none without a predicate.

    ``forced`` are routes that the caller's groups ask for, by canonical name.
    """

    predicate: Predicate | None = None
    matrix_spec_fn: MatrixSpecFn | None = None
    forced: Mapping[str, str] = field(default_factory=dict)
    columns: ColumnPolicy | None = None
    """Which tensor-parallel matrices with owners are orthogonalised where their parts lie."""

    def __post_init__(self) -> None:
        if self.predicate is None and self.matrix_spec_fn is not None:
            raise ConfigurationError(
                "Muon(matrix_spec_fn=...) describes what its predicate selects, and there is none: pass predicate too, "
                "or the matrix_spec_fn to dedicate_params()"
            )

    def matrices(
        self, model: nn.Module, dedicated: Collection[int] = (), stacks: Mapping[str, MatrixSpec] | None = None
    ) -> list[ShardedMatrix]:
        """The trainable parameters that stay where they are, in the order of the model.

        Args:
            model: The model.
            dedicated: Identities of the parameters that have owners.
            stacks: What ``dedicate_params`` selected and left where it is.
        """
        stacks = stacks or {}
        aliases: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(param), []).append(canonical_name(name, model))
        chosen: list[ShardedMatrix] = []
        for name, param in trainable_parameters(model).items():
            if id(param) in dedicated or self.forced.get(name, "muon") != "muon":
                continue
            spec = stacks.get(name)
            if self.predicate is not None and any(self.predicate(alias, param) for alias in aliases[id(param)]):
                own = None if self.matrix_spec_fn is None else self.matrix_spec_fn(name, param)
                spec = own or spec or MatrixSpec()
            if spec is not None:
                chosen.append(ShardedMatrix(name, param, spec))
        return chosen


def names_of(sources: Iterable[MatrixSource], params: Mapping[str, nn.Parameter]) -> set[str]:
    """Which of ``params`` are a source's: by identity, since wrapping a module gives its parameters other names."""
    matrices = {id(param) for source in sources for param in source.params.values()}
    return {name for name, param in params.items() if id(param) in matrices}


def sources_of(model: nn.Module, selection: Selection) -> tuple[OptimizerRuntime, tuple[MatrixSource, ...]]:
    """The sources of a model, and what their ranks agree through. Collective where something is selected.

    Raises:
        ConfigurationError: Nothing is dedicated or selected, or something selected is no matrix.
        LockstepError: The ranks selected differently.
        NotImplementedError: Selected matrices lie on ranks beyond those of the owners.
    """
    if selection.predicate is None or is_dedicated(model):
        runtime = runtime_with_matrices(model)
        dedicated = {id(matrix.param) for matrix in runtime.dedicated.values()}
        chosen = selection.matrices(model, dedicated, runtime.stacks)
        if not chosen:
            return runtime, (OwnedSource(runtime, selection.forced, selection.columns),)
        beyond = set(ranks_of([matrix.param for matrix in chosen])).difference(runtime.topology.ranks or ())
        if beyond and runtime.topology.ranks is not None:
            raise NotImplementedError(
                f"{chosen[0].name} and other matrices that Muon was to update where they are lie on ranks "
                f"{sorted(beyond)} too, where no matrix has its owner: dedicate nothing, and select all in "
                "Muon(predicate=...)"
            )
        monitor = monitor_of(runtime.topology.ranks or ())
        beside = ShardedSource(chosen, mesh=runtime.topology.mesh, monitor=monitor)
        return runtime, (OwnedSource(runtime, selection.forced, selection.columns), beside)
    chosen = selection.matrices(model)
    if not chosen:
        raise ConfigurationError(
            "Muon's predicate selected no trainable parameter: without a single matrix this would train with AdamW "
            "alone. Names look like " + ", ".join(list(trainable_parameters(model))[:3])
        )
    trainable = list(trainable_parameters(model).values())
    surroundings = Surroundings(model, join(trainable))
    return surroundings, (ShardedSource(chosen, mesh=_some_mesh(trainable), monitor=surroundings.monitor),)


def _some_mesh(tensors: Iterable[Tensor]) -> DeviceMesh | None:
    """Any mesh that stands for the ranks that step together; ``None`` in one process."""
    return next((tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)), None)
