"""Compilation, as the board of the rank shows it: whoever compiles for a minute does not hang."""

from __future__ import annotations

import sys
from typing import Any

from ..watch.board import Phase, board

_before: list[int] = []
_shown = False


def show_compilation() -> None:
    """Have torch.compile show on the board when it compiles, if the program has imported it. Called again, do nothing."""
    global _shown
    if _shown or "torch._dynamo" not in sys.modules:
        return
    from torch._dynamo.callback import on_compile_end, on_compile_start

    on_compile_start(_begins)
    on_compile_end(_ends)
    _shown = True


def _begins(_: Any) -> None:
    _before.append(board.enter(Phase.COMPILE))


def _ends(_: Any) -> None:
    if _before:
        board.enter(_before.pop())
