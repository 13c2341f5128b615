"""The monitors' own libraries: tensorboard is read back, wandb runs offline, comet_ml has a stand-in."""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from zerorun.config.parse import load_config
from zerorun.deepspeed.name_table import target_of
from zerorun.errors import ConfigError
from zerorun.monitors.monitor import Monitor

EVENTS: list[tuple[str, Any, int]] = [
    ("Train/Samples/train_loss", 2.5, 8),
    ("Train/Samples/lr", torch.tensor(1e-3, dtype=torch.float64), 8),
    ("Train/Samples/train_loss", 2.25, 16),
    ("my own", math.nan, 16),
]
NEEDS = {name: pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}") for name in ("tensorboard", "wandb")}


def monitor(**sections: Any) -> Monitor:
    return Monitor(load_config({name: {"enabled": True, **section} for name, section in sections.items()}))


def test_files_of_commas(tmp_path: Path) -> None:
    section = {"output_path": str(tmp_path), "job_name": "job"}
    for part in (EVENTS[:2], EVENTS[2:]):  # the second run continues the files of the first
        made = monitor(csv_monitor=section)
        assert made.enabled
        made.write_events(part)
        made.close()
    files = {path.name: path.read_text() for path in (tmp_path / "job").iterdir()}
    assert files == {
        "Train_Samples_train_loss.csv": "step,train_loss\n8,2.5\n16,2.25\n",
        "Train_Samples_lr.csv": "step,lr\n8,0.001\n",
        "my_own.csv": "step,my own\n16,nan\n",
    }


def test_a_monitor_that_fails_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on, and so do the other monitors."""
    stand_in = StandIn("comet_ml")
    monkeypatch.setitem(sys.modules, "comet_ml", stand_in)
    made = monitor(csv_monitor={"output_path": str(tmp_path), "job_name": "job"}, comet={"samples_log_interval": 1})
    with caplog.at_level("WARNING", "zerorun"):
        for samples in (8, 16, 24):
            made.write_events([("loss", 2.5, samples)])
            if samples == 8:
                shutil.rmtree(tmp_path / "job")
        made.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "csv_monitor" in line and "FileNotFoundError" in line and "Remedy" in line
    assert [call for call in stand_in.calls if call[0] in ("loss", "end")] == [
        *(("loss", (2.5, samples)) for samples in (8, 16, 24)), ("end", ()),
    ]  # fmt: skip


def test_a_monitor_that_cannot_be_closed_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in = StandIn("wandb")
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    made = monitor(wandb={})
    monkeypatch.setattr(made._writers["wandb"], "close", lambda: 1 / 0)
    with caplog.at_level("WARNING", "zerorun"):
        made.close()
    assert "wandb" in caplog.text and "ZeroDivisionError" in caplog.text


def test_single_monitors_by_deepspeeds_names(tmp_path: Path) -> None:
    config = load_config({"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}})
    assert Monitor(config.monitor_config).enabled
    made = target_of("deepspeed.monitor.csv_monitor", "csvMonitor")(config.monitor_config.csv_monitor)
    assert made.enabled and made.output_path == str(tmp_path) and made.job_name == "job" and not hasattr(made, "team")
    made.write_events(EVENTS[:1])
    made.close()
    assert (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text() == "step,train_loss\n8,2.5\n"
    for module, name, key in (
        ("tensorboard", "TensorBoardMonitor", "tensorboard"),
        ("wandb", "WandbMonitor", "wandb"),
        ("comet", "CometMonitor", "comet"),
    ):
        section = getattr(target_of("deepspeed.monitor.config", "DeepSpeedMonitorConfig")(), key)
        made = target_of(f"deepspeed.monitor.{module}", name)(section)
        assert not made.enabled and all(getattr(made, field) == value for field, value in section)
        made.write_events(EVENTS)


@NEEDS["tensorboard"]
def test_tensorboard_is_read_back(tmp_path: Path) -> None:
    made = monitor(tensorboard={"output_path": str(tmp_path), "job_name": "job"})
    made.write_events(EVENTS[:3])
    made.close()
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "job")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("Train/Samples/train_loss")] == [(8, 2.5), (16, 2.25)]
    assert [(e.step, e.value) for e in events.Scalars("Train/Samples/lr")] == [(8, pytest.approx(1e-3))]


# Writes, and prints the records of the file: it has a header, and for each record its checksum, length and kind.
WANDB = """
import json, pathlib, struct
from zerorun.config.parse import load_config
from zerorun.monitors.monitor import Monitor
made = Monitor(load_config({"wandb": {"enabled": True, "project": "p", "group": "g", "team": "t"}}))
made.write_events([("loss", 2.5, 8), ("lr", 1e-3, 8), ("loss", 2.25, 16)])
made.close()
from wandb.proto.wandb_internal_pb2 import Record
(path,) = pathlib.Path().rglob("*.wandb")
data, at = path.read_bytes(), 7
while at < len(data):
    length, whole = struct.unpack_from("<HB", data, at + 4)
    record, at = Record.FromString(data[at + 7 : at + 7 + length]), at + 7 + length
    if record.HasField("run"):
        print(json.dumps([record.run.project, record.run.run_group, record.run.entity]))
    if record.HasField("history"):
        items = {(item.nested_key or [item.key])[0]: json.loads(item.value_json) for item in record.history.item}
        print(json.dumps({name: items[name] for name in ("_step", "loss", "lr") if name in items}))
"""


@NEEDS["wandb"]
@pytest.mark.nightly  # wandb starts processes of its own
def test_wandb_offline(tmp_path: Path) -> None:
    own = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", WANDB]
    found = subprocess.run(command, cwd=tmp_path, env={**os.environ, **own}, check=True, capture_output=True, timeout=300)
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert lines[0] == ["p", "g", "t"]
    assert lines[-2:] == [{"_step": 8, "loss": 2.5, "lr": 1e-3}, {"_step": 16, "loss": 2.25}]


class StandIn(ModuleType):
    """Writes down what is called on wandb or comet_ml, and on what they give."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, Any]] = []
        self.run: Any = None

    def _noted(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, kwargs or args))

    def begin(self, **settings: Any) -> SimpleNamespace:
        self.calls.append(("begin", settings))
        return SimpleNamespace(
            **{name: self._noted(name) for name in ("log", "finish", "set_name", "end")}, log_metric=self.metric
        )

    def metric(self, name: str, value: float, step: int) -> None:
        self.calls.append((name, (value, step)))

    init = start = begin


def test_wandb_groups_what_belongs_to_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn("wandb")
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    made = monitor(wandb={"group": "g"})
    made.write_events(EVENTS[:3])
    made.close()
    assert [name for name, _ in stand_in.calls] == ["begin", "log", "log", "finish"]
    assert stand_in.calls[0][1] == {"project": "deepspeed", "group": "g", "entity": None}
    stand_in.run = object()  # the program has begun a run: it is not ended
    made = monitor(wandb={})
    made.close()
    assert [name for name, _ in stand_in.calls[4:]] == ["begin"]


def test_comet_is_told_every_so_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn("comet_ml")
    monkeypatch.setitem(sys.modules, "comet_ml", stand_in)
    settings = {"project": "p", "workspace": "w", "api_key": "k", "experiment_key": "e", "mode": "create", "online": False}
    made = monitor(comet={**settings, "samples_log_interval": 16, "experiment_name": "n"})
    for samples in range(8, 48, 8):
        made.write_events([("loss", samples, samples)])
    made.close()
    assert stand_in.calls == [
        ("begin", settings), ("set_name", ("n",)),
        *(("loss", (float(samples), samples)) for samples in (8, 24, 40)), ("end", ()),
    ]  # fmt: skip


def test_a_library_that_refuses_is_an_error_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn("comet_ml")
    monkeypatch.setattr(stand_in, "start", lambda **settings: 1 / 0, raising=False)
    monkeypatch.setitem(sys.modules, "comet_ml", stand_in)
    with pytest.raises(ConfigError, match=r"comet\.enabled = true: it cannot begin: ZeroDivisionError.*Remedy"):
        monitor(comet={})


def test_only_rank_0_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # another test of this process may be rank 0
    made = monitor(csv_monitor={"output_path": str(tmp_path)})
    made.write_events(EVENTS)
    assert made.enabled
    assert not list(tmp_path.iterdir())


def test_what_is_off_writes_nothing() -> None:
    made = monitor()
    made.write_events(EVENTS)
    assert not made.enabled
    assert target_of("deepspeed.monitor.monitor", "MonitorMaster") is Monitor
