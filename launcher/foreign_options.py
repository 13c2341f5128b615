"""Options of torchrun and deepspeed for what is not done here: some change nothing, the others are refused."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

# What they tune there is not there to be tuned, or is always so.
_FLAGS = ("--run-path", "--no-ssh-check", "-q", "--quiet")
_VALUES = ("--rdzv-conf", "--monitor-interval", "--start-method", "--local-addr", "--signals-to-handle", "--log-level")
# Option, whether it has a value, and what to do instead.
_ELASTIC = "Remedy: --nnodes MIN:MAX and --max-restarts N."
_REFUSED = (
    ("--duplicate-stdout-filters", True, "Remedy: --log-dir DIR writes all streams to files, to be searched there."),
    ("--duplicate-stderr-filters", True, "Remedy: --log-dir DIR writes all streams to files, to be searched there."),
    ("--logs-specs", True, "Remedy: --log-dir DIR and --redirects."),
    ("--event-log-handler", True, "There are no events of torchelastic. Remedy: leave it out; failures are on stderr."),
    ("--numa-binding", True, "Remedy: --bind-cores, or --bind-core-list, binds each worker to cores of one NUMA node."),
    ("--virtual-local-rank", False, "Remedy: leave it out; LOCAL_RANK and the GPU of a worker have the same number."),
    ("--save-pid", False, "Remedy: take the launcher's process id from the shell, as $!."),
    ("--venv-script", True, "Remedy: --python PATH, that of the virtual environment on the other hosts."),
    ("--autotuning", True, "Remedy: zerorun-plan finds settings for a model and a machine."),
    ("--elastic-training", False, _ELASTIC),
    ("--enable-elastic-training", False, _ELASTIC),
    ("--min-elastic-nodes", True, _ELASTIC),
    ("--max-elastic-nodes", True, _ELASTIC),
)


def add_foreign_options(add: Callable[..., None]) -> None:
    """Add them, without a word in --help."""
    for name in _FLAGS:
        add(name, action="store_true", dest="unused", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for name in _VALUES:
        add(name, dest="unused", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for name, has_value, remedy in _REFUSED:
        count = None if has_value else 0
        add(name, action=_Refuse, nargs=count, remedy=remedy, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def launcher_name(text: str) -> str:
    """Return the name of a launcher as zerorun has it; DeepSpeed takes capitals, too."""
    name = text.lower()
    if name in ("mpich", "impi", "mvapich"):
        raise argparse.ArgumentTypeError(
            f"{text!r}: hosts are reached by ssh, slurm or openmpi. Its mpirun can start the ranks without zerorun: "
            "mpirun -np N -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 python train.py"
        )
    return name


class _Refuse(argparse.Action):
    def __init__(self, *args: Any, remedy: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._remedy = remedy

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> NoReturn:
        parser.error(f"{args[-1]}: zerorun has no such option. {self._remedy}")
