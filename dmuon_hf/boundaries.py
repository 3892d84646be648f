"""Hook boundaries: the module whose forward makes the matrices below it whole.

A boundary is a transformer block. It has to be a module that FSDP2 wraps too, so that both gather and release their
weights together. accelerate wraps the classes named by the plugin's `transformer_cls_names_to_wrap`, else by the
model's `_no_split_modules`; the same names decide here. Models that name no block class fall back on `layers.N`,
`blocks.N`, `h.N`, `block.N`, then on the outermost item of any `ModuleList`. Modules, not names, are the keys:
encoder block 0 and decoder block 0 are two boundaries.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan import canonical_name

__all__ = ["HookBoundaries", "block_class_names", "embeddings"]

_BLOCK_LIST_NAMES = frozenset({"layers", "blocks", "h", "block"})


def block_class_names(model: nn.Module) -> tuple[str, ...]:
    """Class names in the model's `_no_split_modules` that are blocks (embedding modules are listed there as well)."""
    names = getattr(model, "_no_split_modules", None) or ()
    return tuple(sorted(name for name in names if "Embed" not in name))


def embeddings(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The input embedding and the output head that the model names, None for those it does not have."""
    return _named_by(model, "get_input_embeddings"), _named_by(model, "get_output_embeddings")


def _named_by(model: nn.Module, getter: str) -> nn.Module | None:
    try:
        module: nn.Module | None = getattr(model, getter, lambda: None)()
    except NotImplementedError:
        return None
    return module


class HookBoundaries:
    """Maps parameter names of one model to the block that contains them.

    Usable as `hook_boundary_resolver=` of `dedicate_params`. It reads the module tree once, at construction; wrappers
    put in later (activation checkpointing, FSDP) do not move the boundaries. Local: no communication.
    """

    def __init__(self, model: nn.Module, block_classes: Iterable[str] | None = None) -> None:
        classes = tuple(block_classes) if block_classes is not None else block_class_names(model)
        self._modules: dict[str, nn.Module] = {
            canonical_name(name, model): module for name, module in model.named_modules()
        }
        self._blocks: dict[str, nn.Module] = {
            name: module for name, module in self._modules.items() if name and _is_instance(module, classes)
        }
        if classes and block_classes is not None and not self._blocks:
            raise ConfigurationError(
                f"none of the block classes {list(classes)} occurs in {type(model).__name__}; name classes of the "
                "model, or leave transformer_cls_names_to_wrap unset to use the model's own"
            )

    def block_name(self, parameter_name: str) -> str | None:
        """Canonical name of the innermost block around the parameter, or None outside all blocks."""
        ancestors = _ancestors(canonical_name(parameter_name))
        if self._blocks:
            return next((name for name in ancestors if name in self._blocks), None)
        listed = [name for name in ancestors if self._is_list_item(name)]
        named = [name for name in listed if _list_name(name) in _BLOCK_LIST_NAMES]
        return named[0] if named else (listed[-1] if listed else None)

    def block(self, parameter_name: str) -> nn.Module | None:
        """The module of `block_name`, or None."""
        name = self.block_name(parameter_name)
        return None if name is None else self._modules[name]

    def __call__(self, parameter_name: str, parameter: nn.Parameter) -> nn.Module:
        """The block, or the parameter's own module where there is no block around it."""
        block = self.block(parameter_name)
        if block is not None:
            return block
        parent = canonical_name(parameter_name).rpartition(".")[0]
        if not parent:
            raise ConfigurationError(
                f"parameter {parameter_name!r} sits on the model itself, outside every block: route it to AdamW"
            )
        return self._modules[parent]

    def _is_list_item(self, name: str) -> bool:
        parent = name.rpartition(".")[0]
        return isinstance(self._modules.get(parent), nn.ModuleList)


def _is_instance(module: nn.Module, class_names: tuple[str, ...]) -> bool:
    return any(base.__name__ in class_names for base in type(module).__mro__)


def _ancestors(name: str) -> list[str]:
    """Module names around a parameter, innermost first: `a.b.weight` -> `["a.b", "a"]`."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _list_name(name: str) -> str:
    """`model.layers.3` -> `layers`."""
    return name.split(".")[-2]
