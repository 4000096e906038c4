"""``python -m commbackend``: the same as the command ``commbackend``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
