"""What travels: 16 bits keep a direction of any magnitude, with parts of one matrix to one scale."""

from __future__ import annotations

import pytest
import torch

from dmuon_hf.core.ns import NewtonSchulz
from dmuon_hf.core.sharded.wire import header_numel, read_parts, wire_dtype, write_parts

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e30])
def test_parts_of_one_matrix_arrive_in_proportion(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [scale * factor * torch.randn(4, 6, generator=generator) for factor in (1.0, 0.1, 0.0, 3.0)]
    segments = [torch.empty(header_numel(dtype) + part.numel(), dtype=dtype) for part in parts]
    write_parts(segments, parts)
    received = torch.cat(read_parts(segments, [0, 0, 0, 0])).double()
    sent = torch.cat(parts).flatten().double()
    assert torch.allclose(received / received.norm(), sent / sent.norm(), atol=2 * torch.finfo(dtype).eps)


def test_matrices_have_scales_of_their_own() -> None:
    parts = [torch.full((2, 2), 1e-20), torch.full((2, 2), 1e20)]
    segments = [torch.empty(header_numel(torch.float16) + 4, dtype=torch.float16) for _ in parts]
    write_parts(segments, parts)
    for part in read_parts(segments, [0, 1]):
        assert part.isfinite().all() and (part >= 0.5).all()


@pytest.mark.parametrize(
    ("ns", "momentum", "expected"),
    [
        (NewtonSchulz("direct"), torch.float32, torch.float32),
        (NewtonSchulz("direct", dtype=torch.bfloat16), torch.float32, torch.bfloat16),
        (NewtonSchulz("direct", dtype=torch.float64), torch.float32, torch.float32),
        (NewtonSchulz("direct"), torch.float64, torch.float64),
        (lambda matrices, steps=None: matrices, torch.float32, torch.float32),
    ],
)
def test_wire_has_the_dtype_that_is_computed_in(ns: object, momentum: torch.dtype, expected: torch.dtype) -> None:
    assert wire_dtype(ns, momentum, CPU) == expected
