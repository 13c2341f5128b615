"""A job for test_preemption.py: trains to step 12 and says what it does; nothing in it knows of checkpoints."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import zerorun


def main(config: str, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    engine = zerorun.initialize(model, config)
    generation = len(list(folder.glob(f"run-{rank}-*")))
    (folder / f"run-{rank}-{generation}").write_text(f"{os.getpid()} {engine.global_steps}")
    while engine.global_steps < 12:
        draw = torch.randn(2, 16)
        loss = engine(draw).square().mean()
        engine.backward(loss)
        engine.step()
        with (folder / f"losses-{rank}").open("a") as log:
            log.write(f"{generation} {engine.global_steps} {loss.item()!r}\n")
        if (folder / "die").exists() and rank == 1 and engine.global_steps == 5:
            (folder / "die").unlink()
            os.kill(os.getpid(), 9)
        while (folder / "wait").exists() and engine.global_steps == 3:
            time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
