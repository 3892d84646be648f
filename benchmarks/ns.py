"""Time Newton-Schulz on this CPU against torch.optim.Muon and gram-newton-schulz.

    pip install --no-deps --target outputs/rivals gram-newton-schulz==0.1.6
    python benchmarks/ns.py --rivals outputs/rivals

All contenders are given the same matrix in the dtype that they iterate in, and take turns, call by call, in one
process. Figures are medians over the rounds:

  ms         time of one call by the clock; CPU is processor time of all threads, which depends less on other load
  of peak    floating-point operations of the products as counted, over CPU time, as a share of what one plain product
             of 2048 x 2048 reaches in the same rounds and dtype
  error      relative, against the contender's own polynomial in float64, on singular values spaced evenly in logarithm
             over the given condition
  speed      CPU time of the fastest peer over that of the contender, formed within each round: of all peers, and of
             those whose error at the larger condition is at most 1.5 times the contender's
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from ns_contenders import Contender, counted_flops, exact, gram_peers, ours, relative_error, spectrum, torch_muon
from report import machine, print_header, print_table, write_json

CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SHAPES = ("512x512", "1024x1024", "2048x2048", "1024x4096", "4096x1024", "512x4096")
CONDITIONS = (1e1, 1e3)
PEAK = 2048
SAME_CLASS = 1.5


@dataclass(frozen=True, slots=True)
class Time:
    """One call, in seconds."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Result:
    """One contender on one shape: all its calls, and what does not change from call to call."""

    name: str
    mine: bool
    times: list[Time]
    flops: float
    errors: list[float]

    @property
    def wall(self) -> float:
        return statistics.median(t.wall for t in self.times)

    @property
    def cpu(self) -> float:
        return statistics.median(t.cpu for t in self.times)


def timed(run: Callable[[], object]) -> Time:
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return Time(time.perf_counter() - wall, time.process_time() - cpu)


def measure(
    shape: tuple[int, int], dtype: torch.dtype, contenders: list[Contender], rounds: int
) -> tuple[list[Result], float]:
    """The contenders on one shape, and the peak rate of ``dtype`` in operations per second of processor time."""
    G = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    square = torch.randn(PEAK, PEAK).to(dtype)
    times: dict[str, list[Time]] = {contender.name: [] for contender in contenders}
    peaks: list[float] = []
    for i in range(1 + rounds):
        shift = i % len(contenders)
        for contender in contenders[shift:] + contenders[:shift]:
            copy = G.clone()
            times[contender.name].append(timed(partial(contender.run, copy)))
        peaks.append(2 * PEAK**3 / timed(partial(torch.mm, square, square)).cpu)
    results = [
        Result(c.name, c.mine, times[c.name][1:], counted_flops(c, G, dtype), _errors(c, shape, dtype))
        for c in contenders
    ]
    return results, statistics.median(peaks[1:])


def _errors(contender: Contender, shape: tuple[int, int], dtype: torch.dtype) -> list[float]:
    """Of matrices shaped like ``shape`` but no larger than 512 in the short side, in float64 soon too slow."""
    m, n = shape
    scale = max(1.0, min(shape) / 512)
    errors = []
    for condition in CONDITIONS:
        G = spectrum(round(m / scale), round(n / scale), condition, device=CPU).to(dtype)
        errors.append(relative_error(contender.on_a_copy(G), exact(G, contender.rows)))
    return errors


def speed(mine: Result, results: list[Result], *, accurate: bool) -> float | None:
    """How many times as fast ``mine`` is as the fastest peer; ``None`` without a peer."""
    rivals = [r for r in results if not r.mine and (not accurate or r.errors[-1] <= SAME_CLASS * mine.errors[-1])]
    if not rivals:
        return None
    best = min(rivals, key=lambda r: r.cpu)
    return statistics.median(b.cpu / a.cpu for a, b in zip(mine.times, best.times, strict=True))


def row(result: Result, results: list[Result], peak: float) -> list[str]:
    speeds = [speed(result, results, accurate=accurate) if result.mine else None for accurate in (False, True)]
    return [
        result.name,
        f"{1e3 * result.wall:.1f}",
        f"{1e3 * result.cpu:.1f}",
        f"{result.flops / 1e9:.1f}",
        f"{100 * result.flops / result.cpu / peak:.0f} %",
        *(f"{error:.1e}" for error in result.errors),
        *("" if value is None else f"{value:.2f}" for value in speeds),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="MxN", help="default: %(default)s")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: %(default)s)")
    parser.add_argument("--rivals", metavar="DIR", help="where pip installed gram-newton-schulz, if not here")
    parser.add_argument("--json", metavar="PATH", help="write everything, every call included")
    options = parser.parse_args()
    if options.rivals is not None:
        sys.path.append(options.rivals)
    torch.set_num_threads(options.threads)
    dtype = DTYPES[options.dtype]
    where = {**machine(), "threads": options.threads}
    print_header(where)
    mine = [*ours(dtype), *ours(dtype, backends=("gram",), restart_iterations=(2,))]
    contenders = [*mine, *([torch_muon()] if dtype == torch.bfloat16 else []), *gram_peers(dtype)]
    print((__doc__ or "").split("\n\n", 2)[2])
    columns = ["", "ms", "CPU ms", "GFLOP", "of peak", *(f"error {c:.0e}" for c in CONDITIONS), "speed", "same error"]
    record = {}
    for text in options.shapes:
        m, n = map(int, text.split("x"))
        results, peak = measure((m, n), dtype, contenders, options.rounds)
        title = f"{text} in {options.dtype}, {options.threads} thread(s), peak {peak / 1e9:.0f} GFLOP/s"
        print_table(title, columns, [row(result, results, peak) for result in results])
        record[text] = {
            "peak": peak,
            "contenders": {
                r.name: {
                    "wall": [t.wall for t in r.times],
                    "cpu": [t.cpu for t in r.times],
                    "flops": r.flops,
                    "errors": r.errors,
                    "speed": speed(r, results, accurate=False) if r.mine else None,
                    "speed_same_error": speed(r, results, accurate=True) if r.mine else None,
                }
                for r in results
            },
        }
    write_json(options.json, {"machine": where, "dtype": options.dtype, "conditions": CONDITIONS, "shapes": record})


if __name__ == "__main__":
    main()
