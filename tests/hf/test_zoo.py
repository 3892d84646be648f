"""Routes and layouts of transformers' own classes agree with what their forward does: a sample of `make sweep`."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from dmuon_hf import families, layouts
from dmuon_hf.layouts import Layout
from tests.harness import run_ranks
from tests.hf.zoo.build import MAPPINGS, entries
from tests.hf.zoo.examine import examine
from tests.hf.zoo.prepared import refusals
from tests.hf.zoo.sweep import sweep

SAMPLE = 10
"""Classes of each mapping; all of them stand in `docs/families.md`."""


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_sampled_classes_have_right_routes_and_layouts(mapping: str) -> None:
    chosen = [entry for entry in entries() if entry[0] == mapping]
    result = sweep(chosen[:: max(len(chosen) // SAMPLE, 1)][:SAMPLE])
    assert len(result.findings) + len(result.refused) == SAMPLE
    assert len(result.findings) > SAMPLE // 2, result.refused
    assert {key: finding.faults for key, finding in result.findings.items() if finding.faults} == {}


@pytest.mark.parametrize(
    ("model_type", "class_name", "layer"),
    [
        ("phi3", "Phi3ForCausalLM", "Phi3Attention.qkv_proj"),
        ("bloom", "BloomForCausalLM", "BloomAttention.query_key_value"),
        ("deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3Attention.kv_b_proj"),
        ("mamba", "MambaForCausalLM", "MambaMixer.x_proj"),
        ("modernbert", "ModernBertForMaskedLM", "ModernBertMLP.Wi"),
        ("siglip2", "Siglip2ForImageClassification", "MultiheadAttention.in_proj_weight"),
        ("granite_speech", "GraniteSpeechForConditionalGeneration", "GraniteSpeechConformerAttention.to_kv"),
    ],
)
def test_forward_proves_a_layout_and_refutes_any_other(
    model_type: str, class_name: str, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: set[str] = set()
    assert examine(model_type, class_name, followed).faults == []
    assert layer in followed

    def without_this(table: Mapping[str, Layout], **other: Layout) -> dict[str, Layout]:
        return {name: layout for name, layout in table.items() if name != layer} | other

    wrong = without_this(families.FUSED, **{layer: layouts.alternating})
    monkeypatch.setattr(families, "FUSED", wrong)
    assert any("arrive together" in fault for fault in examine(model_type, class_name, set()).faults)
    monkeypatch.setattr(families, "FUSED", without_this(families.FUSED))
    assert any("ways" in fault for fault in examine(model_type, class_name, set()).faults)


def _refusals(rank: int, world: int, classes: list[tuple[str, str]]) -> dict[str, str]:
    return refusals(classes)


def test_accelerate_prepares_models_that_it_cannot_wrap_alone() -> None:
    classes = [
        ("bert", "BertForMaskedLM"),
        ("t5", "T5ForConditionalGeneration"),
        # Their embedding is a list, a tensor, unknown.
        ("musicgen", "MusicgenForCausalLM"),
        ("perceiver", "PerceiverForMaskedLM"),
        ("segformer", "SegformerForImageClassification"),
        # Several blocks share their weights.
        ("zamba", "ZambaForCausalLM"),
    ]
    (found,) = run_ranks(_refusals, 1, classes, init=False)
    assert found == dict.fromkeys([name for _, name in classes], "")


def test_models_that_cannot_be_prepared_say_why_and_what_to_do() -> None:
    classes = [
        ("moonshine_streaming", "MoonshineStreamingForConditionalGeneration"),
        ("resnet", "ResNetForImageClassification"),
    ]
    (found,) = run_ranks(_refusals, 1, classes, init=False)
    assert re.search(r"log_k.*scalar.*reshape\(1\)", found["MoonshineStreamingForConditionalGeneration"])
    assert re.search(r"no trainable parameter.*convolutions.*AdamW.*routes=", found["ResNetForImageClassification"])
