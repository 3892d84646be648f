"""Loading what any mode has saved into a model and a Muon optimizer that run in any mode.

A checkpoint has one of the forms of `checkpoint_files`, whatever the mode that reads it. Whole files are read by the
first rank, which sends the values to the others; the directories of DCP are read by all ranks in parallel, each its own
part, nothing gathered. Optimizer state is assigned by parameter name. Names and shapes are compared before anything is
written, and what does not fit is one `ConfigurationError` on every rank.

The functions that load are collective.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, cast

import torch
import torch.distributed.checkpoint.state_dict as torch_state_dict
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

import dmuon_hf.core as dmuon
from dmuon_hf import checkpoint_files as files
from dmuon_hf.adapters import active_adapter, renamed, trained_aliases
from dmuon_hf.core.checkpoint.hyperparameters import update_rule_problems
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.grid_group import GridGroup
from dmuon_hf.core.plan import canonical_name
from dmuon_hf.core.runtime import runtime_of
from dmuon_hf.loaded_shards import is_loaded_in_shards, ranks_of

__all__ = ["load_model", "load_optimizer", "optimizer_state_is_fresh", "saved_whole"]

_SHOWN = 8
"""Problems that a message lists before it counts the rest."""

T = TypeVar("T")


def load_model(model: nn.Module, directory: Path, index: int = 0) -> None:
    """Load the weights of the `index`-th model of a checkpoint, saved in any mode. Collective.

    Of a model with adapters the active one is loaded, and what else trains; its base stays as it is.

    Raises:
        ConfigurationError: there are none, they cannot be read, or a name or shape differs; nothing is changed.
    """
    group = _group(model)
    adapter = active_adapter(model)
    stored = _from_first(lambda: files.model_in(directory, index, adapter), group)
    aliases = None if adapter is None else trained_aliases(model)
    if stored.sharded and _is_distributed(group):
        _load_model_in_parallel(model, stored, group, aliases)
        return
    entries = _on_first(
        lambda: _entries(model, stored) if aliases is None else renamed(files.read_whole(stored), aliases), group
    )
    with _named(stored):
        dmuon.set_model_state_dict(model, {} if entries is None else entries, only=aliases)


def load_optimizer(
    model: nn.Module, optimizer: dmuon.Muon, directory: Path, index: int = 0, *, keep: Collection[str] = ()
) -> None:
    """Load the state and hyperparameters of the `index`-th optimizer of a checkpoint, saved in any mode. Collective.

    Args:
        keep: hyperparameters that stay as they are here.

    Raises:
        ConfigurationError: there is none, it cannot be read, it is another optimizer's, or a name, shape, route or
            group differs; nothing is changed.
    """
    group = _group(model)
    kept = [{key: value for key, value in live.items() if key in keep} for live in optimizer.param_groups]
    stored = _from_first(lambda: files.optimizer_in(directory, index), group)
    if stored.sharded and _is_distributed(group):
        _load_optimizer_in_parallel(model, optimizer, stored, group)
    else:
        state = _on_first(lambda: _by_section(model, optimizer, stored), group)
        with _named(stored):
            dmuon.set_optimizer_state_dict(model, optimizer, {} if state is None else state)
    for live, values in zip(optimizer.param_groups, kept, strict=True):
        live.update(values)


@contextmanager
def saved_whole(model: nn.Module, optimizer: dmuon.Muon) -> Iterator[None]:
    """Inside the block `optimizer.state_dict()` is what one process would save, on the ranks that write files.

    It names the parameters of each group, whose keys are mere positions, and holds the momentum that lies on owners
    whole. Collective at the start where there is any; state dicts in the block are not.
    """
    names = list(_group_names(model, optimizer).values())
    whole = _gathered(optimizer)

    def complete(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        for group, members in zip(state_dict["param_groups"], names, strict=True):
            group["param_names"] = members
        state_dict["state"] = {
            key: {name: whole.get(id(value), value) for name, value in entry.items()}
            for key, entry in state_dict["state"].items()
        }

    handle = optimizer.register_state_dict_post_hook(complete)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def _gathered(optimizer: dmuon.Muon) -> dict[int, Tensor]:
    """State that lies on owners, whole and on the CPU, by the identity of the tensor; on ranks that may write files."""
    whole: dict[int, Tensor] = {}
    optimizer.runtime.finish_publish()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, dmuon.OwnedTensor):
                    full = value.full_tensor()
                    if PartialState().is_local_main_process:
                        whole[id(value)] = full.cpu()
    return whole


def optimizer_state_is_fresh(optimizer: dmuon.Muon) -> bool:
    """Whether all state, on all ranks, is as no step has touched it: zero. Collective."""
    values = (value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor))
    used = any(bool(_local(value).any()) for value in values)
    runtime = optimizer.runtime
    flag = torch.tensor([float(used)], device=runtime.topology.device)
    return not bool(runtime.maximum(flag).item())


# Ranks


def _group(model: nn.Module) -> GridGroup | None:
    """The ranks that share the model; None in one process, also where the Trainer has yet to dedicate it."""
    runtime = runtime_of(model)
    if runtime is None:
        return ranks_of(model) if is_loaded_in_shards(model) else None
    return runtime.topology.grid


def _is_distributed(group: GridGroup | None) -> TypeGuard[GridGroup]:
    return group is not None and group.size > 1


def _on_first(work: Callable[[], T], group: GridGroup | None) -> T | None:
    """What `work` returns, on the first rank alone; its error on every rank. Collective."""
    if not _is_distributed(group):
        return work()
    value: T | None = None
    problem: str | None = None
    if group.rank == 0:
        try:
            value = work()
        except ConfigurationError as error:
            problem = str(error)
    problem = group.broadcast_object(problem)
    if problem is not None:
        raise ConfigurationError(problem)
    return value


def _from_first(work: Callable[[], T], group: GridGroup | None) -> T:
    """What `work` returns on the first rank, on every rank. Collective."""
    value: Any = _on_first(work, group)
    result: T = group.broadcast_object(value) if _is_distributed(group) else value
    return result


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


@contextmanager
def _named(stored: files.Stored) -> Iterator[None]:
    """Put the file in front of what is wrong with it."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{stored.path}: {error}") from error


# Weights


def _entries(model: nn.Module, stored: files.Stored) -> dict[str, Any]:
    """Whole weights by the names that the model has in memory.

    transformers writes some models, such as those with experts, under other names and in other pieces, which only its
    `from_pretrained` puts together again.
    """
    entries = files.read_whole(stored)
    names = {canonical_name(name, model) for name in model.state_dict()}
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if inner is None or entries.keys() <= names or not stored.path.name.startswith(("model.", "pytorch_model.")):
        return entries
    dtype = next(value.dtype for value in entries.values() if value.is_floating_point())
    cls: Any = next(cls for cls in type(inner).__mro__ if not issubclass(cls, FSDPModule))
    loaded, report = cls.from_pretrained(stored.path.parent, config=inner.config, dtype=dtype, output_loading_info=True)
    if problems := {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys}:
        raise ConfigurationError(f"{stored.path} does not fit, nothing was loaded: {problems}")
    return dict(loaded.state_dict())


def _load_model_in_parallel(
    model: nn.Module, stored: files.Stored, group: GridGroup | None, aliases: Mapping[str, str] | None
) -> None:
    state = torch_state_dict.get_model_state_dict(model)
    tied = _tied(model)
    metadata = _from_first(lambda: files.read_metadata(stored), group)
    there = _stored_shapes(metadata, "model.")
    if aliases is not None:
        _load_aliased_in_parallel(model, {name: state[name] for name in aliases}, aliases, stored, there)
        return
    wanted = {name: value for name, value in state.items() if name in there}
    missing = [name for name in state if name not in there and not any(other in there for other in tied.get(name, ()))]
    _require_fit(stored, wanted, there, missing=missing)
    _read_in_parallel(stored, {"model": wanted})
    torch_state_dict.set_model_state_dict(model, wanted, options=torch_state_dict.StateDictOptions(strict=False))


def _load_aliased_in_parallel(
    model: nn.Module,
    state: Mapping[str, Any],
    aliases: Mapping[str, str],
    stored: files.Stored,
    there: Mapping[str, tuple[int, ...] | None],
) -> None:
    """Read what is in the directory under its own name or under an alias; all else in it is left alone."""
    keys = {name: name if name in there else aliases[name] for name in state}
    wanted = {keys[name]: value for name, value in state.items()}
    missing = [name for name, key in keys.items() if key not in there]
    _require_fit(stored, wanted, {key: there[key] for key in wanted if key in there}, missing=missing)
    _read_in_parallel(stored, {"model": wanted})
    options = torch_state_dict.StateDictOptions(strict=False)
    torch_state_dict.set_model_state_dict(model, dict(state), options=options)


def _tied(model: nn.Module) -> dict[str, list[str]]:
    """Canonical names of parameters that have several, each with all of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(canonical_name(name, model))
    return {name: group for group in names.values() if len(group) > 1 for name in group}


# Optimizer state


def _by_section(model: nn.Module, optimizer: dmuon.Muon, stored: files.Stored) -> dict[str, Any]:
    """Saved state in the form of `dmuon.get_optimizer_state_dict`.

    torch keys it by parameter name, or in one process by position in the groups, next to which `saved_whole` put
    the names.
    """
    saved = files.read_whole(stored)
    groups = saved.get("param_groups")
    if not isinstance(groups, Sequence) or "state" not in saved:
        raise ConfigurationError(f"{stored.path} is no state of an optimizer: it holds {', '.join(map(str, saved))}")
    _require_muon(stored, groups)
    live = _group_names(model, optimizer)
    runtime = runtime_of(model)
    dedicated = {} if runtime is None else runtime.dedicated
    result: dict[str, Any] = {"dedicated": {}, "dedicated_adamw": {}, "fsdp": {}, "param_groups": []}
    for group in groups:
        names = _names_of(group, live, stored)
        for key, name in zip(group["params"], names, strict=True):
            section = "dedicated" if group["route"] == "muon" else "dedicated_adamw" if name in dedicated else "fsdp"
            if key in saved["state"]:
                result[section][name] = saved["state"][key]
        hyperparameters = {key: value for key, value in group.items() if key != "param_names"}
        result["param_groups"].append({**hyperparameters, "params": names})
    return result


def _require_muon(stored: files.Stored, groups: Sequence[Mapping[str, Any]]) -> None:
    if not all("route" in group and "params" in group for group in groups):
        raise ConfigurationError(
            f"{stored.path} was saved by another optimizer than dmuon_hf's Muon, so it holds no momentum for Muon. "
            "Resume with the optimizer of that run, or load its weights with from_pretrained and start a new run"
        )


def _group_names(model: nn.Module, optimizer: dmuon.Muon) -> dict[str, list[str]]:
    """Canonical names of the parameters of each group, by the group's name."""
    names = {id(parameter): canonical_name(name, model) for name, parameter in model.named_parameters()}
    return {
        group["group_name"]: [names.get(id(parameter), "?") for parameter in group["params"]]
        for group in optimizer.param_groups
    }


def _names_of(group: Mapping[str, Any], live: Mapping[str, list[str]], stored: files.Stored) -> list[str]:
    """Names of a saved group's parameters; without any in the file, those of the same group here, if as many."""
    named = group.get("param_names", group["params"])
    if all(isinstance(name, str) for name in named):
        return list(named)
    here = live.get(group.get("group_name", ""), [])
    if len(here) != len(named):
        raise ConfigurationError(
            f"group {group.get('group_name')!r} of {stored.path} has {len(named)} parameters, but {len(here)} here: "
            "use the routes and the names without weight decay that the run was saved with"
        )
    return here


def _load_optimizer_in_parallel(
    model: nn.Module, optimizer: dmuon.Muon, stored: files.Stored, group: GridGroup | None
) -> None:
    state: dict[str, Any] = cast(Any, torch_state_dict.get_optimizer_state_dict(model, optimizer))["state"]
    live = _group_names(model, optimizer)
    metadata = _from_first(lambda: files.read_metadata(stored), group)
    groups = _from_first(lambda: files.read_param_groups(stored), group)
    _require_muon(stored, groups)
    saved_names = {saved["group_name"]: list(saved["params"]) for saved in groups}
    if {name: set(members) for name, members in live.items()} != {n: set(m) for n, m in saved_names.items()}:
        raise ConfigurationError(f"{stored.path} {'; '.join(_group_differences(live, saved_names))}")
    if other_rules := list(update_rule_problems(optimizer.param_groups, groups)):
        raise ConfigurationError(f"{stored.path} does not fit, nothing was loaded: {'; '.join(other_rules)}")
    there = _stored_shapes(metadata, "optimizer.state.")
    wanted = {f"{name}.{key}": value for name, entry in state.items() for key, value in entry.items()}
    _require_fit(stored, wanted, there, missing=[key for key in wanted if key not in there])
    _read_in_parallel(stored, {"optimizer": {"state": state}})
    torch_state_dict.set_optimizer_state_dict(model, optimizer, {"state": state, "param_groups": groups})


def _group_differences(live: Mapping[str, list[str]], saved: Mapping[str, list[str]]) -> Iterator[str]:
    if list(live) != list(saved):
        yield f"has groups {list(saved)}, but {list(live)} here"
    for name in live.keys() & saved.keys():
        if difference := sorted(set(live[name]) ^ set(saved[name])):
            yield f"group {name!r} differs in {difference[:_SHOWN]}"


# Reading in parallel


def _stored_shapes(metadata: Metadata, prefix: str) -> dict[str, tuple[int, ...] | None]:
    """Shapes by name of what lies below `prefix`; None for what is no tensor."""
    return {
        key.removeprefix(prefix): tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(prefix)
    }


def _require_fit(
    stored: files.Stored,
    wanted: Mapping[str, Any],
    there: Mapping[str, tuple[int, ...] | None],
    *,
    missing: Sequence[str],
) -> None:
    """Every rank knows both sides in full, so that all raise or none does."""
    problems = [f"{name} is missing" for name in missing]
    problems += [f"{name} is unexpected" for name in there if name not in wanted]
    for name, value in wanted.items():
        shape = there.get(name)
        if isinstance(value, Tensor) and shape is not None and tuple(value.shape) != shape:
            problems.append(f"{name} has shape {shape}, but {tuple(value.shape)} here")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ConfigurationError(
            f"{stored.path} does not fit, nothing was loaded: {'; '.join(problems[:_SHOWN])}{more}"
        )


def _read_in_parallel(stored: files.Stored, state: dict[str, Any]) -> None:
    try:
        load(state, storage_reader=FileSystemReader(stored.path))
    except files.READ_ERRORS as error:
        raise files.unreadable(stored.path, error) from error
