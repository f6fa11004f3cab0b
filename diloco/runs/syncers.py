"""Several syncers of one run on one machine, behind one command: each is a process and holds its own fragments.

A model's bulk then passes several interpreters, and its fragments merge beside each other.  A syncer that dies is
started again, and meanwhile costs only its own fragments their rounds.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from diloco.config.errors import ExitCode
from diloco.runs.process import Stopping, child_environment, end_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from diloco.runs.process import Child

TICK_S = 0.1
JOINS = "a site joins with:"
"""The beginning of a syncer's last line of greeting."""


def keep_running(children: Mapping[Path, Child], begun: Callable[[list[str]], None]) -> ExitCode:
    """Run syncers until all of them have ended; start one that died again, with run.resume=auto.

    ``children`` has for each the file to which it writes its address; ``begun`` gets all addresses once all serve.
    What a syncer prints after its greeting is printed here too, with its name.  The first SIGINT or SIGTERM asks each
    for a last round, a SIGHUP to stop without one.  Where one cannot start, all are killed, and VerbError says why.
    One that keeps dying, or whose settings are refused, costs its own fragments alone: the others go on.  Return FAILED
    if there was such a one, else DRAINED unless all have finished.
    """
    environment, passed_on, failed = child_environment(os.environ), None, False
    before = {path: _written(path) for path in children}
    addresses: dict[Path, str] = {}
    greeted: set[int] = set()
    with Stopping("a last round, then the syncers stop", "the syncers stop, and the sites train on") as stopping:
        stopping.ask()
        try:
            for child in children.values():
                child.start(environment)
            while any(child.wanted for child in children.values()):
                for path, child in children.items():
                    if not child.proven and (found := _written(path)) not in (None, before[path]):
                        child.proven, addresses[path] = True, found[0]
                        child.command = [*child.command, "run.resume=auto"]
                        if len(addresses) == len(children):
                            begun([addresses[each] for each in children])
                    _pass_on(child, greeted)
                    failed |= not _look_after(child, environment, ends=passed_on is not None)
                asked = signal.SIGHUP if stopping.handing_over else signal.SIGTERM if stopping.asked else None
                if asked is not None and asked is not passed_on:
                    passed_on = asked
                    for child in children.values():
                        child.wanted = child.running  # One that has died is not started again.
                        child.signal(asked)
                time.sleep(TICK_S)
            for child in children.values():
                _pass_on(child, greeted)
        finally:
            end_all(children.values(), 0.0)
    if failed:
        return ExitCode.FAILED
    return ExitCode.OK if all(child.code == ExitCode.OK for child in children.values()) else ExitCode.DRAINED


def _pass_on(child: Child, greeted: set[int]) -> None:
    """Print what a child has written since the last call, but for the greeting of those not in ``greeted``, by pid."""
    for line in child.new_lines():
        if child.pid in greeted:
            print(f"[{child.name}] {line}", flush=True)
        elif line.startswith(JOINS):
            greeted.add(child.pid)


def _written(path: Path) -> tuple[str, int, int] | None:
    """Return a file's text, and what tells it from an earlier file of that name; None where there is no file."""
    try:
        found = path.stat()
        return path.read_text(), found.st_ino, found.st_mtime_ns
    except FileNotFoundError:
        return None


def _look_after(child: Child, environment: Mapping[str, str], *, ends: bool) -> bool:
    """Start a child again that has died, after its back-off, unless it ``ends``; return False to give it up."""
    now_s = time.monotonic()
    if child.wanted and not child.running and now_s >= child.next_start_s:
        child.start(environment)
    if not child.ended():
        return True
    early = (-signal.SIGTERM, -signal.SIGHUP) if ends else ()  # It did not handle the signal yet.
    if child.code in (ExitCode.OK, ExitCode.DRAINED, *early):
        child.wanted = False
        return True
    told = f"{child.name} ended with exit code {child.code}: {child.last_words() or 'it printed nothing'}"
    if child.code is not None and child.code < 0:  # What it printed last is not the reason.
        told = f"{child.name} was ended by signal {-child.code}"
    told += f" ({child.log})"
    if not child.proven and not ends:
        raise child.error(told)
    if ends or child.code in (ExitCode.USAGE, ExitCode.MISMATCH) or not child.backed_off(now_s):
        child.wanted = False
        print(f"{told}; it is not started again", flush=True)
        return False
    print(f"{told}; it is started again", flush=True)
    return True
