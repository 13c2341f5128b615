"""Read by Python at the start of each process of another project's suite; see ../their_suite.py."""

import os

if os.environ.get("ZERORUN_THEIR_SUITE"):
    import stand_ins

    stand_ins.install()
