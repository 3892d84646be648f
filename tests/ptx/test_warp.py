"""Matrix loads, tensor cores and shuffles against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx import PtxError
from tests.ptx.snippets import execute
from tests.ptx.values import bfloat16_bits, bfloat16_values

RNG = np.random.default_rng(2)
LANE = np.arange(32)

_STAGE = """
    mov.u32 %r20, dynamic;
    shl.b32 %r21, %tid, 4;
    add.u32 %r20, %r20, %r21;
    mul.wide.u32 %d0, %tid, 16;
    add.s64 %d0, %at0, %d0;
    ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%d0];
    st.shared.v4.b32 [%r20], {%r0, %r1, %r2, %r3};
    bar.sync 0;
"""


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_gives_each_lane_its_pair(index, transposed):
    rows = np.arange(32 * 8, dtype=np.uint16).reshape(32, 8)
    suffix = ".trans" if transposed else ""
    body = f"{_STAGE} ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{%r4, %r5, %r6, %r7}}, [%r20];"
    out, report = execute(f"{body} mov.b32 %o, %r{4 + index};", rows.reshape(-1), out=np.uint32, shared=512)
    matrix = rows[8 * index : 8 * index + 8]
    matrix = matrix.T if transposed else matrix
    np.testing.assert_array_equal(out.view(np.uint16).reshape(8, 8), matrix)
    assert report.clean


def _fragments(matrix: np.ndarray, columns: int) -> list[np.ndarray]:
    """The registers that hold a row-major matrix: blocks of eight rows, then of eight columns, a pair per lane."""
    blocks = [(r, c) for c in range(0, columns, 8) for r in range(0, matrix.shape[0], 8)]
    return [
        np.ascontiguousarray(matrix[r : r + 8, c : c + 8]).reshape(32, 2).view(np.uint32).reshape(32) for r, c in blocks
    ]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("index", range(4))
def test_mma_equals_a_matrix_product(kind, depth, index):
    a, b = RNG.standard_normal((16, depth)), RNG.standard_normal((8, depth))
    c = RNG.standard_normal((16, 8)).astype(np.float32)
    if kind == "f16":
        a_bits, b_bits = (x.astype(np.float16).view(np.uint16) for x in (a, b))
        a_values, b_values = (x.view(np.float16).astype(np.float64) for x in (a_bits, b_bits))
    else:
        a_bits, b_bits = (bfloat16_bits(x) for x in (a, b))
        a_values, b_values = (bfloat16_values(x).astype(np.float64) for x in (a_bits, b_bits))
    inputs = [*_fragments(a_bits, depth), *_fragments(b_bits, depth)]
    sums = [c[h : h + 8].reshape(32, 2)[:, e].copy() for h in (0, 8) for e in (0, 1)]
    names = [f"%i{n}" for n in range(len(inputs) + 4)]
    left, right = names[: depth // 4], names[depth // 4 : len(inputs)]
    body = (
        f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32 {{%r0, %r1, %r2, %r3}}, {{{', '.join(left)}}}, "
    )
    body += f"{{{', '.join(right)}}}, {{{', '.join(names[-4:])}}}; mov.b32 %o, %r{index};"
    out, _ = execute(body, *inputs, *sums, out=np.float32)
    expected = a_values @ b_values.T + c
    half, element = divmod(index, 2)
    np.testing.assert_allclose(out, expected[8 * half : 8 * half + 8].reshape(32, 2)[:, element], rtol=1e-5, atol=1e-5)


def test_mma_by_part_of_a_warp_is_an_error():
    body = "setp.lt.u32 %p0, %tid, 16; @%p0 bra $skip;"
    body += "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r0,%r1,%r2,%r3}, {%r4,%r5}, {%r6}, {%r0,%r1,%r2,%r3};"
    with pytest.raises(PtxError, match="only some lanes"):
        execute(f"{body}\n$skip: mov.u32 %o, 0;", out=np.uint32)


@pytest.mark.parametrize(
    ("shuffle", "origin"),
    [
        ("bfly.b32 %o, %i0, 5, 31", LANE ^ 5),
        ("idx.b32 %o, %i0, 3, 31", np.full(32, 3)),
        ("up.b32 %o, %i0, 4, 0", np.where(LANE >= 4, LANE - 4, LANE)),
        ("down.b32 %o, %i0, 4, 31", np.where(LANE < 28, LANE + 4, LANE)),
        ("idx.b32 %o, %i0, 1, 0x181f", LANE // 8 * 8 + 1),
    ],
    ids=lambda value: value.split(".")[0] if isinstance(value, str) else "",
)
def test_shuffle_takes_the_value_of_another_lane(shuffle, origin):
    values = RNG.integers(0, 2**32, 64).astype(np.uint32)
    out, _ = execute(f"shfl.sync.{shuffle}, 0xffffffff;", values, out=np.uint32, threads=64)
    np.testing.assert_array_equal(out, values.reshape(2, 32)[:, origin].reshape(-1))
