"""Read by Python at the start of each process of another project's; see ../their_suite.py and ../their_examples.py."""

import os

if example := os.environ.get("ZERORUN_THEIR_EXAMPLE"):
    import example_stand_ins

    example_stand_ins.install(example)
elif os.environ.get("ZERORUN_THEIR_SUITE") in ("accelerate", "transformers"):
    import stand_ins

    stand_ins.install()
