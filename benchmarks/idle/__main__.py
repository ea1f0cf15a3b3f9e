"""``python -m benchmarks.idle``."""

import sys

from benchmarks.idle.suite import main

if __name__ == "__main__":
    sys.exit(main())
