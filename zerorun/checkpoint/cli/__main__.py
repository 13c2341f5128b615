"""``python -m zerorun.checkpoint.cli``."""

import sys

from . import main

sys.exit(main())
