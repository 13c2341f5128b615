"""The last save of a program: no call comes after it, and nobody waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import patience, start_script

SCRIPT = """
import atexit, errno, os, sys, time, torch, zerorun

atexit.register(print, "other handlers run")
config = {{"train_micro_batch_size_per_gpu": 1, "optimizer": {{"type": "AdamW"}}}}
engine = zerorun.initialize(torch.nn.Linear(2048, 2048), config)  # 16 MiB: several buffers
write = os.pwrite

def slow(file, data, at):
    time.sleep(0.3)
    return write(file, data, at)

os.pwrite = slow

def full(point):
    raise OSError(errno.ENOSPC, "No space left on device")

if {full}:
    engine.checkpointer.check_point = full
engine.save_checkpoint({folder!r}, asynchronous=True)
print("end of the script")
"""


@pytest.mark.parametrize("full", [False, True])
def test_a_failure_that_nobody_heard_of_is_the_exit_code(tmp_path: Path, full: bool) -> None:
    script = SCRIPT.format(full=full, folder=str(tmp_path / "checkpoints"))
    code, out, errors = start_script(script).finish(120 * patience())
    assert "end of the script" in out
    assert "other handlers run" in out
    assert code == (1 if full else 0), errors
    assert ("No space left" in errors) == full
    assert (tmp_path / "checkpoints" / "latest").exists() != full
