"""The calls by which scripts made for DeepSpeed begin."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

import zerorun

CALLS = ("'gloo'", "dist_backend='gloo'", "'nccl', auto_mpi_discovery=False, verbose=False", "'cpu'", "")


def test_a_script_may_have_its_own_local_rank() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=7)
    found = zerorun.add_config_arguments(parser).parse_args(["--deepspeed_config", "ds.json", "--deepspeed"])
    assert (found.local_rank, found.config) == (7, "ds.json")
    plain = zerorun.add_config_arguments(argparse.ArgumentParser()).parse_args(["--local_rank=1"])
    assert plain.local_rank == 1


@pytest.mark.parametrize("arguments", CALLS)
def test_a_backend_may_be_named(arguments: str) -> None:
    code = f"import zerorun, torch.distributed as d; zerorun.init_distributed({arguments}); print(d.get_world_size())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == "1", found.stderr
