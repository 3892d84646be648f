"""Options of `dmuon_hf.create` from the environment and from a YAML file, for scripts that do not name them.

`DMUON_HF_<OPTION>` is one option, its value read as YAML: `DMUON_HF_MUON_LR=1e-3`,
`DMUON_HF_ROUTES='{"*.k_proj.weight": adamw}'`. A file has them by name at its top level. The environment counts where
both say something.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan import MatrixSpec

__all__ = ["CONFIG_VARIABLE", "ScriptOptions", "script_options"]

_PREFIX = "DMUON_HF_"
CONFIG_VARIABLE = f"{_PREFIX}CONFIG"


@dataclass(frozen=True, slots=True)
class ScriptOptions:
    """Arguments of `create`, and where each of them was said."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]

    def __str__(self) -> str:
        said = [f"{name}={self.values[name]!r} ({self.sources[name]})" for name in self.values]
        return ", ".join(said) or "defaults"


def script_options(config: str | None = None, environment: Mapping[str, str] | None = None) -> ScriptOptions:
    """What environment and file say. Local; the same on every rank that has the same of both.

    Args:
        config: path of a YAML file; None takes that of `DMUON_HF_CONFIG`, if it is set.
        environment: `os.environ` if left out.

    Raises:
        ConfigurationError: an option that does not exist or cannot be given as text, a value of another kind, or a file
            that cannot be read. The message names the variable or the file.
    """
    environment = os.environ if environment is None else environment
    path = config or environment.get(CONFIG_VARIABLE)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, value in (_from_file(Path(path)) if path else {}).items():
        values[name], sources[name] = _option(str(name), value, str(path)), str(path)
    for variable, text in environment.items():
        if variable.startswith(_PREFIX) and variable != CONFIG_VARIABLE:
            name = variable.removeprefix(_PREFIX).lower()
            values[name], sources[name] = _option(name, _parsed(text, variable), variable), variable
    return ScriptOptions(values, sources)


def _from_file(path: Path) -> Mapping[str, Any]:
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    loaded = _parsed(content, str(path))
    if loaded is None:
        return {}
    if not isinstance(loaded, Mapping):
        raise ConfigurationError(f"{path} holds no options: write 'muon_lr: 0.001', one option a line")
    return loaded


def _parsed(text: str, source: str) -> Any:
    try:
        return _with_numbers(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{source} is no YAML: {error}") from error


def _with_numbers(value: Any) -> Any:
    """What YAML takes for text though it is a number, such as `1e-3`, as one."""
    if isinstance(value, dict):
        return {key: _with_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _option(name: str, value: Any, source: str) -> Any:
    if name not in _KINDS:
        raise ConfigurationError(f"{source} sets {name!r}, which is no option here; the options are {sorted(_KINDS)}")
    wanted, convert = _KINDS[name]
    try:
        return convert(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{source} sets {name} to {value!r}, which is not {wanted}") from error


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError
    return float(value)


def _integer(value: Any) -> int:
    if _number(value) != int(value):
        raise ValueError
    return int(value)


def _exactly(*kinds: type) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, kinds):
            raise TypeError
        return value

    return convert


def _layouts(value: Any) -> dict[str, Any]:
    return {
        pattern: MatrixSpec(**layout) if isinstance(layout, Mapping) else layout
        for pattern, layout in _exactly(dict)(value).items()
    }


_NUMBER, _SWITCH, _TEXT = ("a number", _number), ("true or false", _exactly(bool)), ("a word", _exactly(str))
_MAPPING = ("a mapping", _exactly(dict))
_KINDS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(("muon_lr", "adamw_lr", "embedding_lr", "head_lr", "scalar_lr"), _NUMBER),
    **dict.fromkeys(("muon_weight_decay", "momentum", "normuon_beta2", "qk_clip"), _NUMBER),
    **dict.fromkeys(("nesterov", "per_head", "replicate_async"), _SWITCH),
    **dict.fromkeys(("ns_backend", "lr_scale", "update_rule", "lora"), _TEXT),
    **dict.fromkeys(("routes", "momentum_schedule", "weight_decay_schedule"), _MAPPING),
    "ns_steps": ("a whole number", _integer),
    "coefficients": ("a name or a list of rows", _exactly(str, list)),
    "param_groups": ("a mapping or a list of mappings", _exactly(dict, list)),
    "layouts": ("a mapping of patterns to names or to the fields of MatrixSpec", _layouts),
}
"""Option -> what it has to be, in words and as a conversion. Functions cannot be given as text."""
