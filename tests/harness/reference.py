"""Single-process Muon and AdamW written from the formulas, sharing no code with the package under test.

Muon (one logical `(out, in)` matrix `w` with gradient `g`, momentum `m`):
    m = mu * m + g;  u = g + mu * m (Nesterov) or m
    w = w * (1 - lr * wd) - lr * 0.2 * sqrt(max(out, in)) * NS(u)
NorMuon (arXiv 2510.05491) takes `O = NS(u)` further, with `v` of one element a row:
    v = beta2 * v + (1 - beta2) * mean of O * O over the row;  H = O / (sqrt(v) + 1e-8)
    w = w * (1 - lr * wd) - lr * 0.2 * sqrt(out * in) / |H| * H
NS normalises by the Frobenius norm and iterates `X <- a X + (b A + c A A) X` with `A = X X^T` on the short side (Polar
Express, arXiv 2505.16932, rows given here already divided by 1.05, 1.05^3, 1.05^5). All of it in `dtype`, float64
unless asked otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)


def polar_express_rows(steps: int = 5) -> list[tuple[float, float, float]]:
    """The safety-scaled rows; beyond the fifth the last one repeats."""
    scaled = [(a / 1.05, b / 1.05**3, c / 1.05**5) for a, b, c in _POLAR_EXPRESS]
    return [scaled[min(i, len(scaled) - 1)] for i in range(steps)]


def newton_schulz_reference(
    matrix: torch.Tensor, steps: int = 5, *, rows: Iterable[tuple[float, float, float]] | None = None
) -> torch.Tensor:
    """Direct iteration on one `(out, in)` matrix in float64; a zero matrix gives zero."""
    x = matrix.double()
    norm = torch.linalg.matrix_norm(x)
    if norm == 0:
        return torch.zeros_like(x)
    transposed = x.shape[0] > x.shape[1]
    x = (x.T if transposed else x) / norm
    for a, b, c in polar_express_rows(steps) if rows is None else rows:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if transposed else x


class ReferenceOptimizer:
    """Muon on the named matrices and AdamW on every other trainable parameter of one unsharded model.

    `muon` holds names, or a predicate `(name, parameter) -> bool`. `split` maps a name to a function that cuts a stored
    weight into views of its logical matrices, `(out, in)` or, where rows interleave, `(groups, rows, in)`; whole by
    default. A parameter whose `.grad` is None is left alone. With `normuon_beta2` the matrices are NorMuon's;
    `second_moments` has the value of a row in each of its elements, in the shape of the weight.
    """

    def __init__(
        self,
        model: nn.Module,
        muon: Iterable[str] | Callable[[str, nn.Parameter], bool],
        *,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        adamw_lr: float = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.01,
        split: Mapping[str, Callable[[torch.Tensor], list[torch.Tensor]]] | None = None,
        scale: Callable[[int, int], float] | None = None,
        dtype: torch.dtype = torch.float64,
        normuon_beta2: float | None = None,
    ) -> None:
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        chosen = set(muon) if not callable(muon) else {n for n, p in named.items() if muon(n, p)}
        missing = chosen - named.keys()
        if missing:
            raise ValueError(f"no trainable parameter is called {sorted(missing)}")
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        self.weight_decay = weight_decay
        self.ns_steps = ns_steps
        self.ns_calls = 0
        self.dtype = dtype
        self.matrices = {n: p for n, p in named.items() if n in chosen}
        self.buffers = {n: torch.zeros_like(p, dtype=dtype) for n, p in self.matrices.items()}
        self.normuon_beta2 = normuon_beta2
        self.second_moments = {n: torch.zeros_like(p, dtype=dtype) for n, p in self.matrices.items()}
        self._split = dict(split or {})
        self._scale = scale or (lambda out, into: 0.2 * math.sqrt(max(out, into)))
        rest = [p for n, p in named.items() if n not in chosen]
        self.adamw = (
            torch.optim.AdamW(
                rest, lr=adamw_lr, betas=adamw_betas, eps=adamw_eps, weight_decay=adamw_weight_decay, foreach=False
            )
            if rest
            else None
        )

    @torch.no_grad()
    def step(self) -> None:
        """One step from the gradients that the parameters hold."""
        for name, weight in self.matrices.items():
            if weight.grad is not None:
                self._muon_step(name, weight)
        if self.adamw is not None:
            self.adamw.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for weight in self.matrices.values():
            weight.grad = None
        if self.adamw is not None:
            self.adamw.zero_grad()

    def _muon_step(self, name: str, weight: nn.Parameter) -> None:
        assert weight.grad is not None
        grad = weight.grad.to(self.dtype)
        buffer = self.buffers[name]
        buffer.mul_(self.momentum).add_(grad)
        update = grad + self.momentum * buffer if self.nesterov else buffer.clone()
        new = weight.detach().to(self.dtype) * (1 - self.lr * self.weight_decay)
        cut = self._split.get(name, lambda whole: [whole])
        for target, part, moment in zip(cut(new), cut(update), cut(self.second_moments[name]), strict=True):
            matrix = part.reshape(-1, part.shape[-1])
            direction = newton_schulz_reference(matrix, self.ns_steps).to(self.dtype)
            if self.normuon_beta2 is not None:
                direction = self._normalised(direction, moment)
            target.sub_(self.lr * self._scale(*matrix.shape) * direction.view(part.shape))
            self.ns_calls += 1
        weight.copy_(new)

    def _normalised(self, direction: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
        means = (direction**2).mean(dim=1, keepdim=True).expand_as(direction)
        moment.copy_(self.normuon_beta2 * moment + (1 - self.normuon_beta2) * means.reshape(moment.shape))
        balanced = direction / (moment.reshape(direction.shape).sqrt() + 1e-8)
        # So that times 0.2 * sqrt(max(out, in)) it is 0.2 * sqrt(out * in) / |H| * H.
        return balanced * math.sqrt(min(direction.shape)) / torch.linalg.matrix_norm(balanced)


def train_reference(
    model: nn.Module,
    optimizer: ReferenceOptimizer,
    batches: Iterable[torch.Tensor],
    loss_fn: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    *,
    parts: int = 1,
    max_norm: float | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Train on whole batches and return a copy of every parameter after each step.

    With `parts` the gradient is the mean over that many equal parts of the batch, as ranks times micro-batches compute
    it.
    """
    snapshots = []
    for batch in batches:
        optimizer.zero_grad()
        for part in batch.chunk(parts):
            (loss_fn(model, part) / parts).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        snapshots.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return snapshots
