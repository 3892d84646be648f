"""The hooks install and undo cleanly, and do nothing without DMuon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

import dmuon_hf
from dmuon_hf import ConfigurationError, DMuonError, hooks
from dmuon_hf.compat import VersionRange, check_versions
from tests.harness import run_ranks
from tests.hf.support import arguments, error_of, full_weights, tiny_dataset, tiny_llama


def _methods() -> dict[str, Any]:
    return {f"{hook.cls}.{hook.method}": getattr(hook.target(), hook.method) for hook in hooks._HOOKS}


def _install_and_uninstall(rank: int, world: int) -> bool:
    before = _methods()
    hooks.install()
    hooks.install()
    during = _methods()
    hooks.uninstall()
    hooks.uninstall()
    return all(during[name] is not before[name] for name in before) and _methods() == before


def test_uninstall_puts_every_original_back() -> None:
    assert run_ranks(_install_and_uninstall, 1, init=False) == [True]


def _replaced_again(rank: int, world: int) -> None:
    hooks.install()
    ours = Trainer.__init__

    def theirs(self: Trainer, *args: Any, **kwargs: Any) -> None:
        ours(self, *args, **kwargs)

    Trainer.__init__ = theirs
    hooks.uninstall()


def test_uninstall_under_a_later_hook_raises() -> None:
    (outcome,) = run_ranks(_replaced_again, 1, init=False, expect_failure=True)
    assert issubclass(DMuonError, Exception)
    assert "Trainer.__init__ was replaced again" in error_of(outcome)


def _plain_adamw(rank: int, world: int, directory: str, hooked: bool) -> dict[str, torch.Tensor]:
    if hooked:
        hooks.install()
    trainer = Trainer(model=tiny_llama(), args=arguments(directory, max_steps=3), train_dataset=tiny_dataset())
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, torch.optim.AdamW)
    return full_weights(trainer.model)


def test_hooks_change_nothing_for_a_trainer_without_dmuon(tmp_path: Path) -> None:
    plain = run_ranks(_plain_adamw, 1, str(tmp_path), False, init=False)[0]
    hooked = run_ranks(_plain_adamw, 1, str(tmp_path), True, init=False)[0]
    for name, weight in plain.items():
        assert torch.equal(hooked[name], weight)


def test_untested_version_raises_and_says_what_to_install() -> None:
    with pytest.raises(ConfigurationError, match=r"torch .* is installed \(needs torch>=1\.0,<1\.1\)"):
        check_versions((VersionRange("torch", "1.0", "1.1"),))


def test_missing_package_raises() -> None:
    with pytest.raises(ConfigurationError, match="no-such-package is not installed"):
        check_versions((VersionRange("no-such-package", "1", "2"),))


def test_every_public_name_resolves() -> None:
    for name in dmuon_hf.__all__:
        assert getattr(dmuon_hf, name) is not None
