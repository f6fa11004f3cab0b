"""The allowed answers to each class of input: the fuzzer, and a test of every row, compare the syncer with this table.

The classes are those of our rules for bad input.  The protocol's answer to an update is not a status but a result,
written here as ``outcome/reason``: the call is OK, and the result tells the site what to do.  So an update's id with
another digest is ``refused/conflict``, and a stale update is ``refused/stale``.  A Join to another run is a
disagreement like any other, which names the field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

NEVER = frozenset({"UNKNOWN", "INTERNAL"})
DETAILS_MAX = 1200
GOOD = "a good request"
TLS_FAILS = "no client certificate, plaintext, wrong CA"
NOT_KNOWN = "no identity, or not exactly one"
NOT_ALLOWED = "known certificate, other site's id, method not allowed"
MALFORMED = "malformed protobuf"
DISAGREES = "wrong protocol version, model fingerprint, shared configuration"
NOT_FOUND = "unknown run, fragment, version or service"
DECLARED = "declared size, encoding, zstd frame"
BOUNDS = "a field out of its bound"
ORDER = "chunks or messages in no order"
NON_FINITE = "NaN, infinity"
DAMAGED = "digest or checksum mismatch, stream ended before commit"
DUPLICATE = "same id, same digest"
CONFLICT = "same id, other digest"
FENCED = "sequence gap, old incarnation"
STALE = "staleness over its bound"
SUPERSEDED = "a process that a newer one has replaced"
TOO_LARGE = "message above limit, metadata over 16 KiB"
COMPRESSED = "gzip at the gRPC layer"
NO_METHOD = "unknown method"
AWAY = "draining, stopping"
DISK_FULL = "disk full"
OVERLOAD = "overload, no credit"

ROWS: Mapping[str, frozenset[str]] = {
    GOOD: frozenset({"OK"}),
    TLS_FAILS: frozenset({"UNAVAILABLE"}),
    NOT_KNOWN: frozenset({"UNAUTHENTICATED"}),
    NOT_ALLOWED: frozenset({"PERMISSION_DENIED"}),
    MALFORMED: frozenset({"INVALID_ARGUMENT"}),
    DISAGREES: frozenset({"FAILED_PRECONDITION"}),
    NOT_FOUND: frozenset({"NOT_FOUND"}),
    DECLARED: frozenset({"INVALID_ARGUMENT"}),
    BOUNDS: frozenset({"INVALID_ARGUMENT"}),
    ORDER: frozenset({"INVALID_ARGUMENT"}),
    NON_FINITE: frozenset({"refused/non_finite"}),
    DAMAGED: frozenset({"DATA_LOSS"}),
    DUPLICATE: frozenset({"duplicate"}),
    CONFLICT: frozenset({"refused/conflict", "refused/forgotten"}),
    FENCED: frozenset({"retry/gap", "refused/fenced", "FAILED_PRECONDITION"}),
    STALE: frozenset({"refused/stale", "refused/bad_base"}),
    SUPERSEDED: frozenset({"ALREADY_EXISTS"}),
    TOO_LARGE: frozenset({"RESOURCE_EXHAUSTED"}),
    COMPRESSED: frozenset({"UNIMPLEMENTED"}),
    NO_METHOD: frozenset({"UNIMPLEMENTED"}),
    AWAY: frozenset({"UNAVAILABLE"}),
    DISK_FULL: frozenset({"UNAVAILABLE"}),
    OVERLOAD: frozenset({"RESOURCE_EXHAUSTED"}),
}
ANY = frozenset(answer for row in ROWS.values() for answer in row) | {
    "accepted",
    "retry/overload",
    "refused/not_joined",
    "refused/evicted",
    "refused/finished",
    "refused/outlier",
    "refused/corrupt",
    "CANCELLED",
}
"""The allowed answers to a randomly mutated request, which may be of any class, or even valid."""
_TELLS = re.compile(r"Traceback|File \"|\.py\b|(?:^|[\s'\"(=])/(?:tmp|home|root|work|usr|var|dev|proc|etc)\b")


def complaint(row: str, allowed: frozenset[str], answer: str, details: str) -> str | None:
    """Return what is wrong with an answer, or None."""
    if answer in NEVER or answer not in allowed:
        return f"{row}: {answer} ({details[:200]}), where {' or '.join(sorted(allowed))} is due"
    if len(details) > DETAILS_MAX and TOO_LARGE not in row:  # There gRPC wrote them, with headers.
        return f"{row}: {len(details)} characters of details"
    if "\n" in details or "\r" in details or _TELLS.search(details):
        return f"{row}: details tell too much or break a line: {details[:200]!r}"
    return None
