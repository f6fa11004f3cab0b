"""``python -m diloco`` is the command ``diloco``."""

from __future__ import annotations

from diloco.cli.main import command

if __name__ == "__main__":
    command()
