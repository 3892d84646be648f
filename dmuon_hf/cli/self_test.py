"""Two ranks over gloo train a small model, and have to end with the weights of one process.

    python -m dmuon_hf.cli.self_test

Prints one line; exit status 1 and the reason on stderr where the ranks differ from the process.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import mse_loss

import dmuon_hf.core as dmuon

_STEPS = 3
_TOLERANCE = 1e-5


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(12, 28, bias=False)
        self.down_proj = nn.Linear(28, 12)

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self.down_proj(torch.tanh(self.up_proj(x)))
        return x + update


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(_Block(), _Block(), nn.Linear(12, 5))


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return "proj" in name and parameter.ndim == 2


def _train(model: nn.Module, optimizer: dmuon.Muon, rows: slice) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(_STEPS):
        inputs, targets = torch.randn(8, 12, generator=generator), torch.randn(8, 5, generator=generator)
        torch.autograd.backward(mse_loss(model(inputs[rows]), targets[rows]))
        optimizer.step()
        optimizer.zero_grad()


def _optimizer(model: nn.Module) -> dmuon.Muon:
    return dmuon.Muon(model, lr=0.02, adamw_lr=1e-3, ns_backend=dmuon.NewtonSchulz(dtype=torch.float32))


def _one_process() -> dict[str, Tensor]:
    model = _model()
    dmuon.dedicate_params(model, None, predicate=_is_matrix)
    _train(model, _optimizer(model), slice(None))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _rank(rank: int, folder: str, expected: dict[str, Tensor]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = _model()
    dmuon.dedicate_params(model, mesh, predicate=_is_matrix)
    for block in (model[0], model[1], model):
        fully_shard(block, mesh=mesh)
    _train(model, _optimizer(model), slice(4 * rank, 4 * rank + 4))
    whole = dmuon.get_model_state_dict(model, rank0_only=False)
    worst = max(float((whole[name] - value).abs().max() / value.abs().max()) for name, value in expected.items())
    if rank == 0:
        Path(folder, "worst").write_text(str(worst), encoding="utf-8")
    dist.destroy_process_group()


def main() -> int:
    """Run the test; returns the exit status."""
    expected = _one_process()
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(folder, expected), nprocs=2)  # type: ignore[no-untyped-call]
        worst = float(Path(folder, "worst").read_text(encoding="utf-8"))
    if worst > _TOLERANCE:
        sys.stderr.write(f"the weights of two ranks differ by {worst:.1e} from those of one process\n")
        return 1
    sys.stdout.write(f"{_STEPS} steps, largest relative difference of a weight from one process {worst:.1e}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
