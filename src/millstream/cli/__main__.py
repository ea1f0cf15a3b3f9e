"""``python -m millstream.cli`` is the command ``millstream``."""

import sys

from millstream.cli import main

sys.exit(main())
