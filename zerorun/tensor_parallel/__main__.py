"""Shows what tensor parallelism would do to a model, without ranks: ``python -m zerorun.tensor_parallel --help``."""

from __future__ import annotations

import argparse
import sys

from ..errors import ZerorunError
from ..log import print_lines
from ..model_setup.model_factory import model_from
from .describe import bytes_per_rank, describe
from .infer import infer_plan
from .planning import make_plan, own_plan


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m zerorun.tensor_parallel", description=__doc__)
    parser.add_argument("--model", required=True, metavar="MODULE:FACTORY", help="a function that returns the model")
    parser.add_argument("--size", required=True, type=int, help="tensor-parallel ranks")
    parser.add_argument("--dry-run", action="store_true", required=True, help="print the plan; nothing is divided")
    given = parser.parse_args(arguments)
    sys.path.insert(0, "")
    try:
        model = model_from(given.model)
        shipped = own_plan(model)
        plan = make_plan(model, None if shipped else infer_plan(model, given.size), given.size)
    except ZerorunError as error:
        print(error, file=sys.stderr)
        return 2
    told = f"{type(model).__name__}: {'its own plan' if shipped else 'inferred plan'}, {given.size} ranks"
    whole = sum(param.numel() * param.element_size() for param in model.parameters())
    parts = " ".join(f"{count:,}" for count in bytes_per_rank(model, plan))
    print_lines([told, *describe(model, plan).splitlines(), f"bytes of parameters: {whole:,} whole; by rank {parts}"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
