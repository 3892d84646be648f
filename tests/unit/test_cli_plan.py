"""`dmuon-hf plan`, `routes` and `convert-lr` against what the benchmarks count and the library says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, BertConfig, GPT2Config, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

from dmuon_hf import describe
from dmuon_hf.cli import main
from dmuon_hf.core.optim import convert_lr

# The model of the step benchmark, whose memory and traffic docs/scaling.md and docs/performance.md count.
BENCHMARK = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
MIB = 2**20


@pytest.fixture
def llama(tmp_path: Path) -> str:
    LlamaConfig(**BENCHMARK, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def only(found: dict[str, Any]) -> dict[str, Any]:
    (mode,) = found["modes"]
    assert isinstance(mode, dict)
    return mode


@pytest.mark.parametrize(
    ("arguments", "muon_state", "adamw_state", "muon_sent", "adamw_sent"),
    [
        (("--mode", "z3"), 6.76, 9.76, 27.00 + 2.27, 29.27),
        (("--mode", "z2"), 6.76, 9.76, 18.00 + 1.51, 19.51),
        (("--replicas", "2"), 13.51, 19.51, 24.00 + 2.02, 26.02),
    ],
)
def test_memory_and_traffic_equal_what_the_benchmarks_count(
    capsys: pytest.CaptureFixture[str],
    llama: str,
    arguments: tuple[str, ...],
    muon_state: float,
    adamw_state: float,
    muon_sent: float,
    adamw_sent: float,
) -> None:
    mode = only(plan(capsys, llama, "--ranks", "4", "--dtype", "float32", *arguments))
    # Without the step counts and to the digits of the tables.
    assert mode["muon"]["state_bytes"] / MIB == pytest.approx(muon_state, abs=0.006)
    assert mode["adamw"]["state_bytes"] / MIB == pytest.approx(adamw_state, abs=0.006)
    assert mode["muon"]["sent_bytes"] / MIB == pytest.approx(muon_sent, abs=0.011)
    assert mode["adamw"]["sent_bytes"] / MIB == pytest.approx(adamw_sent, abs=0.011)
    assert mode["owners"] == 4
    assert mode["imbalance"] == 0.0


def test_ddp_keeps_weights_whole_and_momentum_on_owners(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    found = plan(capsys, llama, "--ranks", "4", "--mode", "ddp")
    matrices, rest = found["routes"]["muon"]["elements"], found["routes"]["adamw"]["elements"]
    mode = only(found)
    assert mode["muon"]["state_bytes"] == 4 * matrices + 4 * matrices / 4 + 12 * rest
    assert mode["adamw"]["state_bytes"] == 12 * (matrices + rest)
    assert mode["muon"]["sent_bytes"] - mode["adamw"]["sent_bytes"] == 3 / 4 * 4 * matrices


def test_tensor_parallelism_divides_what_its_plan_cuts(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    whole = only(plan(capsys, llama, "--ranks", "2", "--mode", "z3"))
    cut = only(plan(capsys, llama, "--ranks", "4", "--mode", "z3", "--tp", "2"))
    assert cut["shards"] == whole["shards"] == 2
    # Every matrix of a Llama is cut, and so are embedding and head; norms are not.
    assert cut["muon"]["state_bytes"] == pytest.approx(whole["muon"]["state_bytes"] / 2, rel=2e-3)
    assert cut["muon"]["sent_bytes"] > whole["muon"]["sent_bytes"] / 2


def test_one_process_sends_nothing(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    mode = only(plan(capsys, llama, "--ranks", "1"))
    assert mode["name"] == "one process"
    assert mode["muon"]["sent_bytes"] == 0


def test_experts_count_by_the_tokens_that_visit_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = {"num_experts": 8, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    seconds = []
    for visited in (2, 8):
        Qwen3MoeConfig(**sizes, num_experts_per_tok=visited, vocab_size=128).save_pretrained(tmp_path)
        seconds.append(only(plan(capsys, str(tmp_path), "--ranks", "1"))["adamw"]["step_seconds"])
    assert seconds[0] < seconds[1]


def test_most_frugal_of_equally_fast_modes_is_taken_and_named(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    found = plan(capsys, llama, "--ranks", "64", "--tokens", "1000000000")  # computation hides everything
    assert {mode["name"] for mode in found["modes"]} == {"DDP", "FSDP2 Z2", "FSDP2 Z3", "HSDP 8 x 8"}
    assert found["take"]["mode"] == "FSDP2 Z3"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--ranks", "10", "--replicas", "3"), "10 is no multiple of 3"),
        (("--ranks", "4", "--mode", "hsdp", "--replicas", "4"), "at least 2 replicas of at least 2 shards"),
        (("--ranks", "4", "--mode", "z3", "--replicas", "2"), "are --mode hsdp"),
        (("--ranks", "4", "--mode", "ddp", "--tp", "2"), "does not go with tensor parallelism"),
        (("--ranks", "0"), "at least 1"),
        (("--ranks", "4", "--memory", "0.001"), "FSDP2 Z3: needs 0.0 GiB of 0.0 GiB before any activation"),
        (("--adamw", "*"), "has no matrix for Muon"),
        (("--adamw", "nothing.*"), "match no parameter"),
    ],
)
def test_mode_that_does_not_fit_ends_with_status_2_and_the_reason(
    capsys: pytest.CaptureFixture[str], llama: str, arguments: tuple[str, ...], reason: str
) -> None:
    assert main(["plan", llama, *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_tensor_parallelism_without_a_plan_of_the_model_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    GPT2Config(n_layer=2).save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--tp", "2"]) == 2
    assert "no tensor-parallel plan for GPT2LMHeadModel" in capsys.readouterr().err


def test_quantised_and_unknown_models_are_refused_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    LlamaConfig(**BENCHMARK, quantization_config={"quant_method": "fp8"}).save_pretrained(tmp_path / "fp8")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    for model, reason in (("fp8", "is quantised"), ("broken", "broken"), ("nowhere", "MODEL is a hub name")):
        assert main(["routes", str(tmp_path / model)]) == 2
        assert reason in capsys.readouterr().err


def test_table_names_its_assumptions_and_stays_within_120_columns(
    capsys: pytest.CaptureFixture[str], llama: str
) -> None:
    assert main(["plan", llama, "--ranks", "64"]) == 0
    text = capsys.readouterr().out
    assert "The step is a MODEL" in text
    assert "Take: accelerate_configs/dmuon_" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 120


def test_routes_are_those_of_describe(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    assert main(["routes", llama, "--adamw", "*.o_proj.weight"]) == 0
    model = LlamaForCausalLM(LlamaConfig(**BENCHMARK))
    assert capsys.readouterr().out.rstrip() == describe(model, overrides={"*.o_proj.weight": "adamw"}).rstrip()


def test_config_file_without_architectures_is_a_model_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    BertConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    assert main(["routes", str(tmp_path / "config.json"), "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert AutoConfig.from_pretrained(tmp_path).architectures is None
    assert table["bert.encoder.layer.0.attention.self.query.weight"]["route"] == "muon"


def test_learning_rate_is_converted_for_each_shape(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    arguments = ["convert-lr", "0.02", "--from", "original", "--shape", "4096x1024", "--model", llama, "--json"]
    assert main(arguments) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {tuple(row["shape"]): row["matrices"] for row in rows} == {
        (4096, 1024): 1,
        (256, 256): 8,
        (128, 256): 8,
        (768, 256): 8,
        (256, 768): 4,
    }
    for row in rows:
        out, inner = row["shape"]
        assert row["lr"] == convert_lr(0.02, (out, inner), "original", "match_rms_adamw")


def test_learning_rate_without_a_shape_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert-lr", "0.02", "--from", "none"]) == 2
    assert "--shape" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "routes", "export", "import", "convert-lr", "doctor", "version"])
def test_help_fits_on_a_screen(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) <= 45
