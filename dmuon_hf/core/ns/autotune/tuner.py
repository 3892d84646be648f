"""The choices of one ``NewtonSchulz``: found by timing, or taken from the cache or from another rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping

import torch

from dmuon_hf.core.environment import switch
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns.autotune.cache import ChoiceCache, machine
from dmuon_hf.core.ns.autotune.candidates import Choice, build, choices
from dmuon_hf.core.ns.autotune.measure import Clock, Operands, clock_of, fastest
from dmuon_hf.core.ns.autotune.product import Product, TunedKernel
from dmuon_hf.core.ns.kernels import Kernel
from dmuon_hf.core.ns.support import log_once

__all__ = ["ENVIRONMENT_VARIABLE", "Autotuner", "wants_autotune"]

logger = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "DMUON_NS_AUTOTUNE"


def wants_autotune(choice: bool | None, *, deterministic: bool = False) -> bool:
    """``choice``, or if that is ``None`` what the environment variable ``DMUON_NS_AUTOTUNE`` says; off by default.

    ``deterministic`` outranks the variable.

    Raises:
        ConfigurationError: the variable is no switch, or ``choice`` together with ``deterministic``.
    """
    if choice and deterministic:
        raise ConfigurationError(
            "autotune=True and deterministic=True disagree: a kernel that is chosen by timing may be another one in "
            "the next run. Leave one of them out."
        )
    return switch(ENVIRONMENT_VARIABLE, given=choice) and not deterministic


class Autotuner:
    """Tunes products once, until it is given the choices of all ranks.

    Args:
        default: The kernel that runs without tuning.
        request: The kernel that was asked for; another one than ``"auto"`` leaves only its own configurations.
        clock: What times candidates on a device; ``clock_of`` by default.
    """

    def __init__(self, default: Kernel, request: str, *, clock: Callable[[torch.device], Clock] | None = None) -> None:
        self._default = default
        self._request = request
        self._clock = clock
        self._choices: dict[Product, Choice] = {}
        self._table: dict[Product, Kernel] = {}
        self._met: set[Hashable] = set()
        self._closed = False
        self.kernel: Kernel = TunedKernel(default, self._table)
        """Computes each product as it was chosen; what is chosen later, too."""

    @property
    def default(self) -> Kernel:
        """The kernel that runs without tuning."""
        return self._default

    @property
    def request(self) -> str:
        """The kernel that was asked for."""
        return self._request

    @property
    def choices(self) -> Mapping[Product, Choice]:
        """What was chosen for each product so far."""
        return dict(self._choices)

    @property
    def closed(self) -> bool:
        """Whether choices come from ``adopt`` alone."""
        return self._closed

    def __str__(self) -> str:
        """All choices, in an order that does not depend on that of the calls."""
        return f"choices={{{', '.join(sorted(f'{product}: {choice}' for product, choice in self._choices.items()))}}}"

    def tune_once(self, key: Hashable, products: Callable[[], Collection[Product]], device: torch.device) -> None:
        """``tune`` the result of ``products`` at the first call with ``key``; nothing once ``adopt`` was called.

        Nothing is tuned inside the capture of a graph, which is logged once, nor on the meta device.
        """
        if self._closed or key in self._met or device.type == "meta":
            return
        if _is_capturing(device):
            log_once("Newton-Schulz: nothing is tuned while a graph is captured; call it once before")
            return
        self.tune(products(), device)
        self._met.add(key)

    def tune(self, products: Collection[Product], device: torch.device) -> None:
        """Choose for every one of ``products`` that has no choice yet. Local; takes seconds for each of them.

        Raises:
            DMuonError: no kernel computes a product right.
        """
        todo = sorted((product for product in products if product not in self._choices), key=str)
        if not todo:
            return
        cache = ChoiceCache(machine(device))
        cached = cache.load()
        found: dict[str, Choice] = {}
        alone = 0
        try:
            for product in todo:
                key = f"{self._request}: {product}"
                candidates = choices(product, self._default.name, self._request)
                choice = cached.get(key)
                if len(candidates) == 1:
                    choice = candidates[0]
                    alone += 1
                elif choice not in candidates:
                    choice = found[key] = self._measured(product, candidates, device)
                self._take(product, choice)
        finally:
            cache.store(found)
        known = len(todo) - len(found) - alone
        logger.info(
            "Newton-Schulz: %d products tuned, %d known from %s, %d without a choice of kernels",
            *(len(found), known, cache.path, alone),
        )

    def adopt(self, choices: Mapping[Product, Choice]) -> None:
        """Replace all choices by those of all ranks, and tune nothing any more."""
        self._choices.clear()
        self._table.clear()
        for product, choice in choices.items():
            self._take(product, choice)
        self._closed = True

    def _measured(self, product: Product, candidates: list[Choice], device: torch.device) -> Choice:
        kernels = {choice: self._build(choice) for choice in candidates}
        with torch.no_grad():
            finding = fastest(Operands.of(product, device), kernels, (self._clock or clock_of)(device))
        for choice, reason in finding.refused.items():
            logger.warning("Newton-Schulz: kernel %s is refused for %s: %s", choice, product, reason)
        logger.info("Newton-Schulz: %s", finding)
        return finding.choice

    def _take(self, product: Product, choice: Choice) -> None:
        self._choices[product] = choice
        self._table[product] = self._build(choice)

    def _build(self, choice: Choice) -> Kernel:
        return self._default if choice == Choice(self._default.name) else build(choice)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and bool(torch.get_device_module(device).is_current_stream_capturing())
