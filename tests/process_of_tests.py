"""A process of pytest-xdist that is forked from the origin of the run (forked_scripts.py): it need not import PyTorch.

``python process_of_tests.py -u -c CODE`` asks for it, gives it what it has open, and waits until it has ended.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

import forked_scripts

_SHARED = ("torch", "torch._dynamo", "torch.distributed.checkpoint", "zerorun.engine.initialize")
_IF_THERE = ("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama", "peft", "hypothesis")
IMPORT_NOTHING = "TESTS_IMPORT_NOTHING"  # in the environment of a run whose tests need none of these


def prepare(*_: str) -> None:
    """Import what most modules of tests do."""
    if IMPORT_NOTHING in os.environ:
        return
    forked_scripts.prepare(*_SHARED, *(name for name in _IF_THERE if importlib.util.find_spec(name.split(".")[0])))


def main(control: Connection, folder: str, code: str) -> None:
    """Be the process."""
    for number in range(3):
        given = recv_handle(control)
        os.dup2(given, number)
        os.close(given)
    control.close()
    os.chdir(folder)
    sys.argv, sys.path[0] = ["-c"], ""
    exec(code, {"__name__": "__main__"})


if __name__ == "__main__":
    ours, process = forked_scripts.start_server(__file__, dict(os.environ), os.getcwd(), sys.argv[-1], shares=True)
    for descriptor in range(3):
        send_handle(ours, descriptor, process.pid)
        os.close(descriptor)
    process.wait()
