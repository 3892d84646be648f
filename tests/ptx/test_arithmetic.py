"""Arithmetic, comparison and conversion instructions against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ptx import UnsupportedError
from tests.ptx.snippets import execute

RNG = np.random.default_rng(0)
FLOATS = RNG.standard_normal((3, 32)).astype(np.float32)
SIGNED = RNG.integers(-(2**31), 2**31, (3, 32)).astype(np.int32)
UNSIGNED = SIGNED.view(np.uint32)
LONG = RNG.integers(-(2**62), 2**62, (2, 32))
SMALL = RNG.integers(-50, 50, (2, 32)).astype(np.int32)


@pytest.mark.parametrize(
    ("instruction", "inputs", "expected"),
    [
        ("add.f32 %o, %i0, %i1", FLOATS[:2], FLOATS[0] + FLOATS[1]),
        ("sub.rn.f32 %o, %i0, %i1", FLOATS[:2], FLOATS[0] - FLOATS[1]),
        ("mul.f32 %o, %i0, 0f40000000", FLOATS[:1], FLOATS[0] * 2),
        ("mul.f32 %o, %i0, -0.5", FLOATS[:1], FLOATS[0] * np.float32(-0.5)),
        ("max.f32 %o, %i0, %i1", FLOATS[:2], np.maximum(FLOATS[0], FLOATS[1])),
        ("neg.f32 %o, %i0", FLOATS[:1], -FLOATS[0]),
        ("abs.f32 %o, %i0", FLOATS[:1], np.abs(FLOATS[0])),
        ("add.s32 %o, %i0, %i1", SIGNED[:2], SIGNED[0] + SIGNED[1]),
        ("sub.s64 %o, %i0, -7", LONG[:1], LONG[0] + 7),
        ("mul.lo.s32 %o, %i0, %i1", SIGNED[:2], SIGNED[0] * SIGNED[1]),
        ("mul.wide.s32 %o, %i0, %i1", SIGNED[:2], SIGNED[0].astype(np.int64) * SIGNED[1]),
        ("mul.wide.u32 %o, %i0, %i1", UNSIGNED[:2], UNSIGNED[0].astype(np.uint64) * UNSIGNED[1]),
        ("mul.hi.s32 %o, %i0, %i1", SIGNED[:2], (SIGNED[0].astype(np.int64) * SIGNED[1] >> 32).astype(np.int32)),
        ("mad.lo.s32 %o, %i0, %i1, %i2", SIGNED, SIGNED[0] * SIGNED[1] + SIGNED[2]),
        ("max.s32 %o, %i0, 0", SMALL[:1], np.maximum(SMALL[0], 0)),
        ("min.u32 %o, %i0, %i1", UNSIGNED[:2], np.minimum(UNSIGNED[0], UNSIGNED[1])),
        ("div.s32 %o, %i0, 7", SMALL[:1], np.trunc(SMALL[0] / 7).astype(np.int32)),
        ("rem.s32 %o, %i0, 7", SMALL[:1], np.fmod(SMALL[0], 7)),
        ("div.u32 %o, %i0, 7", UNSIGNED[:1], UNSIGNED[0] // 7),
        ("cvt.s64.s32 %o, %i0", SIGNED[:1], SIGNED[0].astype(np.int64)),
        ("cvt.u64.u32 %o, %i0", UNSIGNED[:1], UNSIGNED[0].astype(np.uint64)),
        ("cvt.u32.u64 %o, %i0", LONG[:1].view(np.uint64), LONG[0].astype(np.uint32)),
        ("cvt.rn.f32.s32 %o, %i0", SIGNED[:1], SIGNED[0].astype(np.float32)),
        ("cvt.rzi.s32.f32 %o, %i0", 100 * FLOATS[:1], np.trunc(100 * FLOATS[0]).astype(np.int32)),
        ("cvt.rn.f16.f32 %o, %i0", FLOATS[:1], FLOATS[0].astype(np.float16)),
        ("cvt.f32.f16 %o, %i0", FLOATS[:1].astype(np.float16), FLOATS[0].astype(np.float16).astype(np.float32)),
        ("sqrt.approx.ftz.f32 %o, %i0", FLOATS[:1] ** 2, np.sqrt(FLOATS[0] ** 2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_instruction_equals_numpy(instruction, inputs, expected):
    out, report = execute(f"{instruction};", *inputs, out=expected.dtype)
    np.testing.assert_array_equal(out, expected)
    assert report.clean


def test_fma_rounds_once():
    x = np.float32(1 + 2**-12)
    out, _ = execute("fma.rn.f32 %o, %i0, %i0, %i1;", np.full(32, x), np.full(32, -1, np.float32), out=np.float32)
    assert out[0] == np.float32(np.float64(x) ** 2 - 1)
    assert out[0] != x * x - np.float32(1)


def test_flush_to_zero_applies_only_where_it_is_named():
    tiny = np.full(32, 1e-40, np.float32)
    assert execute("add.ftz.f32 %o, %i0, %i0;", tiny, out=np.float32)[0][0] == 0
    assert execute("add.f32 %o, %i0, %i0;", tiny, out=np.float32)[0][0] == tiny[0] * 2


def test_bfloat16_conversion_rounds_to_nearest_even():
    values = np.concatenate([FLOATS[0, :28], np.array([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, np.nan], np.float32)])
    out, _ = execute("cvt.rn.bf16.f32 %o, %i0;", values, out=np.uint16)
    expected = torch.from_numpy(values).bfloat16()
    torch.testing.assert_close(torch.from_numpy(out).view(torch.bfloat16), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("kind", "dtype"), [("f16x2", torch.float16), ("bf16x2", torch.bfloat16)])
def test_packed_conversion_puts_the_first_operand_into_the_upper_half(kind, dtype):
    out, _ = execute(f"cvt.rn.{kind}.f32 %o, %i0, %i1;", *FLOATS[:2], out=np.uint32)
    halves = torch.from_numpy(out.view(np.uint16).reshape(32, 2)).view(dtype)
    assert torch.equal(halves[:, 0], torch.from_numpy(FLOATS[1]).to(dtype))
    assert torch.equal(halves[:, 1], torch.from_numpy(FLOATS[0]).to(dtype))


def test_packed_multiply_acts_on_both_halves():
    x, y = (RNG.standard_normal((32, 2)).astype(np.float16) for _ in range(2))
    out, _ = execute("mul.rn.f16x2 %o, %i0, %i1;", x.view(np.uint32), y.view(np.uint32), out=np.uint32)
    np.testing.assert_array_equal(out.view(np.float16).reshape(32, 2), x * y)


@pytest.mark.parametrize(
    ("comparison", "expected"),
    [("eq", 0), ("ne", 0), ("lt", 0), ("ge", 0), ("neu", 1), ("ltu", 1), ("nan", 1), ("num", 0)],
)
def test_comparison_with_nan_follows_ptx(comparison, expected):
    nan = np.full(32, np.nan, np.float32)
    out, _ = execute(f"setp.{comparison}.f32 %p0, %i0, 0f00000000; selp.b32 %o, 1, 0, %p0;", nan, out=np.uint32)
    assert (out == expected).all()


def test_comparison_combines_with_a_negated_predicate():
    body = "setp.gt.s32 %p0, %i0, 10; setp.lt.and.s32 %p1|%p2, %i0, 20, !%p0;"
    body += "selp.b32 %r0, 2, 0, %p2; selp.b32 %o, 1, %r0, %p1;"
    out, _ = execute(body, SMALL[0], out=np.uint32)
    x = SMALL[0]
    np.testing.assert_array_equal(out, np.where((x < 20) & ~(x > 10), 1, np.where((x >= 20) & ~(x > 10), 2, 0)))


def test_signed_and_unsigned_comparisons_differ():
    minus = np.full(32, -1, np.int32)
    signed = execute("setp.lt.s32 %p0, %i0, 1; selp.b32 %o, 1, 0, %p0;", minus, out=np.uint32)[0]
    unsigned = execute("setp.lt.u32 %p0, %i0, 1; selp.b32 %o, 1, 0, %p0;", minus, out=np.uint32)[0]
    assert (signed[0], unsigned[0]) == (1, 0)


def test_move_packs_and_unpacks_the_low_part_first():
    out, _ = execute("mov.b32 {%h0, %h1}, %i0; mov.b32 %o, {%h1, %h0};", UNSIGNED[0], out=np.uint32)
    np.testing.assert_array_equal(out, (UNSIGNED[0] << 16) | (UNSIGNED[0] >> 16))


def test_guard_limits_the_threads_that_write():
    body = "mov.u32 %o, 5; setp.lt.u32 %p0, %tid, 3; @!%p0 mov.u32 %o, 9;"
    out, _ = execute(body, out=np.uint32)
    np.testing.assert_array_equal(out, np.where(np.arange(32) < 3, 5, 9))


def test_divergent_loops_run_as_often_as_each_thread_asks():
    body = "mov.u32 %r0, 0; mov.u32 %o, 0;\n$loop: add.u32 %o, %o, %r0; add.u32 %r0, %r0, 1;\n"
    body += "setp.le.u32 %p0, %r0, %tid; @%p0 bra $loop;"
    out, _ = execute(body, out=np.uint32)
    n = np.arange(32)
    np.testing.assert_array_equal(out, n * (n + 1) // 2)


@pytest.mark.parametrize("instruction", ["add.sat.f32 %o, %i0, %i0", "add.rz.f32 %o, %i0, %i0", "tanh.f32 %o, %i0"])
def test_what_is_not_understood_is_an_error(instruction):
    with pytest.raises(UnsupportedError, match=instruction.split()[0]):
        execute(f"{instruction};", FLOATS[0], out=np.float32)
