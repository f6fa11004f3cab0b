"""Python's collector of circular garbage, and what it need never look at."""

from __future__ import annotations

import gc


def keep_what_is_loaded() -> None:
    """Leave out of every later collection what is in memory now: the program itself, for as long as the process lives.

    With torch and gRPC loaded that is hundreds of thousands of objects, and a full collection looks at all of them
    while every thread stands still, for some 30 ms; to be called when all modules are loaded.
    """
    gc.collect()
    gc.freeze()
