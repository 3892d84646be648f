"""Hook boundaries as transformers sees a model: its blocks, whose forward makes the matrices below them whole.

:mod:`dmuon_hf.core.hook_boundaries` is what torch alone knows: which module is hooked, given a resolver such as this.

A boundary is a transformer block, the module that FSDP2 wraps too, so that both gather and release their weights
together. Blocks are found from the model: the items of its repeated containers that are called and hold projections,
as deep as such items go before they become parts of one block (a stage of Swin is a row of blocks, an expert is a part
of its block). What `_no_split_modules` names beside them is taken as a hint. Where the user names the classes to wrap
(`transformer_cls_names_to_wrap`), these are the blocks, and nothing else is. Modules, not names, are the keys: encoder
block 0 and decoder block 0 are two boundaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.hook_boundaries import ancestors, is_called
from dmuon_hf.core.plan import canonical_name
from dmuon_hf.linears import holds_projection, is_linear

__all__ = ["HookBoundaries", "embeddings", "own_class"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def embeddings(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The input embedding and the output head that the model names, None for those it does not have."""
    return _named_by(model, "get_input_embeddings"), _named_by(model, "get_output_embeddings")


def _named_by(model: nn.Module, getter: str) -> nn.Module | None:
    try:
        module: nn.Module | None = getattr(model, getter, lambda: None)()
    except (NotImplementedError, AttributeError):
        return None
    return module


class HookBoundaries:
    """Maps parameter names of one model to the block that contains them.

    Usable as `hook_boundary_resolver=` of `dedicate_params`. It reads the module tree once, at construction; wrappers
    put in later (activation checkpointing, FSDP) do not move the boundaries. Local: no communication.

    Args:
        block_classes: names of the classes that are the blocks; None finds the blocks from the model.
    """

    def __init__(self, model: nn.Module, block_classes: Iterable[str] | None = None) -> None:
        self._modules: dict[str, nn.Module] = {
            canonical_name(name, model): module for name, module in model.named_modules(remove_duplicate=False)
        }
        if block_classes is None:
            hint = getattr(model, "_no_split_modules", None) or ()
            self._blocks = _found_blocks(model, self._modules, [name for name in hint if "Embed" not in name])
        else:
            self._blocks = _named_blocks(model, self._modules, tuple(block_classes))
        holders: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            holders.setdefault(parameter, []).append(canonical_name(name, model))
        self._ties = {name: names for names in holders.values() if len(names) > 1 for name in names}

    @property
    def blocks(self) -> Mapping[str, nn.Module]:
        """The blocks by canonical name, in the order of the module tree."""
        return self._blocks

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes of the blocks, sorted, without those of containers, which are not blocks everywhere."""
        return tuple(sorted({own_class(block).__name__ for block in self._blocks.values()} - _CONTAINER_NAMES))

    def block_name(self, parameter_name: str) -> str | None:
        """Canonical name of the innermost block around the parameter, or None outside all blocks."""
        return next((name for name in ancestors(canonical_name(parameter_name)) if name in self._blocks), None)

    def block(self, parameter_name: str) -> nn.Module | None:
        """The module of `block_name`, or None."""
        name = self.block_name(parameter_name)
        return None if name is None else self._blocks[name]

    def __call__(self, parameter_name: str, parameter: nn.Parameter) -> nn.Module:
        """The block, or the innermost module around the parameter that is called where there is no block.

        Of a parameter that several blocks share, the innermost module around all of them: its matrix is whole from the
        first use of it to the last.
        """
        name = canonical_name(parameter_name)
        uses = {self.block_name(other) or other.rpartition(".")[0] for other in self._ties.get(name, [name])}
        if len(uses) == 1:
            around = [path for path in (*uses, *ancestors(*uses)) if path]
        else:
            around = [path for path in (*ancestors(min(uses)), "") if all(_is_inside(use, path) for use in uses)]
        for path in around:
            if is_called(self._modules[path]):
                return self._modules[path]
        raise ConfigurationError(
            f"parameter {parameter_name!r} sits on the model itself, outside every block: route it to AdamW"
        )


def _is_inside(name: str, path: str) -> bool:
    return not path or name.startswith(f"{path}.")


_CONTAINER_NAMES = {container.__name__ for container in _CONTAINERS}


def own_class(module: nn.Module) -> type:
    """The class that the model was written with: FSDP2 puts one of its own in front."""
    return next(kind for kind in type(module).__mro__ if not kind.__name__.startswith("FSDP"))


def _named_blocks(
    model: nn.Module, modules: Mapping[str, nn.Module], class_names: tuple[str, ...]
) -> dict[str, nn.Module]:
    blocks = {name: module for name, module in modules.items() if name and _is_instance(module, class_names)}
    if class_names and not blocks:
        raise ConfigurationError(
            f"none of the block classes {list(class_names)} occurs in {type(model).__name__}; name classes of the "
            "model, or leave transformer_cls_names_to_wrap unset to use the model's own"
        )
    return blocks


def _found_blocks(model: nn.Module, modules: Mapping[str, nn.Module], hint: Iterable[str]) -> dict[str, nn.Module]:
    found = dict.fromkeys(_items(model))
    kinds = {own_class(block) for block in found} - set(_CONTAINERS)
    hinted = tuple(hint)
    inside = {part for block in found for part in block.modules()}
    for module in map(_unwrapped, model.modules()):
        if module is model or module in inside or any(part in found for part in module.modules()):
            continue
        if _may_be_block(module) and (own_class(module) in kinds or _is_hinted(module, hinted)):
            found[module] = None
            inside.update(module.modules())
    return {name: module for name, module in modules.items() if module in found}


def _is_hinted(module: nn.Module, class_names: tuple[str, ...]) -> bool:
    """Whether the model wants a module kept together that is more than one layer, which a projector often is."""
    return _is_instance(module, class_names) and sum(map(is_linear, module.modules())) > 1


def _items(module: nn.Module, *, is_item: bool = False) -> Iterator[nn.Module]:
    """Blocks below a module: items of containers that are no row of blocks themselves.

    The layers of an item that is never called (a bare `ModuleDict`) are called one by one, so each is its own.
    """
    is_listed = _is_container(module)
    for child in map(_unwrapped, module.children()):
        is_block = is_listed and _may_be_block(child) and not _is_row_of_blocks(child)
        if is_block or (is_item and is_linear(child)):
            yield child
        else:
            yield from _items(child, is_item=is_listed and not is_called(child))


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module inside wrappers of `torch.compile` and activation checkpointing."""
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        module = module._modules.get(name) or module
    return module


def _may_be_block(module: nn.Module) -> bool:
    """Whether a module is called, has parts, and a projection among them."""
    return is_called(module) and any(True for _ in module.children()) and holds_projection(module)


def _is_row_of_blocks(module: nn.Module) -> bool:
    """Whether most of a module is a container of like blocks inside it: a stage, a tower, a group of layers.

    An expert is like its neighbours as well, but beside the experts of a block there is its attention; what stands
    beside the blocks of a stage is less than one of them.
    """
    everything = sum(map(is_linear, module.modules()))
    for name, container in module.named_modules():
        items = [item for item in container.children() if _may_be_block(item)] if _is_container(container) else []
        kinds = {own_class(item) for item in items}
        if "expert" in name or not items or 1 < len(items) == len(kinds):
            continue
        sizes = [sum(map(is_linear, item.modules())) for item in items]
        if everything - sum(sizes) < min(sizes):
            return True
    return False


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, _CONTAINERS)


def _is_instance(module: nn.Module, class_names: tuple[str, ...]) -> bool:
    return any(base.__name__ in class_names for base in type(module).__mro__)
