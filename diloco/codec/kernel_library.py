"""The compiled kernels: the structures that they share with ``base``, and the choice of the instruction level.

``kernels/kernels.cpp`` holds several instruction levels; a process runs the best that its CPU has, unless :func:`force`
names another.  Without the library everything runs on plain torch.  This module does not import torch, because a
process forces its level before it sets how many threads torch may use.

The numbers and structures have the same order as in ``kernels.cpp``.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int32, c_int64, c_uint8, c_uint64, c_void_p
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from importlib.util import find_spec
from typing import Any, ClassVar

INTERFACE = 5
"""Version of the library's interface; a library of another version is not used."""
TILE_MAX = 4096
"""Most values that the kernels handle at a time."""
TILE_USUAL = 2048
SUM_BLOCK, LANES = 1024, 16
"""The order of sums, see ``merging``."""


class Kind(IntEnum):
    """The formats that have kernels."""

    FP32 = 0
    BF16 = 1
    INT8 = 2
    INT4 = 3
    TOPK = 4
    E3M0 = 5
    INT2 = 6
    SIGN = 7


class Status(IntEnum):
    """The result of a kernel, and what the error says of it."""

    text: str

    def __new__(cls, value: int, text: str = "") -> Status:
        """Return the status with its number and its text."""
        status = int.__new__(cls, value)
        status._value_, status.text = value, text
        return status

    DONE = 0
    NOT_FINITE = 1, "holds a NaN or an infinity"
    BAD_SCALE = 2, "holds a scale that is negative, subnormal or not finite"
    BAD_CODE = 3, "holds a code below"
    BEHIND = 4, "holds something behind its last value"
    BEYOND = 5, "holds a value beyond fp32"
    THETA_NOT_FINITE = 6, "theta is not finite after the outer step"
    PUBLISHED_NOT_FINITE = 7, "the values to publish are not finite"
    BAD_INDEX = 8, "holds indices that do not rise or lie outside"
    BAD_LEVELS = 9, "holds levels that are not those of its values"
    BAD_SIGN = 10, "holds a sign without a value"
    NOT_FIRST = 11, "holds a value of 0 that is not the first"
    BEHIND_INDEX = 12, "holds something behind its last index"
    BAD_TOP = 13, "holds a scale of 255"
    SIGN_ALONE = 14, "holds a sign without a code"
    OTHER_TOP = 15, "holds a scale that is not that of its block's largest code"
    TOO_SMALL = 16, "holds a code below 2**-126"
    SIGN_OF_ZERO = 17, "holds a sign in a block of scale 0"


class Fold(IntEnum):
    """How decoded values x are combined with the values that ``out`` holds."""

    WRITE = 0
    ADD = 1
    """``out <- out + x``: a further update of the same site, or a version added to the previous one."""
    TOWARDS = 2
    """``out <- out - share (out - x)``, three roundings: a further site in the running mean of ``merge_mean``."""


class Place(IntFlag):
    """An update's position in a round: of the first counted site, first of its site, last of its site."""

    IN_MEAN = 1
    OPENS_SITE = 2
    ENDS_SITE = 4


class Rule(IntEnum):
    """The outer optimizer."""

    WITHOUT_MOMENTUM = 0
    HEAVY_BALL = 1
    NESTEROV = 2
    PART = 3
    """A part of a step, by the four factors of ``outer.optimizer.LinearPart``."""


def each(kind: Any, *names: str) -> tuple[tuple[str, Any], ...]:
    """Return fields of one type."""
    return tuple((name, kind) for name in names)


class Format(Structure):
    """A payload's format: ``numel`` values in blocks of ``block`` (1 for casts); top-k keeps ``kept`` of each."""

    _fields_ = (("kind", c_int32), ("block", c_int32), ("numel", c_int64), ("kept", c_int64))


class Job(Structure):
    """A pass over memory."""

    function: ClassVar[str]
    """The name of the library's function that carries it out."""


class EncodeJob(Job):
    """``values - less[0] - ... + beta residual`` into ``payload``; the rounding error into ``residual``."""

    function = "diloco_encode"
    _fields_ = (
        ("format", Format),
        *each(c_int64, "start", "count"),
        ("values", c_void_p),
        ("less", POINTER(c_void_p)),
        ("less_count", c_int64),
        *each(c_void_p, "residual", "payload", "decoded"),
        ("beta", c_float),
    )


class DecodeJob(Job):
    """``payload`` into ``out``, or folded with ``held``, which may be ``out``."""

    function = "diloco_decode"
    _fields_ = (
        ("format", Format),
        *each(c_int64, "start", "count"),
        *each(c_void_p, "payload", "held", "out"),
        ("fold", c_int32),
        ("share", c_float),
    )


class MeasureJob(Job):
    """Sums over the decoded values, which ``out`` and ``digest`` receive unless they are null."""

    function = "diloco_measure"
    _fields_ = (
        ("format", Format),
        *each(c_int64, "start", "count", "tile"),
        *each(c_void_p, "payload", "against", "out"),
        *each(c_double, "squares", "products", "against_squares"),
        ("digest", c_void_p),
        ("largest", c_float),
    )


class Update(Structure):
    """One payload of a round."""

    _fields_ = (("format", Format), ("payload", c_void_p), ("place", c_int32), ("share", c_float))


class OuterJob(Job):
    """One range of a version; ``culprit`` is the update that was refused, or -1."""

    function = "diloco_outer"
    _fields_ = (
        *each(c_int64, "start", "stop", "tile"),
        ("updates", POINTER(Update)),
        ("updates_count", c_int64),
        *each(c_void_p, "theta", "published", "momentum", "theta_after", "published_after", "momentum_after"),
        ("down", Format),
        ("payload", c_void_p),
        *each(c_int32, "lossless", "rule", "fused"),
        *each(c_float, "minus_lr", "momentum_factor", "momentum_by_g", "theta_by_momentum"),
        ("squares", c_double),
        ("culprit", c_int64),
    )


class DigestState(Structure):
    """XXH3 of 128 bits over ``total`` bytes, of which ``done`` are in; ``high`` and ``low`` are the final digest."""

    _fields_ = (
        *each(c_int64, "total", "done"),
        ("lanes", c_uint64 * 8),
        ("high", c_uint64),
        ("low", c_uint64),
        ("tail", c_uint8 * 64),
    )


class Pieces(Structure):
    """A fragment's values in place; ``ends`` are the numbers of values up to the end of each piece."""

    _fields_ = (("values", POINTER(c_void_p)), ("ends", POINTER(c_int64)), ("count", c_int64))


class SealJob(Job):
    """``base - local - sent...`` into ``payload``; digest and squares of the decoded values if ``digest`` is set."""

    function = "diloco_seal"
    _fields_ = (
        ("format", Format),
        *each(c_int64, "start", "stop", "tile"),
        ("local", Pieces),
        ("base", c_void_p),
        ("sent", POINTER(Update)),
        ("sent_count", c_int64),
        *each(c_void_p, "payload", "digest"),
        ("squares", c_double),
    )


class FollowJob(Job):
    """``held + parts...`` into ``out``, or only the last part where each is ``whole``; digest of the result."""

    function = "diloco_follow"
    _fields_ = (
        *each(c_int64, "start", "stop", "tile"),
        ("held", c_void_p),
        ("parts", POINTER(Update)),
        ("parts_count", c_int64),
        *each(c_void_p, "out", "digest"),
        ("whole", c_int32),
    )


class TakeJob(Job):
    """``new_base - (old_base - local - merged...)`` into ``local``."""

    function = "diloco_take"
    _fields_ = (
        *each(c_int64, "start", "stop", "tile"),
        ("local", Pieces),
        *each(c_void_p, "old_base", "new_base"),
        ("merged", POINTER(Update)),
        ("merged_count", c_int64),
    )


VARIABLE = "DILOCO_KERNELS"
"""The environment variable that ``launch`` passes to :func:`force`."""
MODULE = "diloco.codec._kernels"
PLAIN = "plain"
LEVELS = ("baseline", "avx2", "avx512")
"""Level names by the library's numbers.  AArch64 has only the first, which includes NEON."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The library at one instruction level."""

    library: ctypes.CDLL
    level: int

    def run(self, job: Job) -> Status:
        """Carry out ``job``, a pass over memory; ``kernels.cpp`` documents it at the job's structure."""
        return Status(getattr(self.library, job.function)(self.level, byref(job)))


@dataclass(slots=True)
class Choice:
    """What this process runs: ``kernels``, or plain torch where they are None; and why."""

    kernels: Kernels | None
    why: str


@functools.cache
def choice() -> Choice:
    """Return the choice of this process, the one object that :func:`force` changes."""
    return _choose("")


def force(name: str) -> str:
    """Run the level ``name``, plain torch for "plain", the best for ""; return an error line where that is impossible.

    Plain torch then runs.  Call it before the first kernel: kernels obtained before keep their level.
    """
    chosen, wanted = choice(), _choose(name)
    chosen.kernels, chosen.why = wanted.kernels, wanted.why
    return "" if wanted.kernels is not None or name in ("", PLAIN) else f"kernels: {description()}"


def level_name() -> str:
    """Return the name of the level that runs, or "plain"."""
    kernels = choice().kernels
    return PLAIN if kernels is None else LEVELS[kernels.level]


def description() -> str:
    """Return which kernels run and why, in one line: ``native (LEVEL, why)`` or ``plain (why)``."""
    name, why = level_name(), choice().why
    return f"{PLAIN} ({why})" if name == PLAIN else f"native ({name}, {why})"


def _choose(name: str) -> Choice:
    found = _loaded()
    if name == PLAIN:
        return Choice(None, f"forced by {VARIABLE}")
    if isinstance(found, str):
        return Choice(None, f"{found}; {VARIABLE}={name}" if name else found)
    best: int = found.diloco_level()
    if not name:
        return Choice(Kernels(found, best), "the best that this CPU has")
    there = LEVELS[: best + 1]
    if name in there:
        return Choice(Kernels(found, there.index(name)), f"forced by {VARIABLE}")
    fault = "this CPU lacks it, and has" if name in LEVELS else "no such level; this CPU has"
    return Choice(None, f"{VARIABLE}={name}: {fault} {', '.join((PLAIN, *there))}")


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
    return library
