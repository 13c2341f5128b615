"""How many files a reader of one stage-3 step passes: whoever follows it should not get lost. Fewer are better."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from harness import run_ranks
from models import CASES, Place
from training import make_config, make_engine

ROOT = Path(__file__).parents[2]
MOST = 29  # only ever lowered; 8 are wanted
BOARD = ROOT / "zerorun/watch/board.py"  # where a step notes what it is at: nothing that it does depends on it
LIMIT = ROOT / "zerorun/distributed/time_limit.py"  # for waits of more than 50 ms, on a busy machine


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

    sys.setprofile(note)
    step()
    sys.setprofile(None)
    engine.destroy()
    product = [ROOT / folder for folder in ("zerorun", "ops", "launcher")]
    seen -= {str(BOARD), str(LIMIT)}
    return sorted(name for name in seen if any(folder in Path(name).parents for folder in product))


def test_a_step_passes_few_files() -> None:
    for found in run_ranks(2, files_of_a_step):
        assert 0 < len(found) <= MOST, "\n".join(found)
