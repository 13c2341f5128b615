"""Run the DeepSpeed tests of accelerate, from a checkout of theirs, with zerorun as DeepSpeed.

    python tests/clients/their_suite.py accelerate PATH/TO/CHECKOUT [pytest's arguments]

Their tests want GPUs and models of a hub. Here they run on the CPU, and each model of the hub becomes a random one of the
same class: on_cpu/ is what Python reads at the start of each process of theirs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDERS = {"accelerate": "tests/deepspeed"}


def main(client: str, checkout: str, *options: str) -> int:
    """Run the suite, and return pytest's exit status."""
    path = str(Path(__file__).parent / "on_cpu")
    environment = {**os.environ, "ZERORUN_AS_DEEPSPEED": "1", "PYTHONPATH": path, "ZERORUN_THEIR_SUITE": client}
    environment |= {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *options]
    folder = Path(checkout, FOLDERS[client])
    return subprocess.call([*command, str(folder)], cwd=folder, env=environment)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
