"""Messages between a standby and the syncer: there and back, and nothing beyond their bounds."""

from __future__ import annotations

import pytest

from diloco.wire.messages import Alive, Chunk, MalformedMessage
from diloco.wire.replication import (
    FollowAck,
    FollowPart,
    Follows,
    FollowStart,
    Item,
    pack_part,
    pack_request,
    unpack_part,
    unpack_request,
)

HEX = "0123456789abcdef" * 4
START = FollowStart("run-1", "standby-1", HEX, HEX, 3, HEX)
PARTS: list[FollowPart] = [
    Follows(True, 3, HEX, 2),
    Follows(False, 0, "", 1, waits=True),
    Item("spool/site-a/0-7-abc.update", 0, 0, 17, HEX),
    Item("spool/.above/0-1795000000000000000-abc.update", 0, 0, 17, HEX),
    Item("above/outbox/0-7.update", 0, 0, 17, HEX),
    Item("snapshots/00000012/state.json", 0, 0, 0, HEX),
    Item("lineages/1795000000/manifest.json", 0, 0, 9, HEX),
    Item("", 4, 1234, 99, HEX),
    Chunk(0, b"bytes", 7),
    Alive(),
]


@pytest.mark.parametrize("request_", [START, FollowStart("r", "s", HEX, HEX, 0, ""), FollowAck(4, 1 << 40)])
def test_requests_there_and_back(request_: FollowStart | FollowAck) -> None:
    assert unpack_request(pack_request(request_)) == request_


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_parts_there_and_back(part: FollowPart) -> None:
    assert unpack_part(pack_part(part)) == part


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "spool/../../etc/passwd",
        "/etc/passwd",
        "spool/a/../b",
        "lineages/x/manifest.json",
        "run.json",
        "spool/.partial/x",
        "above/run.json",
        "above/outbox/.0-7.update.tmp",
        "journal/a/b",
        "x" * 400,
    ],
)
def test_a_file_is_one_of_the_data_folder(name: str) -> None:
    with pytest.raises(MalformedMessage, match="name is"):
        unpack_part(pack_part(Item(name, 0, 0, 1, HEX)))


@pytest.mark.parametrize(
    ("start", "field"),
    [
        (FollowStart("", "s", HEX, HEX, 0, ""), "run_id"),
        (FollowStart("r", "a b", HEX, HEX, 0, ""), "standby"),
        (FollowStart("r", "s", "x", HEX, 0, ""), "layout_fingerprint"),
        (FollowStart("r", "s", HEX, "", 0, ""), "shared_digest"),
        (FollowStart("r", "s", HEX, HEX, 3, ""), "chain"),
        (FollowStart("r", "s", HEX, HEX, 0, HEX), "segment"),
        (FollowStart("r", "s", HEX, HEX, 3, "no"), "chain"),
    ],
)
def test_a_start_that_cannot_be(start: FollowStart, field: str) -> None:
    with pytest.raises(MalformedMessage, match=f"{field} is"):
        unpack_request(pack_request(start))


@pytest.mark.parametrize("raw", [b"", b"\xff\xff", b"\x0a\xff"])
def test_bytes_that_are_no_message(raw: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack_request(raw)
    with pytest.raises(MalformedMessage):
        unpack_part(raw)
