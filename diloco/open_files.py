"""How many files and connections a process may have open, and that a crash leaves no copy of its memory.

The soft limit of open files is the user's to raise to the hard one.  The usual one, 1,024, is there for programs that
call select(), and a syncer that has used it up can neither take a connection nor open a file of its own.
"""

from __future__ import annotations

import sys

WANTED = 65_536


def raise_limit() -> None:
    """Raise the soft limit of this process, and of what it starts, to the hard one, at most to ``WANTED``."""
    soft, hard = limits()
    if soft < (wanted := min(hard, WANTED)):
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def leave_no_core() -> None:
    """No core of this process, nor of what it starts: its memory holds tokens and keys.

    The limit is one byte: no core fits into such a file, and Linux makes none for a pipe (systemd-coredump) either.  A
    limit of 0 says nothing to a pipe.
    """
    if sys.platform != "win32":
        import resource

        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (1 if hard else 0, hard))


def limits() -> tuple[int, int]:
    """The soft and the hard limit; ``sys.maxsize`` where there is none."""
    if sys.platform == "win32":
        return sys.maxsize, sys.maxsize
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return tuple(sys.maxsize if each == resource.RLIM_INFINITY else each for each in (soft, hard))  # type: ignore[return-value]
