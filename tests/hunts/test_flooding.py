from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.hunts.flooding import KINDS, Flood
from tests.loopback.toy import Toy


class Silent:
    """A channel on which every call is answered by nothing."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def stream_stream(self, path: str) -> Any:
        def call(messages: Iterator[bytes], **_: object) -> Iterator[bytes]:
            self.asked.append(path.rpartition("/")[2])
            assert all(isinstance(message, bytes) for message in messages)
            return iter(())

        return call


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_flood_asks_the_syncer_something(kind: str) -> None:
    channel = Silent()
    flood = Flood(Toy(folder="nowhere"), "token", channel)  # type: ignore[arg-type]
    with contextlib.suppress(StopIteration, IndexError):
        getattr(flood, kind)()
    wanted = {"reports": "Report", "pulls": "Pull", "watches": "Watch", "status": "Status", "noise": "Push"}
    assert channel.asked == [wanted.get(kind, "Join")]  # A push is of a process that was taken in.
