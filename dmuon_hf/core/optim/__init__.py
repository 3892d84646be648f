"""The optimizer: Muon on dedicated matrices, AdamW on the rest. The only code that writes optimizer state."""

from __future__ import annotations

from dmuon_hf.core.optim.muon import Muon
from dmuon_hf.core.optim.scaling import LR_SCALES, LrScale, convert_lr, lr_scale_factor

__all__ = ["LR_SCALES", "LrScale", "Muon", "convert_lr", "lr_scale_factor"]
