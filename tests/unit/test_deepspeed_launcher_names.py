"""What scripts that start jobs take from ``deepspeed.launcher.runner``, and what others import and seldom use."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from zerorun.deepspeed import helpers, launcher_names
from zerorun.deepspeed.launcher_names import fetch_hostfile, parse_inclusion_exclusion
from zerorun.deepspeed.refused import CurriculumScheduler
from zerorun.errors import ConfigError, LaunchError


def test_hosts_and_their_slots(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("b slots=2\na slots=4 # the second\n")
    pool = fetch_hostfile(str(path))
    assert pool is not None and list(pool.items()) == [("b", 2), ("a", 4)]
    assert parse_inclusion_exclusion(pool, "", "") == {"b": [0, 1], "a": [0, 1, 2, 3]}
    assert parse_inclusion_exclusion(pool, "a:1,3", "") == {"a": [1, 3]}
    assert parse_inclusion_exclusion(pool, "", "b@a:0") == {"a": [1, 2, 3]}
    with pytest.raises(LaunchError, match="no host 'c'"):
        parse_inclusion_exclusion(pool, "c", "")


def test_where_there_is_no_hostfile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert fetch_hostfile(str(tmp_path / "none")) is None and "there is no hostfile" in caplog.text


def test_a_host_whose_slots_nobody_says(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\n")
    with pytest.raises(LaunchError, match=r"the slots of 'a' are not known\. Remedy"):
        fetch_hostfile(str(tmp_path / "hosts"))


def test_variables_that_a_script_adds_go_to_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As gpt-neox adds one, before it calls the launcher. They are beginnings of names, as in DeepSpeed."""
    (tmp_path / "hosts").write_text("h1 slots=1\nh2 slots=1\n")
    (tmp_path / "x.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OURS_A", "1")
    monkeypatch.setenv("OTHERS", "2")
    words = ["--hostfile=hosts", "--master_addr=h1", "--dry-run=json", "x.py"]
    found = []
    for _ in range(2):
        launcher_names.main(words)
        found.append({**json.loads(capsys.readouterr().out)["exports"]})
        monkeypatch.setattr(launcher_names, "EXPORT_ENVS", [*launcher_names.EXPORT_ENVS, "OURS_"])
    assert ["OURS_A" in exports for exports in found] == [False, True] and "OTHERS" not in found[1]


def test_a_job_that_is_refused_ends_the_caller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As DeepSpeed does: a script, and its installed command, return 0 after it."""
    (tmp_path / "x.py").write_text("")
    with pytest.raises(SystemExit) as ended:
        launcher_names.main(["--hostfile", str(tmp_path / "none"), str(tmp_path / "x.py")])
    assert ended.value.code == 2 and "none" in capsys.readouterr().err


def test_a_place_that_srun_has_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    monkeypatch.setattr(os, "environ", {**told, "MASTER_ADDR": "h1"})
    helpers.mpi_discovery(distributed_port=1234)
    wanted = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "h1", "MASTER_PORT": "1234"}
    assert {name: os.environ[name] for name in wanted} == wanted


def test_what_is_imported_and_refused_where_it_is_used() -> None:
    with pytest.raises(ConfigError, match=r"curriculum_learning.*choose in the dataset"):
        CurriculumScheduler({"min_difficulty": 8})
