"""What a run says at its start: one line, and what its user may not expect."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from dmuon_hf import create_optimizer
from dmuon_hf.announcement import summary_line, unexpected
from tests.harness import run_ranks
from tests.hf.support import arguments, as_launched, finish, fsdp_env, make_trainer, tiny_llama


def test_line_counts_logical_matrices_elements_and_shares() -> None:
    model = tiny_llama()
    model.lm_head.weight.requires_grad_(False)
    line = summary_line(model, create_optimizer(model, lr=1e-3))
    assert line == (
        "Muon: 14 matrices, 61.4 k elements (88 %); AdamW: 6 tensors, 8.5 k; frozen: 1 tensors, 8.2 k; "
        "Newton-Schulz float32, kernel cublas"
    )


def test_fused_weight_counts_each_of_its_matrices() -> None:
    config = tf.Phi3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=128, pad_token_id=0
    )
    model = tf.Phi3ForCausalLM(config)
    assert summary_line(model, create_optimizer(model, lr=1e-3)).startswith("Muon: 14 matrices, ")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (lambda: tiny_llama(vocab_size=2000), {}, "Muon updates only 19 %.*'embedding'"),
        (tiny_llama, {"routes": {"*.mlp.*": "adamw"}}, "Muon updates only .*chosen by the caller"),
        (tiny_llama, {"lr": 0.02}, "'decay/muon' has the learning rate 0.02.*lr_scale='original'"),
    ],
)
def test_what_a_user_may_not_expect_is_said(model: Any, options: dict[str, Any], message: str) -> None:
    built = model()
    optimizer = create_optimizer(built, **{"lr": 1e-3} | options)
    assert re.search(message, " ".join(unexpected(built, optimizer)))


def test_usual_run_has_no_warning() -> None:
    model = tiny_llama()
    assert list(unexpected(model, create_optimizer(model, lr=1e-3))) == []
    assert list(unexpected(model, create_optimizer(model, lr=1e-3, muon_lr=0.02, lr_scale="original"))) == []


def test_loop_of_its_own_says_it_once_in_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()
    optimizer = create_optimizer(model, lr=1e-3)
    steps: list[int] = []
    # A hook of the user's after it, too, runs in every step.
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    ids = torch.arange(8)[None]
    with caplog.at_level(logging.INFO, logger="dmuon_hf.announcement"):
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    assert [message for message in caplog.messages if message.startswith("Muon:")] == [summary_line(model, optimizer)]
    assert len(steps) == 2


def _said(rank: int, world: int, directory: str) -> list[str]:
    as_launched()
    said: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger = logging.getLogger("dmuon_hf.announcement")
    logger.setLevel(logging.INFO)
    logger.addHandler(Collect())
    trainer = make_trainer(tiny_llama(), arguments(directory, max_steps=1, log_level="warning"))
    trainer.train()
    trainer.train()
    make_trainer(tiny_llama(), arguments(directory, max_steps=1, log_level="error")).train()
    finish()
    return said


def test_trainer_says_it_once_on_the_first_rank(tmp_path: Path) -> None:
    first, second = run_ranks(_said, 2, str(tmp_path), init=False, env=fsdp_env(2))
    assert second == []
    (line,) = first
    assert re.fullmatch(
        r"Muon: 14 matrices, 61.4 k elements \(79 %\); AdamW: 7 tensors, 16.7 k; "
        r"2 owners, imbalance \d+\.\d %; Newton-Schulz float32, kernel cublas",
        line,
    )
