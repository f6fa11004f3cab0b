"""Find the compiled kernels and choose the level of instructions that this process runs.

``kernels/kernels.cpp`` holds several levels, of which a process runs the best that its CPU has, unless :func:`force`
names another.  Without the library everything runs on plain torch.  Imports no torch, because a process forces its
level before it settles how many threads torch may use.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from importlib.util import find_spec

from diloco.codec.structures import INTERFACE

VARIABLE = "DILOCO_KERNELS"
"""The environment variable that ``launch`` hands to :func:`force`."""
MODULE = "diloco.codec._kernels"
PLAIN = "plain"
LEVELS = ("baseline", "avx2", "avx512")
"""Names by the number that the library gives them.  AArch64 has the first alone, of which NEON is a part."""


@dataclass(slots=True)
class Choice:
    """What this process runs: the library at one level, or plain torch where ``library`` is None; and why."""

    library: ctypes.CDLL | None
    level: int
    why: str


@functools.cache
def choice() -> Choice:
    """Return what this process runs; the one object that :func:`force` changes."""
    return _choose("")


def force(name: str) -> str:
    """Run the level called ``name``, plain torch for "plain", the best for ""; return a line where that cannot be.

    Plain torch then runs.  To be called before the first kernel, else what was asked before keeps its level.
    """
    chosen, wanted = choice(), _choose(name)
    chosen.library, chosen.level, chosen.why = wanted.library, wanted.level, wanted.why
    return "" if wanted.library is not None or name in ("", PLAIN) else f"kernels: {description()}"


def level_name() -> str:
    """Return the name of the level that runs, or "plain"."""
    chosen = choice()
    return PLAIN if chosen.library is None else LEVELS[chosen.level]


def description() -> str:
    """Return which kernels run and why, in one line: ``native (LEVEL, why)`` or ``plain (why)``."""
    name, why = level_name(), choice().why
    return f"{PLAIN} ({why})" if name == PLAIN else f"native ({name}, {why})"


def _choose(name: str) -> Choice:
    found = _loaded()
    if name == PLAIN:
        return Choice(None, 0, f"forced by {VARIABLE}")
    if isinstance(found, str):
        return Choice(None, 0, f"{found}; {VARIABLE}={name}" if name else found)
    best: int = found.diloco_level()
    if not name:
        return Choice(found, best, "the best that this CPU has")
    there = LEVELS[: best + 1]
    if name in there:
        return Choice(found, there.index(name), f"forced by {VARIABLE}")
    fault = "this CPU lacks it, and has" if name in LEVELS else "no such level; this CPU has"
    return Choice(None, 0, f"{VARIABLE}={name}: {fault} {', '.join((PLAIN, *there))}")


@functools.cache
def _loaded() -> ctypes.CDLL | str:
    """Return the library, or why it cannot be used."""
    spec = find_spec(MODULE)
    if spec is None or spec.origin is None:
        return "the package was built without a C++ compiler"
    try:
        library = ctypes.CDLL(spec.origin)
        interface = library.diloco_interface()
    except (OSError, AttributeError) as error:
        return f"the library cannot be loaded: {error}"
    if interface != INTERFACE:
        return f"the library is of interface {interface}, {INTERFACE} is needed: build the package again"
    if library.diloco_level() < 0:
        return "the library was compiled for another CPU: build the package again without -march in CFLAGS"
    library.diloco_sum_products.argtypes = [c_int32, c_void_p, c_void_p, c_int64, c_double]
    library.diloco_sum_products.restype = c_double
    library.diloco_digest.argtypes = [c_int32, c_void_p, c_void_p, c_int64]
    library.diloco_digest.restype = None
    return library
