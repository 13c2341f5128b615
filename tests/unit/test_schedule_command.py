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
from covering import by_day
from harness import patience

from zerorun.errors import ScheduleError
from zerorun.pipeline import cli
from zerorun.pipeline.schedule import timeline
from zerorun.pipeline.schedule.actions import ActionKind
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


def texts(path: Path) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.parse(path).iter(f"{SVG}text")]


def coloured(path: Path) -> Counter[str]:
    """How many shapes of each colour an SVG has, the one of the legend included."""
    return Counter(re.findall(r'<path d="[^"]*"[^>]*style="fill: (#[0-9a-f]{6})', path.read_text()))


@pytest.mark.parametrize("kind", SCHEDULES)
def test_svg_has_every_action(kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    run(capsys, *USUAL, "--kind", kind, "--svg", str(path))
    chunks = 2 if kind == "interleaved" else 1
    kinds = {"zero_bubble": (0, 2, 3), "forward_only": (0,)}.get(kind, (0, 1))
    colours = [colour for index, (_, colour) in enumerate(timeline.COLOURS.values()) if index in kinds]
    found = coloured(path)
    assert {colour: found[colour] for _, colour in timeline.COLOURS.values() if found[colour]} == dict.fromkeys(
        colours, 32 * chunks + 1
    )
    assert any(text.startswith(kind) and "bubble" in text and "formula" in text for text in texts(path))
    assert texts(path).count("7") == 4 * chunks * len(kinds)  # the number of a micro-batch, wherever there is room


def test_svg_is_to_scale(tmp_path: Path) -> None:
    times = Times.make(2, (2, 3), 0.5, 0.5, 0.25)
    report = simulate(make_schedule("1f1b", 2, 1), times, record=True)
    timeline.draw(tmp_path / "a.svg", [timeline.Panel("<a & b>", report, 1)], "svg")
    assert "<a & b>" in texts(tmp_path / "a.svg")
    outlines = re.findall(r'<path d="([^"]*)"[^>]*style="fill: #(?:4c78a8|54a24b)', (tmp_path / "a.svg").read_text())
    places = [[float(x) for x in re.findall(r"[ML] ([\d.]+)", outline)] for outline in outlines[:4]]
    starts, widths = [min(xs) for xs in places], [max(xs) - min(xs) for xs in places]
    assert widths == pytest.approx([widths[0], widths[0] / 2, widths[0] * 1.5, widths[0] / 2], abs=0.02)
    assert starts[2] - starts[0] == pytest.approx(widths[0] * 2.25 / 2, abs=0.02)


def test_pictures_are_the_same_each_time(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        run(capsys, *USUAL, "--svg", str(tmp_path / name))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_forwards_that_take_no_time(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    printed = run(capsys, *USUAL, "--kind", "forward_only", "--times", "0", "1", "1", "--svg", str(path))
    assert re.search(r"^forward_only +0 +0 +0\.0 +0 +0\.0 +0 +0$", printed, re.MULTILINE)
    assert coloured(path)[timeline.COLOURS[ActionKind.FORWARD][1]] == 32 + 1


def test_png(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    run(capsys, *USUAL, "--compare", "--png", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--svg", "--png"])
def test_pictures_without_matplotlib(
    option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    said = refuse(capsys, *USUAL, option, str(tmp_path / "a"))
    assert "Remedy: pip install matplotlib" in said


# -- traces ------------------------------------------------------------------------------------------------------


TRACED = (("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("forward_only", 1))


@pytest.mark.parametrize(("kind", "chunks"), by_day(TRACED, ("zero_bubble", 1), ("interleaved", 2)))
def test_measured_beside_simulated(kind: str, chunks: int, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = measured(kind, chunks=chunks)
    write_trace(tmp_path / "run.json", trace)
    found = read_trace(tmp_path / "run.json")
    assert [[span.action for span in row] for row in found.spans] == [[span.action for span in row] for row in trace.spans]
    times = [[time for span in row for time in (span.start, span.end)] for row in trace.spans]
    assert [[time for span in row for time in (span.start, span.end)] for row in found.spans] == [
        pytest.approx(row, rel=0, abs=1e-9) for row in times
    ]
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
    titles = [text.split(":")[0] for text in texts(path) if "makespan" in text]
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
    """A function that puts ``value`` (None: nothing) at a place such as "traceEvents/3/ts"."""

    def apply(found: Any) -> None:
        *path, last = [int(part) if part.isdecimal() else part for part in place.split("/")]
        for part in path:
            found = found[part]
        if value is None:
            del found[last]
        else:
            found[last] = value

    return apply


FOURTH = "traceEvents/4"  # after the name of rank 0 and its first three forwards
EVENT = {"ph": "X", "name": "F 3", "cat": "F", "pid": 0, "tid": 0, "args": {"micro_batch": 3, "chunk": 0}}


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (change("otherData", None), "the file lacks 'otherData'"),
        (change("otherData/stages", None), "otherData lacks 'stages'"),
        (change("otherData/stages", 3), "traceEvents[52]: tid is 3, and no whole number from 0 on and below 3"),
        (change("otherData/stages", 10**9), "otherData: stages is 1000000000, and there are 68 events"),
        (change("otherData/stages", 5), "rank 4 has nothing of micro-batch 0, chunk 0"),
        (change("otherData/stages", True), "stages is True, and no whole number from 1 on"),
        (change("otherData/micro_batches", 7.5), "micro_batches is 7.5"),
        (change("otherData/kind", "2f2b"), "kind is '2f2b', and not one of naive"),
        (change("traceEvents", {}), "traceEvents is no list"),
        (change(FOURTH, []), "traceEvents[4] is no object"),
        (change(f"{FOURTH}/ts", None), "traceEvents[4] lacks 'ts'"),
        (change(f"{FOURTH}/ts", "0"), "traceEvents[4]: ts is '0'"),
        (change(f"{FOURTH}/ts", float("nan")), "traceEvents[4]: ts is nan"),
        (change(f"{FOURTH}/dur", -1), "traceEvents[4]: dur is -1"),
        (
            change(FOURTH, {**EVENT, "ts": 1.7e308, "dur": 1.7e308}),
            "traceEvents[4]: dur is 1.7e+308, and no time",
        ),
        (change(f"{FOURTH}/ts", 100.01e6), "action 3 of rank 0 starts at 100.01 s, while another one runs until"),
        (change(f"{FOURTH}/cat", "f"), "traceEvents[4]: cat is 'f', and not one of F, B, I, W"),
        (change(f"{FOURTH}/args", 7), "traceEvents[4]: args is no object"),
        (change(f"{FOURTH}/args/micro_batch", 8), "traceEvents[4]: micro_batch is 8, and no whole number from 0 on and"),
        (change(f"{FOURTH}/args/chunk", -1), "traceEvents[4]: chunk is -1"),
        (change(FOURTH, None), "rank 0 has B of micro-batch 3, chunk 0, and not one F and one B, or one F, I and W"),
        (change("traceEvents/18/args/micro_batch", 1), "rank 1 has B of micro-batch 0, chunk 0"),
        (change("otherData/kind", "forward_only"), "rank 0 has BF of micro-batch 0, chunk 0, and not one F."),
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


def test_traces_are_what_viewers_open(tmp_path: Path) -> None:
    """Complete events have a name, a category, a process, a thread, and times in microseconds; threads have names."""
    write_trace(tmp_path / "run.json", measured())
    found = json.loads((tmp_path / "run.json").read_text())
    complete = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == 4 * 16
    assert all({"name", "cat", "pid", "tid", "ts", "dur", "args"} == event.keys() - {"ph"} for event in complete)
    first = complete[0]
    assert (first["name"], first["ts"], first["dur"]) == ("F 0", pytest.approx(100.001e6), pytest.approx(19e3))
    names = {event["tid"]: event["args"]["name"] for event in found["traceEvents"] if event["ph"] == "M"}
    assert names == {rank: f"rank {rank}" for rank in range(4)}


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
        (("--times", "1", "x", "1"), "argument --times: 'x' is neither a number"),
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
        (("--times", "1", "1", "1"), "--times cannot be combined with --measured"),
        (("--compare",), "--compare cannot be combined with --measured"),
    ],
)
def test_options_that_contradict_a_trace(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_trace(tmp_path / "run.json", measured())
    assert words in refuse(capsys, "--measured", str(tmp_path / "run.json"), *arguments)
    run(capsys, "--measured", str(tmp_path / "run.json"), "--kind", "1f1b", "--stages", "4")  # what agrees is no error
