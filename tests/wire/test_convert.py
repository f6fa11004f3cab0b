from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from diloco.sync.events import Ending, Reason
from diloco.wire import convert
from diloco.wire import messages as m
from diloco.wire.chunks import DamagedChunk
from diloco.wire.v1 import admin_pb2, sync_pb2
from tests.wire.fake_syncer import RUN, join_ask, report_info
from tests.wire.samples import everything

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(("message", "pack", "unpack"), everything(), ids=lambda value: type(value).__name__)
def test_round_trip(message: object, pack: object, unpack: object) -> None:
    assert unpack(pack(message)) == message  # type: ignore[operator]


def test_enums_have_the_same_members_on_both_sides() -> None:
    for ours, theirs, prefix in (
        (Reason, sync_pb2.Reason, "REASON_"),
        (Ending, sync_pb2.Ending, "ENDING_"),
        (m.Outcome, sync_pb2.Outcome, "OUTCOME_"),
    ):
        assert {prefix + member.name for member in ours} | {prefix + "UNSPECIFIED"} == set(theirs.keys())


def test_an_unknown_member_of_an_enum_is_malformed() -> None:
    raw = sync_pb2.WatchResponse(dropped=sync_pb2.Dropped(reason=99)).SerializeToString()  # type: ignore[arg-type]
    with pytest.raises(m.MalformedMessage, match="99"):
        convert.unpack_watch_event(raw)


@pytest.mark.parametrize(
    "event",
    [
        sync_pb2.WatchResponse(),
        sync_pb2.WatchResponse(dropped=sync_pb2.Dropped()),
        sync_pb2.WatchResponse(final=sync_pb2.Final()),
        sync_pb2.WatchResponse(fate=sync_pb2.Fate()),
    ],
)
def test_events_that_say_nothing_are_malformed(event: sync_pb2.WatchResponse) -> None:
    with pytest.raises(m.MalformedMessage):
        convert.unpack_watch_event(event.SerializeToString())


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_not_finite_travels_as_unknown(loss: float) -> None:
    assert convert.unpack_report(convert.pack_report(report_info(loss=loss))).loss is None


def test_the_length_is_compared_before_parsing() -> None:
    nonsense = b"\xff" * (m.CONTROL_BYTES_MAX + 1)
    with pytest.raises(m.MalformedMessage, match="65537 bytes long"):
        convert.unpack_report(nonsense)
    with pytest.raises(m.MalformedMessage, match="bytes long"):
        convert.unpack_join(b"\xff" * (m.JOIN_BYTES_MAX + 1))


def test_the_largest_join_fits() -> None:
    config = {f"outer.key_{index}": "v" * 40 for index in range(1000)}
    ask = join_ask(layout_json=b"x" * m.LAYOUT_BYTES_MAX, shared_config=config)
    assert convert.unpack_join(convert.pack_join(ask)) == ask


@pytest.mark.parametrize("json", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_status_must_be_a_json_object(json: bytes) -> None:
    with pytest.raises(m.MalformedMessage, match="json"):
        convert.unpack_status(admin_pb2.StatusResponse(json=json).SerializeToString())


def test_bad_messages_are_refused_on_the_senders_side_too() -> None:
    with pytest.raises(m.MalformedMessage, match="site_id"):
        convert.pack_watch(m.WatchAsk(RUN, "a b", 0))


def mutated(raw: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """``raw`` with bits flipped, cut, stretched, spliced with another message, or replaced by noise."""
    out = bytearray(raw or b"\x00")
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(out)) if out else 0
        match chance.randrange(7):
            case 0 if out:
                out[at] ^= 1 << chance.randrange(8)
            case 1:
                del out[at:]
            case 2:
                out[at:at] = chance.randbytes(chance.randint(1, 12))
            case 3:
                out += chance.choice(others)[: chance.randint(1, 200)]
            case 4:
                out[at:at] = b"\xff" * 9 + b"\x01"
            case 5:
                out = bytearray(chance.randbytes(chance.randint(0, 64)))
            case 6:
                out[at : at + 4] = out[at : at + 4] * 3
    return bytes(out)


def test_fuzz_only_malformed_message_comes_out() -> None:
    seed = 41
    chance = random.Random(seed)
    samples = everything()
    raws = [pack(message) for message, pack, _ in samples]
    for turn in range(10_000):
        raw = mutated(chance.choice(raws), raws, chance)
        for unpack in {chance.choice(samples)[2], samples[turn % len(samples)][2], convert.unpack_empty}:
            told = words(unpack, raw)
            assert len(told) < 400, f"seed {seed}, turn {turn}"


def words(unpack: Callable[[bytes], object], raw: bytes) -> str:
    """What the refusal says; anything but a refusal passes through and shows the bytes."""
    try:
        unpack(raw)
    except m.MalformedMessage as error:
        return str(error)
    except DamagedChunk as error:
        assert raw[:1] == b"\0", raw  # Only a frame says by itself that it was damaged.
        return str(error)
    except Exception as error:
        raise AssertionError(f"{unpack} of {raw!r}") from error
    return ""
