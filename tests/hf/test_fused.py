"""A weight whose output a model of anybody's own splits is found by reading the model, however it splits it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmuon_hf.presets import routes

WIDTH, HEADS = 12, 2


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.act = nn.SiLU()
        self.out = nn.Linear(WIDTH, WIDTH)


class Chunk(Fused):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(q * k * v)


class TorchSplit(Fused):
    def forward(this, x: Tensor) -> Tensor:  # noqa: N805 - the name of the first argument is the author's
        fused: Tensor = this.act(this.qkv(x))
        q, k, v = torch.split(fused, WIDTH, dim=-1)
        return this.out(q * k * v)


class TensorSplit(Fused):
    def forward(self, x: Tensor) -> Tensor:
        if (fused := self.qkv(x)) is not None:
            q, k, v = (part.contiguous() for part in torch.tensor_split(fused, 3, dim=-1))
        return self.out(q * k * v)


class ViewAndUnbind(Fused):
    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(x).reshape(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = fused.unbind(0)
        return self.out((q * k * v).transpose(1, 2).flatten(2))


class ViewAndIndex(Fused):
    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(x).reshape(*x.shape[:2], 3, HEADS, -1)
        q, k, v = fused[:, :, 0], fused[:, :, 1], fused[:, :, 2]
        return self.out((q * k * v).flatten(2))


class ViewAndUnpack(Fused):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, WIDTH)).permute(2, 0, 1, 3)
        return self.out(q * k * v)


class Slices(Fused):
    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(x)
        q, k, v = fused[..., :WIDTH], fused[..., WIDTH : 2 * WIDTH], fused[..., 2 * WIDTH :]
        return self.out(q * k * v)


class Narrow(Fused):
    def forward(self, x: Tensor) -> Tensor:
        fused = F.linear(x, self.qkv.weight, self.qkv.bias)
        return self.out(fused.narrow(-1, 0, WIDTH) * fused.narrow(-1, WIDTH, WIDTH))


class OtherMethod(Fused):
    def heads(self, fused: Tensor) -> Any:
        return fused.view(*fused.shape[:-1], 3, -1).unbind(-2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.qkv(x))
        return self.out(q * k * v)


class Gated(Fused):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.glu(self.qkv(x))[..., :WIDTH])


class Rotated(Fused):
    """One matrix: what is taken apart is put together again, and batches and tokens are no roles."""

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).view(*x.shape[:2], HEADS, -1)
        first, second = heads.chunk(2, dim=-1)
        heads = torch.cat((first - second, second + first), dim=-1)
        early, late = self.out(x).split(1, dim=0)
        cos, sin = self.act(heads), self.out(x)[:, :1]
        return cos.flatten(2)[..., :WIDTH] + early + late + sin


def _network(layer: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.ModuleDict({"attention": layer()}) for _ in range(2)))


SPLIT = [Chunk, TorchSplit, TensorSplit, ViewAndUnbind, ViewAndIndex, ViewAndUnpack, Slices, Narrow, OtherMethod, Gated]


@pytest.mark.parametrize("layer", SPLIT)
def test_output_that_is_split_is_said_to_be_of_a_fused_weight(layer: type[Fused]) -> None:
    table = routes(_network(layer))
    assert "split in a way not known" in table["1.attention.qkv.weight"].reason
    assert "split" not in table["1.attention.out.weight"].reason


def test_gate_behind_a_layer_of_a_sequence_splits_it() -> None:
    table = routes(_network(lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU(), nn.Linear(WIDTH, WIDTH))))
    assert "split in a way not known" in table["0.attention.0.weight"].reason
    assert "split" not in table["0.attention.2.weight"].reason


def test_output_that_stays_together_is_of_one_matrix() -> None:
    reasons = {route.reason for name, route in routes(_network(Rotated)).items() if name.endswith("weight")}
    assert reasons == {"linear weight in a block"}
