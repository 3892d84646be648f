"""Sections of the GPU check about kernels: against float64, in Newton-Schulz, as CUDA graphs, and their speed."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from functools import partial

import torch
from gpu_timing import Report, Setting, median_seconds, synchronize
from ns_contenders import Contender, counted_flops, exact, gram_peers, ours, relative_error, spectrum, torch_muon
from torch import Tensor

import dmuon_hf.core as dmuon
from dmuon_hf.core.ns.kernels import KERNELS, resolve_kernel
from dmuon_hf.core.ns.support import CANDIDATES
from dmuon_hf.core.optim.clip_kernels import CHUNK, scale_in_place_, sum_of_squares

__all__ = ["check_clip", "check_graphs", "check_newton_schulz", "check_syrk", "compare_newton_schulz"]

HALF_TYPES = (torch.float16, torch.bfloat16)
# Relative errors of five steps at condition 1e3, about twice those of emulated products on a CPU.
BOUNDS = {torch.float16: 5e-2, torch.bfloat16: 1.5e-1, torch.float32: 1e-3}


def runnable(report: Report) -> list[str]:
    """The kernels that can run here, the plainest first, since a fault may take the GPU away from those that follow.

    Why the others cannot goes into ``report``.
    """
    reasons = {name: _problem(name) for name in reversed(KERNELS) if name != "auto"}
    report.left_out += [reason for reason in reasons.values() if reason is not None]
    return [name for name, reason in reasons.items() if reason is None]


def _problem(kernel: str) -> str | None:
    try:
        resolve_kernel(kernel)
    except NotImplementedError as error:
        return str(error)
    return None


def check_syrk(setting: Setting) -> Report:
    """Every kernel on shapes that its tiles do not divide, against float64, inside a buffer that must stay as it is."""
    report = Report(columns=["kernel", "dtype", "shape", "worst error / rounding"])
    candidates = {candidate.name: candidate for candidate in CANDIDATES}
    names = [name for name in runnable(report) if name in candidates]
    full = [(128, 64), (200, 328), (513, 257), (1000, 4104), (3, 264, 136)]
    shapes = [(40, 72), (1, 33, 48)] if setting.tiny else full
    # Triton's interpreter computes no bfloat16 products.
    dtypes = HALF_TYPES if setting.cuda else (torch.float16,)
    for name, dtype, shape in itertools.product(names, dtypes, shapes):
        if setting.out_of_time:
            report.left_out.append(f"{name} {dtype} {shape}: out of time")
            continue
        with report.part(f"{name} {dtype} {shape}"):
            syrk = importlib.import_module(f"dmuon_hf.core.ns.backends.{candidates[name].module}").syrk
            worst = max(_syrk_errors(syrk, shape, dtype, setting.device, report, name))
            report.rows.append([name, str(dtype), str(shape), f"{worst:.2f}"])
    return report


def _syrk_errors(
    syrk: Callable[..., Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    report: Report,
    name: str,
) -> list[float]:
    """Errors of a Gram matrix, either way up, and of a whole expression, in units of rounding the largest result."""
    generator = torch.Generator().manual_seed(0)
    X = (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(device, dtype)
    R = (X.float() @ X.float().mT).to(dtype)
    R = (R.tril() + R.tril(-1).mT).contiguous()
    tall = X.mT.contiguous().mT
    cases = [
        ("gram", (X,), {}, X.double() @ X.double().mT),
        ("tall gram", (tall,), {"alpha": 0.5}, 0.5 * X.double() @ X.double().mT),
        (
            "square",
            (R, R, R),
            {"alpha": 1.5, "beta": -2.0, "diag": 3.0},
            1.5 * R.double() @ R.double() - 2.0 * R.double() + 3.0 * torch.eye(R.shape[-1], device=device).double(),
        ),
    ]
    errors = []
    for case, operands, scalars, expected in cases:
        # Rows end on 16 bytes, so that every kernel may write in whole vectors.
        width = -(-R.shape[-1] // 8) * 8 + 8
        guard = torch.full((*R.shape[:-2], R.shape[-2] + 2, width), 7.0, dtype=dtype, device=device)
        inner = (..., slice(1, -1), slice(0, R.shape[-1]))
        result = syrk(*operands, **scalars, out=guard[inner])
        unit = torch.finfo(dtype).eps / 2 * float(expected.abs().max())
        error = float((result.double() - expected).abs().max()) / unit
        where = f"{name} {case} {tuple(shape)} {dtype}"
        # One rounding, of sums in float32; quack rounds the diagonal once more.
        report.check(error < 2.5, f"{where}: error of {error:.1f} roundings")
        report.check(torch.equal(result, result.mT), f"{where}: not symmetric")
        outside = guard.clone()
        outside[inner] = 7.0
        report.check(bool((outside == 7.0).all()), f"{where}: wrote outside its output")
        again = syrk(*operands, **scalars)
        report.check(torch.equal(again, result), f"{where}: a second call gives other bits")
        errors.append(error)
    return errors


def check_clip(setting: Setting) -> Report:
    """The kernels of gradient clipping against float64, and their time beside torch's multi-tensor kernels."""
    report = Report(columns=["dtype", "tensors", "elements", "kernels ms", "torch ms"])
    try:
        resolve_kernel("triton")
    except NotImplementedError as error:
        report.left_out.append(str(error))
        return report
    sizes = [5, CHUNK + 3, 100] if setting.tiny else [4096 * 4096, 5, *[2048] * 200, 1024 * 4096 + 7] * 2
    for dtype in (*HALF_TYPES, torch.float32) if setting.cuda else (torch.float16, torch.float32):
        with report.part(f"clip {dtype}"):
            generator = torch.Generator().manual_seed(0)
            grads = [torch.randn(size, generator=generator).to(setting.device, dtype) for size in sizes]
            exact_sum = sum(float(grad.double().square().sum()) for grad in grads)
            total, again = sum_of_squares(grads), sum_of_squares(grads)
            report.check(abs(float(total) - exact_sum) < 1e-5 * exact_sum, f"{dtype}: {float(total)}, not {exact_sum}")
            report.check(torch.equal(total, again), f"{dtype}: a second call gives other bits")
            expected = [(grad.float() * torch.tensor(0.3)).to(dtype) for grad in grads]
            scale_in_place_(grads, 0.3)
            report.check(all(map(torch.equal, grads, expected)), f"{dtype}: scaled gradients differ")
            runs: dict[str, Callable[[], object]] = {
                "ours": lambda grads=grads: (sum_of_squares(grads), scale_in_place_(grads, 1.0)),  # type: ignore[misc]
                "torch": lambda grads=grads: (  # type: ignore[misc]
                    torch._foreach_norm(grads, 2, dtype=torch.float32),
                    torch._foreach_mul_(grads, 1.0),
                ),
            }
            times = median_seconds(runs, setting.device, rounds=3 if setting.tiny else 20)
            shown = [f"{1e3 * times[name]:.3f}" for name in ("ours", "torch")]
            report.rows.append([str(dtype), str(len(grads)), str(sum(sizes)), *shown])
    return report


def check_newton_schulz(setting: Setting) -> Report:
    """``NewtonSchulz`` on every kernel against the polynomial in float64."""
    report = Report(columns=["kernel", "backend", "dtype", "shape", "error", "bound"])
    names = runnable(Report())
    shapes = [(40, 72)] if setting.tiny else [(512, 512), (384, 1000), (1500, 200)]
    dtypes = HALF_TYPES if setting.cuda else (torch.bfloat16, torch.float32)
    for name, backend, dtype, shape in itertools.product(names, ("gram", "direct"), dtypes, shapes):
        if setting.out_of_time:
            report.left_out.append(f"{name} {backend} {dtype} {shape}: out of time")
            continue
        with report.part(f"{name} {backend} {dtype} {shape}"):
            G = spectrum(*shape, 1e3, device=setting.device)
            ns = dmuon.NewtonSchulz(backend, name, dtype=dtype)
            error = relative_error(ns(G), exact(G, dmuon.DEFAULT_COEFFICIENTS))
            report.check(error < BOUNDS[dtype], f"{name} {backend} {dtype} {shape}: error {error:.1e}")
            report.rows.append([name, backend, str(dtype), str(shape), f"{error:.1e}", f"{BOUNDS[dtype]:.1e}"])
    return report


def check_graphs(setting: Setting) -> Report:
    """Replays of CUDA graphs give the bits of eager calls, for several shapes in turn."""
    report = Report(columns=["kernel", "shape", "eager ms", "graph ms"])
    if not setting.cuda:
        report.left_out.append("CUDA graphs need a CUDA GPU")
        return report
    shapes = [(24, 40), (2, 24, 40)] if setting.tiny else [(256, 256), (16, 256, 512), (1024, 384)]
    for name in runnable(Report()):
        if setting.out_of_time:
            report.left_out.append(f"graphs of {name}: out of time")
            continue
        with report.part(name):
            _check_graphs_of(name, shapes, setting, report)
    return report


def _check_graphs_of(name: str, shapes: list[tuple[int, ...]], setting: Setting, report: Report) -> None:
    eager = dmuon.NewtonSchulz(kernel=name, cuda_graph=False)
    replayed = dmuon.NewtonSchulz(kernel=name, cuda_graph=True)
    for seed, shape in itertools.product(range(4), shapes):
        G = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(setting.device)
        same = torch.equal(replayed(G), eager(G))
        report.check(same, f"{name} {shape}: call {seed} differs from the eager one")
    for shape in shapes:
        G = torch.randn(shape, device=setting.device)
        runs = {"eager": partial(eager, G), "graph": partial(replayed, G)}
        times = median_seconds(runs, setting.device, rounds=10)
        report.rows.append([name, str(shape), f"{1e3 * times['eager']:.3f}", f"{1e3 * times['graph']:.3f}"])
        report.data[f"{name} {shape}"] = times
    captured = replayed.graphs.captured if replayed.graphs is not None else 0
    report.check(captured == len(shapes), f"{name}: {captured} of {len(shapes)} shapes were captured")


def compare_newton_schulz(setting: Setting) -> Report:
    """Newton-Schulz per shape: every kernel and every rival, next to the rate of a plain product."""
    report = Report(columns=["shape", "contender", "ms", "of peak", "times torch.optim.Muon"])
    device, dtype = setting.device, torch.float16 if setting.cuda else torch.bfloat16
    side = 512 if setting.tiny else 8192
    square = torch.randn(side, side, device=device, dtype=dtype)
    peak = 2 * side**3 / median_seconds({"peak": lambda: square @ square}, device, rounds=5)["peak"]
    report.data["peak"] = peak
    contenders = _that_run(_contenders(setting, dtype), torch.randn(64, 128, device=device).to(dtype), report)
    full = [(1024, 1024), (2048, 2048), (4096, 4096), (2048, 8192), (8192, 1024)]
    shapes = [(64, 64), (64, 128)] if setting.tiny else full
    for shape in shapes:
        if setting.out_of_time:
            report.left_out.append(f"speed on {shape}: out of time")
            continue
        G = torch.randn(shape, device=device).to(dtype)
        runs = {c.name: partial(c.on_a_copy, G) for c in contenders}
        times = median_seconds(runs, device, rounds=3 if setting.tiny else 10)
        report.data[str(shape)] = times
        for c in contenders:
            ratio = times.get("torch.optim.Muon", float("nan")) / times[c.name]
            # The counter does not see into the kernels of a peer.
            hidden = not c.mine and c.name.endswith("quack")
            share = "" if hidden else f"{100 * counted_flops(c, G, dtype) / times[c.name] / peak:.0f} %"
            report.rows.append([str(shape), c.name, f"{1e3 * times[c.name]:.3f}", share, f"{ratio:.2f}"])
    return report


def _that_run(contenders: list[Contender], G: Tensor, report: Report) -> list[Contender]:
    """Those that get through ``G``; the others are failures."""
    found = []
    for contender in contenders:
        with report.part(contender.name):
            contender.on_a_copy(G)
            synchronize(G.device)
            found.append(contender)
    return found


def _contenders(setting: Setting, dtype: torch.dtype) -> list[Contender]:
    names = runnable(Report()) if setting.cuda else ["cublas"]
    mine = [c for name in names for c in ours(dtype, backends=("direct", "gram"), kernel=name)]
    quack = gram_peers(dtype, kernels=True) if "quack" in names else []
    return [*mine, torch_muon(), *gram_peers(dtype), *quack]
