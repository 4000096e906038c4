"""``python -m commbackend.testing.soak``."""

import sys

from . import main

if __name__ == "__main__":  # ranks import this module too
    sys.exit(main())
