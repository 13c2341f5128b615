"""On a CUDA device: ways to divide states between ranks equal the CPU run. Needs one GPU; the ranks share it."""

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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the CPU runs cover the same code"),
]
STEPS, RANKS = 3, 4
OFFLOADED = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {  # stage, and keys of zero_optimization
    "hybrid": (2, {"shard_degree": 2}),
    "hybrid of whole parameters": (2, {"shard_degree": 2}),  # shards have different sizes
    "second copy": (3, {"zero_hpz_partition_size": 2}),
    "second copy in host memory": (3, {"zero_hpz_partition_size": 2, **OFFLOADED}),
    "offload": (3, OFFLOADED),
}


def run(device: str, way: str) -> dict[str, Any]:
    """Train in processes of their own; the losses and norms of rank 0. ``way`` "": stage 0."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "zerorun.launcher.cli", "--nproc-per-node", str(RANKS), __file__]
        environment = {**os.environ, "ZERORUN_DEVICE": device, "PYTHONPATH": str(Path(__file__).parents[1])}
        subprocess.run([*command, way, str(result)], env=environment, check=True, timeout=300)
        return dict(json.loads(result.read_text()))


@pytest.mark.parametrize("way", WAYS)
def test_it_equals_the_cpu(way: str) -> None:
    expected, found = run("cpu", "whole parameters" if way.endswith("whole parameters") else ""), run("cuda:0", way)
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-4)
    assert found["norms"] == pytest.approx(expected["norms"], rel=2e-3)


# -- in the trained processes ------------------------------------------------------------------------------------------


def work(way: str, result: str) -> None:
    import torch.distributed as dist
    from models import CASES, Place
    from own_optimizers import UnitRows
    from training import make_config

    import zerorun

    zerorun.init_distributed()
    case, (stage, keys) = CASES["plain"], WAYS.get(way, (0, {}))
    options = {"optimizer": lambda params: UnitRows(params)} if way.endswith("whole parameters") else {}
    engine = zerorun.initialize(case.build(), make_config(stage, clip=1.0, zero_optimization=keys), **options)
    losses, norms = [], []
    for step in range(STEPS):
        loss = case.loss(engine, Place(dist.get_rank(), step))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps({"losses": losses, "norms": norms}))


if __name__ == "__main__":
    work(*sys.argv[1:])
