"""Options of torchrun and deepspeed for what is not done here: some change nothing, the others are refused.

Also the variables PET_* by which torchrun's options have defaults, as operators of Kubernetes set them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

# What they tune there is not there to be tuned, or is always so.
_FLAGS = ("--run-path", "--no-ssh-check", "-q", "--quiet")
_VALUES = ("--rdzv-conf", "--monitor-interval", "--start-method", "--local-addr", "--signals-to-handle", "--log-level")
# Option, whether it has a value, and what to do instead.
_ELASTIC = "Remedy: --nnodes MIN:MAX and --max-restarts N."
_REFUSED = (
    ("--duplicate-stdout-filters", True, "Remedy: --log-dir DIR writes all streams to files, to be searched there."),
    ("--duplicate-stderr-filters", True, "Remedy: --log-dir DIR writes all streams to files, to be searched there."),
    ("--log-line-prefix-template", True, "Remedy: leave it out; lines of all ranks but 0 begin with [rank N]."),
    ("--print-completion", True, "Remedy: zerorun --help shows the options."),
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
# Options of torchrun for which there may be a variable, but those that change nothing here.
_MEETING = ("nnodes", "node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "standalone")
_OTHERS = (
    "nproc_per_node", "rdzv_id", "role", "max_restarts", "module", "no_python", "log_dir", "redirects", "tee",
    "local_ranks_filter", "shutdown_timeout", "event_log_handler", "duplicate_stdout_filters", "duplicate_stderr_filters",
    "virtual_local_rank", "log_line_prefix_template",
)  # fmt: skip
TORCHRUN = (*_MEETING, *_OTHERS)
_SAYING_WHERE = ("hostfile", "launcher", "standalone", "sbatch", "dump", "trace")  # whose use makes those of _MEETING moot


def add_foreign_options(add: Callable[..., None]) -> None:
    """Add them, without a word in --help."""
    for name in _FLAGS:
        add(name, action="store_true", dest="unused", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for name in _VALUES:
        add(name, dest="unused", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for name, has_value, remedy in _REFUSED:
        count = None if has_value else 0
        add(name, action=_Refuse, nargs=count, remedy=remedy, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def torchrun_defaults(
    parser: argparse.ArgumentParser, words: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return, by variable, the options for which torchrun's variables stand, without those that ``words`` decide.

    Ends the program, as the parser does, if a variable has a value that cannot be.
    """
    told = {name: value for name in TORCHRUN if (value := environment.get(f"PET_{name.upper()}"))}
    if not told:
        return {}
    given = _given(parser, words)
    moot = set(_MEETING if given.intersection(_SAYING_WHERE) else ())
    if "master_addr" in given:
        moot.add("rdzv_endpoint")
    elif "rdzv_endpoint" in given or "rdzv_endpoint" in told:
        moot.update(("master_addr", "master_port"))
    found = {}
    for name, value in told.items():
        option = f"--{name.replace('_', '-')}"
        action = parser._option_string_actions[option]
        is_flag = action.nargs == 0
        if name in moot or action.dest in given or (is_flag and value == "0"):
            continue
        if problem := _problem(parser, action, value):
            parser.error(f"PET_{name.upper()}={value}: {problem}")
        found[f"PET_{name.upper()}"] = option if is_flag else f"{option}={value}"
    return found


def without_torchrun_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the ``environment`` of a launcher whose options are all on its command line."""
    return {name: value for name, value in environment.items() if name not in {f"PET_{name.upper()}" for name in TORCHRUN}}


def _given(parser: argparse.ArgumentParser, words: Sequence[str]) -> set[str]:
    """Return what the options among ``words`` set."""
    unset: list[object] = []
    nothing = argparse.Namespace(**{action.dest: unset for action in parser._actions})
    found, _ = parser.parse_known_args(words, nothing)
    return {name for name, value in vars(found).items() if value is not unset}


def _problem(parser: argparse.ArgumentParser, action: argparse.Action, value: str) -> str:
    """Return why the option of ``action`` cannot have ``value``, and what to do; an empty string if it can."""
    if isinstance(action, _Refuse):
        return f"zerorun has no such option. {action.remedy}"
    try:
        if action.nargs is None:
            parser._check_value(action, parser._get_value(action, value))
    except argparse.ArgumentError as error:
        return f"{error.message}. Remedy: another value, or unset the variable."
    return ""


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
        self.remedy = remedy

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> NoReturn:
        parser.error(f"{args[-1]}: zerorun has no such option. {self.remedy}")
