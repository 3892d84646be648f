"""The reference optimizer and the tiny models, checked against mathematics rather than against the package."""

from __future__ import annotations

import math

import pytest
import torch

from tests.harness.models import (
    container_mlp,
    dense_batch,
    loss_of,
    rank_part,
    tiny_llama,
    tiny_mlp,
    token_batch,
    uneven_model,
)
from tests.harness.reference import ReferenceOptimizer, newton_schulz_reference, train_reference


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5), (1, 7)])
def test_reference_newton_schulz_keeps_singular_vectors_and_flattens_values(shape):
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    result = newton_schulz_reference(matrix, steps=10)
    values = torch.diagonal(u.T @ result @ vt.T)
    torch.testing.assert_close(result, u @ torch.diag(values) @ vt, atol=1e-10, rtol=0)
    # The safety scaling of the last row leaves the fixed point a little below one.
    assert values.min() > 0.9
    assert values.max() < 1.1


def test_reference_newton_schulz_of_zero_is_zero():
    assert newton_schulz_reference(torch.zeros(3, 4)).abs().max() == 0


def test_reference_newton_schulz_ignores_scale():
    matrix = torch.randn(6, 9, dtype=torch.float64)
    torch.testing.assert_close(newton_schulz_reference(matrix * 1e-20), newton_schulz_reference(matrix))


def test_first_reference_step_follows_the_formula():
    model = tiny_mlp()
    weight = model.layers[0].up_proj.weight
    before = weight.detach().clone().double()
    optimizer = ReferenceOptimizer(model, ["layers.0.up_proj.weight"], lr=0.1, weight_decay=0.5, momentum=0.9)
    loss_of(model, dense_batch(0)).backward()
    direction = newton_schulz_reference(weight.grad.double() * 1.9)
    optimizer.step()
    expected = before * (1 - 0.1 * 0.5) - 0.1 * 0.2 * math.sqrt(32) * direction
    torch.testing.assert_close(weight.detach().double(), expected, atol=1e-6, rtol=0)
    assert optimizer.ns_calls == 1


def test_reference_split_orthogonalises_each_part_alone():
    model = tiny_mlp()
    name = "layers.0.up_proj.weight"
    weight = model.layers[0].up_proj.weight
    before = weight.detach().clone().double()
    optimizer = ReferenceOptimizer(model, [name], lr=1.0, momentum=0.0, split={name: lambda w: [w[:24], w[24:]]})
    loss_of(model, dense_batch(0)).backward()
    parts = [newton_schulz_reference(g) * 0.2 * math.sqrt(max(g.shape)) for g in (weight.grad[:24], weight.grad[24:])]
    optimizer.step()
    torch.testing.assert_close(weight.detach().double(), before - torch.cat(parts), atol=1e-6, rtol=0)


def test_reference_training_in_parts_equals_training_on_the_whole_batch():
    finals = []
    for parts in (1, 4):
        model = tiny_mlp()
        optimizer = ReferenceOptimizer(model, lambda n, p: "proj" in n)
        finals.append(train_reference(model, optimizer, [dense_batch(s) for s in range(3)], loss_of, parts=parts)[-1])
    for name, value in finals[0].items():
        torch.testing.assert_close(finals[1][name], value, atol=2e-5, rtol=1e-4)


def test_reference_with_unknown_name_is_an_error():
    with pytest.raises(ValueError, match="nothing"):
        ReferenceOptimizer(tiny_mlp(), ["nothing.weight"])


def test_models_of_one_seed_are_equal_and_of_two_seeds_differ():
    for make in (tiny_mlp, uneven_model, tiny_llama):
        first, again, other = (list(make(seed).parameters()) for seed in (0, 0, 1))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_container_form_of_the_mlp_computes_the_same():
    first, second = tiny_mlp(), container_mlp()
    assert [n for n, _ in first.named_parameters()] == [n for n, _ in second.named_parameters()]
    assert torch.equal(first(dense_batch(0)), second(dense_batch(0)))


def test_llama_ties_its_embedding_when_asked():
    for tied in (True, False):
        model = tiny_llama(tied=tied)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("make", [tiny_mlp, uneven_model, tiny_llama], ids=lambda make: make.__name__)
def test_every_parameter_of_the_models_gets_a_gradient(make):
    model = make()
    batch = token_batch(0) if make is tiny_llama else dense_batch(0, width=64 if make is uneven_model else 16)
    loss_of(model, batch).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0] == []


def test_rank_parts_make_up_the_batch():
    batch = token_batch(3)
    parts = [rank_part(batch, rank, 2, micro=m, n_micro=2) for rank in range(2) for m in range(2)]
    assert torch.equal(torch.cat(parts), batch)


def test_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="does not divide"):
        rank_part(dense_batch(0), 0, 3)
