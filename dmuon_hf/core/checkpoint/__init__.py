"""Whole state dicts of a dedicated model and its optimizer: the format of a single process, on any topology.

For checkpoints that are written in parallel and never gathered use ``torch.distributed.checkpoint`` with torch's own
``get_model_state_dict`` and ``get_optimizer_state_dict``; owned tensors support both.
"""

from __future__ import annotations

from dmuon_hf.core.checkpoint.model import get_model_state_dict, set_model_state_dict
from dmuon_hf.core.checkpoint.optimizer import get_optimizer_state_dict, set_optimizer_state_dict

__all__ = ["get_model_state_dict", "get_optimizer_state_dict", "set_model_state_dict", "set_optimizer_state_dict"]
