"""Messages between a standby and the syncer: there and back, and nothing beyond their bounds."""

from __future__ import annotations

import pytest

from diloco.wire.convert import pack_follow, pack_follow_part, unpack_follow, unpack_follow_part
from diloco.wire.messages import FollowStart, Item, MalformedMessage

HEX = "0123456789abcdef" * 4


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
        unpack_follow_part(pack_follow_part(Item(name, 0, 0, 1, HEX)))


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
        unpack_follow(pack_follow(start))


@pytest.mark.parametrize("raw", [b"", b"\xff\xff", b"\x0a\xff"])
def test_bytes_that_are_no_message(raw: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack_follow(raw)
    with pytest.raises(MalformedMessage):
        unpack_follow_part(raw)
