"""On a CUDA device: every stage equals the CPU run. Needs one GPU; two ranks share it over gloo."""

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
STEPS = 4


def run(ranks: int, device: str, stage: int, precision: str, delay: bool = False) -> dict[str, Any]:
    """Train the small GPT in processes of their own; what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "zerorun.launcher.cli", "--nproc-per-node", str(ranks), __file__]
        environment = {**os.environ, "ZERORUN_DEVICE": device, "PYTHONPATH": str(Path(__file__).parents[1])}
        arguments = [str(stage), precision, str(int(delay)), str(result)]
        subprocess.run([*command, *arguments], env=environment, check=True, timeout=300)
        return dict(json.loads(result.read_text()))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_stage_equals_the_cpu(ranks: int, precision: str) -> None:
    tolerance = {"fp32": 2e-4, "bf16": 2e-2}[precision]
    expected = run(ranks, "cpu", 0, precision)
    for stage in range(4):
        found = run(ranks, "cuda:0", stage, precision)
        assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance), stage
        assert found["norms"] == pytest.approx(expected["norms"], rel=10 * tolerance), stage


@pytest.mark.parametrize("stage", range(4))
def test_delays_on_side_streams_change_nothing(stage: int) -> None:
    plain, delayed = run(2, "cuda:0", stage, "fp32"), run(2, "cuda:0", stage, "fp32", delay=True)
    assert delayed["losses"] == plain["losses"]


def delayed_collectives(engine: Any) -> None:
    """Let every collective's result come late: a long kernel before each gather and each reduction."""
    for name in ("all_gather", "reduce_scatter"):
        collective = getattr(engine.comm, name)

        def late(*args: Any, _collective: Any = collective, **kwargs: Any) -> Any:
            torch.cuda._sleep(2_000_000)
            return _collective(*args, **kwargs)

        setattr(engine.comm, name, late)


def work(stage: str, precision: str, delay: str, result: str) -> None:
    import torch.distributed as dist
    from models import Gpt, Place, token_loss, tokens
    from training import make_config

    import zerorun

    torch.manual_seed(0)
    engine = zerorun.initialize(Gpt(), make_config(int(stage), clip=1.0, precision=precision))
    if int(delay):
        delayed_collectives(engine)
    losses, norms = [], []
    for step in range(STEPS):
        loss = token_loss(engine, tokens(Place(dist.get_rank(), step)).to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        norms.append(engine.get_global_grad_norm())
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps({"losses": losses, "norms": norms}))


if __name__ == "__main__":
    work(*sys.argv[1:])
