"""Reading PTX."""

from __future__ import annotations

import pytest

from tests.ptx import PtxError, UnsupportedError, parse
from tests.ptx.parser import Address, Immediate, Register, Sink, Symbol, Vector

TEXT = """
.version 8.7
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
.visible .entry first( .param .u32 a ) { ret; }
.visible .entry second(
    .param .u64 .ptr .global .align 16 second_param_0, // a comment
    .param .align 8 .b8 second_param_1[24],
    .param .f32 second_param_2
)
.maxntid 128, 1, 1
{
    .reg .pred %p<3>;
    .reg .b32 %r<7>, %odd;
    .shared .align 4 .b8 fixed[20];
    .loc 1 120 0
$start:
    /* several
       lines */ mov.u32 %r1, 0x1F;
    .pragma "nounroll";
    { .reg .b32 %t; mov.b32 %t, 0f3F800000; }
    @!%p1 bra.uni $start;
    ld.global.v2.b32 {%r2, _}, [%rd1+-8];
    st.shared.b32 [ dynamic + 4 ], -1;
    setp.lt.and.s32 %p1|%p2, %r1, %r2, !%p0;
$end:
    ret;
}
"""


@pytest.fixture(scope="module")
def kernel():
    return parse(TEXT, "second")


def test_parameters_have_their_sizes(kernel):
    assert kernel.parameters == {"second_param_0": 8, "second_param_1": 24, "second_param_2": 4}


def test_labels_point_at_the_next_instruction(kernel):
    assert kernel.labels == {"$start": 0, "$end": 6}
    assert kernel.instructions[6].name == "ret"


def test_registers_have_their_declared_types(kernel):
    assert [kernel.register_type(name) for name in ("%p2", "%r3", "%odd", "%t")] == ["pred", "b32", "b32", "b32"]
    with pytest.raises(PtxError, match="%x1 is not declared"):
        kernel.register_type("%x1")


def test_dynamic_shared_memory_begins_after_the_static_one(kernel):
    assert kernel.shared == {"fixed": 0, "dynamic": 32}
    assert kernel.static_shared_bytes == 32


def test_operands_are_parsed(kernel):
    move, constant, branch, load, store, compare, _ = kernel.instructions
    assert move.operands == (Register("%r1"), Immediate(31))
    assert constant.operands[1] == Immediate(0x3F800000, 32)
    assert branch.guard == Register("%p1", negated=True)
    assert branch.operands == (Symbol("$start"),)
    assert load.modifiers == ("global", "v2", "b32")
    assert load.operands == (Vector((Register("%r2"), Sink())), Address(Register("%rd1"), -8))
    assert store.operands == (Address(Symbol("dynamic"), 4), Immediate(-1))
    assert compare.operands[0] == Vector((Register("%p1"), Register("%p2")))
    assert compare.operands[3] == Register("%p0", negated=True)


def test_several_entries_need_a_name():
    with pytest.raises(PtxError, match="2 entry functions"):
        parse(TEXT)


@pytest.mark.parametrize(
    ("line", "message"),
    [("$start: mov.u32 %r1, 1;", "stands twice"), ("mov.u32 %r1, &x;", "operand"), (".reg .f32 %odd;", "two types")],
)
def test_text_that_cannot_be_understood_is_an_error(line, message):
    with pytest.raises((PtxError, UnsupportedError), match=message):
        parse(TEXT.replace("$end:", f"{line}\n$end:"), "second")
