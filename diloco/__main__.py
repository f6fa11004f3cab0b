"""``python -m diloco`` is the command ``diloco``."""

from __future__ import annotations

import sys

from diloco.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
