"""One dedicated parameter as the runtime, the optimizer and the diagnostics see it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan import SHARDED, MatrixSpec
from dmuon_hf.core.runtime.owned_tensor import Content, GradHook, OwnedTensor
from dmuon_hf.core.runtime.tensor_part import TensorPart

__all__ = ["DedicatedParam", "Version", "without_values"]

# [Note: generations and epochs] in states.py: the content object and the number it showed.
Version = tuple[Content, int]


class DedicatedParam:
    """A matrix with one owner.

    Attributes:
        name: Canonical name in the model.
        aliases: Further canonical names of the same parameter (tied weights).
        param: What the module holds outside its forward: an ``nn.Parameter`` that is an :class:`OwnedTensor`, or a
            plain one in a single process without a process group.
        spec: How the stored tensor decomposes into logical ``(out, in)`` matrices.
        owner: Owner slot ``(shard, replicate)``.
        places: Every ``(module, attribute)`` that holds it.
        unit: Name of the hook boundary.
        boundary: The module of that name.
        route: ``"muon"``, ``"adamw"`` or ``"sharded_adamw"``.
        optim_dtype: Dtype of the tensors of its optimizer state; ``None`` is the optimizer's choice.
        part: Its place on the tensor-parallel axis; ``None`` where every tensor-parallel rank has the whole.
    """

    __slots__ = (
        "_dtype", "_hsdp",
        "_is_meta", "_shape", "_shown", "aliases", "boundary", "name", "optim_dtype", "owner",
        "param", "part", "places", "route", "spec", "unit"
    )  # fmt: skip

    def __init__(
        self,
        *,
        name: str,
        aliases: tuple[str, ...],
        param: nn.Parameter,
        places: tuple[tuple[nn.Module, str], ...],
        spec: MatrixSpec,
        owner: tuple[int, int],
        unit: str,
        boundary: nn.Module,
        hsdp: bool,
        route: str = "muon",
        optim_dtype: torch.dtype | None = None,
        part: TensorPart | None = None,
    ) -> None:
        self.name = name
        self.aliases = aliases
        self.param = param
        self.places = places
        self.spec = spec
        self.owner = owner
        self.unit = unit
        self.boundary = boundary
        self.route = route
        self.optim_dtype = optim_dtype
        self.part = part
        self._hsdp = hsdp
        module, attribute = places[0]
        self._shown = module._parameters[attribute]
        self._dtype, self._shape, self._is_meta = param.dtype, param.shape, param.is_meta

    @property
    def shape(self) -> torch.Size:
        """Global shape, on every rank."""
        return self.param.shape

    @property
    def numel(self) -> int:
        """Global number of elements, on every rank."""
        return self.param.numel()

    @property
    def gathered_shape(self) -> torch.Size:
        """Shape of what this rank gathers for the forward: the whole, or its tensor-parallel part."""
        return self.param.shape if self.part is None else self.part.shape

    @property
    def is_sharded(self) -> bool:
        """Whether it has no owner and lies in rows on all ranks, each of which counts as the owner of its own."""
        return self.route == SHARDED

    @property
    def is_owner(self) -> bool:
        return self.param.is_owner if isinstance(self.param, OwnedTensor) else True

    @property
    def owner_rank(self) -> int | tuple[int, int]:
        """Owner as the rank in the shard mesh (1-D) or as ``(shard, replicate)`` (HSDP)."""
        return self.owner if self._hsdp else self.owner[0]

    @property
    def owner_shard(self) -> int:
        return self.owner[0]

    @property
    def master(self) -> Tensor:
        """What the optimizer updates: the whole matrix (this rank's part) on the owner, zero rows elsewhere."""
        return self.param._local_tensor if isinstance(self.param, OwnedTensor) else self.param.detach()

    @property
    def state_like(self) -> Tensor:
        """What the optimizer's state of this matrix is laid out like."""
        return self.param

    @property
    def held_grad(self) -> Tensor | None:
        """The live gradient as far as this rank holds it: plain where no other rank does, a DTensor where others do."""
        if not self.is_owner or self.param.grad is None:
            return None
        return self.param.grad._local_tensor if isinstance(self.param.grad, OwnedTensor) else self.param.grad

    @property
    def version(self) -> Version:
        """What the current content is called; equal on all ranks while they run the same program.

        Raises:
            ConfigurationError: The weight was cast since it was dedicated; see :attr:`converted`.
        """
        assert isinstance(self.param, OwnedTensor)
        if self.param.dtype is not self._dtype:
            raise ConfigurationError(f"{self.name}: {self.converted}")
        return (self.param.content, self.param.content.version)

    def mark_updated(self) -> None:
        """The owner has written its master, which the dispatcher did not see. To be called on every rank."""
        if isinstance(self.param, OwnedTensor):
            self.param.content.bump()

    @property
    def converted(self) -> str | None:
        """Why the weight is no longer of the kind that it was dedicated as, or ``None``.

        ``model.to(dtype)`` and its like change a parameter and leave the buffers that it travels in as they are.
        """
        if self.param.dtype is not self._dtype:
            return (
                f"it was cast from {self._dtype} to {self.param.dtype} after dedicate_params(): cast the model before, "
                "or pass compute_dtype"
            )
        if self.param.shape != self._shape:
            return f"its shape was changed from {tuple(self._shape)} to {tuple(self.param.shape)}"
        if self.param.is_meta and not self._is_meta:
            return "it was moved to the meta device and lost its values"
        return None

    def install(self, parameter: nn.Parameter) -> None:
        """Put ``parameter`` into every module slot of this weight.

        A slot that holds neither the owned parameter nor what was put there last was edited: it stays as it is, so that
        the next step finds and names it ([Note: identity]).
        """
        for module, attribute in self.places:
            held = module._parameters.get(attribute)
            if held is self._shown or held is self.param:
                module._parameters[attribute] = parameter
        self._shown = parameter

    def refuse_tensor_hooks(self, original: nn.Parameter | None = None) -> None:
        """Raise if somebody hooked the gradient itself, which of the loss on data never passes there.

        Args:
            original: the parameter that this one takes the place of, looked at instead.

        Raises:
            ConfigurationError: ``register_hook`` was called on the parameter.
        """
        hooks = (self.param if original is None else original)._backward_hooks or {}
        if any(not isinstance(hook, GradHook) for hook in hooks.values()):
            raise ConfigurationError(
                f"{self.name} has a hook of register_hook(), which would see no gradient, or the parts of it that this "
                "rank computed: use register_post_accumulate_grad_hook(), which runs on the reduced gradient and may "
                "change param.grad in place"
            )

    def __repr__(self) -> str:
        return f"DedicatedParam({self.name}, shape={tuple(self.shape)}, owner={self.owner_rank})"


def without_values(name: str, device: torch.device) -> ConfigurationError:
    """The error for a weight of a model that was dedicated on meta and is used before it was materialised."""
    return ConfigurationError(
        f"{name} is on the meta device: after dedicate_params and fully_shard call "
        f'model.to_empty(device="{device.type}"), then initialise the model or load a checkpoint'
    )
