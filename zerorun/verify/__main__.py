"""Shows whether a model trains as configured as it does in one process: ``zerorun [options] verify --help``."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence

from ..engine.initialize import initialize
from ..errors import ZerorunError
from ..log import is_rank_zero, own_rank, positive
from ..model_setup.model_factory import function_from
from .verification import Verification

DIFFERS, REFUSED = 1, 2
_EPILOG = (
    "exit status: 0 if both runs are equal, 1 if they differ, 2 if the function or the configuration cannot be used, or if "
    "the model or the loss raises an error."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on this rank and return the exit status, which is the same on all ranks."""
    given = build_parser().parse_args(arguments)
    sys.path.insert(0, "")
    began = time.perf_counter()
    try:
        function = function_from(given.function)
        verdict = Verification(function, given.config, initialize, given.steps, given.blocks, given.seed).run()
    except ZerorunError as error:
        if is_rank_zero():
            print(f"zerorun verify: {error}", file=sys.stderr)
        return REFUSED
    except (Exception, SystemExit) as error:  # of the script's own code, and perhaps on this rank alone
        traceback.print_exc()
        told = f"the model or the loss raised {type(error).__name__}: {error}, on rank {own_rank()}. Nothing was compared."
        print(f"zerorun verify: {told} Remedy: train it in one process, and mend it.", file=sys.stderr)
        return REFUSED
    if is_rank_zero():
        print(verdict.text + (f" ({time.perf_counter() - began:.1f} s)" if verdict.equal else ""), flush=True)
    return 0 if verdict.equal else DIFFERS


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zerorun [options] verify", description=__doc__, epilog=_EPILOG)
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="returns (model, batches), or (model, batches, loss)")
    parser.add_argument("--config", required=True, metavar="FILE", help="the configuration, JSON")
    parser.add_argument("--steps", type=positive, default=3, metavar="N", help="optimizer steps (default 3)")
    parser.add_argument(
        "--blocks", type=positive, metavar="N", help="verify only N blocks of each list (default: what fits)"
    )
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="of weights, data and dropout (default 1234)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
