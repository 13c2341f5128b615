"""On a CUDA device: every stage equals the CPU run, updates bit for bit. Needs one GPU; two ranks share it over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from updates import DTYPES, RULES, Rule, Work, random_bits, same, training

from zerorun.activations import host_pool
from zerorun.distributed.device import CopyStream
from zerorun.ops import on_cuda, single_pass
from zerorun.ops.rounding import MasterFormat, Origin, Rounding
from zerorun.ops.state_format import StateFormat
from zerorun.optim import optimizers as optim

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the CPU runs cover the same code"),
]
STEPS = 4
# Ranks that share a GPU exchange over NCCL only where the user says so: see process_group.py.
NCCL = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def run(
    ranks: int,
    device: str,
    stage: int,
    precision: str,
    offload: bool = False,
    delay: bool = False,
    compiled: bool = False,
    waits: str = "default",
) -> dict[str, Any]:
    """Train the small GPT in processes of their own; what rank 0 found.

    ``offload``: states, parameters and activations. ``waits``: what torch does when the program waits for the device.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "zerorun.launcher.cli", "--nproc-per-node", str(ranks), __file__]
        environment = {**os.environ, "ZERORUN_DEVICE": device, "PYTHONPATH": str(Path(__file__).parents[1])}
        arguments = [str(stage), precision, str(int(offload)), str(int(delay)), str(int(compiled)), waits, str(result)]
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
        assert ranks == 1 or (found["over"] == "nccl") == NCCL


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_late_copies_change_nothing(stage: int, precision: str) -> None:
    """What waits for no copy reads what was there before: one rank shows it, as copies are the same with many."""
    plain, late = (run(1, "cuda:0", stage, precision, offload=True, delay=delay) for delay in (False, True))
    assert late["losses"] == plain["losses"] and late["norms"] == plain["norms"]


# -- updates in one pass -----------------------------------------------------------------------------------------------


def test_kernels_are_in_force() -> None:
    assert on_cuda.kernels(torch.device("cuda", 0)) is not None, on_cuda.status(torch.device("cuda", 0))
    param = torch.ones(4, device="cuda")
    for name in ("AdamW", "Adam", "Adagrad", "Lion", "SGD"):
        assert isinstance(optim.build_optimizer(name, {}, [{"params": [param]}]), single_pass.SinglePassOptimizer)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_updates_give_the_bits_of_the_cpu(rule: Rule) -> None:
    for make in (random_bits, training):
        for start in (0, 1):  # aligned, and not
            for gradient_type in DTYPES:
                for out_type in (*DTYPES, None):
                    here = make(rule, 300_001)
                    here.gradient, here.coefficient = here.gradient.to(gradient_type), 0.37
                    here.out = None if out_type is None else torch.zeros(300_001, dtype=out_type)
                    there = on_gpu(here)
                    rule.run(part(here, start))
                    rule.run(part(there, start))
                    pairs = zip(here.results(), there.results(), strict=True)
                    assert all(same(one, other.cpu()) for one, other in pairs), (start, gradient_type, out_type)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("kind", MasterFormat)
@pytest.mark.parametrize("rows", [0, 13])
def test_weights_in_bf16_have_the_bits_of_the_cpu(rule: Rule, kind: MasterFormat, rows: int) -> None:
    """Chance rounds the same way on both: positions begin below 2^32 and end above it."""
    noise = Origin(0, 6561, "name", (1 << 32) - 3000, rows, 29, 5).noise(7)
    start = random_bits(rule, 6561)
    weight, rest = kind.parts(start.weight)
    states = tuple(state.bfloat16() for state in start.states)
    here = replace(start, weight=weight, states=states, rounding=Rounding(rest, noise), out=torch.zeros(6561).bfloat16())
    there = on_gpu(here)
    rule.run(here)
    rule.run(there)
    assert all(same(one, other.cpu()) for one, other in zip(here.results(), there.results(), strict=True))


@pytest.mark.parametrize("format", [StateFormat.BLOCK8, StateFormat.BF16])
@pytest.mark.parametrize("numel", [1, 255, 256, 1025, 70_001])
def test_small_states_have_the_bits_of_the_cpu(format: StateFormat, numel: int) -> None:
    found = {}
    for where in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(numel, generator=generator).to(where)
        optimizer = single_pass.Adam([weight], lr=1e-3, weight_decay=0.1)
        optimizer.formats[weight] = format
        for step in range(3):
            gradient = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-9, 3, (numel,), generator=generator)
            gradient[numel // 2] = float("inf") if step == 2 else 0.0
            weight.grad = gradient.to(where)
            optimizer.step()
        states = optimizer.state[weight]
        parts = [states[f"{key}{part.key}"] for key in ("exp_avg", "exp_avg_sq") for part in format.parts]
        found[where] = [tensor.cpu().float() for tensor in (weight, *parts)]
    assert all(map(same, found["cpu"], found["cuda"]))


def on_gpu(work: Work) -> Work:
    out, rest = (None if tensor is None else tensor.cuda() for tensor in (work.out, work.rounding.rest))
    states = tuple(state.cuda() for state in work.states)
    rounding = replace(work.rounding, rest=rest)
    return Work(work.weight.cuda(), work.gradient.cuda(), states, out, work.coefficient, rounding)


def part(work: Work, start: int) -> Work:
    out = None if work.out is None else work.out[start:]
    states = tuple(state[start:] for state in work.states)
    return Work(work.weight[start:], work.gradient[start:], states, out, work.coefficient)


def test_more_elements_than_32_bits_count() -> None:
    numel = 2**31 + 4321
    if torch.cuda.mem_get_info()[0] < 8 * numel:
        pytest.skip(f"needs {8 * numel / 2**30:.0f} GiB of free device memory")
    weight, gradient = torch.zeros(numel, device="cuda"), torch.ones(numel, dtype=torch.bfloat16, device="cuda")
    single_pass.sgd(weight, gradient, lr=0.5)
    assert weight.min() == weight.max() == -0.5


def test_updates_do_not_wait_for_the_device() -> None:
    param = torch.zeros(1000, device="cuda", requires_grad=True)
    param.grad = torch.ones_like(param)
    optimizer = single_pass.Adam([param])
    optimizer.step()
    torch.cuda._sleep(10**9)
    slept = torch.cuda.Event()
    slept.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not slept.query()


# -- the steady state --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_a_step_does_not_wait_for_the_device(stage: int, precision: str) -> None:
    """From a forward to the next one: what the host knows of a step, it learns in the one after it."""
    run(1, "cuda:0", stage, precision, waits="error")


@pytest.mark.parametrize("stage", (0, 3))
def test_compiled_blocks_equal_the_cpu(stage: int) -> None:
    expected, found = run(1, "cpu", 0, "fp32"), run(1, "cuda:0", stage, "fp32", compiled=True)
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-4)


# -- in the trained processes ------------------------------------------------------------------------------------------


def delay_copies() -> None:
    """Let every copy beside the computation come late: a long kernel goes before it."""
    copy = CopyStream.copy

    def late(self: CopyStream, source: torch.Tensor, target: torch.Tensor) -> Any:
        with self.copying():
            torch.cuda._sleep(2_000_000)
        return copy(self, source, target)

    CopyStream.copy = late  # type: ignore[method-assign]


def work(stage: str, precision: str, offload: str, delay: str, compiled: str, waits: str, result: str) -> None:
    import torch.distributed as dist
    from models import Gpt, Place, token_loss, tokens
    from training import make_config, merged

    import zerorun

    torch.manual_seed(0)
    config = make_config(int(stage), clip=1.0, precision=precision)
    if int(offload):
        host_pool.SMALL_BYTES = 0  # the tensors of this model are
        places = {"offload_optimizer": {"device": "cpu"}} | ({"offload_param": {"device": "cpu"}} if stage == "3" else {})
        kept = {"policy": "full", "cpu_checkpointing": True}
        config = merged(config, {"zero_optimization": places, "activation_checkpointing": kept})
    if int(delay):
        delay_copies()
    engine = zerorun.initialize(Gpt(), config)
    if int(compiled):
        engine.compile()
    losses, norms = [], []
    for step in range(STEPS):
        ids = tokens(Place(dist.get_rank(), step)).to(engine.device)
        looking = waits != "default" and step > 1
        if looking:
            torch.cuda.set_sync_debug_mode(waits)
        loss = token_loss(engine, ids)
        engine.backward(loss)
        engine.step()
        if looking:
            torch.cuda.set_sync_debug_mode("default")
        losses.append(float(loss))
        norms.append(engine.get_global_grad_norm())
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps({"losses": losses, "norms": norms, "over": engine.comm.transport}))


if __name__ == "__main__":
    work(*sys.argv[1:])
