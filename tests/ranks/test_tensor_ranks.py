"""tp_model_init, autotp_size, an mpu and groups, in the words of DeepSpeed: equal to one process, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from mixtures import make
from torch import nn

import zerorun.deepspeed.entry as deepspeed
from zerorun.deepspeed import groups
from zerorun.deepspeed.tensor_ranks import tp_model_init
from zerorun.errors import ConfigError, ZerorunError

STEPS = 3


class Flat(nn.Module):
    """No list of blocks: layers that lie side by side in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down, self.head = (
            nn.Embedding(11, 6),
            nn.Linear(6, 16),
            nn.Linear(16, 8),
            nn.Linear(8, 11),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(nn.functional.gelu(self.up(self.words(ids)))))  # type: ignore[no-any-return]


def made() -> Flat:
    torch.manual_seed(3)
    return Flat()


def batch(step: int, group: int) -> torch.Tensor:
    return torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(10 * step + group))


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def config(**more: Any) -> dict[str, Any]:
    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": adam, "gradient_clipping": 0.5, **more}


class Mpu:
    """What Megatron's mpu says of two tensor ranks: ``ranks`` are in the group of this rank."""

    def __init__(self, ranks: dict[int, tuple[int, ...]]) -> None:
        groups = {members: dist.new_group(members) for members in sorted(set(ranks.values()))}
        self._group = groups[ranks[dist.get_rank()]]

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._group)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._group


def train(stage: int, asked: str) -> dict[str, torch.Tensor]:
    model, more, mpu = made(), {"zero_optimization": {"stage": stage}}, None
    if asked == "mpu of one":
        for param in model.parameters():
            param.model_parallel = param.tensor_model_parallel = True  # type: ignore[attr-defined]
        mpu = Mpu({0: (0,), 1: (1,)})
    elif asked == "tp_model_init":
        model = tp_model_init(model, tp_size=2, dtype=torch.float32)
    else:
        more["tensor_parallel"] = {"autotp_size": 2}
    if asked == "mpu":
        mpu = Mpu({0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)})
    engine, *_ = deepspeed.initialize(model=model, config=config(**more), mpu=mpu)
    size = 1 if asked == "mpu of one" else 2
    assert engine.module.up.weight.shape[0] in (0, 16 // size) or stage == 3
    for step in range(STEPS):
        ids = batch(step, dist.get_rank() // size)
        engine.backward(loss_of(engine(ids), ids))
        engine.step()
    weights: dict[str, torch.Tensor] = engine.state_dict()
    engine.destroy()
    return weights


@pytest.mark.parametrize(
    ("stage", "asked"), ((1, "tp_model_init"), (3, "mpu"), (2, "autotp_size"), (2, "mpu of one"), (3, "mpu of one"))
)
def test_a_model_without_blocks_is_divided(stage: int, asked: str) -> None:
    """Or is not, by an mpu of one rank for each layer, whose parameters Megatron marks as those of parts none the less."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(STEPS):
        losses = [loss_of(model(batch(step, group)), batch(step, group)) for group in (0, 1)]
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(2 if asked == "mpu of one" else 4, train, stage, asked):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


class DataMpu(Mpu):
    """It tells data-parallel ranks from tensor ranks."""

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size() // self.get_model_parallel_world_size()


def batches_of_steps() -> list[tuple[int, int]]:
    """(samples of a step, micro-batches of a step) of configurations with a train_batch_size, as DeepSpeed counts it."""
    raw, found = {"train_batch_size": 16, "tensor_parallel": {"autotp_size": 2}}, []
    neighbours = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    for mpu in (None, Mpu(neighbours), DataMpu(neighbours)):
        engine, *_ = deepspeed.initialize(model=made(), config=config(**raw), mpu=mpu)
        found.append((engine.train_batch_size(), engine.gradient_accumulation_steps()))
        engine.destroy()
    wished = tp_model_init(made(), tp_size=2, dtype=torch.float32)
    for source in (deepspeed.parse_config(config(**raw)), config(train_batch_size=16)):
        engine, *_ = deepspeed.initialize(model=wished, config=source)
        found.append((engine.train_batch_size(), engine.gradient_accumulation_steps()))
        engine.destroy()
    with pytest.raises(ConfigError, match=r"train_batch_size = 15: as in DeepSpeed it counts .* the 2 tensor ranks"):
        deepspeed.initialize(model=made(), config=config(**{**raw, "train_batch_size": 15}))
    return found


def test_the_batch_of_a_step_counts_tensor_ranks_as_deepspeed_does() -> None:
    for found in run_ranks(4, batches_of_steps):
        assert found == [(8, 2), (8, 2), (16, 4), (8, 2), (8, 2)]


def refusals() -> list[str]:
    halves = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    marked, asked = made(), tp_model_init(made(), 2, torch.float32)
    marked.up.weight.tensor_model_parallel = True  # type: ignore[assignment]
    apart = Mpu(halves)
    cases: list[tuple[nn.Module, dict[str, Any], Any]] = [
        (made(), {}, apart),
        (made(), {"tensor_parallel": {"autotp_size": 2}}, apart),
        (marked, {"tensor_parallel": {"autotp_size": 2}}, Mpu({0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)})),
        (marked, {}, object()),
        (asked, {"tensor_parallel": {"autotp_size": 4}}, None),
        (asked, {"bf16": {"enabled": True}}, None),
    ]
    said = []
    for model, more, mpu in cases:
        try:
            deepspeed.initialize(model=model, config=config(**more), mpu=mpu)
        except ZerorunError as error:
            said.append(f"{type(error).__name__} {error}")
    return said


def test_what_differs_is_refused() -> None:
    """Parts that are not zerorun's, ranks that are no neighbours, two sizes, two dtypes."""
    whole, neighbours, marked, untold, size, dtype = run_ranks(4, refusals)[0]
    for text in (whole, marked, untold):
        assert text.startswith("TopologyError") and "Remedy: pass the whole model" in text
    assert "divides them over neighbours, here [0, 1]" in neighbours
    assert "tp_size=2" in size and size.startswith("ConfigError")
    assert "dtype=torch.float32" in dtype and "Pass dtype=torch.bfloat16" in dtype


def of_experts() -> list[Any]:
    before = groups.get_expert_parallel_world_size(), groups.get_expert_data_parallel_world_size()
    spread = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
    engine, *_ = deepspeed.initialize(model=make("mixtral"), config=config(**spread))
    members = [
        dist.get_process_group_ranks(group)  # type: ignore[arg-type]
        for group in (groups.get_expert_parallel_group("ep_size_2"), groups.get_expert_data_parallel_group())
    ]
    places = groups.get_expert_parallel_rank(), groups.get_expert_data_parallel_rank(groups.get_expert_size_name())
    try:
        groups.get_expert_parallel_group("ep_size_8")
    except ZerorunError as error:
        other = str(error)
    engine.destroy()
    return [before, members, places, other]


def test_groups_of_experts() -> None:
    for rank, (before, members, places, other) in enumerate(run_ranks(4, of_experts)):
        assert before == (1, 4)
        assert members == [[rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]]
        assert places == (rank % 2, rank // 2)
        assert "ep_size_8" in other and "Remedy: pass 'ep_size_2'" in other
