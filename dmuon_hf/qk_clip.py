"""QK-clip, the second half of MuonClip (Kimi K2, arXiv 2507.20534, section 2.1): attention logits stay small.

After the update of a step, each head whose largest logit `S` of the step's batch, over all ranks, exceeds `tau` has the
weights of its queries and keys rescaled so that the same input would give `tau`: by `gamma = tau / S`, shared out over
rows as [Note: what QK-clip multiplies] says. Momentum and the state of AdamW stay. Nothing is kept from step to step,
so there is nothing to save.

Ranks agree on the maxima with one reduction of a float per head after every step that was made, and compute the same
factors from them. Each multiplies the rows that it holds, so no weight travels for it, but that replicas under HSDP get
a rescaled one once more.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import dmuon_hf.core as dmuon
from dmuon_hf.attention_logits import HeadMaxima, stacked, watch
from dmuon_hf.attention_sites import AttentionSite, Rows, attention_sites
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.runtime import OwnedTensor
from dmuon_hf.core.shards.parts import parts_of
from dmuon_hf.survey import Survey

__all__ = ["QKClipReport", "check_threshold", "clip_logits", "last_qk_clip", "sites_to_clip"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QKClipReport:
    """What QK-clip saw and did in one step; equal on every rank.

    Attributes:
        max_logit: the largest attention logit of the step, over all modules, heads and ranks.
        clipped_heads: heads whose weights were rescaled.
        logits: largest logit of each query head, by canonical name of the attention module; minus infinity where it was
            not called.
    """

    max_logit: float
    clipped_heads: int
    logits: Mapping[str, tuple[float, ...]] = field(repr=False)


def check_threshold(threshold: float) -> None:
    """Refuse what is no threshold.

    Raises:
        ConfigurationError: not a positive finite number.
    """
    is_number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
    if not is_number or not math.isfinite(threshold) or threshold <= 0:
        raise ConfigurationError(f"qk_clip is the largest attention logit to allow, such as 100.0; got {threshold!r}")


def sites_to_clip(found: Survey) -> list[AttentionSite]:
    """The attention modules of a model, before anything is changed. Local.

    Raises:
        ConfigurationError: attention that cannot be clipped, or none that can or need be.
    """
    sites, bounded = attention_sites(found)
    if not any(part.trains for site in sites for part in site.rows):
        reason = next(iter(bounded.values()), "no attention module was found whose queries and keys train")
        raise ConfigurationError(
            f"qk_clip has nothing to rescale in {type(found.model).__name__}: {reason}. Leave qk_clip out"
        )
    if bounded and (not dist.is_initialized() or dist.get_rank() == 0):
        name, reason = next(iter(bounded.items()))
        logger.warning(
            "qk_clip leaves %d attention modules alone, whose weights do not make their logits grow, first %s: %s",
            len(bounded),
            name,
            reason,
        )
    return sites


def clip_logits(optimizer: dmuon.Muon, sites: Sequence[AttentionSite], threshold: float) -> None:
    """Clip after every step of `optimizer` from now on. Every rank of the model calls it.

    Raises:
        NotImplementedError: heads are spread over a tensor-parallel axis.
    """
    topology = optimizer.runtime.topology
    if topology.tensor is not None or any(_is_cut_by_heads(rows.parameter) for site in sites for rows in site.rows):
        raise NotImplementedError(
            "qk_clip with tensor parallelism is not built: each rank sees the logits of some heads. Leave qk_clip out, "
            "or train without tp_size"
        )
    clip = _QKClip(optimizer, sites, float(threshold))
    optimizer.register_step_post_hook(clip.after_step)
    _clips[optimizer] = clip


def last_qk_clip(optimizer: torch.optim.Optimizer) -> QKClipReport | None:
    """What QK-clip saw and did in the last step that was made; None before, and without `qk_clip`. Local.

    Args:
        optimizer: from `create_optimizer`, the Trainer's, or what `accelerator.prepare` made of it.
    """
    clip = _clips.get(getattr(optimizer, "optimizer", optimizer))
    return None if clip is None else clip.report


def _is_cut_by_heads(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())


def _watch(site: AttentionSite) -> HeadMaxima:
    # Not through the module, whose key in the table of those watched must not hold it.
    rows = site.rows
    return watch(site.module, site.name, site.heads, site.shared, lambda: any(part.trains for part in rows))


class _QKClip:
    """The maxima of one model's attention and what is done about them."""

    def __init__(self, optimizer: dmuon.Muon, sites: Sequence[AttentionSite], threshold: float) -> None:
        self._sites = sites
        self._threshold = threshold
        self._heads = [site.heads for site in sites]
        self._maxima = [_watch(site) for site in sites]
        self._skipped = optimizer.skipped_steps
        self._warned = False
        self.report: QKClipReport | None = None

    @torch.no_grad()
    def after_step(self, optimizer: dmuon.Muon, *_: Any) -> None:
        """Collective after a step that was made; after one that all ranks skipped the maxima are forgotten."""
        values = stacked(self._maxima, self._heads, optimizer.runtime.topology.device)
        if optimizer.skipped_steps != self._skipped:
            self._skipped = optimizer.skipped_steps
            return
        # A maximum with NaN among its arguments is not the same with every backend.
        values = torch.where(values.isnan(), math.inf, values)
        logits = optimizer.runtime.maximum(values).cpu()
        self._check(logits)
        clipped = (logits > self._threshold) & logits.isfinite()
        factors = torch.where(clipped, self._threshold / logits, 1.0)
        for site, gamma in zip(self._sites, torch.split(factors, self._heads), strict=True):
            if bool((gamma < 1.0).any()):
                for rows in site.rows:
                    rescale(rows, gamma)
        self.report = QKClipReport(
            max_logit=float(logits.max()), clipped_heads=int(clipped.sum()), logits=self._by_name(logits)
        )

    def _by_name(self, logits: Tensor) -> dict[str, tuple[float, ...]]:
        parts = torch.split(logits, self._heads)
        return {site.name: tuple(part.tolist()) for site, part in zip(self._sites, parts, strict=True)}

    def _check(self, logits: Tensor) -> None:
        """Say what a user may not expect, once."""
        if bool((logits == -math.inf).all()):
            raise ConfigurationError(
                f"qk_clip saw no attention logits in a step: none of {len(self._sites)} attention modules, such as "
                f"{self._sites[0].name}, called its attention function in training mode. Call model.train() before the "
                "forward, or leave qk_clip out"
            )
        if self._warned or (dist.is_initialized() and dist.get_rank() != 0):
            return
        for name, largest in self._by_name(logits).items():
            if math.inf in largest:
                self._warned = True
                logger.warning(
                    "attention logits of %s, head %d, are infinite or NaN in a step whose gradients are finite: such "
                    "heads are not clipped",
                    name,
                    largest.index(math.inf),
                )
                return


def rescale(rows: Rows, gamma: Tensor) -> None:
    """Multiply the rows of one parameter by their powers of `gamma`, as far as this rank holds them. No communication.

    Every rank calls it, so that copies of the old values are stale on all of them.

    Args:
        rows: of the parameter.
        gamma: of each query head, in fp32 on the host.
    """
    parameter: Tensor = rows.parameter
    shape = [1] * parameter.ndim
    shape[rows.dim] = -1
    factors = (gamma[rows.head] ** rows.power).view(shape).to(parameter.device)
    if isinstance(parameter, DTensor) and not isinstance(parameter, OwnedTensor):
        local = parameter.to_local()
        for part in parts_of(parameter, rows.name):
            outer = [slice(None)] * parameter.ndim
            outer[rows.dim] = part.outer[rows.dim]
            local[part.inner].mul_(factors[tuple(outer)])
    else:
        parameter.mul_(factors)


_clips: WeakKeyDictionary[torch.optim.Optimizer, _QKClip] = WeakKeyDictionary()
