"""What is loaded is left alone, and garbage is still collected."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

from diloco.launch.lasting import keep_what_is_loaded

SHOW = "import gc; from diloco.launch.lasting import keep_what_is_loaded as keep; keep(); print(gc.get_freeze_count())"


class Circle:
    """Holds itself."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_loaded_is_looked_at_no_more() -> None:
    done = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) > 1000


def test_garbage_made_later_is_collected() -> None:
    try:
        keep_what_is_loaded()
        gone = weakref.ref(Circle())
        gc.collect()
        assert gone() is None
    finally:
        gc.unfreeze()
