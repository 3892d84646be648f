"""Families of all six Auto mappings train on several ranks as they do in one process: a sample of `make launches`."""

from __future__ import annotations

import pytest
from accelerate import Accelerator

from tests.harness import run_ranks
from tests.hf.support import as_launched, finish, fsdp_env
from tests.hf.zoo.build import MAPPINGS
from tests.hf.zoo.launches import differences
from tests.hf.zoo.tiny import FAMILIES

SAMPLE = (
    "phi3", "deepseek_v3", "zamba", "xlnet", "dbrx", "t5", "marian", "bert", "albert", "llava", "swin", "whisper",
)  # fmt: skip
"""Fused weights, latent attention and experts, blocks that share weights, projections in three dimensions, shared
embeddings and biases."""


def _compare(rank: int, world: int, names: tuple[str, ...]) -> dict[str, str]:
    as_launched()
    accelerator = Accelerator()
    assert accelerator.is_fsdp2
    found = differences(names, accelerator)
    finish()
    return found


def test_families_of_every_mapping_train_on_two_ranks_as_in_one_process() -> None:
    assert {FAMILIES[name].mapping for name in SAMPLE} == set(MAPPINGS)
    assert run_ranks(_compare, 2, SAMPLE, init=False, env=fsdp_env(2), timeout=150) == [{}, {}]


def test_weights_of_one_process_alone_reach_shared_parameters_and_experts() -> None:
    env = fsdp_env(2, FSDP_CPU_RAM_EFFICIENT_LOADING="true")
    assert run_ranks(_compare, 2, ("t5", "bert", "mixtral"), init=False, env=env, timeout=150) == [{}, {}]


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_table_of_families_has_some_of_every_mapping(mapping: str) -> None:
    assert len(FAMILIES) >= 30
    assert any(family.mapping == mapping for family in FAMILIES.values())
