"""Instructions on bit patterns against Python integers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.snippets import execute

RNG = np.random.default_rng(1)
X, Y, Z = RNG.integers(0, 2**32, (3, 32)).astype(np.uint32)
COUNTS = np.arange(32, dtype=np.uint32) * 2


def _each(function, *arrays, dtype=np.uint32):
    bits = 8 * np.dtype(dtype).itemsize
    return np.array([function(*map(int, row)) % 2**bits for row in zip(*arrays, strict=True)], dtype=dtype)


def _signed_extract(value: int, position: int, length: int) -> int:
    field = value >> position & (1 << length) - 1
    return field - (1 << length) if field >> (length - 1) else field


def _permute(a: int, b: int, selector: int) -> int:
    pool = (b << 32 | a).to_bytes(8, "little")
    return int.from_bytes(bytes(pool[selector >> 4 * n & 7] for n in range(4)), "little")


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("and.b32 %o, %i0, %i1", X & Y),
        ("or.b32 %o, %i0, %i1", X | Y),
        ("xor.b32 %o, %i0, 255", X ^ np.uint32(255)),
        ("not.b32 %o, %i0", ~X),
        ("lop3.b32 %o, %i0, %i1, %i2, 0x96", X ^ Y ^ Z),
        ("lop3.b32 %o, %i0, %i1, %i2, 0xCA", (X & Y) | (~X & Z)),
        ("shl.b32 %o, %i0, %i3", _each(lambda x, n: x << n, X, COUNTS)),
        ("shr.u32 %o, %i0, %i3", _each(lambda x, n: x >> n, X, COUNTS)),
        ("shr.s32 %o, %i0, %i3", _each(lambda x, n: (x - 2**32 if x >> 31 else x) >> n, X, COUNTS)),
        ("shf.l.wrap.b32 %o, %i0, %i1, 5", _each(lambda lo, hi: (hi << 32 | lo) << 5 >> 32, X, Y)),
        ("shf.r.wrap.b32 %o, %i0, %i1, 37", _each(lambda lo, hi: (hi << 32 | lo) >> 5, X, Y)),
        ("bfe.u32 %o, %i0, 5, 7", X >> 5 & np.uint32(127)),
        ("bfe.s32 %o, %i0, 3, 4", _each(lambda x: _signed_extract(x, 3, 4), X)),
        ("bfi.b32 %o, %i0, %i1, 8, 4", _each(lambda x, y: y & ~0xF00 | (x & 0xF) << 8, X, Y)),
        ("prmt.b32 %o, %i0, %i1, 0x5410", _each(lambda x, y: _permute(x, y, 0x5410), X, Y)),
        ("prmt.b32 %o, %i0, %i1, 0x3276", _each(lambda x, y: _permute(x, y, 0x3276), X, Y)),
        ("popc.b32 %o, %i0", _each(lambda x: x.bit_count(), X)),
        ("clz.b32 %o, %i0", _each(lambda x: 32 - x.bit_length(), X)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_instruction_equals_integer_arithmetic(instruction, expected):
    out, _ = execute(f"{instruction};", X, Y, Z, COUNTS, out=np.uint32)
    np.testing.assert_array_equal(out, expected)


def test_permute_replicates_signs():
    out, _ = execute("prmt.b32 %o, %i0, %i1, 0xBBBB;", X, Y, out=np.uint32)
    np.testing.assert_array_equal(out, np.where(X >> 31, 0xFFFFFFFF, 0))


def test_predicates_take_part_in_logic():
    body = "setp.lt.u32 %p0, %tid, 8; setp.gt.u32 %p1, %tid, 4; and.pred %p2, %p0, %p1; not.pred %p3, %p2;"
    out, _ = execute(f"{body} selp.b32 %o, 1, 0, %p3;", out=np.uint32)
    lane = np.arange(32)
    np.testing.assert_array_equal(out, ~((lane < 8) & (lane > 4)))
