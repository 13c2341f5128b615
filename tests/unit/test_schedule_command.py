"""zerorun-schedule: its numbers, its pictures, measured traces, and what it says of bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness import patience

from zerorun.errors import ScheduleError
from zerorun.pipeline import cli
from zerorun.pipeline.schedule import timeline
from zerorun.pipeline.schedule.schedules import SCHEDULES, make_schedule
from zerorun.pipeline.schedule.simulate import Span, simulate
from zerorun.pipeline.schedule.times import Times
from zerorun.pipeline.schedule.trace import Trace, read_trace, write_trace

ROOT = Path(__file__).parents[2]
BIN = ROOT / "bin" / "zerorun-schedule"
SVG = "{http://www.w3.org/2000/svg}"
USUAL = ("--stages", "4", "--micro-batches", "8")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said of ``arguments``, on one line."""
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("zerorun-schedule: error: ")
    assert printed.err.count("\n") == 1
    return printed.err


def measured(kind: str = "1f1b", stages: int = 4, micro_batches: int = 8, chunks: int = 1) -> Trace:
    """A run in which everything takes as long as it should, but messages take 2 ms and each action 1 ms to begin."""
    times = Times.make(stages, 0.02, 0.021, 0.019, 0.002)
    schedule = make_schedule(kind, stages, micro_batches, chunks=chunks)
    spans = simulate(schedule, times, record=True).spans
    late = tuple(tuple(Span(span.action, 100 + span.start + 0.001, 100 + span.end) for span in row) for row in spans)
    return Trace(kind, stages, micro_batches, chunks, late)


# -- numbers -----------------------------------------------------------------------------------------------------


def test_the_example_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, "--stages", "8", "--micro-batches", "32", "--kind", "1f1b")
    assert re.search(r"^1f1b +117 +21 +17\.9 +21 +17\.9 +8 +8$", printed, re.MULTILINE)
    assert re.search(r"^ +3 +96 +21 +17\.9 +5 +5$", printed, re.MULTILINE)  # rank 3


def test_compare_shows_all_kinds_that_train(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, *USUAL, "--compare", "--chunks", "3", "--limit", "7")
    table = printed.split("schedule")[1].splitlines()
    rows = [re.split(r"  +", line) for line in table[1:6]]
    assert [row[0] for row in rows] == ["naive", "gpipe", "1f1b", "interleaved, 3 chunks", "zero_bubble, limit 7"]
    assert [row[1] for row in rows] == ["96", "33", "33", "27", "27"]
    assert rows[-1][4] == "-"  # no formula for that limit


def test_compare_shows_the_kinds_that_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, *USUAL, "--compare", "zero_bubble", "1f1b", "--json"))
    assert [(schedule["kind"], schedule["makespan"]) for schedule in found["schedules"]] == [
        ("zero_bubble", 27),
        ("1f1b", 33),
    ]


def test_json_has_what_the_tables_have(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, *USUAL, "--kind", "zero_bubble", "--times", "1", "2,1,1,1", "0.5", "--json"))
    assert (found["stages"], found["micro_batches"]) == (4, 8)
    assert found["times"]["input_gradient"] == [2, 1, 1, 1]
    (schedule,) = found["schedules"]
    times = Times.make(4, 1, (2, 1, 1, 1), 0.5)
    report = simulate(make_schedule("zero_bubble", 4, 8, times=times), times)
    assert schedule["makespan"] == report.makespan
    assert schedule["idle"] == list(report.idle)
    assert schedule["peak_kept"] == list(report.peak_kept)
    assert schedule["formula_inexact"] == "takes the mean of stages that differ"


def test_long_tables_lose_their_middle(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, "--stages", "30", "--micro-batches", "30")
    ranks = re.findall(r"^ +(\d+|\.\.\.)(?: |$)", printed.split("each rank")[1], re.MULTILINE)
    assert ranks == [*map(str, range(8)), "...", *map(str, range(22, 30))]


def test_the_command_starts_without_torch_and_numpy() -> None:
    code = "import sys, zerorun.pipeline.cli; print({'torch', 'numpy', 'matplotlib', 'pydantic'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60 * patience(), check=True
    )
    assert done.stdout.strip() == "set()"
    shown = subprocess.run([sys.executable, BIN, *USUAL], capture_output=True, text=True, cwd=ROOT, timeout=60 * patience())
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "4 stages, 8 micro-batches" in shown.stdout


# -- pictures ----------------------------------------------------------------------------------------------------


def rectangles(path: Path) -> Counter[str]:
    """How many rectangles of each class an SVG has; "" are background, idle time and legend."""
    return Counter(element.get("class", "") for element in ElementTree.parse(path).iter(f"{SVG}rect"))


@pytest.mark.parametrize("kind", SCHEDULES)
def test_svg_has_every_action(kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    run(capsys, *USUAL, "--kind", kind, "--svg", str(path))
    chunks = 2 if kind == "interleaved" else 1
    found = rectangles(path)
    kinds = {"zero_bubble": ("k0", "k2", "k3"), "forward_only": ("k0",)}.get(kind, ("k0", "k1"))
    assert {name: count for name, count in found.items() if name} == dict.fromkeys(kinds, 32 * chunks)
    texts = [element.text or "" for element in ElementTree.parse(path).iter(f"{SVG}text")]
    assert any(text.startswith(kind) and "bubble" in text and "formula" in text for text in texts)
    assert texts.count("7") == 4 * chunks * len(kinds)  # the number of a micro-batch, wherever there is room for it


def test_svg_is_to_scale(tmp_path: Path) -> None:
    times = Times.make(2, (2, 3), 0.5, 0.5, 0.25)
    report = simulate(make_schedule("1f1b", 2, 1), times, record=True)
    timeline.write_svg(tmp_path / "a.svg", [timeline.Panel("<a & b>", report, 1)])
    bars = [e for e in ElementTree.parse(tmp_path / "a.svg").iter(f"{SVG}rect") if e.get("class") in ("k0", "k1")]
    widths = [float(bar.get("width", "nan")) for bar in bars]
    assert widths == pytest.approx([widths[0], widths[0] / 2, widths[0] * 1.5, widths[0] / 2], abs=0.02)
    starts = [float(bar.get("x", "nan")) for bar in bars]
    assert starts[2] - starts[0] == pytest.approx(widths[0] * 2.25 / 2, abs=0.02)


def test_forwards_that_take_no_time(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    printed = run(capsys, *USUAL, "--kind", "forward_only", "--times", "0", "1", "1", "--svg", str(path))
    assert re.search(r"^forward_only +0 +0 +0\.0 +0 +0\.0 +0 +0$", printed, re.MULTILINE)
    assert rectangles(path)["k0"] == 32


def test_png_by_matplotlib(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.png"
    run(capsys, *USUAL, "--compare", "--png", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_png_without_matplotlib(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    said = refuse(capsys, *USUAL, "--png", str(tmp_path / "a.png"))
    assert "Remedy: pip install matplotlib, or write an SVG" in said


# -- traces ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "chunks"), [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("forward_only", 1)])
def test_measured_beside_simulated(kind: str, chunks: int, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = measured(kind, chunks=chunks)
    write_trace(tmp_path / "run.json", trace)
    assert read_trace(tmp_path / "run.json") == trace
    path = tmp_path / "a.svg"
    printed = run(capsys, "--measured", str(tmp_path / "run.json"), "--svg", str(path), "--json")
    simulated, real = json.loads(printed)["schedules"]
    assert [simulated["label"], real["label"]] == [f"{kind} simulated", f"{kind} measured"]
    assert real["peak_kept"] == simulated["peak_kept"]
    assert real["busy"] == pytest.approx(simulated["busy"])
    assert real["makespan"] > simulated["makespan"] > sum(simulated["busy"]) / 4
    assert real["formula_bubble"] == simulated["formula_bubble"]
    if (kind, chunks) == ("1f1b", 1):  # equal stages, and the simulation knows of no transfers
        assert simulated["bubble"] == pytest.approx(simulated["formula_bubble"])
    texts = [element.text or "" for element in ElementTree.parse(path).iter(f"{SVG}text")]
    titles = [text.split(":")[0] for text in texts if "makespan" in text]
    assert titles == [f"{kind} simulated", f"{kind} measured"]


def test_medians_forget_a_hiccup() -> None:
    trace = measured()
    first = trace.spans[3][0]
    slow = (first._replace(start=first.start - 5), *trace.spans[3][1:])
    hiccup = Trace(trace.kind, 4, 8, 1, (*trace.spans[:3], slow))
    assert hiccup.times().forward == pytest.approx((0.019,) * 4)
    assert hiccup.times().input_gradient == pytest.approx((0.039,) * 4)
    assert hiccup.report().makespan > trace.report().makespan + 4


def change(place: str, value: Any) -> Any:
    """A function that puts ``value`` (None: nothing) at a place such as "ranks/0/3/start"."""

    def apply(found: Any) -> None:
        *path, last = [int(part) if part.isdecimal() else part for part in place.split("/")]
        for part in path:
            found = found[part]
        if value is None:
            del found[last]
        else:
            found[last] = value

    return apply


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (change("stages", None), "the file lacks 'stages'"),
        (change("stages", 3), "ranks has 4 lists for 3 stages"),
        (change("stages", True), "stages is True, and no whole number from 1 on"),
        (change("micro_batches", 7.5), "micro_batches is 7.5"),
        (change("kind", "2f2b"), "kind is '2f2b', and not one of naive"),
        (change("ranks", {}), "ranks has no list for 4 stages"),
        (change("ranks/2", 1), "ranks[2] is no list"),
        (change("ranks/0/3", []), "ranks[0][3] is no object"),
        (change("ranks/0/3/start", None), "ranks[0][3] lacks 'start'"),
        (change("ranks/0/3/start", "0"), "ranks[0][3]: start is '0'"),
        (change("ranks/0/3/start", float("nan")), "ranks[0][3]: start is nan"),
        (change("ranks/0/3/end", 1), "ranks[0][3] ends at 1 s, before it starts"),
        (change("ranks/0/3/start", 100.01), "ranks[0][3] starts at 100.01 s, while another action runs until"),
        (change("ranks/0/3/kind", "f"), "ranks[0][3]: kind is 'f', and not one of F, B, I, W"),
        (change("ranks/0/3/micro_batch", 8), "ranks[0][3]: micro_batch is 8, and no whole number from 0 on and below 8"),
        (change("ranks/0/3/chunk", -1), "ranks[0][3]: chunk is -1"),
        (change("ranks/0/3", None), "rank 0 has B of micro-batch 3, chunk 0, and not one F and one B, or one F, I and W"),
        (change("ranks/1/0/micro_batch", 1), "rank 1 has B of micro-batch 0, chunk 0"),
        (change("ranks/3", []), "rank 3 has nothing of micro-batch 0, chunk 0"),
        (change("kind", "forward_only"), "rank 0 has BF of micro-batch 0, chunk 0, and not one F."),
    ],
)
def test_traces_that_are_none(breaks: Any, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_trace(path, measured())
    found = json.loads(path.read_text())
    breaks(found)
    path.write_text(json.dumps(found))
    said = refuse(capsys, "--measured", str(path))
    assert f"trace {path}: " in said
    assert words in said
    assert "Remedy: record one whole optimizer step" in said


def test_a_trace_in_an_order_that_cannot_be(tmp_path: Path) -> None:
    """Rank 1 took micro-batch 1 before 0, and rank 0 did not: no run did that."""
    trace = measured("gpipe", stages=2, micro_batches=2)
    first, second, *rest = trace.spans[1]
    turned = (second.action, first.action)
    spans = tuple(Span(action, span.start, span.end) for action, span in zip(turned, (first, second), strict=True))
    wrong = Trace("gpipe", 2, 2, 1, (trace.spans[0], (*spans, *rest)))
    with pytest.raises(ScheduleError, match=r"rank 1: receive_activation\(micro-batch 1, chunk 0\) finds micro-batch 0"):
        simulate(wrong.schedule(), wrong.times())


# -- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--stages is missing. Remedy: give it, or a trace with --measured"),
        (("--stages", "4"), "--micro-batches is missing"),
        ((*USUAL, "--kind", "interleaved", "--chunks", "1"), "chunks = 1"),
        ((*USUAL, "--kind", "gpipe", "--chunks", "2"), "chunks = 2"),
        ((*USUAL, "--limit", "3"), "limit = 3"),
        ((*USUAL, "--compare", "--kind", "1f1b"), "--compare shows several kinds, and --kind 1f1b one"),
        ((*USUAL, "--times", "1,2", "1", "1"), "times: forward has 2 numbers for 4 stages"),
        ((*USUAL, "--times", "1", "nan", "1"), "times: input_gradient of stage 0 is nan"),
        ((*USUAL, "--transfer", "1,1,1,-1"), "times: transfer of stage 3 is -1.0"),
        ((*USUAL, "--svg", "no/such/directory/a.svg"), "no/such/directory/a.svg: No such file or directory"),
        (("--stages", "1024", "--micro-batches", "4096", "--svg", "a.svg"), "a picture of 4194304 actions is too large"),
        ((*USUAL, "--times", "0", "0", "0"), "no stage takes any time"),
        (("--measured", "no.json"), "trace no.json cannot be read"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refuse(capsys, *arguments)
    assert words in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--stages", "0"), "argument --stages: '0' is not a whole number from 1 on"),
        (("--times", "1", "x", "1"), "argument --times: 'x' is no number"),
        (("--compare", "1f1b", "forward_only"), "argument --compare: invalid choice: 'forward_only'"),
        (("--kind", "1f2b"), "argument --kind: invalid choice: '1f2b'"),
    ],
)
def test_options_that_cannot_be_read(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kind", "gpipe"), "--kind gpipe is not what"),
        (("--micro-batches", "9"), "--micro-batches 9 is not what"),
        (("--times", "1", "1", "1"), "--times has no place beside --measured"),
        (("--compare",), "--compare has no place beside --measured"),
    ],
)
def test_options_that_contradict_a_trace(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_trace(tmp_path / "run.json", measured())
    assert words in refuse(capsys, "--measured", str(tmp_path / "run.json"), *arguments)
    run(capsys, "--measured", str(tmp_path / "run.json"), "--kind", "1f1b", "--stages", "4")  # what agrees is no error
