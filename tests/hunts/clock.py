"""The wall clock of a process, read from a file that the hunt rewrites while the process lives."""

from __future__ import annotations

import datetime
import sys
import time
from pathlib import Path
from types import ModuleType

YEAR_S = 365 * 86_400
OFFSETS = {"true": 0, "+10 years": 10 * YEAR_S, "-10 years": -10 * YEAR_S, "+1 s": 1, "-1 s": -1, "second twice": 0}
KINDS = (*OFFSETS, "1960", "1970", "frozen")


def tell(clock: Path, kind: str) -> int:
    """Have the process of this file see the time so; that time, in seconds since 1970."""
    now_s = time.time_ns() // 1_000_000_000
    if kind == "second twice":
        _write(clock, "+ 1")
        time.sleep(0.1)
    if kind in OFFSETS:
        _write(clock, f"+ {OFFSETS[kind]}")
        return now_s + OFFSETS[kind]
    if kind == "frozen":
        _write(clock, f"= {now_s}")
        return now_s
    then_s = {"1960": -10 * YEAR_S, "1970": 86_400}[kind]
    _write(clock, f"+ {then_s - now_s}")
    return then_s


def _write(clock: Path, text: str) -> None:
    beside = clock.with_suffix(".new")
    beside.write_text(text)
    beside.replace(clock)


def follow(clock: Path) -> None:
    """From now on all that the product's own code asks for wall time in this process is told what ``clock`` says.

    Libraries go on with the machine's clock (gRPC makes of its deadlines instants of wall time, which its core in C
    compares with that), and so do the dates of files, which another machine may have written.
    """

    def now_ns() -> int:
        how, number = clock.read_text().split()
        return int(number) * 1_000_000_000 + (time.time_ns() if how == "+" else 0)

    class Datetime(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Datetime:
            return cls.fromtimestamp(now_ns() / 1e9, tz)

    faked = ModuleType("time")
    vars(faked).update({**vars(time), "time_ns": now_ns, "time": lambda: now_ns() / 1e9})
    for module in [module for name, module in sys.modules.items() if name.startswith("diloco.")]:
        for name, true, other in (("time", time, faked), ("datetime", datetime.datetime, Datetime)):
            if getattr(module, name, None) is true:
                setattr(module, name, other)
