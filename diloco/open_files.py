"""Raise the limit on open files and connections, and disable core dumps.

A user may raise the soft limit on open files up to the hard limit.  The usual soft limit, 1,024, is meant for programs
that call select(); a syncer that has reached it can neither accept a connection nor open a file of its own.
"""

from __future__ import annotations

import sys

WANTED = 65_536


def raise_limit() -> None:
    """Raise the soft limit of this process and its children to the hard limit, at most to ``WANTED``."""
    soft, hard = limits()
    if soft < (wanted := min(hard, WANTED)):
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def leave_no_core() -> None:
    """Disable core dumps of this process and its children: its memory holds tokens and keys.

    The limit is one byte: no core fits into such a file, and at that limit Linux dumps nothing to a pipe
    (systemd-coredump) either.  A limit of 0 does not apply to a pipe.
    """
    if sys.platform != "win32":
        import resource

        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (1 if hard else 0, hard))


def limits() -> tuple[int, int]:
    """Return the soft and the hard limit on open files; ``sys.maxsize`` where there is none."""
    if sys.platform == "win32":
        return sys.maxsize, sys.maxsize
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return tuple(sys.maxsize if each == resource.RLIM_INFINITY else each for each in (soft, hard))  # type: ignore[return-value]
