"""``python -m commbackend.bench FILE... [--compare OLD]``: tables of benchmark files as Markdown."""

import sys

from .report import main

sys.exit(main(sys.argv[1:]))
