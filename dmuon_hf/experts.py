"""The logical matrices of transformers' expert stacks `(experts, out, in)`.

A class of experts says how its weights lie (`use_experts_implementation`): with a gate or without, the rows of gate and
up behind each other or alternating, stored `(out, in)` or transposed. What it does not say is not guessed.
"""

from __future__ import annotations

from torch import nn

from dmuon_hf.core.plan import MatrixSpec, canonical_name

__all__ = ["expert_stacks"]

_DECLARED = ("has_gate", "is_concatenated", "is_transposed")


def expert_stacks(model: nn.Module) -> dict[str, MatrixSpec]:
    """Canonical name of every stack of known layout -> the matrices inside each of its experts. Local."""
    found = {}
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            spec = _spec(module, leaf, tuple(parameter.shape))
            if spec is not None:
                found[canonical_name(f"{module_name}.{leaf}", model)] = spec
    return found


def _spec(module: nn.Module, leaf: str, shape: tuple[int, ...]) -> MatrixSpec | None:
    if len(shape) != 3 or min(shape[1:]) == 1 or not all(hasattr(module, name) for name in _DECLARED):
        return None
    transposed = bool(module.is_transposed)
    if leaf == "gate_up_proj" and module.has_gate:
        size = shape[2 if transposed else 1] // 2
        if module.is_concatenated:
            return MatrixSpec(sections=(size, size), transposed=transposed)
        return MatrixSpec(groups=size, sections=(1, 1), transposed=transposed)
    if leaf == "down_proj" or (leaf == "up_proj" and not module.has_gate):
        return MatrixSpec(transposed=transposed)
    return None
