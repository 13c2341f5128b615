"""Sequences that ranks divide, in the words of DeepSpeed's Ulysses (ALST): its documented loop, mpu and mesh_param."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from contexts import build
from harness import run_ranks
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader, default_collate
from transformers import BatchEncoding

import zerorun.deepspeed.entry as deepspeed
from zerorun.deepspeed import sequence_ranks
from zerorun.deepspeed.sequence_ranks import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from zerorun.errors import ZerorunError

LENGTH, RANKS = 9, 2


def sentences(rank: int) -> list[dict[str, torch.Tensor]]:
    """Three of this rank, the last one longer; of some tokens nobody asks for the next one."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for length in (LENGTH, LENGTH, LENGTH + rank + 1):
        ids = torch.randint(1, 61, (length,), generator=generator)
        labels = torch.where(torch.arange(length) < 4, -100, ids)
        found.append({"input_ids": ids, "labels": labels, "position_ids": torch.arange(length)})
    return found


def collated(rows: list[dict[str, torch.Tensor]]) -> BatchEncoding:
    """As a collator of transformers makes it: no dict."""
    return BatchEncoding(default_collate(rows))


def config(stage: int, **more: Any) -> dict[str, Any]:
    more |= {"gradient_clipping": 0.5, "zero_optimization": {"stage": stage}}
    return {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **more}


def documented(stage: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model = build("llama, 8 heads")
    own = model.config._attn_implementation
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=own,
        sequence_parallel_size=RANKS,
        micro_batch_size=1,
        seq_length_is_variable=True,
    )
    engine, *_ = deepspeed.initialize(model=model, config=config(stage), mpu=mpu)
    group, size = mpu.get_sequence_parallel_group(), mpu.get_sequence_parallel_world_size()
    data: Any = DataLoader(sentences(dist.get_rank()), batch_size=1, collate_fn=collated)  # type: ignore[arg-type]
    rank = mpu.get_sequence_parallel_rank()
    batches = UlyssesSPDataLoaderAdapter(data, sp_rank=rank, sp_group=group, sp_world_size=size, device=engine.device)
    assert len(batches) == 3 * RANKS and batches.batch_size == 1
    losses, norms = [], []
    for batch in batches:
        shift_labels = batch.pop("shift_labels")
        logits = engine(**batch).logits
        loss = engine.module.loss_function(
            logits=logits, labels=None, shift_labels=shift_labels, vocab_size=engine.module.config.vocab_size
        )
        per_rank = all_gather(loss, group=group)
        good = all_gather((shift_labels != -100).sum(), group=group)
        loss = sum(per_rank[place] * good[place] for place in range(size)) / sum(good)  # type: ignore[assignment]
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(float(engine.get_global_grad_norm()))
    assert len(list(batches)) == 3 * RANKS  # it begins anew
    weights: dict[str, torch.Tensor] = engine.state_dict()
    engine.destroy()
    return losses, norms, weights


@pytest.mark.parametrize("stage", (0, 1, pytest.param(2, marks=pytest.mark.nightly), 3))
def test_the_documented_loop(stage: int) -> None:
    """DeepSpeed #5248, #5555, #7833: its gradients were twice as large at stages 1 and 2, and stage 0 did not run."""
    model = build("llama, 8 heads")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for turn in zip(*map(sentences, range(RANKS)), strict=True):
        for batch in turn:
            loss = model(**{name: value[None] for name, value in batch.items()}).loss
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    for found in run_ranks(RANKS, documented, stage):
        assert found[0] == pytest.approx(losses, abs=2e-6)
        assert found[1] == pytest.approx(norms, rel=1e-5)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[2][name], value, rtol=1e-5, atol=2e-6)


def said(**arguments: Any) -> str:
    try:
        engine, *_ = deepspeed.initialize(model=build("llama"), **arguments)
    except ZerorunError as error:
        return f"{type(error).__name__} {error}"
    found = f"{engine.topology.context} of {engine.topology.world_size}"
    engine.destroy()
    return found


def asked() -> list[str]:
    before = "nothing"
    try:
        sequence_ranks.get_sequence_parallel_rank()
    except ZerorunError as error:
        before = str(error)
    try:
        UlyssesSPAttentionHF.register_with_transformers(build("llama"), "flash_attention_2", RANKS)
    except ZerorunError as error:
        before += str(error)
    return [
        before,
        said(config=config(1), mesh_param=(1, RANKS)),
        said(config=config(1, sequence_parallel_size=RANKS), mesh_param=(1, RANKS)),
        said(config=config(1, sequence_parallel_size=1), mesh_param=(RANKS, 1)),
        said(config=config(1), mesh_param=RANKS),
        said(config=config(1, sequence_parallel_size=RANKS), mesh_param=(1, 3)),
    ]


def test_what_scripts_say_of_ranks() -> None:
    before, alone, both, one, number, other = run_ranks(RANKS, asked)[0]
    assert "no ranks divide sequences yet" in before and "'flash_attention_2'" in before
    assert alone == both == "2 of 2" and one == "1 of 2"
    assert number.startswith("ConfigError") and "mesh_param" in number and "Pass (4, 2)" in number
    assert other.startswith("ConfigError") and "Name one size in both places" in other
