"""Checks of a machine, its data folder, the path to a syncer and the syncer itself, before a run starts.

The result of a check is one line for a person and fields for a program.  A check runs in its own thread with a
timeout: a name server or a disk that never answers is a finding like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")
NAME_WIDTH = 10


class Level(Enum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    """It works, but less well than it could."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """``remedy`` says what to change, for every level but OK; ``figures`` are the measured values."""

    check: str
    level: Level
    says: str
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    address: str = ""
    """The address that the finding is about, if any."""

    def line(self) -> str:
        """Return one line for a person."""
        told = " ".join(self.says.split())
        what = f" -> {' '.join(self.remedy.split())}" if self.remedy else ""
        return f"{self.level.value:<4}  {self.check:<{NAME_WIDTH}}  {told}{what}"

    def fields(self) -> dict[str, Any]:
        """Return the fields for a program."""
        return asdict(self) | {"level": self.level.value}


def ok(check: str, says: str, **figures: Any) -> Finding:
    """Return a finding of level OK."""
    return Finding(check, Level.OK, says, "", figures)


def warn(check: str, says: str, remedy: str, **figures: Any) -> Finding:
    """Return a finding of level WARN."""
    return Finding(check, Level.WARN, says, remedy, figures)


def fail(check: str, says: str, remedy: str, **figures: Any) -> Finding:
    """Return a finding of level FAIL."""
    return Finding(check, Level.FAIL, says, remedy, figures)


def bounded(name: str, check: Callable[[], T], limit_s: float) -> T | Finding:
    """Return the result of ``check`` within ``limit_s`` seconds; a timeout or an exception becomes a FAIL finding.

    A check that takes longer goes on in its thread, which ends with the process.
    """
    done: list[T | Finding] = []

    def run() -> None:
        try:
            done.append(check())
        except Exception as error:
            # The top level of a check: an error in one check must be reported, and must not stop the others.
            text = f"the check itself broke: {type(error).__name__}: {error}"
            done.append(fail(name, text, "this is a defect of diloco's: please report it"))

    thread = threading.Thread(target=run, name=f"check-{name}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not done:
        return fail(name, f"no answer within {limit_s:g} s", _UNANSWERED.get(name, "find out what it waits for"))
    return done[0]


_UNANSWERED: Mapping[str, str] = {
    "dns": "ask the operator of the name servers in /etc/resolv.conf, or give an IP address",
    "store": "the disk does not answer: look at its mount (a network file system that is away?) and at dmesg",
}
