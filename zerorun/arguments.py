"""Command-line options of training scripts."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--config`` (also ``--zerorun_config``, ``--deepspeed_config``), ``--deepspeed`` and ``--local_rank``.

    ``initialize(args=parser.parse_args())`` then finds the configuration. The last two, of which the parser may have
    ``--local_rank`` already, exist so that scripts and launchers made for DeepSpeed keep working; ``--deepspeed`` switches
    nothing.
    """
    group = parser.add_argument_group("zerorun")
    group.add_argument(
        "--config", "--zerorun_config", "--deepspeed_config", dest="config", help="path of the JSON configuration"
    )
    group.add_argument("--deepspeed", action="store_true", help="accepted for DeepSpeed's scripts; has no effect")
    if "--local_rank" not in parser._option_string_actions:  # scripts made for DeepSpeed have their own
        group.add_argument(
            "--local_rank", type=int, default=-1, help="accepted for DeepSpeed's launcher; LOCAL_RANK counts"
        )
    return parser
