"""The C library's pools of memory, of which it makes one for each new thread, up to eight for each core.

What is free in one pool is of no use to a thread of another, and pages that a single small block keeps from being
handed back are kept by every pool apart.  A syncer answers in many threads, and what it holds would depend on which of
them happened to get the large messages: measured under a fuzzer, 30 MiB of 250 MiB were free and in no way to be had
in 16 pools, and still growing; with two of them it is 8 MiB of 224 MiB, and stands still.
"""

from __future__ import annotations

import ctypes

ARENAS_MAX = 2
_M_ARENA_MAX = -8


def limit_arenas() -> None:
    """Have no more than ``ARENAS_MAX`` of them in this process; to be called before it has threads.

    It is glibc's to do; other C libraries have no such pools and nothing to be told.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, ARENAS_MAX)
