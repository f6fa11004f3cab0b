"""Digests: by them two ends compare bytes, and a file is known to be what was written.

One is written as its name and 32 hexadecimal digits, ``xxh3:<digits>`` (XXH3 of 128 bits, big-endian): it runs at the
speed of memory, where SHA-256, at a tenth of it, was the largest part of a round.  64 digits without a name are a
SHA-256, the form of earlier versions.  It stays readable: whoever compares computes in the form of what he was told
(``like``), and every file and every peer keeps the form that it began with.

XXH3 finds damage as SHA-256 does, with 2**-128 for one that it misses.  It does not withstand who looks for two inputs
of one digest: a site that does so has two updates of its own under one name, and harms nobody else.  What must
withstand that (the journal's chain, manifests, certificates) has SHA-256 and none of this.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import xxhash

Raw = bytes | bytearray | memoryview
XXH3 = "xxh3:"


class Hasher(Protocol):
    """A digest in the making."""

    def update(self, data: Raw, /) -> None:
        """Take the next bytes."""
        ...

    def text(self) -> str:
        """The digest of all bytes so far, as it is written."""
        ...


class _Xxh3:
    """The form of today."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Raw, /) -> None:
        self._state.update(data)

    def text(self) -> str:
        return XXH3 + self._state.hexdigest()


class _Sha256:
    """The form of earlier versions."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = hashlib.sha256()

    def update(self, data: Raw, /) -> None:
        self._state.update(data)

    def text(self) -> str:
        return self._state.hexdigest()


def hasher(like: str = "") -> Hasher:
    """A new one, in the form of the digest ``like``; in that of today where there is none to compare with."""
    return _Sha256() if is_sha256(like) else _Xxh3()


def digest_of(data: Raw, like: str = "") -> str:
    """The digest of ``data``, in the form of ``like``."""
    found = hasher(like)
    found.update(data)
    return found.text()


def is_sha256(digest: str) -> bool:
    """Whether it has the form of earlier versions."""
    return bool(digest) and not digest.startswith(XXH3)


def digits(digest: str) -> str:
    """Its hexadecimal digits, without the name."""
    return digest.removeprefix(XXH3)


def shorter(digest: str) -> str:
    """As much of it as tells two apart for people."""
    return digest[: 12 + (len(XXH3) if digest.startswith(XXH3) else 0)]
