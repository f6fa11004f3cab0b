"""A frame that was made is there for whoever wants the same."""

from __future__ import annotations

from diloco.wire.frames import FRAME_HEAD_BYTES, pack_frame
from diloco.wire.repeats import Repeats

DATA = memoryview(bytes(range(100)))


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
