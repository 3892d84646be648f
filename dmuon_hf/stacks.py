"""The logical matrices of weights that are stored as stacks `(count, out, in)`: of experts, or one matrix a head.

A class of experts says how its weights lie (`use_experts_implementation`): with a gate or without, the rows of gate and
up behind each other or alternating, stored `(out, in)` or transposed. For classes that say nothing there is a table,
read from their forward, which a test follows. What neither says is not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from torch import nn

from dmuon_hf.core.plan import MatrixSpec, canonical_name

__all__ = ["STACKS", "known_stacks"]

_DECLARED = ("has_gate", "is_concatenated", "is_transposed")

Shape = tuple[int, ...]


def known_stacks(model: nn.Module) -> dict[str, MatrixSpec]:
    """Canonical name of every stack of known layout -> the matrices inside each of its members. Local."""
    found = {}
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            shape = tuple(parameter.shape)
            if len(shape) != 3 or min(shape[1:]) == 1:
                continue
            spec = _declared(module, leaf, shape)
            for user, attribute in _users(model, module_name, module, leaf) if spec is None else ():
                layout = _layout(user, attribute)
                spec = None if layout is None else layout(user, shape)
            if spec is not None:
                found[canonical_name(f"{module_name}.{leaf}", model)] = spec
    return found


def _declared(module: nn.Module, leaf: str, shape: Shape) -> MatrixSpec | None:
    """The layout that a class of experts declares."""
    if not all(hasattr(module, name) for name in _DECLARED):
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


def _users(model: nn.Module, path: str, module: nn.Module, leaf: str) -> Iterator[tuple[nn.Module, str]]:
    """Who uses a stack, and under which attribute: the module that holds it, or of a `weight` the one around that."""
    if leaf != "weight":
        yield module, leaf
        return
    outer, _, attribute = path.rpartition(".")
    yield model.get_submodule(outer), attribute


def _layout(user: nn.Module, attribute: str) -> Layout | None:
    known = (STACKS.get(f"{kind.__name__}.{attribute}") for kind in type(user).__mro__)
    return next((layout for layout in known if layout is not None), None)


Layout = Callable[[nn.Module, Shape], MatrixSpec]


def _whole(user: nn.Module, shape: Shape) -> MatrixSpec:
    """One matrix a member."""
    return MatrixSpec()


def _transposed(user: nn.Module, shape: Shape) -> MatrixSpec:
    """One matrix a member, stored `(in, out)`."""
    return MatrixSpec(transposed=True)


def _gate_up(user: nn.Module, shape: Shape) -> MatrixSpec:
    """Rows `[gate | up]` of each member."""
    return MatrixSpec(sections=(shape[1] // 2, shape[1] // 2))


def _gate_up_transposed(user: nn.Module, shape: Shape) -> MatrixSpec:
    """Columns `[gate | up]` of each member, stored `(in, out)`."""
    return MatrixSpec(sections=(shape[2] // 2, shape[2] // 2), transposed=True)


def _scan_parameters(user: nn.Module, shape: Shape) -> MatrixSpec:
    """Mamba, one matrix a head: rows `[step size, low-rank | B | C]`."""
    state = int(user.ssm_state_size)  # type: ignore[arg-type]
    return MatrixSpec(sections=(shape[1] - 2 * state, state, state))


_LAYOUTS: tuple[tuple[Layout, str], ...] = (
    (
        _whole,
        """
        InklingSharedExperts.down_proj InklingSharedExperts.gate_proj InklingSharedExperts.up_proj
        JetMoeMoA.input_linear JetMoeMoA.output_linear JetMoeMoE.output_linear LongcatFlashExperts.down_proj
        Step3p7Experts.down_proj ZambaMambaMixer.dt_proj_weight
        """,
    ),
    (
        _transposed,
        "Llama4TextExperts.down_proj RecurrentGemmaRglru.input_gate_weight RecurrentGemmaRglru.recurrent_gate_weight",
    ),
    (_gate_up, "JetMoeMoE.input_linear LongcatFlashExperts.gate_up_proj Step3p7Experts.gate_up_proj"),
    (_gate_up_transposed, "Llama4TextExperts.gate_up_proj"),
    (_scan_parameters, "ZambaMambaMixer.x_proj_weight"),
)

STACKS: Mapping[str, Layout] = MappingProxyType({name: layout for layout, names in _LAYOUTS for name in names.split()})
"""`Class.attribute` of every stack whose class declares nothing -> its layout."""
