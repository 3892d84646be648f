"""An interpreter of PTX for sm_80 in numpy: kernels run, and are caught, on machines without a GPU.

It executes what Triton and CuTe DSL generate for sm_80: loads and stores, ``cp.async`` groups, ``ldmatrix``,
``mma.sync`` of 16-bit inputs, shuffles, barriers, predicates. It does not know ``wgmma``, TMA, ``tcgen05``, mbarriers
or atomics: any instruction or modifier that it does not know is an error.

Errors: an access outside a tensor or shared memory, a misaligned one, a deadlock. Counted in ``Report``: shared
memory touched while a ``cp.async`` fills it, touched by two warps with no barrier between, read before it is written,
and copies that nothing waited for.

    kernel = parse(ptx)
    memory = GlobalMemory()
    a, out = add_tensor(memory, A), add_tensor(memory, result)
    report = launch(kernel, memory, [a.address, out.address, 64, 1.0], grid=(4, 1, 1), threads=128)

``parser`` reads text; ``registers``, ``memory`` and ``shared`` hold state; ``arithmetic``, ``bits``, ``access`` and
``warp`` execute; ``cta`` schedules; ``launch`` binds tensors.
"""

from __future__ import annotations

from tests.ptx.errors import MisalignedError, OutOfBoundsError, PtxError, UnsupportedError
from tests.ptx.launch import add_tensor, launch
from tests.ptx.memory import GlobalMemory
from tests.ptx.parser import Kernel, parse
from tests.ptx.shared import Report

__all__ = [
    "GlobalMemory",
    "Kernel",
    "MisalignedError",
    "OutOfBoundsError",
    "PtxError",
    "Report",
    "UnsupportedError",
    "add_tensor",
    "launch",
    "parse",
]
