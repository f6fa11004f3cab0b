"""A frame that was made is there for whoever wants the same."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from diloco.wire.frames import FRAME_HEAD_BYTES, pack_frame
from diloco.wire.messages import KIB, PullAsk
from diloco.wire.options import FRAMES_KEPT
from diloco.wire.pulled import PullSink
from diloco.wire.repeats import Repeats
from tests.wire.fake_syncer import RUN
from tests.wire.relay import Relay
from tests.wire.test_pushing import MARK, MARKS, PAYLOAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.wire.conftest import Wired

DATA = memoryview(bytes(range(100)))
CHUNK = 64 * KIB
SHORT = PAYLOAD[: 2 * CHUNK] + MARKS + PAYLOAD[2 * CHUNK : 4 * CHUNK]
CUTS = [*range(0, 4 * CHUNK, CHUNK), 4 * CHUNK]
ASK = PullAsk(RUN, "site-a", 0, 2)


def test_a_frame_is_made_once() -> None:
    repeats = Repeats(1000)
    frame = repeats.frame("version 3", 20, DATA[20:50])
    assert frame == pack_frame(20, DATA[20:50])
    assert repeats.frame("version 3", 20, DATA[20:50]) is frame


def test_other_bytes_are_another_frame() -> None:
    repeats, more = Repeats(1000), memoryview(bytes(100))
    frames = [repeats.frame("version 3", 20, DATA[20:50]), repeats.frame("version 4", 20, more[20:50])]
    frames += [repeats.frame("version 3", 20, DATA[20:51]), repeats.frame("version 3", 21, DATA[21:51])]
    wanted = [(20, DATA[20:50]), (20, more[20:50]), (20, DATA[20:51]), (21, DATA[21:51])]
    assert frames == [pack_frame(offset, data) for offset, data in wanted]


def test_the_oldest_make_room() -> None:
    length = FRAME_HEAD_BYTES + 10
    repeats = Repeats(2 * length)
    first, second, _ = (repeats.frame("v", at, DATA[at : at + 10]) for at in (0, 10, 20))
    assert repeats.frame("v", 10, DATA[10:20]) is second
    assert repeats.frame("v", 0, DATA[:10]) is not first
    alone = Repeats(length - 1)
    assert alone.frame("v", 0, DATA[:10]) is not alone.frame("v", 0, DATA[:10]), "it has no room for one"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offset of each frame that a server has made, in order."""
    offsets: list[int] = []

    def watched(offset: int, data: memoryview) -> bytes:
        offsets.append(offset)
        return pack_frame(offset, data)

    monkeypatch.setattr("diloco.wire.repeats.pack_frame", watched)
    monkeypatch.setattr("diloco.wire.convert_bulk.pack_frame", watched)
    return offsets


@pytest.fixture
def short(start: Callable[..., Wired]) -> Wired:
    """A server that cuts short, and a version whose frames are all kept."""
    assert len(CUTS) <= FRAMES_KEPT
    wired = start(chunk_bytes=CHUNK)
    wired.syncer.publish(SHORT)
    return wired


@pytest.fixture
def relay(short: Wired) -> Iterator[Relay]:
    relay = Relay(short.server.address)
    yield relay
    relay.close()


def pull(wired: Wired, site: str, address: str = "") -> bytes:
    client = wired.client(site, address)
    return b"".join(client.pull(replace(ASK, site_id=site), PullSink()).parts)


def test_sites_that_pull_a_version_are_sent_the_same_frames(short: Wired, made: list[int]) -> None:
    for epoch, site in enumerate(("site-a", "site-b", "site-c")):
        short.syncer.version = replace(short.syncer.version, fates=short.syncer.version.fates[epoch:], epoch=epoch)
        assert pull(short, site) == SHORT
    assert made == CUTS
    short.syncer.publish(SHORT[::-1])
    assert pull(short, "site-d") == SHORT[::-1], "it has the same length and another checksum"


def test_a_frame_that_is_asked_for_again_is_made_again(short: Wired, relay: Relay, made: list[int]) -> None:
    pull(short, "site-a")
    relay.damage(MARK, 1)
    assert pull(short, "site-b", relay.address) == SHORT
    assert relay.damaged == 1
    assert made == [*CUTS, 2 * CHUNK], "it may have been damaged here"
