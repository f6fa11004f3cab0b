"""What a module of tests says in a process whose hash seed is another one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HASH_SEED = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
"""Another than that of this process, which draws its own if nothing is said."""


def told_in_another_process(module: str) -> str:
    """What ``told()`` of ``module`` returns there."""
    return subprocess.run(
        [sys.executable, "-c", f"from {module} import told\nprint(told())"],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": HASH_SEED, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.strip()
