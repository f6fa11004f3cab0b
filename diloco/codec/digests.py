"""Digests: by them two ends compare bytes, and a file is known to be what was written."""

from __future__ import annotations

import hashlib
from typing import Protocol

Raw = bytes | bytearray | memoryview


class Hasher(Protocol):
    """A digest in the making."""

    def update(self, data: Raw, /) -> None:
        """Take the next bytes."""
        ...

    def text(self) -> str:
        """The digest of all bytes so far, as it is written."""
        ...


class _Sha256:
    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = hashlib.sha256()

    def update(self, data: Raw, /) -> None:
        self._state.update(data)

    def text(self) -> str:
        return self._state.hexdigest()


def hasher(like: str = "") -> Hasher:
    """A new one, in the form of the digest ``like``."""
    del like
    return _Sha256()


def digest_of(data: Raw, like: str = "") -> str:
    """The digest of ``data``, in the form of ``like``."""
    found = hasher(like)
    found.update(data)
    return found.text()
