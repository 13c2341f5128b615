"""The calls by which scripts made for DeepSpeed begin."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from covering import by_day
from harness import patience, start_script

import zerorun
from zerorun.model_setup.checked_arguments import take_in

CALLS = ("'gloo'", "dist_backend='gloo'", "'nccl', auto_mpi_discovery=False, verbose=False", "'cpu'", "")


def test_a_script_may_have_its_own_local_rank() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=7)
    found = zerorun.add_config_arguments(parser).parse_args(["--deepspeed_config", "ds.json", "--deepspeed"])
    assert (found.local_rank, found.config) == (7, "ds.json")
    plain = zerorun.add_config_arguments(argparse.ArgumentParser()).parse_args(["--local_rank=1"])
    assert plain.local_rank == 1


def test_the_local_rank_is_that_of_the_launcher_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """By it scripts made for DeepSpeed choose whether they are one of several processes."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for told, found in ((None, -1), ("2", 2)):
        if told is not None:
            monkeypatch.setenv("LOCAL_RANK", told)
        assert zerorun.add_config_arguments(argparse.ArgumentParser()).parse_args([]).local_rank == found


def test_scripts_made_for_deepspeed_find_their_arguments() -> None:
    def parsed(*line: str, **own: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        for name, default in own.items():
            parser.add_argument(f"--{name}", default=default)
        return zerorun.add_config_arguments(parser).parse_args(line)

    for option in ("--config", "--zerorun_config", "--deepspeed_config"):
        found = parsed(option, "ds.json")
        assert (found.deepspeed_config, found.config, found.deepspeed) == ("ds.json", "ds.json", False)
    found = parsed("--deepspeed")
    assert (found.deepspeed_config, found.config, found.deepspeed) == (None, None, True)
    found = parsed("--deepspeed_config", "ds.json", config="model.yaml")  # of something else
    assert (found.deepspeed_config, found.config) == ("ds.json", "model.yaml")
    assert parsed("--deepspeed_config", "a.json", deepspeed_config="b.json").deepspeed_config == "a.json"
    assert parsed("--config", "a.json", deepspeed_config="b.json").config == "a.json"
    assert parsed(deepspeed="yes").deepspeed == "yes"


def test_initialize_takes_the_arguments_of_deepspeeds_scripts(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 3}')
    parser = zerorun.add_config_arguments(argparse.ArgumentParser())
    own = argparse.Namespace(deepspeed_config=str(path), config="model.yaml")
    for args in (parser.parse_args(["--deepspeed_config", str(path)]), own):
        config, _ = take_in(torch.nn.Linear(2, 2), None, args, None, None, 1)
        assert config.train_batch_size == 3


@pytest.mark.parametrize("arguments", by_day(CALLS, *CALLS[1:3]))
def test_a_backend_may_be_named(arguments: str) -> None:
    code = f"import zerorun, torch.distributed as d; zerorun.init_distributed({arguments}); print(d.get_world_size())"
    status, found, errors = start_script(code).finish(120 * patience())
    assert (status, found.strip()) == (0, "1"), errors
