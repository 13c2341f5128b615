"""Run the DeepSpeed tests of accelerate and transformers, or DeepSpeed's own, from a checkout, with zerorun as DeepSpeed.

    python tests/clients/their_suite.py accelerate PATH/TO/CHECKOUT [pytest's arguments]
    python tests/clients/their_suite.py transformers PATH/TO/CHECKOUT [pytest's arguments]
    python tests/clients/their_suite.py deepspeed PATH/TO/CHECKOUT [FOLDERS, FILES or TESTS of tests/unit] [options]

Their tests want GPUs and models of a hub. Here they run on the CPU, and each model of the hub becomes a random one of the
same class: on_cpu/ is what Python reads at the start of each process of theirs. DeepSpeed's own need one thing more: names
of its internals, which raise when a test uses them (on_cpu/their_internals.py), and ranks (on_cpu/their_ranks.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ON_CPU = Path(__file__).parent / "on_cpu"
FOLDERS = {"accelerate": "tests/deepspeed", "transformers": "tests/deepspeed", "deepspeed": "tests"}
OPTIONS = {
    "accelerate": [],
    "transformers": [],
    "deepspeed": [
        "-p",
        "their_ranks",
        "--tb=no",
        "-W",
        "ignore",
        "--continue-on-collection-errors",
        "-o",
        "console_output_style=count",
        "--no-header",
    ],
}


def main(client: str, checkout: str, *options: str) -> int:
    """Run the suite, and return pytest's exit status."""
    environment = {**os.environ, "ZERORUN_AS_DEEPSPEED": "1", "ZERORUN_THEIR_SUITE": client, "HF_HUB_OFFLINE": "1"}
    own = [str(Path(checkout, "src").resolve())] if client == "accelerate" else []
    environment["PYTHONPATH"] = os.pathsep.join([str(ON_CPU), str(ROOT), *own])
    folder = Path(checkout, FOLDERS[client]).resolve()
    chosen = list(options)
    if client == "deepspeed":
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # deepspeed's command
        chosen = [
            f"unit/{option}" if (folder / "unit" / option.partition("::")[0]).exists() else option for option in options
        ]
        chosen = chosen if any(option.startswith("unit/") for option in chosen) else [*chosen, "unit"]
    else:
        chosen.append(str(folder))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *OPTIONS[client], *chosen]
    inside = Path(checkout) if client == "transformers" else folder  # its tests import one another from the root
    return subprocess.call(command, cwd=inside, env=environment)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
