"""Instructions of whole warps: shuffles, matrix loads and the tensor cores."""

from __future__ import annotations

import numpy as np

from tests.ptx.access import resolve
from tests.ptx.errors import PtxError, UnsupportedError
from tests.ptx.parser import Instruction, Operand
from tests.ptx.registers import WARP
from tests.ptx.registry import Machine, operation
from tests.ptx.values import decode

__all__: list[str] = []

_LANE = np.arange(WARP)
# In fragments of 8-row matrices a lane holds, of row ``_ROW``, the pair of elements from ``_PAIR`` on.
_ROW, _PAIR = _LANE // 4, _LANE % 4 * 2


def _whole_warps(mask: np.ndarray) -> np.ndarray:
    """The numbers of the warps in ``mask``; ``.aligned`` instructions need all their lanes."""
    lanes = mask.reshape(-1, WARP)
    if (lanes.any(axis=1) != lanes.all(axis=1)).any():
        raise PtxError("only some lanes of a warp execute an aligned instruction")
    return np.nonzero(lanes[:, 0])[0]


@operation("shfl", modifiers="sync idx bfly up down")
def _shuffle(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    """Every lane takes the value of another one, within segments that the clamp operand defines."""
    target, source, distance, clamp, *_ = instruction.operands
    read = machine.registers.read
    value, step, limits = read(source, "b32"), read(distance, "u32").astype(int), read(clamp, "u32").astype(int)
    lane = np.arange(machine.threads) % WARP
    segment = limits >> 8 & 31
    last, first = (lane & segment) | (limits & 31 & ~segment), lane & segment
    mode = next(m for m in instruction.modifiers if m in ("idx", "bfly", "up", "down"))
    step &= 31
    other = {"idx": first | (step & ~segment), "bfly": lane ^ step, "up": lane - step, "down": lane + step}[mode]
    inside = other >= last if mode == "up" else other <= last
    other = np.where(inside, other, lane)
    origin = np.arange(machine.threads) - lane + other
    if not mask[origin[mask]].all():
        raise PtxError("a shuffle reads from a lane that does not take part")
    destinations = machine.registers.unpack(target)
    machine.registers.write(destinations[0], value[origin], "b32", mask)
    if len(destinations) > 1:
        machine.registers.write(destinations[1], inside, "pred", mask)


@operation("ldmatrix", modifiers="sync aligned m8n8 x1 x2 x4 trans shared shared::cta")
def _load_matrices(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    """8x8 matrices of 16-bit elements: lanes ``8 i`` to ``8 i + 7`` give the addresses of the rows of matrix ``i``."""
    warps = _whole_warps(mask)
    target, source = instruction.operands
    targets = machine.registers.unpack(target)
    addresses = resolve(machine, source, "u32").reshape(-1, WARP)
    for index, register in enumerate(targets):
        rows = addresses[warps, 8 * index : 8 * index + 8].reshape(-1)
        data = machine.shared.read(rows, 16, np.repeat(warps * WARP, 8))
        matrices = np.ascontiguousarray(data).view(np.uint16).reshape(-1, 8, 8)
        if "trans" in instruction.modifiers:
            matrices = matrices.transpose(0, 2, 1)
        pairs = np.stack([matrices[:, _ROW, _PAIR], matrices[:, _ROW, _PAIR + 1]], axis=-1)
        bits = np.zeros((machine.threads // WARP, WARP), dtype=np.uint32)
        bits[warps] = np.ascontiguousarray(pairs).view(np.uint32)[..., 0]
        machine.registers.write(register, bits.reshape(-1), "b32", mask)


@operation("mma", modifiers="sync aligned m16n8k16 m16n8k8 row col")
def _multiply_matrices(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    """``D = A B + C`` with ``A`` 16 x k, ``B`` k x 8, k 8 or 16, in float16 or bfloat16; ``C`` and ``D`` in float32."""
    _whole_warps(mask)
    shape, *layout = instruction.modifiers[2:5]
    kinds = instruction.modifiers[5:]
    if layout != ["row", "col"] or kinds not in (("f32", "f16", "f16", "f32"), ("f32", "bf16", "bf16", "f32")):
        raise UnsupportedError(instruction.text)
    depth = int(shape.rpartition("k")[2])
    target, *sources = instruction.operands
    targets, a, b, c = (machine.registers.unpack(operand) for operand in (target, *sources))
    if (len(targets), len(a), len(b), len(c)) != (4, depth // 4, depth // 8, 4):
        raise PtxError(f"wrong number of registers in {instruction.text}")
    warps = machine.threads // WARP
    left = np.zeros((warps, 16, depth), dtype=np.float32)
    right = np.zeros((warps, depth, 8), dtype=np.float32)
    total = np.zeros((warps, 16, 8), dtype=np.float32)
    for index, register in enumerate(a):
        pair = _fragment(machine, register, f"{kinds[1]}x2")
        for element in range(2):
            left[:, _ROW + 8 * (index % 2), _PAIR + 8 * (index // 2) + element] = pair[..., element]
    for index, register in enumerate(b):
        pair = _fragment(machine, register, f"{kinds[1]}x2")
        for element in range(2):
            right[:, _PAIR + 8 * index + element, _ROW] = pair[..., element]
    for index, register in enumerate(c):
        total[:, _ROW + 8 * (index // 2), _PAIR + index % 2] = _fragment(machine, register, "f32")
    total += left @ right
    for index, register in enumerate(targets):
        values = total[:, _ROW + 8 * (index // 2), _PAIR + index % 2].reshape(-1)
        machine.registers.write(register, values, "f32", mask)


def _fragment(machine: Machine, register: Operand, kind: str) -> np.ndarray:
    """The values of one register, ``(warps, 32)`` or ``(warps, 32, 2)``."""
    if kind == "f32":
        return machine.registers.read(register, kind).reshape(-1, WARP)
    bits = machine.registers.read(register, "b32")
    return decode(bits, kind).reshape(-1, WARP, 2)
