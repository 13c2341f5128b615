"""tests/perf/gpu.py on the CPU: the code that one call on a GPU runs, with models of a few thousand parameters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness import patience

SCRIPT = Path(__file__).parents[1] / "perf" / "gpu.py"


@pytest.mark.nightly
def test_it_measures_everything(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--peers", "fsdp2", "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240 * patience())
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())["found"]
    assert "without a result" not in done.stdout
    assert found["optimizer"]["found"]["single pass"]["gb_s"] > 0
    assert all(found["runtime"]["found"][f"zerorun-{stage}"]["rho"] > 0 for stage in range(4))
    for row in found["offload"]["found"].values():
        assert row["of_bound"] > 0 and row["of_resident"] > 0
        assert row["bound"]["bound_s"] == pytest.approx(max(row["bound"].values()))
    assert found["7B"]["zerorun-3+ckpt"]["found"]["zerorun-3+ckpt"]["mfu_matmul"] > 0
    for row in found["largest"].values():  # 2 layers are what the limit lets through
        assert row["layers"] == 2 and [entry["layers"] for entry in row["tries"]] == [3, 1, 2]


@pytest.mark.nightly
def test_time_runs_out(tmp_path: Path) -> None:
    """What is not measured says why."""
    result = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--peers", "--limit", "0", "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 * patience())
    assert done.returncode == 0, done.stderr
    assert json.loads(result.read_text())["found"]["machine"] == {"error": "no time left"}
    assert "without a result: runtime: no time left" in done.stdout
