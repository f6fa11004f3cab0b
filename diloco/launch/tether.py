"""Children that do not outlive their parent, however it ends.

The kernel is asked to kill this process when the one that started it dies (``PR_SET_PDEATHSIG``): unlike a thread
that looks, this also reaches a process that is stopped.  Linux only; elsewhere a child notices nothing.

``python -m diloco.launch.tether PARENT command ...`` does so and becomes the command, for programs not our own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "DILOCO_PARENT"
"""In a child's environment: the process id without which it must not live."""
PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Be killed when process ``parent`` ends, and now if it has ended already.

    It is the parent's thread that counts: a parent starts children from a thread that lives as long as it does.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Tie this process to its parent and become the command."""
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
