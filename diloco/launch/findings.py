"""What a check has found: one line for a person, the same as fields for a program.

A check runs beside the one who waits for it, for as long as it is given and no
longer: a name server or a disk that never answers is a finding like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")
NAME_WIDTH = 10


class Level(Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """It works, and less well than it could."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """``remedy`` says what to change, for everything that is not ok; ``figures`` are what was measured."""

    check: str
    level: Level
    says: str
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    address: str = ""
    """Of whom it speaks, where it is one of several."""

    def line(self) -> str:
        """For a person."""
        told = " ".join(self.says.split())
        what = f" -> {' '.join(self.remedy.split())}" if self.remedy else ""
        return f"{self.level.value:<4}  {self.check:<{NAME_WIDTH}}  {told}{what}"

    def fields(self) -> dict[str, Any]:
        """For a program."""
        return {
            "check": self.check,
            "level": self.level.value,
            "says": self.says,
            "remedy": self.remedy,
            "figures": dict(self.figures),
            "address": self.address,
        }


def ok(check: str, says: str, **figures: Any) -> Finding:
    """As it should be."""
    return Finding(check, Level.OK, says, "", figures)


def warn(check: str, says: str, remedy: str, **figures: Any) -> Finding:
    """It works, and less well than it could."""
    return Finding(check, Level.WARN, says, remedy, figures)


def fail(check: str, says: str, remedy: str, **figures: Any) -> Finding:
    """It does not work."""
    return Finding(check, Level.FAIL, says, remedy, figures)


def bounded(name: str, check: Callable[[], T], limit_s: float) -> T | Finding:
    """What ``check`` returns within ``limit_s``; that it did not, or broke, is a failure of its own.

    A check that goes on for longer is left to itself, in a thread that ends with the process.
    """
    done: list[T | Finding] = []

    def run() -> None:
        try:
            done.append(check())
        except Exception as error:
            # The outermost end of a check: whatever breaks one must neither end the others nor be kept to itself.
            text = f"the check itself broke: {type(error).__name__}: {error}"
            done.append(fail(name, text, "this is a defect of diloco's: please report it"))

    thread = threading.Thread(target=run, name=f"check-{name}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not done:
        return fail(name, f"no answer within {limit_s:g} s", _UNANSWERED.get(name, "look at what it waits for"))
    return done[0]


_UNANSWERED: Mapping[str, str] = {
    "dns": "ask whoever runs the name servers in /etc/resolv.conf, or give an IP address",
    "store": "the disk does not answer: look at its mount (a network file system that is away?) and at dmesg",
}
