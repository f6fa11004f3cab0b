"""The end of a process that was a rank."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """End this process with ``code``; one that was a rank of several, without taking its interpreter apart.

    gloo's threads let go of what a collective was given when they come to it, and need the interpreter's lock to do so.
    A thread that asks for it while the interpreter is being taken apart aborts the process, after all its work was
    done, and torchrun ends the other ranks with it.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # Nobody reads it any more.
            stream.flush()
    os._exit(code)
