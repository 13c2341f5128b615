"""Command-line options of training scripts."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ..watch.launch_environment import launched


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--config`` (also ``--zerorun_config``, ``--deepspeed_config``), ``--deepspeed`` and ``--local_rank``.

    ``initialize(args=parser.parse_args())`` then finds the configuration. Whichever of the names is used, its path is both
    in ``args.config`` and, for scripts written for DeepSpeed, in ``args.deepspeed_config``. ``args.deepspeed`` tells
    whether ``--deepspeed`` was given, and has no effect. Options that the parser already has are left alone.
    """
    group = parser.add_argument_group("zerorun")
    names = [name for name in ("--config", "--zerorun_config", "--deepspeed_config") if not _has(parser, name)]
    places = [name[2:] for name in ("--config", "--deepspeed_config") if name in names]
    if names:
        group.add_argument(*names, dest=places[0] if places else None, action=_Path, places=places,
                           help="path of the JSON configuration")  # fmt: skip
        parser.set_defaults(**{place: parser.get_default(place) for place in places})
    if not _has(parser, "--deepspeed"):
        group.add_argument("--deepspeed", action="store_true", help="accepted for DeepSpeed's scripts; has no effect")
    if not _has(parser, "--local_rank"):
        group.add_argument(
            "--local_rank",
            type=int,
            default=int(launched(os.environ).get("LOCAL_RANK", -1)),
            help="of DeepSpeed's launcher (default: what this rank's launcher tells, or -1)",
        )
    return parser


def _has(parser: argparse.ArgumentParser, option: str) -> bool:
    return option in parser._option_string_actions


class _Path(argparse.Action):
    """Stores one value under several names."""

    def __init__(self, *args: Any, places: list[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._places = places or [self.dest]

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        for place in self._places:
            setattr(namespace, place, values)
