"""Choosing the kernel of each symmetric product by timing it: opt-in, per ``NewtonSchulz``.

``product`` says what a product is and records those of an iteration, ``candidates`` what could compute it, ``measure``
which of these is sound and fastest, ``cache`` keeps the answer for other processes, ``tuner`` puts them together.
"""

from __future__ import annotations

from dmuon_hf.core.ns.autotune.candidates import Choice
from dmuon_hf.core.ns.autotune.product import Product, ProductRecorder
from dmuon_hf.core.ns.autotune.tuner import ENVIRONMENT_VARIABLE, Autotuner, wants_autotune

__all__ = ["ENVIRONMENT_VARIABLE", "Autotuner", "Choice", "Product", "ProductRecorder", "wants_autotune"]
