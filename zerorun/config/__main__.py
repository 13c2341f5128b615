"""``python -m zerorun.config``: check and print a configuration."""

import sys

from . import main

sys.exit(main())
