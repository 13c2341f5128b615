"""Read by Python at the start of each process of another project's suite; see ../their_suite.py."""

import os
import sys

if os.environ.get("ZERORUN_THEIR_SUITE") and not any("pip" in argument for argument in sys.argv[:1]):
    import stand_ins

    stand_ins.install()
