"""Every switch of the environment: one set of words, and a misspelt one is refused by whoever reads it."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import dmuon_hf
from dmuon_hf.core.environment import switch
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns import graph
from dmuon_hf.core.ns.autotune import wants_autotune
from dmuon_hf.core.optim import Muon
from dmuon_hf.core.planning import OwnerChoice
from dmuon_hf.core.runtime.forward_profile import forward_profile
from dmuon_hf.core.runtime.replica_check import debug_enabled


def owner_choice() -> OwnerChoice:
    return OwnerChoice.of_arguments(None, None, None, None, hsdp_column_balance=None)


def muon_fences() -> bool:
    return Muon(nn.Linear(4, 4, bias=False), predicate=lambda *_: True)._fences


SWITCHES = {
    "DMUON_DEBUG": (debug_enabled, False),
    "DMUON_HSDP_COLUMN_BALANCE": (lambda: owner_choice().column_balance, True),
    "DMUON_ISOLATED_PG_BARRIER": (muon_fences, False),
    "DMUON_NS_AUTOTUNE": (lambda: wants_autotune(None), False),
    "DMUON_NS_CUDA_GRAPH": (lambda: graph.wants_graphs(None), False),
    "DMUON_OWNER_PACK_SMALL_PARAMS": (lambda: owner_choice().pack_small_params, True),
    "DMUON_RECORD_FORWARD_PROFILE": (lambda: forward_profile(torch.device("cpu")) is not None, False),
}
"""What reads each of them, and what it means when it is not set."""

each_switch = pytest.mark.parametrize(
    ("variable", "read", "default"), [(name, *row) for name, row in SWITCHES.items()], ids=SWITCHES
)


@pytest.fixture(autouse=True)
def graphs_can_be_had(monkeypatch):
    monkeypatch.setattr(graph, "_has_cuda", lambda: True)


@each_switch
def test_switch_takes_every_word_for_on_and_off(monkeypatch, variable, read, default):
    for word, value in {"1": True, " On ": True, "0": False, "FALSE": False}.items():
        monkeypatch.setenv(variable, word)
        assert read() is value


@each_switch
def test_switch_that_is_not_set_has_its_default(monkeypatch, variable, read, default):
    monkeypatch.delenv(variable, raising=False)
    assert read() is default
    monkeypatch.setenv(variable, "")
    assert read() is default


@each_switch
def test_misspelt_switch_is_refused_by_name(monkeypatch, variable, read, default):
    monkeypatch.setenv(variable, "ture")
    with pytest.raises(ConfigurationError, match=f"{variable} must be 0 or 1, got 'ture'"):
        read()


@pytest.mark.parametrize(
    ("word", "value"),
    [*((word, True) for word in ("1", "true", "yes", "on")), *((word, False) for word in ("0", "false", "no", "off"))],
)
def test_word_of_a_switch_is_understood(monkeypatch, word, value):
    monkeypatch.setenv("DMUON_DEBUG", word)
    assert switch("DMUON_DEBUG", default=not value) is value


def test_argument_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("DMUON_DEBUG", "1")
    assert switch("DMUON_DEBUG", given=False) is False


def test_every_variable_that_the_package_reads_as_a_switch_is_known_here():
    read = set()
    for path in Path(dmuon_hf.__file__).parent.rglob("*.py"):
        text = path.read_text()
        constants = dict(re.findall(r'^(\w+)(?:: Final)? = "(DMUON_\w+)"', text, re.MULTILINE))
        for quoted, name in re.findall(r'\bswitch\((?:"(\w+)"|(\w+))', text):
            if name != "variable":
                read.add(quoted or constants[name])
    assert read == set(SWITCHES)
