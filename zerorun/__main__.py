"""``python -m zerorun`` is the command ``zerorun``."""

import sys

from .launcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
