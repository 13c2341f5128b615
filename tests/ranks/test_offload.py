"""Offload: what lies in host memory changes nothing but where it lies."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day, covering
from harness import run_ranks
from models import CASES, Case, Gpt, Mlp, Place
from reference import Result
from test_checkpoint import AFTER, BEFORE, held, steps
from test_equivalence import assert_identical, by_world
from training import make_config, make_engine, train

import zerorun
from zerorun.plan.placement import Placement, place_units
from zerorun.zero import builder
from zerorun.zero.offload.host_link import HostLink, Staging

STEPS = 2
DISK = tempfile.gettempdir()  # files there have no names
PLACES: dict[str, dict[str, Any]] = {
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "ratio 0": {"offload_optimizer": {"device": "cpu", "ratio": 0.0}},
    "ratio 0.3": {"offload_optimizer": {"device": "cpu", "ratio": 0.3}},
    "params": {"offload_param": {"device": "cpu"}},
    "both": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "part of both": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "offload_param": {"device": "cpu"}},
    "disk": {"offload_optimizer": {"device": "nvme", "nvme_path": DISK}},
    "part on disk": {"offload_optimizer": {"device": "nvme", "nvme_path": DISK, "ratio": 0.5}},
    "all on disk": {
        "offload_optimizer": {"device": "nvme", "nvme_path": DISK},
        "offload_param": {"device": "nvme", "nvme_path": DISK},
    },
}
WHERE: dict[str, Sequence[Any]] = {
    "world": (2, 3, 1),
    "stage": (3, 2, 1),
    "place": tuple(PLACES),
    "accumulation": (1, 3),
    "clip": (0.0, 0.5),
    "precision": ("fp32", "bf16", "fp16"),
}
MODELS = ("plain", "tied", "lora", "unused_alternating", "moe", "two_forwards", "checkpoint", "two_groups")
OPTIMIZERS = ("AdamW", "Lion", "Adagrad", "SGD")
ROWS = covering({**WHERE, "model": MODELS, "optimizer": OPTIMIZERS})
# By day every pair of what decides where something is; models and optimizers in turn.
BY_DAY = [
    {**row, "model": MODELS[index % 8], "optimizer": OPTIMIZERS[(index + index // 8) % 4]}
    for index, row in enumerate(covering(WHERE))
    if row["stage"] == 3 or "offload_param" not in PLACES[row["place"]]  # which needs stage 3
]


def train_placed(model: str, configs: list[dict[str, Any]]) -> list[Result]:
    return [train(CASES[model], config, STEPS) for config in configs]


@pytest.mark.parametrize("row", by_world(BY_DAY, ROWS))
def test_offloaded_equals_resident(row: dict[str, Any]) -> None:
    """Bit for bit: the same sums and the same updates, elsewhere."""
    place = PLACES[row["place"]]
    if "offload_param" in place and row["stage"] != 3:
        place = PLACES["optimizer"]
    configs = [
        make_config(
            row["stage"],
            accumulation=row["accumulation"],
            clip=row["clip"],
            precision=row["precision"],
            optimizer=row["optimizer"],
            zero_optimization=where,
        )
        for where in ({}, place)
    ]
    for rank, (resident, placed) in enumerate(run_ranks(row["world"], train_placed, row["model"], configs)):
        assert_identical(placed, resident, f"{row['place']} on rank {rank} and resident")


def train_apart(model: str, configs: list[dict[str, Any]]) -> list[Result]:
    """As with a device apart from the host: a thread works on what is in host memory, through staging buffers."""
    builder.HostLink = functools.partial(HostLink, apart=True)  # type: ignore[misc, assignment]
    try:
        return train_placed(model, configs)
    finally:
        builder.HostLink = HostLink  # type: ignore[misc]


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("stage", "place"),
    by_day(
        ((1, "optimizer"), (2, "ratio 0.3"), (3, "optimizer"), (3, "both"), (2, "disk"), (3, "all on disk")),
        *((2, "ratio 0.3"), (3, "both"), (2, "disk")),
    ),
)
def test_a_thread_of_the_host_changes_nothing(stage: int, place: str, precision: str) -> None:
    configs = [
        make_config(stage, accumulation=2, clip=0.5, precision=precision, zero_optimization=where)
        for where in ({}, PLACES[place])
    ]
    for rank, (resident, placed) in enumerate(run_ranks(2, train_apart, "unused_alternating", configs)):
        assert_identical(placed, resident, f"{place} on rank {rank} and resident")


# -- overflow ----------------------------------------------------------------------------------------------------

SMALL = Case("mlp", lambda: Gpt(3, Mlp, tied=True))
PLANTED = [False, True, False, False, True, True, False, False]  # by step: rank 1's loss is infinite times too large


Overflows = tuple[list[float], list[bool], list[float], dict[str, Any]]  # loss scales, steps skipped, losses, weights


def train_with_overflows(stage: int, places: list[dict[str, Any]], options: dict[str, Any]) -> list[Overflows]:
    """For each placement."""
    found = []
    for place in places:
        config = make_config(stage, **options, zero_optimization=place)
        engine = make_engine(SMALL, config)
        scales, skipped, losses = [], [], []
        for step, planted in enumerate(PLANTED):
            for micro in range(engine.gradient_accumulation_steps()):
                loss = SMALL.loss(engine, Place(dist.get_rank(), step, micro))
                losses.append(loss.item())
                bad = planted and micro == 0 and dist.get_rank() == 1 and engine.compute_dtype == torch.float16
                engine.backward(loss * (1e30 if bad else 1.0))
                engine.step()
            scales.append(engine.loss_scale)
            skipped.append(not engine.was_step_applied())
        found.append((scales, skipped, losses, engine.state_dict()))
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", by_day((1, 2, 3), 3))
def test_planted_overflows(stage: int) -> None:
    places = [{}, *(PLACES[name] for name in ("optimizer", "ratio 0.3", "disk")), *([PLACES["both"]] if stage == 3 else [])]
    for found in run_ranks(2, train_with_overflows, stage, places, {"clip": 1.0, "precision": "fp16", "accumulation": 2}):
        assert found[0][1] == PLANTED
        for other in found[1:]:
            assert_same(other, found[0])


def assert_same(one: Overflows, other: Overflows) -> None:
    assert one[:3] == other[:3]
    assert all(torch.equal(value, other[3][name]) for name, value in one[3].items())


def every_combination(stage: int, rows: list[dict[str, Any]]) -> list[list[Overflows]]:
    return [train_with_overflows(stage, [{}, PLACES["optimizer"]], row) for row in rows]


COMBINED: dict[str, tuple[Any, ...]] = {
    "accumulation": (1, 2),
    "clip": (0.0, 1.0),
    "optimizer": ("Adam", "AdamW", "Lion", "Adagrad", "SGD", "AdamSAGE", "Sophia"),
    "precision": ("bf16", "fp16"),
}


@pytest.mark.nightly  # by day: test_offloaded_equals_resident and test_planted_overflows
@pytest.mark.parametrize("strength", (1, 2, 4))
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_every_combination(stage: int, strength: int) -> None:
    """With planted overflows in fp16: the same bits with and without offload."""
    rows = covering(COMBINED, strength)
    for found in run_ranks(2, every_combination, stage, rows):
        for row, (resident, placed) in zip(rows, found, strict=True):
            assert resident[1] == (PLANTED if row["precision"] == "fp16" else [False] * len(PLANTED)), row
            assert_same(placed, resident)


# -- bytes -------------------------------------------------------------------------------------------------------


def ledgers(places: list[dict[str, Any]], stage: int, precision: str) -> list[dict[str, int]]:
    found = []
    for place in places:
        engine = make_engine(SMALL, make_config(stage, precision=precision, zero_optimization=place))
        engine.backward(SMALL.loss(engine, Place(dist.get_rank(), 0, 0)))
        engine.step()
        found.append(engine.memory_report())
        engine.destroy()
    return found


@pytest.mark.each_pair
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_device_bytes_fall_by_what_is_moved(world: int, stage: int, precision: str) -> None:
    """Moments, masters and reduced gradients are on the host instead, and parameter shards if they are to be."""
    places = [{}, PLACES["optimizer"], *([PLACES["both"]] if stage == 3 else [])]
    for found in run_ranks(world, ledgers, places, stage, precision):
        resident = found[0]
        assert not [kind for kind in resident if kind.startswith("host")]
        moments = resident["moments"]
        for place, ledger in zip(places[1:], found[1:], strict=True):
            assert ledger["moments"] == ledger["master"] == 0
            assert ledger["host moments"] == moments
            assert ledger["host gradients"] * 2 == moments  # Adam has two moments
            # In fp32 a weight is its own master only if both are on the same side.
            masters = ledger["host parameters"] if precision == "fp32" and "offload_param" in place else 0
            assert ledger["host master"] + masters == moments // 2
            if world > 1:  # one rank alone shares no slots unless it offloads
                assert ledger["gradients"] == (resident["gradients"] if stage == 1 else 0)
                moved = "offload_param" in place
                assert ledger["parameters"] + ledger.get("host parameters", 0) == resident["parameters"]
                assert (ledger["parameters"] < resident["parameters"] / 2) == moved
                assert ledger["slots"] == resident["slots"]


def test_one_rank_holds_slots_instead_of_the_model() -> None:
    """What fits on one device at stage 3 with everything in host memory: two units' parameters and one's gradients."""
    config = make_config(3, precision="bf16", zero_optimization=PLACES["both"])
    (ledger,) = run_ranks(1, lone_ledger, config)
    assert ledger["parameters"] < ledger["host parameters"]
    assert ledger["gradients"] == 0
    assert ledger["slots"] < 4 * ledger["host parameters"]


def lone_ledger(config: dict[str, Any]) -> dict[str, int]:
    engine = make_engine(Case("deep", lambda: Gpt(12, Mlp)), config)
    report = engine.memory_report()
    engine.destroy()
    return report


def test_ratio() -> None:
    """The last units go to the host, as many as the share says, to half of a unit."""

    def placed(numels: list[int], **how: Any) -> list[Placement]:
        given = {"optimizer": True, "params": False, "states_on_disk": False, "params_on_disk": False, **how}
        return place_units(numels, **given)

    assert [p.optimizer for p in placed([10, 30, 30, 30], ratio=0.3)] == [False, False, False, True]
    assert [p.optimizer for p in placed([10, 30, 30, 30], ratio=0.9)] == [False, True, True, True]
    for ratio, expected in ((0.0, False), (1.0, True)):
        assert placed([0, 5, 5], ratio=ratio, params=True) == [Placement(expected, params=True)] * 3
    assert placed([5, 5], optimizer=False, ratio=1.0) == [Placement()] * 2
    on_disk = placed([5, 5], ratio=0.5, states_on_disk=True)
    assert on_disk == [Placement(), Placement(optimizer=True, states_on_disk=True)]


def test_a_staging_buffer_is_waited_for_before_it_is_used_again() -> None:
    staging = Staging(64, pinned=False)
    waited: list[int] = []
    for number in range(5):
        index, buffer = staging.take(16, torch.float32)
        assert waited == list(range(max(number - 1, 0)))
        assert (index, buffer.numel()) == (number % 2, 16)
        staging.hold(index, functools.partial(waited.append, number))
    assert staging.bytes == 128


# -- access ------------------------------------------------------------------------------------------------------


def access(places: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    """For each placement: gradients, masters and moments as read, and as they are after both have been set."""
    found = []
    for place in places:
        engine = make_engine(SMALL, make_config(3, accumulation=2, zero_optimization=place))
        params = list(engine.module.parameters())
        values: list[Any] = []
        for micro in range(2):
            engine.backward(SMALL.loss(engine, Place(dist.get_rank(), 0, micro)))
            values += [zerorun.zero.safe_get_full_grad(param) for param in params]
            engine.step()
        for param in params:
            values.append(zerorun.zero.safe_get_full_fp32_param(param))
            values.append(zerorun.zero.safe_get_full_optimizer_state(param, "exp_avg"))
            zerorun.zero.safe_set_full_fp32_param(param, values[-2] * 2)
            zerorun.zero.safe_set_full_optimizer_state(param, values[-1] + 1, "exp_avg")
        with zerorun.zero.GatheredParameters(params[0], modifier_rank=0):
            params[0].data.add_(1.0)
        for micro in range(2):
            engine.backward(SMALL.loss(engine, Place(dist.get_rank(), 1, micro)))
            engine.step()
        values += engine.state_dict().values()
        engine.destroy()
        found.append(values)
    return found


def test_access_by_name() -> None:
    places = [PLACES[name] for name in ("optimizer", "both", "ratio 0.3", "disk", "all on disk")]
    for resident, *others in run_ranks(2, access, [{}, *places]):
        for other in others:
            assert len(other) == len(resident)
            assert all(torch.equal(a, b) for a, b in zip(other, resident, strict=True))


# -- checkpoints -------------------------------------------------------------------------------------------------


def cross(folder: str, places: dict[str, dict[str, Any]], pairs: list[tuple[str, str]]) -> dict[tuple[str, str], bool]:
    """Save under each placement, load by pairs: whether losses, masters and moments go on as where it was saved."""
    found, saved = {}, {}
    for name, place in places.items():
        engine = make_engine(SMALL, make_config(3, clip=1.0, zero_optimization=place))
        steps(engine, 0, BEFORE)
        engine.save_checkpoint(Path(folder) / name)
        saved[name] = steps(engine, BEFORE, BEFORE + AFTER), held(engine)
        engine.destroy()
    for source, name in pairs:
        losses, state = saved[source]
        torch.manual_seed(1000)  # other weights than those saved
        engine = make_engine(SMALL, make_config(3, clip=1.0, zero_optimization=places[name]))
        engine.load_checkpoint(Path(folder) / source)
        same = steps(engine, BEFORE, BEFORE + AFTER) == losses
        now = held(engine)
        found[source, name] = same and all(torch.equal(value, now[key]) for key, value in state.items())
        engine.destroy()
    return found


@pytest.mark.parametrize("loads", [1, pytest.param(6, marks=pytest.mark.nightly)])
def test_checkpoints_cross_over(loads: int, tmp_path: Path) -> None:
    """Each placement loads what ``loads`` of the placements have saved."""
    places = {"resident": {}, **{name: PLACES[name] for name in ("optimizer", "both", "params", "ratio 0.3", "disk")}}
    names = list(places)
    pairs = [(names[at - shift], name) for at, name in enumerate(names) for shift in range(1, 1 + loads)]
    for found in run_ranks(2, cross, str(tmp_path), places, pairs):
        assert set(found) == set(pairs)
        assert all(found.values()), [pair for pair, same in found.items() if not same]
