"""How many files a reader of one stage-3 step passes: whoever follows it should not get lost. Fewer are better."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from harness import run_ranks
from models import CASES, Place
from training import make_config, make_engine

from zerorun.distributed.transport import peer_memory

ROOT = Path(__file__).parents[2]
MOST = 26  # only ever lowered; 8 are wanted
ABOVE = 14  # of them those that are neither below the transports' interface nor in ops/; only ever lowered, too
BOARD = ROOT / "zerorun/watch/board.py"  # where a step notes what it is at: nothing that it does depends on it


def files_of_a_step() -> list[str]:
    """Those of which a function is called between the forward and the end of ``step()``, on this thread."""
    case, engine = CASES["plain"], make_engine(CASES["plain"], make_config(3))

    def step() -> None:
        engine.backward(case.loss(engine, Place(0, 0)))
        engine.step()

    for _ in range(3):
        step()
    seen: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_memory, "_CHECK_S", 60.0)  # a wait of 50 ms, on a busy machine, would look for the time limit
        sys.setprofile(note)
        step()
        sys.setprofile(None)
    engine.destroy()
    product = [ROOT / folder for folder in ("zerorun", "ops", "launcher")]
    seen.discard(str(BOARD))
    return sorted(name for name in seen if any(folder in Path(name).parents for folder in product))


def test_a_step_passes_few_files() -> None:
    for found in run_ranks(2, files_of_a_step):
        assert 0 < len(found) <= MOST, "\n".join(found)
        below = [str(ROOT / folder) for folder in ("ops", "zerorun/distributed")]
        above = [name for name in found if not name.startswith(tuple(below))]
        assert len(above) <= ABOVE, "\n".join(above)


def test_the_manual_follows_a_step_through_eight_files() -> None:
    design = (ROOT / "docs/design.md").read_text()
    section = design.split("\n## One step\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`((?:engine|zero|plan|distributed)/[\w/]+\.py)`", section.split("\n\nBeside")[0]))
    (passed,) = {tuple(found) for found in run_ranks(2, files_of_a_step)}
    assert len(named) == 8
    assert {str(ROOT / "zerorun" / name) for name in named} <= set(passed)
