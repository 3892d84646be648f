"""Run a few lines of PTX in every thread of one CTA."""

from __future__ import annotations

import numpy as np

from tests.ptx import GlobalMemory, Report, launch, parse

__all__ = ["execute", "program"]

_HEAD = """
.version 8.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
.visible .entry snippet(
    {parameters}
)
{{
    .reg .pred %p<8>;
    .reg .b16 %h<16>;
    .reg .b32 %r<32>;
    .reg .b64 %d<16>;
    .reg .b32 %tid;
    .reg .b64 %at<16>;
    {declarations}
    mov.u32 %tid, %tid.x;
"""


def _letter(dtype: np.dtype) -> str:
    return f"b{8 * dtype.itemsize}"


def program(body: str, inputs: list[np.ndarray], out: np.dtype) -> str:
    """``body`` finds pointers in ``%at0``, ..., its thread's element of the inputs in ``%i0``, ..., and sets ``%o``."""
    dtypes = [array.dtype for array in inputs] + [out]
    names = [f"%i{n}" for n in range(len(inputs))] + ["%o"]
    declarations = "\n".join(f".reg .{_letter(d)} {name};" for d, name in zip(dtypes, names, strict=True))
    lines = [
        _HEAD.format(parameters=",\n".join(f".param .u64 p{n}" for n in range(len(dtypes))), declarations=declarations)
    ]
    for n, (dtype, name) in enumerate(zip(dtypes, names, strict=True)):
        lines += [f"ld.param.u64 %at{n}, [p{n}];", f"mul.wide.u32 %d15, %tid, {dtype.itemsize};"]
        lines += [f"add.s64 %d15, %at{n}, %d15;"]
        lines += [f"ld.global.{_letter(dtype)} {name}, [%d15];"] if name != "%o" else []
    return "\n".join([*lines, body, f"st.global.{_letter(out)} [%d15], %o;", "ret;", "}"])


def execute(
    body: str,
    *inputs: np.ndarray,
    out: type | np.dtype,
    threads: int = 32,
    shared: int = 0,
    out_elements: int | None = None,
) -> tuple[np.ndarray, Report]:
    """The ``%o`` of every thread after ``body``, and the report."""
    result = np.zeros(out_elements or threads, dtype=out)
    text = program(body, list(inputs), result.dtype)
    memory = GlobalMemory()
    buffers = [memory.add(np.ascontiguousarray(array).view(np.uint8).reshape(-1)) for array in (*inputs, result)]
    report = launch(
        parse(text), memory, [b.address for b in buffers], grid=(1, 1, 1), threads=threads, dynamic_shared_bytes=shared
    )
    return result, report
