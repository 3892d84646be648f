"""Parameters whose new values are on their way to this rank.

[Note: reads of arriving parameters] Between the publish of a step and the forward that waits for it, anything may read
a parameter: a copy of the weights, their running average, a norm that is logged. Such a read must find the new values.
So for that time the parameter is of a class whose every operation waits first, and then of its own class again. What
looks at no values (gradients, shape, device) does not wait, so that ``zero_grad()`` leaves the publish on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["arrived", "arriving"]

_WAIT: Final = "_dmuon_wait"

_GRAD: Any = Tensor.grad
_WITHOUT_VALUES: Final = frozenset(
    [
        *(
            getattr(Tensor, name).__get__
            for name in (
                "_backward_hooks",
                "_post_accumulate_grad_hooks",
                "device",
                "dtype",
                "grad",
                "grad_dtype",
                "grad_fn",
                "is_cpu",
                "is_cuda",
                "is_leaf",
                "is_meta",
                "is_sparse",
                "itemsize",
                "layout",
                "nbytes",
                "ndim",
                "requires_grad",
                "shape",
            )
        ),
        _GRAD.__set__,
        _GRAD.__delete__,
        Tensor.__hash__,
        Tensor.dim,
        Tensor.element_size,
        Tensor.is_contiguous,
        Tensor.is_floating_point,
        Tensor.numel,
        Tensor.requires_grad_,
        Tensor.size,
        Tensor.stride,
    ]
)


class _Arriving(nn.Parameter):
    """See [Note: reads of arriving parameters]."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _WITHOUT_VALUES:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, _Arriving):
                    _wait_for(value)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _wait_for(self)
        return nn.Parameter.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait_for(self)
        return nn.Parameter.__reduce_ex__(self, protocol)


def arriving(param: nn.Parameter, wait: Callable[[], None]) -> bool:
    """Have whoever reads ``param`` call ``wait``, which calls :func:`arrived`. False where its class has no room."""
    if type(param) is not nn.Parameter:
        return False
    param.__dict__[_WAIT] = wait
    param.__class__ = _Arriving
    return True


def arrived(param: nn.Parameter) -> None:
    """``param`` holds its new values, in the order of the current stream."""
    if type(param) is _Arriving:
        param.__class__ = nn.Parameter  # type: ignore[assignment]
        del param.__dict__[_WAIT]


def _wait_for(param: _Arriving) -> None:
    wait: Callable[[], None] = param.__dict__[_WAIT]
    wait()
