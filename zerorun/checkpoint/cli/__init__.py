"""The ``zerorun-checkpoint`` command: its arguments, and how it ends. Each subcommand is a module."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import zerorun
from zerorun.log import command_parser, end_as_by_ctrl_c, run_command

FAILED = 2
_DTYPES = ("fp32", "bf16", "fp16")
_UNITS = {"": 1, "B": 1}
_UNITS |= {
    f"{letter}{end}": base**power for power, letter in enumerate("KMGT", 1) for end, base in (("B", 1000), ("iB", 1024))
}

_DESCRIPTION = """\
Look at checkpoints of zerorun, check them, compare them, and bring weights and
whole checkpoints to and from other formats. Needs neither the model nor the
ranks and GPUs of the run.
"""
_EPILOG = """\
DIR is a checkpoint (a directory with zerorun.json) or a directory of them. Then
the checkpoint is --tag, or without it the one that a run would load first: what
`latest` names, or a newer one whose save was interrupted at its very end.

exit status: 0 done; good (verify); equal (diff). 1 damaged (verify, diff);
different (diff). 2 the command could not be understood or carried out. What
the command writes appears as a whole or not at all.
"""
_MODULES = {"import": "importing"}  # of a subcommand whose name cannot be a module's
_NAMES_HELP = (
    "JSON: for each group of the optimizer the names of its parameters, in order; needed only if the optimizer's state is "
    "stored by number, and fits the parameters in several ways"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` and return the exit status."""
    args = build_parser().parse_args(argv)
    end_as_by_ctrl_c()  # so that a half-written directory is deleted, as after Ctrl-C
    return run_command("zerorun-checkpoint", FAILED, partial(_run, args))


def _run(args: argparse.Namespace) -> tuple[int, Iterable[str]]:
    module: Any = importlib.import_module(f".{args.module}", __name__)  # here: it imports torch
    status, lines = module.run(args)
    return int(status), lines


# -- arguments ---------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("zerorun-checkpoint", _DESCRIPTION, _EPILOG)
    parser.add_argument("--version", action="version", version=f"zerorun {zerorun.__version__}")
    commands = parser.add_subparsers(title="subcommands", metavar="COMMAND", required=True)
    _add_inspect(commands)
    _add_verify(commands)
    _add_export(commands)
    _add_diff(commands)
    _add_imports(commands)
    return parser


def _command(commands: Any, name: str, summary: str, more: str = "") -> Any:
    """The parser of one subcommand. The module named after the first word of ``name`` carries it out."""
    text = f"{summary[0].upper()}{summary[1:]}. {more}".strip()
    verb = name.partition("-")[0]
    parser = commands.add_parser(name, help=summary, description=text, allow_abbrev=False)
    parser.set_defaults(command=name, module=_MODULES.get(verb, verb))
    return parser


def _add_inspect(commands: Any) -> None:
    more = (
        "In a directory of several checkpoints, also what each of them is. Of a folder of safetensors files without a "
        "zerorun.json, such as an export: what it is, and its tensors. Reads headers only."
    )
    parser = _command(commands, "inspect", "say what is in a checkpoint", more)
    parser.add_argument("dir", metavar="DIR")
    _add_tag(parser)
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")


def _add_verify(commands: Any) -> None:
    more = (
        "Every byte of every file is read and compared with the manifest's checksums; then it is checked that indexes, "
        "files and manifest tell of the same tensors. Names every damaged file with the bytes concerned. With --all, what "
        "interrupted saves have left counts as damage; else it is only named."
    )
    parser = _command(commands, "verify", "check that a checkpoint is complete and undamaged", more)
    parser.add_argument("dir", metavar="DIR")
    which = parser.add_mutually_exclusive_group()
    _add_tag(which)
    which.add_argument("--all", action="store_true", help="all checkpoints in DIR")


def _add_export(commands: Any) -> None:
    more = (
        "Model files in shards with an index, and the model's configuration if it was a Hugging Face model. Floating-point "
        "weights are taken from the fp32 masters when another dtype is asked for than that of the model."
    )
    parser = _command(commands, "export", "write the weights alone, as a Hugging Face directory", more)
    parser.add_argument("dir", metavar="DIR")
    parser.add_argument("out", metavar="OUT", help="the directory to make; it must not exist")
    _add_tag(parser)
    parser.add_argument("--dtype", choices=_DTYPES, help="of floating-point weights (default: as the model computed)")
    parser.add_argument(
        "--max-shard-size", type=size, default=size("5GB"), metavar="SIZE", help="such as 500MB, 2GiB (default: 5GB)"
    )


def _add_diff(commands: Any) -> None:
    more = (
        "Compares the tensors of the model, the masters and the optimizer, and what the manifests say of them: parameters, "
        "hyperparameters, counters, schedule, loss scale, client state. Random number generators, the position in the data "
        "and the number of ranks are not compared. Of a damaged checkpoint what can be read is compared."
    )
    parser = _command(commands, "diff", "compare two checkpoints", more)
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.add_argument("--tag-a", metavar="TAG", help="which checkpoint in A")
    parser.add_argument("--tag-b", metavar="TAG", help="which checkpoint in B")
    meaning = "numbers may differ by X times their magnitude, those of a tensor by X times its largest (default: 0)"
    parser.add_argument("--tolerance", type=tolerance, default=0.0, metavar="X", help=meaning)
    parser.add_argument("--all", action="store_true", help="list all tensors that differ, not only 20 of each set")


def _add_imports(commands: Any) -> None:
    for name, origin in (("import-deepspeed", "DeepSpeed"), ("import-dcp", "torch.distributed.checkpoint (FSDP)")):
        parser = _command(commands, name, f"make a checkpoint of zerorun from one of {origin}",
            "It is OUT/global_step<n>. Prints what could not be carried over.")  # fmt: skip
        parser.add_argument("dir", metavar="DIR")
        parser.add_argument("out", metavar="OUT", help="the directory of checkpoints to put it into")
        if name == "import-deepspeed":
            _add_tag(parser)
        else:
            for what in ("model", "optimizer"):
                text = f"the key under which DIR has the {what}, if it is none of the usual ones"
                parser.add_argument(f"--{what}", metavar="KEY", help=text)
        parser.add_argument("--names", type=names_file, metavar="FILE", help=_NAMES_HELP)


def _add_tag(parser: Any) -> None:
    parser.add_argument("--tag", metavar="TAG", help="which checkpoint in DIR")


def size(text: str) -> int:
    """Return the number of bytes that a text such as ``5GB`` stands for. Raises ArgumentTypeError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = next((value for name, value in _UNITS.items() if found and name.lower() == found[2].lower()), 0)
    nbytes = int(float(found[1]) * unit) if found else 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 500MB or 5GB")
    return nbytes


def tolerance(text: str) -> float:
    """Return a finite number that is not negative. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def names_file(text: str) -> list[list[str]]:
    """Read the lists of names in the JSON file ``text``. Raises ArgumentTypeError."""
    try:
        with open(text, encoding="utf-8") as file:
            names = json.load(file)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be read: {error}") from error
    if not isinstance(names, list) or not all(isinstance(group, list) for group in names):
        raise argparse.ArgumentTypeError(f"{text} is no list of lists of names")
    return [[str(name) for name in group] for group in names]
