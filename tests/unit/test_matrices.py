"""Decomposition of stored parameters into logical matrices, against slices taken by hand."""

from __future__ import annotations

import json
import random

import pytest
import torch

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan import MatrixSpec, stored_matrices


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def test_plain_spec_gives_the_parameter_itself() -> None:
    weight = numbered(6, 4)
    (matrix,) = MatrixSpec().split(weight)
    assert matrix.data_ptr() == weight.data_ptr() and matrix.shape == (6, 4)


def test_transposed_spec_gives_out_by_in_view() -> None:
    weight = numbered(4, 6)  # GPT-2 Conv1D: (in, out)
    spec = MatrixSpec(transposed=True)
    (matrix,) = spec.split(weight)
    assert torch.equal(matrix, weight.T) and matrix.data_ptr() == weight.data_ptr()
    assert spec.logical_shapes((4, 6)) == [(6, 4)]


def test_transposed_sections_split_conv1d_qkv_by_output() -> None:
    weight = numbered(4, 18)
    query, key, value = MatrixSpec(sections=(6, 6, 6), transposed=True).split(weight)
    assert torch.equal(query, weight[:, :6].T)
    assert torch.equal(key, weight[:, 6:12].T)
    assert torch.equal(value, weight[:, 12:].T)


def test_sections_split_phi3_qkv_rows_as_views() -> None:
    weight = numbered(128, 64)
    spec = MatrixSpec(sections=(64, 32, 32))
    query, key, value = spec.split(weight)
    assert torch.equal(query, weight[:64]) and torch.equal(key, weight[64:96]) and torch.equal(value, weight[96:])
    assert key.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    assert spec.logical_shapes((128, 64)) == [(64, 64), (32, 64), (32, 64)]


def test_groups_collect_query_and_gate_of_every_head() -> None:
    heads, head_dim, width = 3, 2, 5
    weight = numbered(heads * 2 * head_dim, width)  # Qwen3-Next q_proj: (query | gate) per head
    query, gate = MatrixSpec(groups=heads, sections=(head_dim, head_dim)).split(weight)
    rows_query = [head * 4 + row for head in range(heads) for row in range(2)]
    assert torch.equal(query, weight[rows_query])
    assert torch.equal(gate, weight[[row + 2 for row in rows_query]])


def test_transposed_sections_are_turned_each_by_itself() -> None:
    weight = numbered(6, 4)  # DBRX w2: two experts one below the other, each (in, out)
    spec = MatrixSpec(sections=(3, 3), sections_transposed=True)
    first, second = spec.split(weight)
    assert torch.equal(first, weight[:3].T) and torch.equal(second, weight[3:].T)
    assert spec.logical_shapes((6, 4)) == [(4, 3), (4, 3)]


def test_folded_spec_makes_two_dimensions_of_three() -> None:
    weight = numbered(5, 2, 3)  # XLNet: (in, heads, dim)
    spec = MatrixSpec(folded=True, transposed=True)
    assert stored_matrices(weight.shape, spec) == (1, (5, 6))
    matrix = spec.stored(weight)
    assert torch.equal(matrix, weight.flatten(1)) and matrix.data_ptr() == weight.data_ptr()
    assert torch.equal(spec.unfolded.split(matrix)[0], weight.flatten(1).T)
    with pytest.raises(ConfigurationError, match="three dimensions"):
        stored_matrices((5, 6), spec)
    with pytest.raises(ConfigurationError, match="not contiguous"):
        spec.check_foldable(weight.permute(2, 0, 1), "layer.q")


def test_transposed_sections_without_sections_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no effect"):
        MatrixSpec(sections_transposed=True)


def random_spec(rng: random.Random) -> tuple[MatrixSpec, tuple[int, int]]:
    transposed, width = rng.random() < 0.5, rng.randint(1, 7)
    if rng.random() < 0.25:
        spec, rows = MatrixSpec(transposed=transposed), rng.randint(1, 9)
    else:
        sections = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 4)))
        groups = rng.randint(1, 4)
        turned = rng.random() < 0.3
        spec = MatrixSpec(groups=groups, sections=sections, transposed=transposed, sections_transposed=turned)
        rows = groups * sum(sections)
    return spec, (width, rows) if transposed else (rows, width)


@pytest.mark.parametrize("seed", range(40))
def test_split_then_merge_and_write_restore_the_parameter(seed: int) -> None:
    spec, shape = random_spec(random.Random(seed))
    weight = numbered(*shape)
    matrices = spec.split(weight)
    assert [tuple(matrix.shape) for matrix in matrices] == spec.logical_shapes(shape)
    assert len(matrices) == spec.count
    assert sorted(torch.cat([matrix.flatten() for matrix in matrices]).tolist()) == weight.flatten().tolist()
    merged = spec.merge(matrices)
    assert torch.equal(merged, weight) and merged.is_contiguous() and merged.data_ptr() != weight.data_ptr()
    target = torch.zeros(shape, dtype=torch.float64)
    spec.write(target, matrices)
    assert torch.equal(target, weight.double())
    assert MatrixSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_specs_are_hashable_values() -> None:
    assert {MatrixSpec(sections=[2, 3]), MatrixSpec(sections=(2, 3))} == {MatrixSpec(sections=(2, 3))}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": 0}, "groups must be"),
        ({"groups": 2}, "without sections"),
        ({"sections": ()}, "positive"),
        ({"sections": (3, 0)}, "positive"),
    ],
)
def test_meaningless_spec_raises(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MatrixSpec(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(7, 4), (4, 6)])
def test_rows_that_do_not_add_up_raise(shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigurationError, match="makes 6 rows"):
        MatrixSpec(groups=2, sections=(1, 2), transposed=shape == (6, 4)).validate(shape)


@pytest.mark.parametrize("shape", [(5,), (), (0, 4), (4, 0)])
def test_shape_that_is_no_matrix_raises(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="AdamW"):
        MatrixSpec().validate(shape)


def test_expert_stack_names_the_adamw_route() -> None:
    with pytest.raises(NotImplementedError, match="AdamW"):
        MatrixSpec().validate((8, 64, 32))


def test_write_of_wrong_matrices_raises_and_changes_nothing() -> None:
    spec, target = MatrixSpec(sections=(2, 2)), torch.zeros(4, 3)
    with pytest.raises(ConfigurationError, match="2 logical matrices, got 1"):
        spec.write(target, [torch.ones(4, 3)])
    with pytest.raises(ConfigurationError, match="do not fill"):
        spec.write(target, [torch.ones(3, 3), torch.ones(1, 3)])
    assert not target.any()
