"""What ``kernels/kernels.cpp`` and ``native`` hand to each other: the numbers and structures of both, in one order."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint8, c_uint64, c_void_p
from dataclasses import dataclass
from enum import IntEnum, IntFlag

INTERFACE = 5
"""Of the library that this module describes; any other is not used."""
TILE_MAX = 4096
"""Values that the kernels handle at a time, at most."""
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
    """What a kernel answers."""

    DONE = 0
    NOT_FINITE = 1
    BAD_SCALE = 2
    BAD_CODE = 3
    BEHIND = 4
    BEYOND = 5
    THETA_NOT_FINITE = 6
    PUBLISHED_NOT_FINITE = 7
    BAD_INDEX = 8
    BAD_LEVELS = 9
    BAD_SIGN = 10
    NOT_FIRST = 11
    BEHIND_INDEX = 12
    BAD_TOP = 13
    SIGN_ALONE = 14
    OTHER_TOP = 15
    TOO_SMALL = 16
    SIGN_OF_ZERO = 17


class Fold(IntEnum):
    """What becomes of decoded values."""

    WRITE = 0
    ADD = 1
    TOWARDS = 2


class Place(IntFlag):
    """An update's place among those of a round: of the first site that counts, first or last of its site."""

    IN_MEAN = 1
    OPENS_SITE = 2
    ENDS_SITE = 4


class Rule(IntEnum):
    """The outer optimizer."""

    WITHOUT_MOMENTUM = 0
    HEAVY_BALL = 1
    NESTEROV = 2
    PART = 3
    """Of a step, by the four factors of ``outer.optimizer.LinearPart``."""


class Format(Structure):
    """A payload's format: of ``numel`` values, in blocks of ``block`` (1 for casts); ``kept`` of each with top-k."""

    _fields_ = (("kind", c_int32), ("block", c_int32), ("numel", c_int64), ("kept", c_int64))


@dataclass(frozen=True, slots=True)
class Layout:
    """The format of a codec that has kernels: its kind and the size of its blocks, 1 for a cast.

    ``kept`` is how many values of a block top-k keeps.
    """

    kind: Kind
    block: int
    kept: int = 0

    def format(self, numel: int) -> Format:
        """Of a payload of ``numel`` values."""
        return Format(self.kind, self.block, numel, self.kept)


class EncodeJob(Structure):
    """``values - less[0] - ... + beta residual`` into ``payload``; what that loses into ``residual``."""

    _fields_ = (
        ("format", Format),
        ("start", c_int64),
        ("count", c_int64),
        ("values", c_void_p),
        ("less", POINTER(c_void_p)),
        ("less_count", c_int64),
        ("residual", c_void_p),
        ("payload", c_void_p),
        ("decoded", c_void_p),
        ("beta", c_float),
    )


class DecodeJob(Structure):
    """``payload`` into ``out``, or folded with ``held``, which may be ``out``."""

    _fields_ = (
        ("format", Format),
        ("start", c_int64),
        ("count", c_int64),
        ("payload", c_void_p),
        ("held", c_void_p),
        ("out", c_void_p),
        ("fold", c_int32),
        ("share", c_float),
    )


class MeasureJob(Structure):
    """Sums over the decoded values, which ``out`` and ``digest`` receive unless they are null."""

    _fields_ = (
        ("format", Format),
        ("start", c_int64),
        ("count", c_int64),
        ("tile", c_int64),
        ("payload", c_void_p),
        ("against", c_void_p),
        ("out", c_void_p),
        ("squares", c_double),
        ("products", c_double),
        ("against_squares", c_double),
        ("digest", c_void_p),
        ("largest", c_float),
    )


class Update(Structure):
    """One payload of a round."""

    _fields_ = (("format", Format), ("payload", c_void_p), ("place", c_int32), ("share", c_float))


class OuterJob(Structure):
    """One range of a version; ``culprit`` is the update that was refused, or -1."""

    _fields_ = (
        ("start", c_int64),
        ("stop", c_int64),
        ("tile", c_int64),
        ("updates", POINTER(Update)),
        ("updates_count", c_int64),
        ("theta", c_void_p),
        ("published", c_void_p),
        ("momentum", c_void_p),
        ("theta_after", c_void_p),
        ("published_after", c_void_p),
        ("momentum_after", c_void_p),
        ("down", Format),
        ("payload", c_void_p),
        ("lossless", c_int32),
        ("rule", c_int32),
        ("fused", c_int32),
        ("minus_lr", c_float),
        ("momentum_factor", c_float),
        ("momentum_by_g", c_float),
        ("theta_by_momentum", c_float),
        ("squares", c_double),
        ("culprit", c_int64),
    )


class DigestState(Structure):
    """XXH3 of 128 bits over ``total`` bytes, of which ``done`` are in; ``high`` and ``low`` are it when all are."""

    _fields_ = (
        ("total", c_int64),
        ("done", c_int64),
        ("lanes", c_uint64 * 8),
        ("high", c_uint64),
        ("low", c_uint64),
        ("tail", c_uint8 * 64),
    )


class Pieces(Structure):
    """A fragment's values where they lie; ``ends`` are how many there are up to the end of each piece."""

    _fields_ = (("values", POINTER(c_void_p)), ("ends", POINTER(c_int64)), ("count", c_int64))


class SealJob(Structure):
    """``base - local - sent...`` into ``payload``; digest and squares of what it decodes to, unless that is null."""

    _fields_ = (
        ("format", Format),
        ("start", c_int64),
        ("stop", c_int64),
        ("tile", c_int64),
        ("local", Pieces),
        ("base", c_void_p),
        ("sent", POINTER(Update)),
        ("sent_count", c_int64),
        ("payload", c_void_p),
        ("digest", c_void_p),
        ("squares", c_double),
    )


class FollowJob(Structure):
    """``held + parts...`` into ``out``, or the last part by itself where each is ``whole``; digest of that."""

    _fields_ = (
        ("start", c_int64),
        ("stop", c_int64),
        ("tile", c_int64),
        ("held", c_void_p),
        ("parts", POINTER(Update)),
        ("parts_count", c_int64),
        ("out", c_void_p),
        ("digest", c_void_p),
        ("whole", c_int32),
    )


class TakeJob(Structure):
    """``new_base - (old_base - local - merged...)`` into ``local``."""

    _fields_ = (
        ("start", c_int64),
        ("stop", c_int64),
        ("tile", c_int64),
        ("local", Pieces),
        ("old_base", c_void_p),
        ("new_base", c_void_p),
        ("merged", POINTER(Update)),
        ("merged_count", c_int64),
    )


STRUCTURES = (
    Format,
    EncodeJob,
    DecodeJob,
    MeasureJob,
    Update,
    OuterJob,
    DigestState,
    Pieces,
    SealJob,
    FollowJob,
    TakeJob,
)
"""In the order in which the library tells their sizes."""
