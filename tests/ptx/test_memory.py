"""What memory accesses do, and what the interpreter says about wrong ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ptx import GlobalMemory, MisalignedError, OutOfBoundsError, PtxError, add_tensor, launch, parse
from tests.ptx.snippets import execute, program

WORDS = np.arange(1, 129, dtype=np.uint32)

# Each thread copies its four words to its place in shared memory.
_COPY = """
    mov.u32 %r20, dynamic;
    shl.b32 %r21, %tid, 4;
    add.u32 %r20, %r20, %r21;
    mul.wide.u32 %d0, %tid, 16;
    add.s64 %d0, %at0, %d0;
    cp.async.cg.shared.global [%r20], [%d0], 16;
    cp.async.commit_group;
"""
# The word of the next thread, the first one after the last.
_NEXT = "add.u32 %r22, %tid, 1; rem.u32 %r22, %r22, %ntid.x; shl.b32 %r22, %r22, 4; ld.shared.b32 %o, [%r22+8];"


def _copied(body: str, threads: int = 32):
    return execute(
        f"{_COPY} {body}", np.arange(4 * threads, dtype=np.uint32), out=np.uint32, threads=threads, shared=1024
    )


def test_asynchronous_copy_arrives_after_wait_and_barrier():
    out, report = _copied(f"cp.async.wait_group 0; bar.sync 0; {_NEXT}", threads=64)
    np.testing.assert_array_equal(out, 4 * (np.arange(1, 65) % 64) + 2)
    assert report.clean


def test_missing_wait_is_reported_and_changes_the_result():
    out, report = _copied(f"bar.sync 0; {_NEXT}")
    assert report.in_flight
    assert report.unfinished == 32
    assert (out == 0).all()


def test_wait_that_leaves_the_group_in_flight_is_reported():
    assert _copied(f"cp.async.wait_group 1; bar.sync 0; {_NEXT}")[1].in_flight


def test_wait_may_leave_newer_groups_in_flight():
    newer = "add.u32 %r20, %r20, 512; cp.async.ca.shared.global [%r20], [%d0], 4; cp.async.commit_group;"
    out, report = _copied(f"{newer} cp.async.wait_group 1; bar.sync 0; {_NEXT} cp.async.wait_all;")
    np.testing.assert_array_equal(out, 4 * (np.arange(1, 33) % 32) + 2)
    assert report.clean


def test_wait_all_includes_copies_without_a_group():
    body = _COPY.replace("cp.async.commit_group;", "cp.async.wait_all; bar.sync 0;")
    out, report = execute(f"{body} {_NEXT}", WORDS, out=np.uint32, shared=512)
    assert report.clean
    assert out[0] == WORDS[6]


def test_missing_barrier_between_warps_is_reported():
    assert _copied(f"cp.async.wait_group 0; {_NEXT}", threads=64)[1].unordered


def test_missing_barrier_before_a_buffer_is_filled_again_is_reported():
    again = "cp.async.cg.shared.global [%r20], [%d0], 16; cp.async.commit_group; cp.async.wait_group 0;"
    first = f"cp.async.wait_group 0; bar.sync 0; {_NEXT}"
    other = "xor.b32 %r23, %r21, 512; mov.u32 %r20, dynamic; add.u32 %r20, %r20, %r23;"
    assert _copied(f"{first} {other} {again}", threads=64)[1].unordered
    assert _copied(f"{first} bar.sync 0; {other} {again}", threads=64)[1].clean


def test_asynchronous_copy_fills_with_zeros_beyond_the_source_size():
    # The last thread would read past the end but for its source size.
    body = _COPY.replace("[%d0], 16;", "[%d0], 16, %r10;").replace(
        "cp.async.cg", "selp.b32 %r10, 8, 16, %p0; cp.async.cg"
    )
    body = f"setp.eq.u32 %p0, %tid, 31; {body} cp.async.wait_group 0; bar.sync 0;"
    words = WORDS[:126]
    low, _ = execute(f"{body} ld.shared.b32 %o, [%r20+4];", words, out=np.uint32, shared=512)
    high, report = execute(f"{body} ld.shared.b32 %o, [%r20+8];", words, out=np.uint32, shared=512)
    np.testing.assert_array_equal(low, WORDS[1::4])
    np.testing.assert_array_equal(high, np.where(np.arange(32) < 31, WORDS[2::4], 0))
    assert report.clean


def test_read_of_shared_memory_that_nothing_wrote_is_reported():
    _, report = execute("mov.u32 %r0, dynamic; ld.shared.b32 %o, [%r0];", out=np.uint32, shared=16)
    assert report.uninitialized


@pytest.mark.parametrize("access", ["ld.shared.b32 %o, [512]", "st.shared.b32 [0+-4], %tid"])
def test_access_outside_shared_memory_is_an_error(access):
    with pytest.raises(OutOfBoundsError, match="shared"):
        execute(f"{access};", out=np.uint32, shared=512)


def test_access_past_a_buffer_is_an_error_that_names_the_instruction():
    with pytest.raises(OutOfBoundsError, match=r"ld\.global\.b32 %o"):
        execute("add.s64 %d0, %at0, 512; ld.global.b32 %o, [%d0];", WORDS, out=np.uint32)


def test_masked_access_past_a_buffer_is_none():
    body = "setp.lt.u32 %p0, %tid, 0; mov.u32 %o, 3; @%p0 ld.global.b32 %o, [%at0+512];"
    assert (execute(body, WORDS, out=np.uint32)[0] == 3).all()


@pytest.mark.parametrize("columns", [5, 6])
def test_padding_between_rows_is_out_of_bounds(columns):
    view = torch.arange(24, dtype=torch.int32).reshape(4, 6)[:, :columns]
    out = np.zeros(32, dtype=np.uint32)
    memory = GlobalMemory()
    source, target = add_tensor(memory, view), memory.add(out.view(np.uint8))
    kernel = parse(
        program("ld.global.b32 %o, [%at0+20];", [WORDS], out.dtype).replace("ld.global.b32 %i0, [%d15];", "")
    )
    if columns == 6:
        launch(kernel, memory, [source.address, target.address], grid=(1, 1, 1), threads=32)
        assert (out == 5).all()
    else:
        with pytest.raises(OutOfBoundsError, match="byte 20 of buffer 0"):
            launch(kernel, memory, [source.address, target.address], grid=(1, 1, 1), threads=32)


@pytest.mark.parametrize("access", ["ld.global.v2.b32 {%o, %r0}, [%at0+4]", "ld.shared.b32 %o, [2]"])
def test_misaligned_access_is_an_error(access):
    with pytest.raises(MisalignedError):
        execute(f"{access};", WORDS, out=np.uint32, shared=64)


def test_vector_load_and_store_keep_the_order_of_elements():
    body = "mul.wide.u32 %d0, %tid, 8; add.s64 %d1, %at0, %d0; ld.global.v2.b32 {%r0, %r1}, [%d1];"
    body += "mov.u32 %r3, dynamic; shl.b32 %r4, %tid, 3; add.u32 %r3, %r3, %r4; st.shared.v2.b32 [%r3], {%r1, %r0};"
    out, _ = execute(f"{body} ld.shared.b32 %o, [%r3];", WORDS, out=np.uint32, shared=256)
    np.testing.assert_array_equal(out, WORDS[1:64:2])


def test_generic_address_of_shared_memory_reaches_it():
    body = "mov.u64 %d0, dynamic; cvta.shared.u64 %d1, %d0; st.b32 [%d1], 7; ld.shared.b32 %o, [dynamic];"
    assert (execute(body, out=np.uint32, shared=16)[0] == 7).all()


def test_threads_at_different_barriers_are_a_deadlock():
    body = "setp.lt.u32 %p0, %tid, 32; @%p0 bar.sync 1; @!%p0 bar.sync 2; mov.u32 %o, 0;"
    with pytest.raises(PtxError, match="deadlock"):
        execute(body, out=np.uint32, threads=64)


def test_program_without_end_is_an_error(monkeypatch):
    monkeypatch.setattr("tests.ptx.cta._MOST_STEPS", 100)
    with pytest.raises(PtxError, match="has not ended"):
        execute("$loop: bra $loop;", out=np.uint32)


def test_every_block_of_the_grid_runs_with_its_index():
    text = program("mov.u32 %o, %ctaid.x;", [], np.dtype(np.uint32))
    out = np.zeros(96, dtype=np.uint32)
    memory = GlobalMemory()
    buffer = memory.add(out.view(np.uint8))
    shifted = text.replace("mov.u32 %tid, %tid.x;", "mad.lo.s32 %tid, %ctaid.x, 32, %tid.x;")
    launch(parse(shifted), memory, [buffer.address], grid=(3, 1, 1), threads=32)
    np.testing.assert_array_equal(out, np.repeat([0, 1, 2], 32))
    assert (buffer.writes == 1).all()
