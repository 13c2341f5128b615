"""On a CUDA device: tensor ranks and pipeline stages equal the CPU run. Needs one GPU; the ranks share it over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the CPU runs cover the same code"),
]
STEPS, ACCUMULATION, WIDTH, VOCABULARY = 3, 3, 32, 61


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + normed


def run(device: str, tensor: int, pipe: int, schedule: str = "1f1b") -> dict[str, Any]:
    """Train in processes of their own; the losses and norms of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        ranks = str(tensor * pipe)
        command = [sys.executable, "-m", "zerorun.launcher.cli", "--nproc-per-node", ranks, __file__]
        environment = {**os.environ, "ZERORUN_DEVICE": device, "PYTHONPATH": str(Path(__file__).parents[1])}
        arguments = [str(tensor), str(pipe), schedule, str(result)]
        subprocess.run([*command, *arguments], env=environment, check=True, timeout=300)
        return dict(json.loads(result.read_text()))


@pytest.mark.parametrize(
    ("tensor", "pipe", "schedule"), ((2, 1, "1f1b"), (1, 2, "1f1b"), (1, 2, "zero_bubble"), (2, 2, "gpipe"))
)
def test_it_equals_the_cpu(tensor: int, pipe: int, schedule: str) -> None:
    expected, found = run("cpu", 1, 1), run("cuda:0", tensor, pipe, schedule)
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-4)
    assert found["norms"] == pytest.approx(expected["norms"], rel=2e-3)


# -- in the trained processes ------------------------------------------------------------------------------------------


def micro_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randint(VOCABULARY, (2, 5 + number % 2), generator=generator) for _ in range(2))  # type: ignore[return-value]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.to(logits.device).flatten())


def work(tensor: str, pipe: str, schedule: str, result: str) -> None:
    import torch.distributed as dist
    from training import make_config

    import zerorun

    zerorun.init_distributed()
    torch.manual_seed(0)
    layers = [nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, VOCABULARY)]
    module = zerorun.PipelineModule(layers, num_stages=int(pipe), loss_fn=loss_of)
    config = make_config(1, accumulation=ACCUMULATION, clip=1.0, pipeline={"schedule": schedule})
    if int(tensor) > 1:
        config["tensor_parallel"] = {"size": int(tensor), "plan": {"*.up": "colwise", "*.down": "rowwise"}}
    engine = zerorun.initialize(module, config)
    losses, norms = [], []
    for step in range(STEPS):
        batches = (micro_batch(step * ACCUMULATION + number) for number in range(ACCUMULATION))
        losses.append(float(engine.train_batch(batches)))
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps({"losses": losses, "norms": norms}))


if __name__ == "__main__":
    work(*sys.argv[1:])
