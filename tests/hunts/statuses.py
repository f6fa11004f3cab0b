"""The allowed answers to each class of input: the fuzzer, and a test of every row, compare the syncer with this table.

The classes are those of our rules for bad input.  The protocol's answer to an update is not a status but a result,
written here as ``outcome/reason``: the call is OK, and the result tells the site what to do.  So an update's id with
another digest is ``refused/conflict``, and a stale update is ``refused/stale``.  A Join to another run is a
disagreement like any other, which names the field.
"""

from __future__ import annotations

import re

NEVER = frozenset({"UNKNOWN", "INTERNAL"})
DETAILS_MAX = 1200
ROWS: dict[str, frozenset[str]] = {}


def _row(name: str, *answers: str) -> str:
    ROWS[name] = frozenset(answers)
    return name


GOOD = _row("a good request", "OK")
TLS_FAILS = _row("no client certificate, plaintext, wrong CA", "UNAVAILABLE")
NOT_KNOWN = _row("no identity, or not exactly one", "UNAUTHENTICATED")
NOT_ALLOWED = _row("known certificate, other site's id, method not allowed", "PERMISSION_DENIED")
MALFORMED = _row("malformed protobuf", "INVALID_ARGUMENT")
DISAGREES = _row("wrong protocol version, model fingerprint, shared configuration", "FAILED_PRECONDITION")
NOT_FOUND = _row("unknown run, fragment, version or service", "NOT_FOUND")
DECLARED = _row("declared size, encoding, zstd frame", "INVALID_ARGUMENT")
BOUNDS = _row("a field out of its bound", "INVALID_ARGUMENT")
ORDER = _row("chunks or messages in no order", "INVALID_ARGUMENT")
NON_FINITE = _row("NaN, infinity", "refused/non_finite")
DAMAGED = _row("digest or checksum mismatch, stream ended before commit", "DATA_LOSS")
DUPLICATE = _row("same id, same digest", "duplicate")
CONFLICT = _row("same id, other digest", "refused/conflict", "refused/forgotten")
FENCED = _row("sequence gap, old incarnation", "retry/gap", "refused/fenced", "FAILED_PRECONDITION")
STALE = _row("staleness over its bound", "refused/stale", "refused/bad_base")
SUPERSEDED = _row("a process that a newer one has replaced", "ALREADY_EXISTS")
TOO_LARGE = _row("message above limit, metadata over 16 KiB", "RESOURCE_EXHAUSTED")
COMPRESSED = _row("gzip at the gRPC layer", "UNIMPLEMENTED")
NO_METHOD = _row("unknown method", "UNIMPLEMENTED")
AWAY = _row("draining, stopping", "UNAVAILABLE")
DISK_FULL = _row("disk full", "UNAVAILABLE")
OVERLOAD = _row("overload, no credit", "RESOURCE_EXHAUSTED")
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
