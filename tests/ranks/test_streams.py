"""Iterable datasets and loaders as ``training_data``: what ranks read, and that they train as one process does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from training import make_config, shared_topology

import zerorun
from zerorun.errors import ConfigError, ModelError

SAMPLES, BATCH = 24, 3


class Vectors(IterableDataset[torch.Tensor]):
    """The same samples in the same order, whoever reads them."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        return (torch.randn(5, generator=generator) for _ in range(SAMPLES + 1))


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))


def loss_of(engine: Any, batch: torch.Tensor) -> torch.Tensor:
    return (engine(batch) - batch).square().mean()


def settings(**changes: Any) -> dict[str, Any]:
    config = make_config(2, **changes) | {"train_micro_batch_size_per_gpu": BATCH}
    return config | {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}


def trained_in_torch(ranks: int) -> dict[str, torch.Tensor]:
    found = model()
    optimizer = torch.optim.SGD(found.parameters(), lr=0.1, momentum=0.9)
    for batch in DataLoader(Vectors(), BATCH * ranks, drop_last=True):
        loss_of(found, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found.state_dict()


def trained(workers: int, folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """One epoch. After the second step another engine goes on from a checkpoint."""
    config = settings(dataloader={"num_workers": workers})
    engine = zerorun.initialize(model(), config, training_data=Vectors(), topology=shared_topology())
    batches = iter(engine.dataloader)
    for _ in range(2):
        engine.backward(loss_of(engine, next(batches)))
        engine.step()
    engine.save_checkpoint(folder)
    del batches
    engine.destroy()
    engine = zerorun.initialize(model(), config, training_data=Vectors(), topology=shared_topology())
    engine.load_checkpoint(folder)
    for batch in engine.dataloader:
        engine.backward(loss_of(engine, batch))
        engine.step()
    weights, samples = engine.state_dict(), engine.global_samples
    engine.destroy()
    return samples, weights


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_train_on_a_stream_as_one_process_does(workers: int, tmp_path: Path) -> None:
    wanted = trained_in_torch(2)
    for samples, weights in run_ranks(2, trained, workers, tmp_path):
        assert samples == SAMPLES
        for name, weight in wanted.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)


def read_with(config: dict[str, Any]) -> list[float]:
    data: Any = Vectors()
    engine = zerorun.initialize(model(), settings(**config), training_data=data, topology=shared_topology())
    found = [row[0].item() for batch in engine.dataloader for row in batch]
    assert [row[0].item() for batch in engine.deepspeed_io(data) for row in batch] == found
    engine.destroy()
    return found


def test_the_file_says_that_a_stream_divides_itself() -> None:
    first, second = run_ranks(2, read_with, {"dataloader": {"divide_stream": False}})
    assert first == second and len(first) == SAMPLES + 1
    first, second = run_ranks(2, read_with, {})
    assert len(first) == len(second) == SAMPLES // 2 and not set(first) & set(second)


def read_from_hugging_face() -> list[list[list[int]]]:
    """Batches of the same stream as it is, and after it has been told to divide itself."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    whole = datasets.Dataset.from_dict({"x": list(range(12))}).to_iterable_dataset().with_format("torch")
    found = []
    for data in (whole, split_dataset_by_node(whole, dist.get_rank(), 2)):
        engine = zerorun.initialize(model(), settings(), training_data=data, topology=shared_topology())
        assert engine.dataloader.is_state_of_rank == (data is not whole)
        found.append([batch["x"].tolist() for batch in engine.dataloader])
        engine.destroy()
    return found


def test_streams_of_hugging_face() -> None:
    pytest.importorskip("datasets")
    assert run_ranks(2, read_from_hugging_face) == [[[[0, 2, 4], [6, 8, 10]]] * 2, [[[1, 3, 5], [7, 9, 11]]] * 2]


def read_a_datapipe(filters: bool) -> list[int]:
    from torch.utils.data.datapipes.iter import IterableWrapper

    data = IterableWrapper(range(12)).shuffle()
    data = data.sharding_filter() if filters else data
    engine = zerorun.initialize(model(), settings(), training_data=data, topology=shared_topology())
    torch.manual_seed(dist.get_rank() if filters else 0)  # where there is a filter, torch sees to one seed for all ranks
    found = [number for batch in engine.dataloader for number in batch.tolist()]
    engine.destroy()
    return found


@pytest.mark.parametrize("filters", [False, True])
def test_a_datapipe_is_divided_once(filters: bool) -> None:
    first, second = run_ranks(2, read_a_datapipe, filters)
    assert len(first) == len(second) == 6
    assert sorted(first + second) == list(range(12))


# -- loaders with a state ----------------------------------------------------------------------------------------


def loaders() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def initialize(size: int | None, keys: dict[str, Any], **options: Any) -> zerorun.Engine:
        loader = StatefulDataLoader(list(range(12)), batch_size=size)
        return zerorun.initialize(model(), settings(**keys), training_data=loader, topology=shared_topology(), **options)

    with pytest.raises(ModelError, match=r"collate_fn= is of no use.* StatefulDataLoader"):
        initialize(BATCH, {}, collate_fn=torch.stack)
    with pytest.raises(ConfigError, match=r"train_micro_batch_size_per_gpu = 3: the loader .* batches of 2.*Set it to 2"):
        initialize(2, {})
    initialize(None, {}).destroy()  # whose samples are batches
    engine = initialize(BATCH, {"dataloader_drop_last": True, "dataloader": {"shuffle": False}})
    notes = {note.key for note in engine.config.notes if "training_data is a loader" in note.reason}
    assert notes == {"dataloader_drop_last", "dataloader.shuffle"}
    engine.destroy()
    keys = {"dataloader": {"divide_stream": True, "num_workers": 1}}
    engine = zerorun.initialize(model(), settings(**keys), training_data=list(range(12)), topology=shared_topology())
    assert [note.key for note in engine.config.notes if "no IterableDataset" in note.reason] == ["dataloader.divide_stream"]
    assert len(list(engine.dataloader)) == 12 // BATCH // dist.get_world_size()
    engine.destroy()


def test_settings_of_a_loader_are_not_ignored() -> None:
    run_ranks(2, loaders)
