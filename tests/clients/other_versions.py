"""Run the clients' tests with other versions of the clients than those that are installed; for the night.

    python tests/clients/other_versions.py                              the newest of each
    python tests/clients/other_versions.py transformers==5.20.0 trl     these, and of the others what is installed
    python tests/clients/other_versions.py accelerate -- -k accelerate  with options of pytest

They go to a virtual environment of their own, which has everything else from this one. The versions are printed before the
tests, and with their result.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

CLIENTS = ("transformers", "accelerate", "trl", "peft", "lightning")
TESTS = Path(__file__).parent
VERSIONS = "import sys, importlib.metadata as m; print(*(f'{name} {m.version(name)}' for name in sys.argv[1:]), sep=', ')"


def main(arguments: list[str]) -> int:
    """Install, run, and return pytest's exit status."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    wanted, options = arguments[:cut] or list(CLIENTS), arguments[cut + 1 :]
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin", "python"))
        site = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
        here = sysconfig.get_path("purelib")
        Path(site.strip(), "zz_this_environment.pth").write_text(f"import site; site.addsitedir({here!r})\n")
        subprocess.check_call([python, "-m", "pip", "install", "--quiet", "--upgrade", *wanted])
        versions = subprocess.check_output([python, "-c", VERSIONS, *CLIENTS], text=True).strip()
        print(f"clients: {versions}", flush=True)
        command = [python, "-m", "pytest", "-q", "-m", "nightly or not nightly", *options, str(TESTS)]
        status = subprocess.call(command, cwd=TESTS.parents[1])
    print(f"{'passed' if status == 0 else 'FAILED'} with {versions}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
