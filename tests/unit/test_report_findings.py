"""zerorun-report without hosts: findings from planted facts and measurements, the page, and reading a machine."""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import cpuinfo
import pytest
from covering import by_day
from harness import patience

from zerorun.launcher.hosts import Host
from zerorun.log import listed
from zerorun.report import collect, live_check, machine, page
from zerorun.report.finding import Finding, gibibytes, majority
from zerorun.report.findings import able, find
from zerorun.report.live_check import Live
from zerorun.report.reporter import Reporter, mark, parse_faults, unmark

GIB = 1 << 30
FACTS: dict[str, Any] = {
    "problems": [],
    "hostname": "host",
    "machine": "host/boot",
    "versions": {"python": "3.11.7", "zerorun": "0.1.0", "zerorun_commit": "abc", "torch": "2.13.0",
                 "torch_metadata": "2.13.0"},
    "cpu": {"model": "Some CPU", "flags": ["avx2"], "architecture": "x86_64", "usable_cores": 8, "present_cores": 8,
            "limit_cores": None, "load": 0.1},
    "memory": {"total": 64 * GIB, "available": 60 * GIB, "limit": None, "swap": 0},
    "shared_memory": {"total": 32 * GIB, "free": 32 * GIB},
    "limits": {"locked_memory": None, "open_files": 1024, "processes": None},
    "network": {
        "interfaces": [{"name": "eth0", "up": True, "mbit_per_s": 10000, "mtu": 1500, "addresses": ["10.0.0.1"]}],
        "infiniband": [],
        "own_name_addresses": ["10.0.0.1"],
        "gloo_interface": None,
    },
    "gpus": {"visible": 0, "devices": None, "topology": None, "trouble": None},
    "environment": {},
    "cuda": {"devices": [], "peer_access": [], "trouble": "this torch is built without CUDA"},
    "native_ops": [{"name": "native optimizer", "in_force": True, "why": "tried"}],
    "software_trouble": None,
    "ranks": [],
}  # fmt: skip
MEASURED: dict[str, Any] = {
    "hosts": ["a", "b", "c"],
    "world_size": 3,
    "ended": "finished",
    "seconds": 4.0,
    "furthest": "leaving the process group",
    "silent": [],
    "behind": {},
    "ranks": [
        {"rank": rank, "host": name, "node": rank, "device": "cpu", "backend": "gloo", "matmul_ms": 1.0 + rank / 100}
        for rank, name in enumerate("abc")
    ],
    "transport": {},
    "checked": ["all_reduce float32", "all_gather bfloat16"],
    "wrong": [],
    "errors": [],
    "pairs": [{"hosts": list(pair), "latency_us": 50.0, "gb_per_s": 1.0, "sure": True} for pair in combinations("abc", 2)],
    "sizes": [{"name": "all_reduce", "bytes": 8 << 20, "us": 900.0, "bus_gb_per_s": 9.3}],
    "words": [],
}


def host(name: str, **changed: Any) -> dict[str, Any]:
    facts = copy.deepcopy(FACTS)
    facts["machine"] = name
    for path, value in changed.items():
        *folders, last = path.split("__")
        place = facts
        for folder in folders:
            place = place[folder]
        place[last] = value
    return {"name": name, "facts": facts, "clock": {"ahead_s": 0.0, "within_s": 0.001}, "trouble": None}


def measured(**changed: Any) -> dict[str, Any]:
    return {**copy.deepcopy(MEASURED), **changed}


def told(hosts: list[dict[str, Any]], live: dict[str, Any] | None = None) -> list[Finding]:
    """The findings but for that there is no GPU."""
    return [finding for finding in find(hosts, live) if "no GPU" not in finding.what]


def one(hosts: list[dict[str, Any]], live: dict[str, Any] | None = None) -> Finding:
    found = told(hosts, live)
    assert len(found) == 1, found
    return found[0]


# -- facts -------------------------------------------------------------------------------------------------------------


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert not told([host("a"), host("b"), host("c")], measured())


@pytest.mark.parametrize(
    ("changed", "severity", "words"),
    [
        (
            {"versions__torch": "2.9.0", "versions__torch_metadata": "2.9.0"},
            "error",
            "has torch 2.9.0, most hosts have 2.13.0",
        ),
        ({"versions__torch": "2.13.1", "versions__torch_metadata": "2.13.1"}, "warning", "has torch 2.13.1"),
        ({"versions__python": "3.11.9"}, "warning", "has python 3.11.9, most hosts have 3.11.7"),
        ({"versions__python": "3.12.7"}, "error", "has python 3.12.7"),
        ({"versions__zerorun": "0.2.0"}, "error", "has zerorun 0.2.0"),
        ({"versions__zerorun_commit": "def"}, "warning", "at commit def"),
        ({"versions__cuda": "13.0"}, "error", "has cuda 13.0, most hosts have none"),
        ({"versions__nccl": "2.27.5"}, "error", "has nccl 2.27.5"),
        ({"software_trouble": "no module named torch"}, "error", "torch cannot be used: no module named torch"),
        ({"shared_memory__free": 10 << 20}, "error", "/dev/shm has 10 MiB free of 32 GiB"),
        ({"shared_memory__free": 100 << 20}, "warning", "/dev/shm has 100 MiB free"),
        ({"memory__limit": 16 * GIB}, "note", "may use 16 GiB of 64 GiB"),
        ({"cpu__limit_cores": 2.0}, "note", "the time of 2 of its 8 cores"),
        ({"cpu__load": 30.0}, "note", "load 30.0 on 8 cores"),
        ({"problems": ["network: OSError"]}, "note", "could not be read: network"),
        (
            {"native_ops": [{"name": "peer memory", "in_force": False, "why": "why"}]},
            "note",
            "peer memory is not in force: why",
        ),
        ({"gpus__trouble": "nvidia-smi ended with status 9"}, "warning", "nvidia-smi ended with status 9"),
    ],
)
def test_a_fault_of_one_host_is_named(changed: dict[str, Any], severity: str, words: str) -> None:
    finding = one([host("a"), host("b", **changed), host("c")])
    assert (finding.severity, finding.host) == (severity, "b")
    assert words in finding.what


def test_a_host_that_does_not_answer() -> None:
    lost = {"name": "b", "facts": None, "clock": None, "trouble": "ssh: connect to host b port 22: Connection refused"}
    finding = one([host("a"), lost])
    assert (finding.severity, finding.host) == ("error", "b")
    assert "Connection refused" in finding.what


def test_metadata_of_another_torch_than_the_one_imported() -> None:
    found = told([host("a"), host("b", versions__torch_metadata="2.9.0"), host("c")])
    assert [(finding.severity, finding.host) for finding in found] == [("error", "b"), ("warning", "b")]
    assert "has torch 2.9.0" in found[0].what
    assert "imports torch 2.13.0" in found[1].what


@pytest.mark.parametrize(("ahead", "severity"), [(3.0, "warning"), (-90.0, "error")])
def test_a_clock_that_is_off(ahead: float, severity: str) -> None:
    off = host("b")
    off["clock"]["ahead_s"] = ahead
    finding = one([host("a"), off, host("c")])
    assert (finding.severity, finding.host) == (severity, "b")
    assert f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'}" in finding.what


def test_when_the_own_clock_is_off_it_is_the_one_that_is_named() -> None:
    hosts = [host("own"), host("b"), host("c")]
    for other in hosts[1:]:
        other["clock"]["ahead_s"] = 5.0
    assert one(hosts).host == "own"


def test_a_clock_is_not_blamed_for_a_slow_answer() -> None:
    slow = host("b")
    slow["clock"] = {"ahead_s": 1.5, "within_s": 2.0}
    assert not told([host("a"), slow])


def test_locked_memory_matters_only_with_infiniband() -> None:
    assert not told([host("a", limits__locked_memory=8 << 20)])
    port = {"device": "mlx5_0", "port": "1"}
    finding = one([host("a", limits__locked_memory=8 << 20, network__infiniband=[port])])
    assert "8 MiB of memory may be locked" in finding.what


def test_names_that_lead_to_loopback() -> None:
    changed = {"network__own_name_addresses": ["127.0.1.1"]}
    assert not told([host("a", **changed)])
    assert one([host("a", **changed), host("b", **changed)]).host == "a, b"
    assert not told([host("a", **changed, network__gloo_interface="eth0"), host("b", **changed)])


def test_gpus_that_torch_cannot_use() -> None:
    broken = {"gpus__visible": 4, "cuda__trouble": "driver too old"}
    finding = one([host("a", **broken)])
    assert finding.severity == "error"
    assert "4 GPUs that torch cannot use: driver too old" in finding.what
    assert any("has 0 GPUs, most hosts have 4" in finding.what for finding in find([host("a", **broken), host("b")], None))


@pytest.mark.parametrize(
    ("errors", "said"),
    (
        ("0", ""),
        ("N/A", ""),
        ("3", "GPU 0 has 3 memory errors"),
        ("[GPU requires reset]", "says [GPU requires reset] of GPU 0"),
    ),
)
def test_what_nvidia_smi_says_of_a_gpu(errors: str, said: str) -> None:
    """It has words in place of numbers that it cannot read, which were told as a number of errors."""
    devices = machine.parse_gpus(f"0, NVIDIA H100, GPU-1, 570.1, 81559, 4, Enabled, {errors}, 5, 16, 41")
    whats = [finding.what for finding in find([host("a", gpus__devices=devices)], None)]
    assert any(said in what for what in whats) if said else not any("GPU 0" in what for what in whats)


def test_which_hosts_the_live_check_can_have() -> None:
    lost = {"name": "b", "facts": None, "clock": None, "trouble": "gone"}
    hosts = [
        host("a"),
        lost,
        host("c", versions__zerorun="0.2.0"),
        host("d", software_trouble="no torch"),
        host("e", machine="a"),
    ]
    assert able(hosts, "0.1.0") == ["a"]


def test_majority_prefers_the_first_host_in_a_tie() -> None:
    assert majority({"a": "1", "b": "2"}) == "1"
    assert majority({"a": "1", "b": "2", "c": "2"}) == "2"


# -- measurements ------------------------------------------------------------------------------------------------------


def test_a_wrong_result_names_collective_dtypes_and_rank() -> None:
    wrong = [
        {"rank": 1, "check": f"all_reduce {dtype}", "text": "element 0 is 2, must be 1"} for dtype in ("int64", "uint8")
    ]
    finding = one([host("a")], measured(wrong=wrong))
    assert (finding.severity, finding.host) == ("error", "b")
    assert "wrong result of all_reduce in int64, uint8 on rank 1: element 0" in finding.what


def test_a_slow_rank_is_named_and_those_that_wait_are_not() -> None:
    slow = measured()
    slow["ranks"][2]["matmul_ms"] = 1.5
    finding = one([host("a")], slow)
    assert (finding.severity, finding.host) == ("warning", "c")
    assert "rank 2 is slow" in finding.what


def test_a_rank_that_has_no_processor_for_itself() -> None:
    live = measured()
    for entry in live["ranks"]:
        entry["processor_ms"] = 1.0
    live["ranks"][1]["matmul_ms"] = 2.0
    assert "has a processor for only a part" in one([host("a")], live).what
    live["ranks"][1]["processor_ms"] = 2.0
    assert "only a part" not in one([host("a")], live).what
    live["ranks"][1]["matmul_ms"] = 1.0
    assert "rank 1 is slow" in one([host("a")], live).what


def test_of_two_ranks_the_slower_one_is_named() -> None:
    two = measured()
    two["ranks"] = two["ranks"][:2]
    two["ranks"][0]["matmul_ms"] = 2.0
    assert "rank 0 is slow" in one([host("a")], two).what


@pytest.mark.parametrize("names", ["ab", "abc", "abcdefgh"])
def test_the_host_that_all_slow_pairs_have_in_common(names: str) -> None:
    pairs = [
        {"hosts": list(pair), "latency_us": 10_000.0 if "b" in pair else 60.0, "gb_per_s": 0.1 if "b" in pair else 1.0,
         "sure": True}
        for pair in combinations(names, 2)
    ]  # fmt: skip
    finding = one([host("a")], measured(pairs=pairs))
    assert finding.severity == "warning"
    assert finding.host == ("a, b" if len(names) == 2 else "b")
    assert "10.0 ms one way" in finding.what


def test_one_slow_pair_names_both_hosts() -> None:
    live = measured()
    live["pairs"][2]["latency_us"] = 9000.0
    finding = one([host("a")], live)
    assert finding.host == "b, c"
    assert "slow pair of hosts: b and c" in finding.what


def test_a_narrow_pair_only_where_that_is_sure() -> None:
    live = measured()
    live["pairs"][0]["gb_per_s"] = 0.05
    assert "narrow pair of hosts: a and b" in one([host("a")], live).what
    live["pairs"][0]["sure"] = False
    assert not told([host("a")], live)


def test_a_hang_names_the_check_and_who_had_not_come_to_it() -> None:
    finding = one([host("a")], measured(ended="hang", furthest="all_reduce float32", behind={"2": "computing"}))
    assert (finding.severity, finding.host) == ("error", "c")
    assert "hang: all_reduce float32 did not return, and rank 2 had not come to it (in computing)" in finding.what
    assert "GLOO_SOCKET_IFNAME" in finding.remedy


def test_a_hang_of_nccl_names_what_to_try() -> None:
    live = measured(ended="hang", furthest="all_reduce float32")
    for entry in live["ranks"]:
        entry["backend"] = "nccl"
    remedy = one([host("a")], live).remedy
    assert all(word in remedy for word in ("NCCL_P2P_DISABLE=1", "IOMMU", "NCCL_SOCKET_IFNAME"))


def test_a_hang_of_peer_memory_names_how_to_do_without() -> None:
    from zerorun.distributed.transport import peer_memory

    check = "zerorun all_gather float32 by peer memory, 2 ranks"
    remedy = one([host("a")], measured(ended="hang", furthest=check)).remedy
    variable, value = remedy.removeprefix("Try ").removesuffix(".").split("=")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(variable, value)
        assert not peer_memory.can_be_used()


@pytest.mark.parametrize("wrong", [[False, True], [True, False], [True, True], [False, False]])
def test_one_wrong_result_of_several_is_told(wrong: list[bool]) -> None:
    import torch

    from zerorun.report import collective_checks
    from zerorun.report.reporter import Reporter

    said: list[dict[str, Any]] = []
    reporter = Reporter(rank=0, faults=[])
    reporter.say = lambda **message: said.append(message)  # type: ignore[method-assign]
    collective_checks._check(
        reporter, "all_reduce float32", lambda: ((torch.ones(3) + bad, torch.ones(3)) for bad in wrong)
    )
    assert said[-1]["checked"] == "all_reduce float32"
    assert (said[-1]["wrong"] is not None) == any(wrong)
    assert not any(wrong) or "3 of 3 elements; element 0 is 2.0, must be 1.0" in said[-1]["wrong"]


def test_a_hang_between_two_hosts_names_them() -> None:
    assert "between a and c did not return" in one([host("a")], measured(ended="hang", furthest="pair 0 2")).what


@pytest.mark.parametrize(
    ("changed", "severity", "words"),
    [
        ({"ended": "time limit", "furthest": "barrier"}, "warning", "not done after 4 s; it was at barrier"),
        ({"ended": "refused", "words": ["zerorun: error: no", "No worker is running."]}, "error", "not started: no"),
        ({"ended": "failed", "words": ["killed by SIGSEGV"]}, "error", "killed by SIGSEGV"),
        ({"ended": "hang", "silent": [1, 2]}, "error", "ranks 1-2 did not start"),
        (
            {"ended": "failed", "errors": [{"rank": 0, "check": "barrier", "text": "E1"}, {"rank": 1, "check": "barrier",
                                                                                           "text": "E2"}]},
            "error",
            "barrier failed on rank 0: E1; then on rank 1",
        ),
    ],
)  # fmt: skip
def test_other_ends(changed: dict[str, Any], severity: str, words: str) -> None:
    finding = one([host("a")], measured(**changed))
    assert finding.severity == severity
    assert words in finding.what


# -- the page ----------------------------------------------------------------------------------------------------------


def rendered(hosts: list[dict[str, Any]], live: dict[str, Any] | None) -> list[str]:
    found = find(hosts, live)
    status, line = page.verdict(found, "a summary")
    return page.render({"verdict": {"status": status, "line": line}, "hosts": hosts, "live": live}, found).splitlines()


@pytest.mark.parametrize("count", [1, 3, 100])
def test_no_line_is_longer_than_80_columns(count: int) -> None:
    hosts = [host(f"a-rather-long-name-of-a-host-{index}") for index in range(count)]
    hosts[0]["facts"]["versions"]["torch"] = "2.9.0" + "+local" * 30
    hosts[0]["facts"]["shared_memory"]["free"] = 0
    hosts[0]["facts"]["cpu"]["model"] = "x" * 200
    hosts[-1]["facts"]["network"]["interfaces"] *= 20
    hosts[-1]["facts"]["cuda"] = {
        "devices": [{"name": "A GPU with a name" * 5, "memory": 80 * GIB, "capability": "9.0"}] * 2,
        "peer_access": [[True, False], [True, True]],
        "trouble": None,
    }
    wrong = [{"rank": 1, "check": "all_reduce float32", "text": "very long " * 40}]
    lines = rendered(hosts, measured(wrong=wrong, ended="failed", hosts=[entry["name"] for entry in hosts]))
    assert max(map(len, lines)) <= 80
    assert len(lines) < 150


def test_the_verdict_is_on_top() -> None:
    assert rendered([host("a")], measured())[0] == "CAN TRAIN: a summary; 1 note"
    low = host("b", shared_memory__free=100 << 20)
    assert rendered([host("a"), low], measured())[0].startswith("CAN TRAIN, BUT LOOK: b: /dev/shm has 100 MiB free")
    full = host("c", shared_memory__free=1 << 20)
    line = rendered([host("a"), low, full], None)[0]
    assert line.startswith("CANNOT TRAIN: c: /dev/shm has 1 MiB free")


def test_exit_statuses() -> None:
    findings = [Finding(severity, "", "what") for severity in ("note", "warning", "error")]
    assert [page.verdict(findings[:count], "")[0] for count in range(4)] == [0, 0, 1, 2]


def test_control_characters_of_a_remote_host_do_not_reach_the_terminal() -> None:
    lost = {"name": "b", "facts": None, "clock": None, "trouble": "\x1b[2Jgone\x07"}
    text = "\n".join(rendered([host("a"), lost], None))
    assert "gone" in text
    assert all(char.isprintable() or char == "\n" for char in text)


def test_a_page_of_hosts_of_which_nothing_could_be_read() -> None:
    empty = host("a", **dict.fromkeys(("cpu", "memory", "shared_memory", "limits", "network", "gpus", "cuda", "versions")))
    assert rendered([empty], None)
    lost = {"name": "b", "facts": None, "clock": None, "trouble": "gone"}
    assert "none was made" in "\n".join(rendered([lost], None))


def test_sizes_and_lists_in_words() -> None:
    assert [gibibytes(size) for size in (512 << 20, 3.5 * GIB, 1511 * GIB)] == ["512 MiB", "3.5 GiB", "1511 GiB"]
    assert listed(["a", "b", "c"], 2) == "a, b and 1 more"


# -- what comes over lines ---------------------------------------------------------------------------------------------


def test_marked_lines_are_found_among_others() -> None:
    assert unmark("[rank 3] " + mark({"rank": 3})) == {"rank": 3}
    assert unmark("Welcome to node7") is None
    assert unmark("@zerorun-report {cut off") is None
    assert unmark("@zerorun-report 7") is None


def test_what_ranks_say_is_put_together() -> None:
    run = Live(["a", "b"], 2)
    for rank in (0, 1):
        joined = {"node": rank, "device": "cpu", "backend": "gloo"}
        for message in ({"begin": "start"}, {"joined": joined}, {"compute": {"matmul_ms": 1.0}}, {"begin": "barrier"}):
            assert run.take(mark({"rank": rank, **message}))
    run.take(mark({"rank": 0, "checked": "barrier", "wrong": None}))
    run.take(mark({"rank": 1, "checked": "barrier", "wrong": "no"}))
    run.take(mark({"rank": 0, "pair": {"hosts": [0, 1], "latency_us": 1.0, "gb_per_s": 1.0, "sure": True}}))
    run.take(mark({"rank": 0, "begin": "all_reduce float32"}))
    assert not run.take("something else")
    found = run.as_json()
    assert json.loads(json.dumps(found)) == found
    assert found["ranks"][1] == {"rank": 1, "node": 1, "device": "cpu", "backend": "gloo", "host": "b", "matmul_ms": 1.0}
    assert found["wrong"] == [{"rank": 1, "check": "barrier", "text": "no"}]
    assert found["pairs"][0]["hosts"] == ["a", "b"]
    assert (found["furthest"], found["behind"]) == ("all_reduce float32", {"1": "barrier"})
    assert found["words"] == ["something else"]


def test_patience_is_longer_while_much_is_started() -> None:
    run = Live(["a"], 2)
    run.take(mark({"rank": 0, "begin": "start"}))
    assert run.patience == live_check.START_SECONDS
    for rank in (0, 1):
        run.take(mark({"rank": rank, "begin": "joining the process group"}))
    assert run.patience == live_check.JOIN_SECONDS
    for rank in (0, 1):
        run.take(mark({"rank": rank, "begin": "barrier"}))
    assert run.patience == live_check.STALL_SECONDS


def test_a_launcher_that_never_starts_a_rank_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_check, "START_SECONDS", 0.5)
    begun = time.monotonic()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    run = live_check.run_live([Host("a", (0, 1))], command, several=False, quick=True)
    assert run.ended == "hang"
    assert run.as_json()["silent"] == [0, 1]
    assert time.monotonic() - begun < 8 * patience()


def test_a_launcher_that_refuses() -> None:
    command = [sys.executable, "-c", "import sys; print('zerorun: error: no', file=sys.stderr); sys.exit(2)"]
    run = live_check.run_live([Host("a", (0,))], command, several=False, quick=True)
    assert (run.ended, run.words) == ("refused", ["zerorun: error: no"])


def test_planted_faults() -> None:
    reporter = Reporter(rank=1, faults=parse_faults("wrong:all_reduce float32:1,slow:1:1.5,wrong:barrier:0"))
    assert reporter.spoils("all_reduce float32")
    assert not reporter.spoils("all_reduce float64")
    assert not reporter.spoils("barrier")
    assert reporter.slowness() == 1.5


def test_every_pair_of_hosts_meets_once_and_none_twice_in_a_round() -> None:
    from zerorun.report.speed import rounds

    for count in (2, 3, 8, 16):
        found = rounds(count)
        assert sorted(pair for meeting in found for pair in meeting) == sorted(combinations(range(count), 2))
        assert all(len({host for pair in meeting for host in pair}) == 2 * len(meeting) for meeting in found)
    many = [pair for meeting in rounds(40) for pair in meeting]
    assert len(many) == len(set(many)) < 2 * 40


# -- asking a host -----------------------------------------------------------------------------------------------------

ANSWERS = """
import sys
print("Welcome!")
print('@zerorun-report {"hostname": "x"}', flush=True)
import time
for line in sys.stdin:
    print('@zerorun-report {"clock": %r}' % (time.time() + 7), flush=True)
"""


def test_a_host_that_answers_among_a_login_shells_words() -> None:
    answer = collect.ask("a", [sys.executable, "-c", ANSWERS])
    assert answer["facts"] == {"hostname": "x"}
    assert answer["clock"]["ahead_s"] == pytest.approx(7, abs=0.5)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; sys.exit('Permission denied')", "Permission denied"),
        ("raise SystemExit(3)", "ended with status 3 and said nothing"),
        ("import time; time.sleep(60)", "no facts within 1 s"),
    ],
)
def test_a_host_that_does_not_answer_says_why(program: str, words: str) -> None:
    answer = collect.ask("a", [sys.executable, "-c", program], seconds=1.0)
    assert answer["facts"] is None
    assert words in answer["trouble"]


def test_a_carrier_that_is_not_there() -> None:
    assert "cannot run 'no-such-ssh'" in collect.ask("a", ["no-such-ssh", "a"])["trouble"]


# -- reading a machine -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _processor_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpuinfo, "get_cpu_info", _processor)


_processor = cache(cpuinfo.get_cpu_info)  # which starts a process of a second


def test_this_machine_can_be_described() -> None:
    facts = machine.describe_machine(os.environ)
    assert not facts["problems"]
    assert facts["cpu"]["usable_cores"] >= 1
    assert facts["memory"]["total"] > 0
    assert json.loads(json.dumps(facts)) == facts


def test_what_cannot_be_read_is_a_problem_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SHARED_MEMORY", "/no/such/place")
    facts = machine.describe_machine({})
    assert facts["shared_memory"] is None
    assert [problem.partition(":")[0] for problem in facts["problems"]] == ["shared_memory"]


def test_secrets_are_hidden() -> None:
    found = machine.describe_machine({"TORCH_TOKEN": "x", "NCCL_DEBUG": "INFO", "HOME": "/"})["environment"]
    assert found == {"NCCL_DEBUG": "INFO", "TORCH_TOKEN": "(hidden)"}


def test_limits_of_cgroups(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "memory.max").write_text("max\n")
    (tmp_path / "a" / "memory.max").write_text("1073741824\n")
    (tmp_path / "a" / "b" / "cpu.max").write_text("150000 100000\n")
    assert machine.memory_limit("0::/a/b\n", tmp_path) == GIB
    assert machine.processor_limit("0::/a/b\n", tmp_path) == 1.5
    assert machine.memory_limit("0::/\n", tmp_path) is None
    old = tmp_path / "memory" / "x"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("2147483648\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert machine.memory_limit("7:memory:/x\n3:cpu,cpuacct:/x\n", tmp_path) == 2 * GIB
    assert machine.processor_limit("7:memory:/x\n3:cpu,cpuacct:/x\n", tmp_path) is None


GOOD_SMI = """#!/bin/sh
case "$1" in
  topo) echo "GPU0 X NV18"; echo "GPU1 NV18 X";;
  *) for i in 0 1; do echo "$i, NVIDIA H200, GPU-$i, 580.95.05, 143771, 4, Enabled, 0, 5, 16, 31"; done;;
esac
"""


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (GOOD_SMI, None),
        ("#!/bin/sh\necho 'NVIDIA-SMI has failed: no driver'; exit 9\n", "ended with status 9: NVIDIA-SMI has failed"),
        *by_day(
            (
                *(("#!/bin/sh\nexec sleep 60\n", "did not answer within"), ("not a program\x01", "nvidia-smi")),
                ("#!/bin/sh\necho garbage\n", "'garbage' is not understood"),
            )
        ),
    ],
)
def test_nvidia_smi_good_and_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str | None
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(machine, "PROGRAM_SECONDS", 1.0)
    gpus = machine.describe_machine(os.environ)["gpus"]
    if words is None:
        assert gpus["trouble"] is None
        assert [device["driver_version"] for device in gpus["devices"]] == ["580.95.05"] * 2
        assert "NV18" in gpus["topology"]
    else:
        assert words in gpus["trouble"]
