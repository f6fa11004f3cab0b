"""A frame that was made is there for whoever wants the same."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from diloco.wire.convert import FRAME_HEAD_BYTES, pack_frame
from diloco.wire.handlers import ASKERS_KEPT, Repeats
from diloco.wire.messages import KIB, MIB, PullAsk, Unreachable
from diloco.wire.options import FRAMES_KEPT
from diloco.wire.pulling import PullSink
from tests.wire.fake_syncer import RUN
from tests.wire.relay import Relay
from tests.wire.test_messages import MARK, MARKS, PAYLOAD

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


def test_who_begins_once_more_and_whoever_comes_next_get_frames_that_are_made_anew() -> None:
    repeats = Repeats(1000)

    def frames() -> list[bytes]:
        return [repeats.frame(name, at, DATA[at : at + 10]) for name, at in (("v3", 0), ("v3", 10), ("v4", 0))]

    def are_kept(before: list[bytes]) -> list[bool]:
        return [one is other for one, other in zip(before, frames(), strict=True)]

    made = frames()
    for asker, attempt in (("a", 7), ("a", 7), ("b", 0), ("c", 8), ("a", 7)):
        repeats.asked("v3", asker, attempt)
        assert are_kept(made) == [True] * 3, (asker, attempt)
    repeats.asked("v4", "a", 9)
    assert are_kept(made) == [True] * 3, "it had not begun with this one"
    for asker, attempt in (("a", 9), ("b", 0), ("b", 0)):
        made = frames()
        repeats.asked("v3", asker, attempt)
        assert are_kept(made) == [False, False, True], (asker, attempt)


def test_what_is_forgotten_makes_room() -> None:
    length = FRAME_HEAD_BYTES + 10
    repeats = Repeats(2 * length)
    for _ in range(3):
        repeats.asked("v", "a", 0)
        first, second = (repeats.frame("v", at, DATA[at : at + 10]) for at in (0, 10))
    assert repeats.frame("v", 0, DATA[:10]) is first
    assert repeats.frame("v", 10, DATA[10:20]) is second


@pytest.mark.parametrize(("others", "kept"), [(ASKERS_KEPT - 1, False), (ASKERS_KEPT, True)])
def test_so_many_are_known_to_have_begun(others: int, *, kept: bool) -> None:
    repeats = Repeats(1000)
    repeats.asked("v", "first", 0)
    frame = repeats.frame("v", 0, DATA[:10])
    for count in range(others):
        repeats.asked("v", str(count), 0)
    repeats.asked("v", "first", 0)
    assert (repeats.frame("v", 0, DATA[:10]) is frame) == kept


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offset of each frame that a server has made, in order."""
    offsets: list[int] = []

    def watched(offset: int, data: memoryview) -> bytes:
        offsets.append(offset)
        return pack_frame(offset, data)

    monkeypatch.setattr("diloco.wire.handlers.pack_frame", watched)
    monkeypatch.setattr("diloco.wire.convert.pack_frame", watched)
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


def pull(wired: Wired, site: str, address: str = "", sink: PullSink | None = None) -> bytes:
    client = wired.client(site, address)
    return b"".join(client.pull(replace(ASK, site_id=site), sink or PullSink()).parts)


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


def test_a_payload_that_was_read_wrong_is_read_again_for_whoever_asks_again(short: Wired, made: list[int]) -> None:
    sink = PullSink()
    short.syncer.parts = (SHORT[:-1] + bytes([SHORT[-1] ^ 1]),)
    for site in ("site-a", "site-b"):
        with pytest.raises(Unreachable, match="whole payload differs"):
            pull(short, site, sink=sink)
    assert made == CUTS
    short.syncer.parts = (SHORT,)
    assert pull(short, "site-a", sink=sink) == SHORT
    assert pull(short, "site-c") == SHORT
    assert made == 2 * CUTS


def test_streams_that_bring_a_payload_together_are_one_attempt(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, int]] = []
    monkeypatch.setattr(Repeats, "asked", lambda repeats, name, asker, attempt: begun.append((asker, attempt)))
    wired.syncer.publish(PAYLOAD[: 4 * MIB])
    wired.client(data_channels=3).pull(ASK, PullSink())
    assert len(begun) == 3
    assert len(set(begun)) == 1
    assert begun[0][0] == "site-a"
    assert begun[0][1] != 0
