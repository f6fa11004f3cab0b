"""Frames that were made for one site and are what the next one wants: sites pull a version at the same time.

To make a frame is to read its data, to hash them and to copy them into memory that the system has yet to give.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from diloco.wire.frames import pack_frame

if TYPE_CHECKING:
    from collections.abc import Hashable

ASKERS_KEPT = 256
"""Those of whom it is known that they began with a payload, each once for each payload; the last ones."""


class Repeats:
    """The frames that were made last, at most ``bytes_max`` of them in all; any thread may ask."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._kept: dict[tuple[Hashable, int, int], bytes] = {}
        self._bytes = 0
        self._asked: dict[tuple[Hashable, str], int] = {}

    def asked(self, payload: Hashable, asker: str, attempt: int) -> None:
        """``asker`` begins with ``payload``; streams that bring it together are one ``attempt``, and 0 is one alone.

        Who begins once more may have got other bytes than were described, though each frame was intact, and it may be
        here that they were damaged: the frames of this payload are forgotten, and made anew for whoever comes next.
        """
        with self._lock:
            before = self._asked.pop((payload, asker), None)
            self._asked[payload, asker] = attempt
            if len(self._asked) > ASKERS_KEPT:
                del self._asked[next(iter(self._asked))]
            if before is None or before == attempt != 0:
                return
            for key in [key for key in self._kept if key[0] == payload]:
                self._bytes -= len(self._kept.pop(key))

    def frame(self, payload: Hashable, offset: int, data: bytes | memoryview) -> bytes:
        """The frame of ``data``, which stand at ``offset`` of ``payload``: a name that is always of the same bytes."""
        key = (payload, offset, len(data))
        with self._lock:
            found = self._kept.get(key)
        return found if found is not None else self._keep(key, pack_frame(offset, data))

    def _keep(self, key: tuple[Hashable, int, int], frame: bytes) -> bytes:
        with self._lock:
            if key not in self._kept:  # Another thread may have made it at the same time.
                self._kept[key] = frame
                self._bytes += len(frame)
            while self._bytes > self._bytes_max:
                self._bytes -= len(self._kept.pop(next(iter(self._kept))))
        return frame
