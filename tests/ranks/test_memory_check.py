"""The memory check of initialize(): what cannot fit is refused before anything is touched, and what can is not."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from covering import by_day
from harness import patience, run_ranks, start_script
from test_estimate import Deep
from test_parallel_matrix import batch_of, build
from training import make_config, merged, shared_topology

import zerorun
from zerorun.errors import DoesNotFitError, ZerorunError
from zerorun.memory import fitting
from zerorun.memory.limits import Limit

PARAMETERS = sum(param.numel() for param in Deep().parameters())


@contextmanager
def limited_to(available: int) -> Iterator[None]:
    """All ranks of this node together may take ``available`` bytes more."""
    original = fitting.host_limits
    fitting.host_limits = lambda: [Limit("a limit of the test", available)]  # type: ignore[assignment]
    try:
        yield
    finally:
        fitting.host_limits = original  # type: ignore[assignment]


def suggested(text: str) -> dict[str, Any]:
    found = re.search(r"set (\{.*\})[;,]", text)
    return json.loads(found[1]) if found else {}


def refused_and_mended(config: dict[str, Any], available: int) -> tuple[str, bool, int]:
    """(the refusal, whether the model was left alone, the stage of the configuration that was suggested and works)."""
    module, topology = Deep(), shared_topology()
    before = [(param.data_ptr(), param.clone(), param.grad) for param in module.parameters()]
    with limited_to(available):
        try:
            zerorun.initialize(module, config, topology=topology)
        except DoesNotFitError as error:
            text = str(error)
        after = list(module.parameters())
        same = all(p.data_ptr() == at and torch.equal(p, value) for p, (at, value, _) in zip(after, before, strict=True))
        engine = zerorun.initialize(module, merged(config, suggested(text)), topology=topology)
    engine.backward(engine(torch.ones(1, 256)).square().mean())
    engine.step()
    stage = engine.config.zero_optimization.stage
    engine.destroy()
    return text, same, stage


@pytest.mark.parametrize(("precision", "expected"), [("fp32", 3), ("bf16", 1)])
def test_refusal_suggests_what_then_works(precision: str, expected: int) -> None:
    """Two ranks of stage 0 need 24 P in fp32 and 28 P in bf16, beyond their modules."""
    config = make_config(0, precision=precision)
    available = {"fp32": 14, "bf16": 20}[precision] * PARAMETERS
    results = run_ranks(2, refused_and_mended, config, available)
    for text, same, stage in results:
        assert same
        assert stage == expected
        for words in ("2 ranks of node", "a limit of the test leaves", "moments", "nearest configuration", "=0 switches"):
            assert words in text


def refused_with_degrees(available: int) -> tuple[str, bool, int]:
    """As above, of a model that is divided over 2 tensor ranks."""
    config = {**make_config(0), "tensor_parallel": {"size": 2}}
    module = build("llama")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with limited_to(available):
        try:
            zerorun.initialize(module, config)
        except DoesNotFitError as error:
            text = str(error)
        same = all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        engine = zerorun.initialize(module, merged(config, suggested(text)))
    engine.backward(engine(**batch_of(0, 0, engine.topology.data_parallel_rank)).loss)
    engine.step()
    stage = engine.config.zero_optimization.stage
    engine.destroy()
    return text, same, stage


def test_refusal_of_a_divided_model() -> None:
    """Beyond what they hold, 4 ranks need 12 P / 2 bytes each at stage 0, and half of that at stage 1."""
    parameters = sum(param.numel() for param in build("llama").parameters())
    for text, same, stage in run_ranks(4, refused_with_degrees, 4 * 9 * parameters // 2):
        assert same
        assert stage > 0
        assert "4 ranks of node" in text


def outcome(config: dict[str, Any], available: int, check: str) -> str | None:
    module, topology = Deep(), shared_topology()
    os.environ["ZERORUN_MEMORY_CHECK"] = check
    try:
        with limited_to(available):
            zerorun.initialize(module, config, topology=topology).destroy()
    except ZerorunError as error:
        return str(error)
    finally:
        del os.environ["ZERORUN_MEMORY_CHECK"]
    return None


def test_more_ranks_are_suggested_where_no_stage_helps() -> None:
    """Nor a disk, on which RAdam cannot work."""
    config = {**make_config(3), "optimizer": {"type": "RAdam", "params": {"lr": 1e-3}}}
    for text in run_ranks(2, outcome, config, 10 * PARAMETERS, "1"):
        assert text is not None
        assert re.search(r"start \d+ ranks on \d+ such nodes", text)


def test_a_disk_is_suggested_before_more_ranks() -> None:
    for text in run_ranks(2, outcome, make_config(3), 10 * PARAMETERS, "1"):
        assert text is not None
        assert '"offload_optimizer": {"device": "nvme", "nvme_path": "a folder on a local disk"}' in text
        assert "such nodes" not in text


def test_where_nothing_would_fit() -> None:
    """Not even the memory that the module gives back would do."""
    for text in run_ranks(2, outcome, make_config(3), -10 * PARAMETERS, "1"):
        assert text is not None
        assert "no stage, placement or number of ranks would fit" in text


def test_the_check_can_be_switched_off() -> None:
    assert run_ranks(2, outcome, make_config(3), 1000, "0") == [None, None]


def refused_on_rank_1() -> str | None:
    return outcome(make_config(1), 1000 if torch.distributed.get_rank() else 10**12, "1")


def test_all_ranks_learn_of_one_rank_s_refusal() -> None:
    first, second = run_ranks(2, refused_on_rank_1)
    assert first is not None
    assert second is not None
    assert first.startswith("rank 1: the training does not fit")


def least(config: dict[str, Any]) -> int:
    """What the ranks of this node need in all, as the check sees it."""
    demands: list[Any] = []
    original = fitting.Fitting.require

    def watch(self: fitting.Fitting, others: list[fitting.Demand]) -> None:
        demands.extend(others)

    fitting.Fitting.require = watch  # type: ignore[method-assign]
    try:
        zerorun.initialize(Deep(), config, topology=shared_topology()).destroy()
    finally:
        fitting.Fitting.require = original  # type: ignore[method-assign]
    return sum(demand.host for demand in demands)


@pytest.mark.parametrize("stage", range(4))
def test_the_bound_is_exact(stage: int) -> None:
    config = make_config(stage, precision="bf16")
    needed = run_ranks(2, least, config)[0]
    assert run_ranks(2, outcome, config, needed, "1") == [None, None]
    assert None not in run_ranks(2, outcome, config, needed - 1, "1")


SCRIPT = """
import resource, sys
import torch, zerorun
from torch import nn
from zerorun.errors import DoesNotFitError

module = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))  # 64 MiB
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[1]) << 20), resource.RLIM_INFINITY))
config = {"train_batch_size": 1, "zero_optimization": {"stage": 0}, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
try:
    engine = zerorun.initialize(module, config)
except DoesNotFitError as error:
    print(error)
    sys.exit(3)
engine.backward(engine(torch.ones(1, 2048)).mean())
engine.step()
"""


@pytest.mark.parametrize(("mib", "status"), by_day(((150, 3), (1500, 0)), (150, 3)))
def test_under_a_limit_of_the_process(mib: int, status: int) -> None:
    """Adam needs 192 MiB more for 64 MiB of fp32 parameters."""
    code, said, errors = start_script(SCRIPT, str(mib), OMP_NUM_THREADS="1").finish(120 * patience())
    assert code == status, errors
    if status:
        assert "this rank needs 192.0 MiB more, and RLIMIT_AS leaves" in said
