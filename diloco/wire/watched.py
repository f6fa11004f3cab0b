"""Files that are read again when they change, so that nobody has to restart for a new token or certificate.

What a file says is replaced as a whole or not at all: one that is broken, half written or gone leaves what was read
before in force, and the complaint is told once and kept for whoever asks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
_Mark = tuple[tuple[int, ...], ...]


class Watched(Generic[T]):
    """What ``read`` makes of ``paths``, now and after each change.  ``read`` raises ``ValueError`` or ``OSError``."""

    def __init__(self, what: str, paths: Sequence[str], read: Callable[[], T]) -> None:
        self.what = what
        self.complaint = ""
        self._paths = [Path(path) for path in paths]
        self._read = read
        # Marked before it is read: what changes in between is read once more.
        self._mark = self._marked()
        self.value = read()

    def refresh(self) -> str | None:
        """Read again if anything changed since the last look; what there is to say about it, None where nothing is."""
        mark = self._marked()
        if mark == self._mark:
            return None
        self._mark = mark
        try:
            self.value = self._read()
        except OSError as error:
            return self._complain(error.strerror or str(error))
        except ValueError as error:
            return self._complain(str(error))
        self.complaint = ""
        return f"{self.what} was read again"

    def _complain(self, why: str) -> str:
        self.complaint = f"{self.what} cannot be used, what was read before stays in force: {why}"
        return self.complaint

    def _marked(self) -> _Mark:
        return tuple(_mark_of(path) for path in self._paths)


def _mark_of(path: Path) -> tuple[int, ...]:
    """What no change of ``path`` leaves as it was; the change of its mode or owner counts too."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
