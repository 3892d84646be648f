"""Whether the model still uses what has an owner, and whether somebody synchronises the rest.

[Note: identity] A name says nothing: a module that is swapped after ``dedicate_params`` keeps it. A weight is in order
if the modules of the model hold the very parameter that has an owner, in as many places and under the same attribute as
then, inside of the module whose forward gathers it. Wrapping modules keeps all that; parametrising, pruning, tying or
replacing does not. The same rule holds in one process, where nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import DTensor

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.runtime.dedicated import DedicatedParam
from dmuon_hf.core.runtime.fingerprint import Place, places_of
from dmuon_hf.core.runtime.owned_tensor import OwnedTensor

if TYPE_CHECKING:
    from dmuon_hf.core.mesh import Topology
    from dmuon_hf.core.optim.interfaces import OptimizerRuntime
    from dmuon_hf.core.runtime.runtime import Runtime

__all__ = ["misplaced", "raise_first", "raise_together", "refuse_misplaced", "shown", "unsynchronised"]

_SHOWN = 6
_WAY_OUT = (
    "Swap, resize, parametrise, prune, tie or cast weights before dedicate_params(), and create the optimizer last; "
    "where it was created before fully_shard(), call optimizer.rebind(model)."
)


def misplaced(runtime: Runtime, model: nn.Module) -> dict[str, str]:
    """What is wrong with each owned weight that ``model`` no longer uses as it was dedicated, by its name.

    A weight that moved as [Note: identity] allows is followed to its new module. No communication.
    """
    places = places_of(model)
    modules = set(model.modules())
    at_name = {place.name: place for found in places.values() for place in found}
    whole = {id(u): p.name for unit in runtime.units for p, u in zip(unit.params, unit.weights.unsharded, strict=True)}
    found_whole = {whole[key]: found for key, found in places.items() if key in whole}
    problems: dict[str, str] = {}
    for param in runtime.dedicated.values():
        found = places.get(id(param.param)) or found_whole.get(param.name) or []
        problem = param.converted or _displaced(param, found, modules, at_name)
        if problem is not None:
            problems[param.name] = problem
    return problems


def _displaced(
    param: DedicatedParam, found: list[Place], modules: Collection[nn.Module], at_name: Mapping[str, Place]
) -> str | None:
    """Why the places in which a weight was found are not in order; follows it where they are."""
    here = {(place.module, place.attribute) for place in found}
    if param.boundary not in modules:
        return f"module {param.unit!r}, in whose forward it is used, is no longer in the model"
    if here == set(param.places):
        return None
    if not here:
        now = at_name.get(param.name)
        module = param.name.rpartition(".")[0] or "the model"
        if now is None:
            return f"{module} no longer has it as a parameter"
        return f"{module} ({type(now.module).__name__}) holds another parameter now"
    if len(here) != len(param.places):
        names = sorted(place.name for place in found)
        return f"it is held by {len(here)} modules now ({', '.join(names)}) and was by {len(param.places)}"
    if sorted(attribute for _, attribute in here) != sorted(attribute for _, attribute in param.places):
        return f"it became {found[0].name}, from which the module computes what it uses"
    inside = set(param.boundary.modules())
    if not all(module in inside for module, _ in here):
        return f"it moved to {found[0].name}, out of module {param.unit!r}, whose forward gathers it"
    param.places = tuple((place.module, place.attribute) for place in found)
    return None


def unsynchronised(runtime: Runtime, param: nn.Parameter) -> str | None:
    """Why the ranks would train a parameter apart, or ``None``: the one place that decides who synchronises it.

    On several ranks it has an owner, is averaged over them by ``replicate``, ``replicate_tp`` or
    ``DistributedDataParallel``, or is a DTensor over exactly the ranks of the data-parallel grid, as ``fully_shard``
    makes it; where there is a tensor-parallel axis too, that may be in or not.
    """
    topology = runtime.topology
    if topology.mesh is None or isinstance(param, OwnedTensor):
        return None
    if runtime.averaging is not None and runtime.averaging.covers(param):
        return None
    if isinstance(param, DTensor) and not (topology.keeps_whole and topology.tensor is not None):
        return _sharded_elsewhere(topology, param)
    if topology.size == 1:
        return None
    if topology.keeps_whole and topology.tensor is not None:
        return (
            "no rank synchronises it: call dmuon.replicate_tp(model, mesh) after dedicate_params_ddp_tp(), before the "
            "first step"
        )
    if topology.keeps_whole:
        return (
            "no rank synchronises it: call dmuon.replicate(model, mesh) after dedicate_params_ddp(), or wrap the model "
            "in DistributedDataParallel, before the first step"
        )
    return (
        "no rank synchronises it: call fully_shard on the modules and at last on the model (or accelerator.prepare), "
        "without it in ignored_params, before the first step"
    )


def _sharded_elsewhere(topology: Topology, param: DTensor) -> str | None:
    """Why a DTensor is not over the ranks of the grid, or ``None``."""
    grid = sorted(topology.ranks or ())
    ranks = sorted(param.device_mesh.mesh.flatten().tolist())
    if ranks in (grid, sorted(topology.data.ranks if topology.data is not None else ())):
        return None
    return (
        f"it is sharded over the ranks {ranks}, but the owners are spread over {grid}: give fully_shard the mesh "
        "of dedicate_params, for HSDP mesh['shard'] with replicate_mesh=mesh['replicate'] and the whole mesh"
    )


def shown(problems: Mapping[str, str]) -> str:
    """Problems by name as one line; names with the same problem stand together, the first ones in full."""
    alike: dict[str, list[str]] = {}
    for name, text in problems.items():
        alike.setdefault(text, []).append(name)
    return "; ".join(f"{_listed(names)}: {text}" for text, names in alike.items())


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def refuse_misplaced(runtime: Runtime, model: nn.Module) -> None:
    """Raise ``ConfigurationError`` on this rank if ``model`` no longer uses what the owners hold. No communication."""
    if not runtime.is_hidden:
        raise_first([shown(misplaced(runtime, model))])


def raise_together(runtime: OptimizerRuntime, problems: Mapping[str, str]) -> None:
    """Raise ``ConfigurationError`` on every rank if any has problems, by name. Collective, twice then."""
    if runtime.any_rank(bool(problems)):
        raise_first(runtime.exchange(shown(problems)))


def raise_first(texts: Sequence[str]) -> None:
    """Raise ``ConfigurationError`` with the text of the first rank that has one; nothing if none has."""
    for rank, text in enumerate(texts):
        if text:
            where = f" (data-parallel rank {rank})" if len(texts) > 1 else ""
            raise ConfigurationError(
                f"the optimizer does not hold the model's current parameters{where}: {text}. {_WAY_OUT}"
            )
