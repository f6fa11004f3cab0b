from __future__ import annotations

import pytest

from diloco.wire.convert import pack_probe, unpack_probe, unpack_probe_reply
from diloco.wire.messages import CHUNK_BYTES_MAX, MESSAGE_BYTES_MAX, Filler, MalformedMessage, ProbeAsk
from tests.wire.samples import probes


def test_every_message_comes_back_as_it_was() -> None:
    for message, pack, unpack in probes():
        assert unpack(pack(message)) == message


@pytest.mark.parametrize("unpack", [unpack_probe, unpack_probe_reply])
def test_what_holds_no_part_is_refused(unpack: object) -> None:
    assert callable(unpack)
    for raw, words in ((b"", "part is not set"), (b"\xff", "cannot be parsed"), (bytes(MESSAGE_BYTES_MAX + 1), "long")):
        with pytest.raises(MalformedMessage, match=words):
            unpack(raw)


def test_bounds_hold_before_a_byte_leaves() -> None:
    for message in (Filler(bytes(CHUNK_BYTES_MAX + 1)), ProbeAsk(3, limit_ns=0), ProbeAsk(-1)):
        with pytest.raises(MalformedMessage):
            pack_probe(message)
