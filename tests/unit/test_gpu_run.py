"""tests/gpu/run.sh without a GPU: what each part starts, and what it says of one that fails. A stub stands for Python."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEFT_OUT = ROOT / "tests" / "gpu" / "not_on_a_gpu.txt"
STUB = """#!/bin/sh
echo "$ZERORUN_TEST_DEVICE|$NCCL_MULTI_RANK_GPU_ENABLE|$TORCH_CUDA_SANITIZER|$*" >>{calls}
case "$*" in *{bad}*) exit 3;; esac
"""


def started(folder: Path, *parts: str, bad: str = "nothing of this") -> tuple[int, str, list[str]]:
    """(exit code, output, command lines) of run.sh. Whatever has ``bad`` in it fails."""
    calls, stub = folder / "calls", folder / "python"
    stub.write_text(STUB.format(calls=calls, bad=bad.replace(" ", "\\ ")))
    stub.chmod(0o755)
    command = ["bash", str(ROOT / "tests" / "gpu" / "run.sh"), "--results", str(folder / "out"), *parts]
    done = subprocess.run(command, env={**os.environ, "PYTHON": str(stub)}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines()


def test_every_part_is_started_and_what_it_names_is_there(tmp_path: Path) -> None:
    code, _, calls = started(tmp_path)
    assert code == 0
    (ranks,) = [call for call in calls if "tests/ranks" in call]
    assert ranks.startswith("cuda:0|||") and ranks.count("--deselect") == len(left_out())
    assert any(call.startswith("|1||") and "every_stage" in call for call in calls)
    assert any(call.startswith("||1|") and "late_copies" in call for call in calls)
    for path in {path for call in calls for path in re.findall(r"(?:tests|bin)/[\w/.-]+", call)}:
        assert (ROOT / path).exists(), path


def test_the_others_run_though_one_fails(tmp_path: Path) -> None:
    code, said, calls = started(tmp_path, "benchmark", "profile", bad="tests/perf/gpu.py")
    assert code == 1 and "FAILED: benchmark" in said
    assert any("gpu_profile.py" in call for call in calls)


def left_out() -> list[str]:
    return [line for line in LEFT_OUT.read_text().splitlines() if line.startswith("tests/")]


def test_what_is_left_out_on_a_gpu_is_there() -> None:
    for name in left_out():
        file, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text() if function else (ROOT / file).exists(), name
