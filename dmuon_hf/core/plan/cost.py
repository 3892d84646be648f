"""What a matrix costs its owner at each optimizer step. Integers, so that every rank computes the same number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns.flops import direct_flops, gram_flops
from dmuon_hf.core.plan.matrices import MatrixSpec, stored_matrices

__all__ = [
    "FOOTPRINT_FLOPS",
    "CostModel",
    "LinkCosts",
    "elementwise_cost",
    "matrix_cost",
    "newton_schulz_flops",
    "sharing_is_cheaper",
]

CostModel = Literal["optimizer", "numel"]

FOOTPRINT_FLOPS = 3000
"""Cost of one element besides Newton-Schulz, in flops: momentum, decay, update and the wire move about 32 bytes per
element at roughly 100 flops per byte (machine balance between a server CPU and a GPU). It decides only between
small matrices."""


def newton_schulz_flops(shape: tuple[int, int], *, algorithm: Literal["direct", "gram"] = "gram") -> int:
    """Flops of a five-step Newton-Schulz on one ``(out, in)`` matrix, with m the short and n the long side.

    ``direct`` forms ``X X^T``, its square and a product with ``X`` in each step: ``20 m^2 n + 10 m^3``. ``gram``
    iterates on the m x m side and returns to ``X`` at its one restart and at the end: ``8 m^2 n + 28 m^3``. No credit
    for symmetric products.
    """
    m, n = sorted(shape)
    if algorithm == "direct":
        return round(direct_flops(m, n, steps=5, share=1.0))
    return round(gram_flops(m, n, segment_lengths=(2, 3), share=1.0))


def matrix_cost(shape: Sequence[int], spec: MatrixSpec, *, model: CostModel = "optimizer") -> int:
    """Cost of owning a parameter of stored ``shape`` whose logical matrices ``spec`` describes; a stack by its members.

    ``optimizer`` counts Newton-Schulz flops of each logical matrix, by the cheaper algorithm for its shape, plus the
    footprint of all elements. ``numel`` counts elements only, a diagnostic that ignores shape.

    Raises:
        ConfigurationError: for an unknown model, or a shape that the spec does not fit.
    """
    if model not in get_args(CostModel):
        raise ConfigurationError(f"owner_cost_model must be one of {get_args(CostModel)}, got {model!r}")
    count, stored = stored_matrices(shape, spec)
    spec.validate(stored)
    numel = math.prod(shape)
    if model == "numel":
        return numel
    flops = sum(
        min(newton_schulz_flops(logical, algorithm="direct"), newton_schulz_flops(logical, algorithm="gram"))
        for logical in spec.logical_shapes(stored)
    )
    return count * flops + FOOTPRINT_FLOPS * numel


def elementwise_cost(numel: int, *, model: CostModel = "optimizer") -> int:
    """Cost of owning a parameter of ``numel`` elements whose update is elementwise, in the terms of `matrix_cost`."""
    return numel if model == "numel" else FOOTPRINT_FLOPS * numel


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """Cost of one byte on the wire, in flops: inside one copy of a matrix, and from one copy to another.

    By default those of 450 GB/s between the accelerators of a machine and 45 GB/s between machines, beside 4.5e14
    flops of 16-bit products a second.
    """

    near: int = 1_000
    far: int = 10_000

    @classmethod
    def beside(cls, device_type: str) -> LinkCosts:
        """What links cost where ``device_type`` computes; a process on a CPU has 1 GB/s beside 1e11 flops a second."""
        return cls(near=100, far=100) if device_type == "cpu" else cls()


def sharing_is_cheaper(cost: int, numel: int, copies: int, links: LinkCosts) -> bool:
    """Whether one worker for all copies of a matrix costs less than one for each of them, summed over all ranks.

    One worker takes in the direction and sends the update to every copy; one for each computes ``copies`` times, and
    nothing leaves a copy. Elements travel in 16 bits.

    Args:
        cost: of the matrix, by :func:`matrix_cost`.
        numel: elements of the matrix.
        copies: replicas that hold it.
        links: what the wire costs.
    """
    one_way = 2 * numel
    shared = cost + 2 * one_way * links.near + (copies - 1) * one_way * links.far
    alike = copies * (cost + 2 * one_way * links.near)
    return shared < alike
