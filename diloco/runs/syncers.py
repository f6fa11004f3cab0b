"""Several syncers of one run on one machine, behind one command: each is a process and holds its own fragments.

A model's bulk then passes several interpreters, and its fragments merge beside each other.  A syncer that dies is
started again, and meanwhile costs only its own fragments their rounds.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from diloco.config.errors import ExitCode, VerbError
from diloco.runs.process import Stopping, child_environment, end_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from diloco.runs.process import Child

TICK_S = 0.1


def keep_running(children: Mapping[Path, Child], begun: Callable[[list[str]], None]) -> ExitCode:
    """Run syncers until all of them have ended; start one that died again.  Return DRAINED unless all have finished.

    ``children`` has for each the file to which it writes its address; ``begun`` gets all addresses once all serve.  The
    first SIGINT or SIGTERM asks each for a last round, a SIGHUP to stop without one.  Where one cannot start, or keeps
    dying, all are killed, and VerbError says why: what they acknowledged is on the disk, and the sites train on.
    """
    environment, passed_on = child_environment(os.environ), False
    addresses: dict[Path, str] = {}
    with Stopping("a last round, then the syncers stop", "the syncers stop, and the sites train on") as stopping:
        stopping.ask(lambda: None)
        try:
            began_s = time.time()
            for child in children.values():
                child.start(environment)
            while any(child.wanted for child in children.values()):
                for path, child in children.items():
                    if path not in addresses and (address := _written(path, began_s)):
                        addresses[path], child.proven = address, True
                        if len(addresses) == len(children):
                            begun([addresses[each] for each in children])
                    _look_after(child, environment, ends=passed_on)
                if (stopping.asked or stopping.handing_over) and not passed_on:
                    passed_on = True
                    for child in children.values():
                        child.wanted = child.running  # One that has died is not started again.
                        child.signal(signal.SIGHUP if stopping.handing_over else signal.SIGTERM)
                time.sleep(TICK_S)
        finally:
            end_all(children.values(), 0.0)
    return ExitCode.OK if all(child.code == ExitCode.OK for child in children.values()) else ExitCode.DRAINED


def _written(path: Path, since_s: float) -> str:
    """Return what was written to a file since that instant; "" if nothing was: an earlier process may have left one."""
    try:
        return path.read_text() if path.stat().st_mtime >= since_s else ""
    except FileNotFoundError:
        return ""


def _look_after(child: Child, environment: Mapping[str, str], *, ends: bool) -> None:
    """Start a child again that has died, after its back-off, unless it ``ends``."""
    now_s = time.monotonic()
    if child.ended():
        if ends or child.code in (ExitCode.OK, ExitCode.DRAINED):
            child.wanted = False
            return
        told = f"{child.name} ended with exit code {child.code}: {child.last_words() or 'it printed nothing'}"
        if child.code is not None and child.code < 0:  # What it printed last is not the reason.
            told = f"{child.name} was ended by signal {-child.code}"
        told += f" ({child.log})"
        if not child.proven:
            raise VerbError(ExitCode(child.code) if child.code in set(ExitCode) else ExitCode.FAILED, told)
        if not child.backed_off(now_s):
            raise VerbError(ExitCode.FAILED, f"{told}, for the {child.deaths}th time in a row")
        print(f"{told}; it is started again", flush=True)
    elif child.wanted and not child.running and now_s >= child.next_start_s:
        child.start(environment)
