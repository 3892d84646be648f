"""What ``dedicate_params`` selects of a model: parameters, their hook boundaries, and the candidates of the plan."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.hook_boundaries import BoundaryRule
from dmuon_hf.core.plan import SHARDED, Candidate, MatrixSpec, canonical_name
from dmuon_hf.core.policy import ParamPolicy
from dmuon_hf.core.runtime.build import Target

__all__ = [
    "AssignmentGroupKeyFn",
    "MatrixSpecFn",
    "Predicate",
    "Selected",
    "select",
    "stacks_of",
]

logger = logging.getLogger(__name__)

Predicate: TypeAlias = Callable[[str, nn.Parameter], bool]
MatrixSpecFn: TypeAlias = Callable[[str, nn.Parameter], "MatrixSpec | None"]
AssignmentGroupKeyFn: TypeAlias = Callable[[str, nn.Parameter], Hashable]


@dataclass(frozen=True, slots=True)
class Selected:
    """The parameters that get owners, in model order: by name, and as the plan sees them."""

    targets: Mapping[str, Target]
    candidates: tuple[Candidate, ...]
    frozen: frozenset[str]
    """Names of what the predicate selects and does not train."""

    @property
    def units(self) -> list[str]:
        """Names of their units, in model order."""
        return list(dict.fromkeys(candidate.unit for candidate in self.candidates))

    @property
    def policies(self) -> str:
        """What the policies say about each parameter, for a plan, which the ranks compare."""
        return json.dumps({name: told for name, target in self.targets.items() if (told := target.policy.described())})


def select(
    model: nn.Module,
    predicate: Predicate,
    *,
    matrix_spec_fn: MatrixSpecFn | None,
    group_key_fn: AssignmentGroupKeyFn | None,
    policy_of: Callable[[str, nn.Parameter], ParamPolicy],
    boundaries: BoundaryRule,
    may_be_empty: bool = False,
) -> Selected:
    """What the predicate selects; units are named by their module.

    Raises:
        ConfigurationError: Nothing is selected, unless that may be, a parameter cannot be owned, or is shared by two
            hook boundaries.
    """
    places: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for attribute, param in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{attribute}" if path else attribute
            places.setdefault(param, []).append((name, module, attribute))
    paths = {module: path for path, module in model.named_modules()}

    targets: dict[str, Target] = {}
    candidates: list[Candidate] = []
    kinds: dict[str, list[tuple[str, ...]]] = {}
    frozen: set[str] = set()
    for param, holders in places.items():
        raw = [name for name, _, _ in holders]
        names = [canonical_name(name, model) for name in raw]
        if not any(predicate(name, param) for name in names):
            continue
        if not param.requires_grad:
            frozen.update(names)
            continue
        _check_param(names[0], param)
        modules = {boundaries.module_of(model, name, param) for name in raw}
        if len(modules) > 1:
            raise ConfigurationError(
                f"{names[0]} is shared by the hook boundaries {sorted(paths[m] for m in modules)}: exclude it in "
                "the predicate, or pass a hook_boundary_resolver that gives one module containing every use"
            )
        module = modules.pop()
        policy = policy_of(names[0], param)
        held = tuple((owner, attribute) for _, owner, attribute in holders)
        targets[names[0]] = Target(param, held, module, policy)
        path = canonical_name(paths[module], model) or "(root)"
        spec = matrix_spec_fn(names[0], param) if matrix_spec_fn is not None and param.ndim > 1 else None
        candidates.append(
            Candidate(
                name=names[0],
                aliases=tuple(names[1:]),
                shape=tuple(param.shape),
                dtype=param.dtype,
                spec=spec or MatrixSpec(),
                unit=_unit_name(path, _unit_key(names[0], policy), kinds.setdefault(path, [])),
                group=None if group_key_fn is None else repr(group_key_fn(names[0], param)),
                route=policy.route,
            )
        )
    if not candidates and not may_be_empty:
        raise ConfigurationError(
            "dedicate_params selected no parameter that requires a gradient"
            + (f" ({len(frozen)} selected ones are frozen)" if frozen else "")
            + ": without a single Muon matrix this would train with AdamW alone. Widen the predicate; names look like "
            + ", ".join(names for names in list(dict.fromkeys(n for h in places.values() for n, _, _ in h))[:3])
        )
    if frozen:
        logger.info("dedicate_params: %d selected parameters are frozen and stay with FSDP2", len(frozen))
    return Selected(targets, tuple(candidates), frozenset(frozen))


def _unit_key(name: str, policy: ParamPolicy) -> tuple[str, ...]:
    return (*policy.unit_key, name) if policy.route == SHARDED else policy.unit_key


def _unit_name(path: str, key: tuple[str, ...], kinds: list[tuple[str, ...]]) -> str:
    """Name of the unit of a parameter: its boundary, and for each further kind of travel there what that is."""
    if key not in kinds:
        kinds.append(key)
    return path if key == kinds[0] else f"{path} ({', '.join(key) or 'as the others'})"


def _check_param(name: str, param: nn.Parameter) -> None:
    if param.ndim == 0:
        raise ConfigurationError(f"{name} is a scalar, which has no owner: leave it out of the predicate")
    if not param.is_floating_point():
        raise ConfigurationError(f"{name} has dtype {param.dtype}: only floating-point matrices can be dedicated")


def stacks_of(
    model: nn.Module, predicate: Predicate, is_stack: Predicate, matrix_spec_fn: MatrixSpecFn | None
) -> dict[str, MatrixSpec]:
    """Stacks of matrices among what is selected, by name, and what each of their members decomposes into."""
    stacks: dict[str, MatrixSpec] = {}
    for raw, param in model.named_parameters():
        name = canonical_name(raw, model)
        if not param.requires_grad or not predicate(name, param) or not is_stack(name, param):
            continue
        spec = (matrix_spec_fn(name, param) if matrix_spec_fn is not None else None) or MatrixSpec()
        try:
            spec.validate(param.shape[1:])
        except ConfigurationError as error:
            raise ConfigurationError(f"{name}, a stack of {param.shape[0]} matrices: {error}") from error
        stacks[name] = spec
    return stacks
