"""The lossless stage: never longer than one byte over raw, and not to be blown up."""

from __future__ import annotations

import io
import random
from collections.abc import Callable

import pytest
import torch
import zstandard

from diloco.codec import entropy
from diloco.codec.base import DecodeError
from diloco.codec.blocks import Fp32Codec
from diloco.codec.entropy import UNPACK_BYTES_MAX, ZSTD, EntropyCodec, stage_of
from diloco.codec.registry import make_codec
from tests.codec.values import any_bits, drawn

NUMEL = 100_000
CODEC = EntropyCodec("fp32+zstd1", Fp32Codec(), 1)
RAW_BYTES = 4 * NUMEL


def frame(content: bytes, level: int = 1, content_size: bool = True, window_log: int | None = None) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level, write_content_size=content_size, **({"window_log": window_log} if window_log else {})
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compress(content)


def test_noise_goes_raw_with_one_byte_more() -> None:
    values = any_bits(NUMEL, torch.Generator().manual_seed(0))
    payload = CODEC.encode(values)
    assert payload[0] == 0
    assert payload[1:] == make_codec("fp32").encode(values)
    assert len(payload) == CODEC.payload_bytes(NUMEL) + 1 == CODEC.payload_bytes_max(NUMEL)
    assert torch.equal(CODEC.decode(payload, NUMEL), values)


@pytest.mark.parametrize("codec", ["int4:32+zstd1", "int4:32+auto"])
def test_values_that_did_not_change_cost_next_to_nothing(codec: str) -> None:
    """Such as an expert that no token of a site chose, alone in a fragment or beside others."""
    numel, made = 8 * 100_000, make_codec(codec)
    values = torch.zeros(numel)
    assert len(made.encode(values)) < 200 + made.payload_bytes(numel) / 1000
    values[: numel // 8] = torch.randn(numel // 8, generator=torch.Generator().manual_seed(0))
    alone = len(made.encode(values[: numel // 8].clone()))
    assert len(made.encode(values)) < 200 + alone + made.payload_bytes(numel) / 1000


@pytest.mark.parametrize("level", [1, 19])
def test_every_level_passes_its_own_window_check(level: int) -> None:
    codec = make_codec(f"fp32+zstd{level}")
    values = torch.arange(3_000_000).remainder(100).float()  # 12 MB, more than the largest window
    if level == 19:
        values = values.div(50, rounding_mode="floor")
    assert torch.equal(codec.decode(codec.encode(values), values.numel()), values)


def behind(header_of: bytes, blocks_of: bytes) -> bytes:
    """The header of one frame in front of the blocks of another."""
    return header_of[: zstandard.frame_header_size(header_of)] + blocks_of[zstandard.frame_header_size(blocks_of) :]


def test_what_is_no_frame_of_that_size_or_has_a_large_window_is_refused() -> None:
    good, bomb, skippable = frame(bytes(RAW_BYTES)), frame(bytes(2**26)), b"\x50\x2a\x4d\x18"
    sizes = (RAW_BYTES - 4, RAW_BYTES + 4, 2**28)
    cases = [
        *((frame(bytes(size)), f"declares {size} bytes, must be {RAW_BYTES}") for size in sizes),
        (frame(bytes(RAW_BYTES), content_size=False), "declares"),
        (behind(good, bomb), "damaged"),  # It declares 400 kB and holds 64 MiB ...
        (behind(bomb, good), "declares"),  # ... and the other way round.
        (behind(good, frame(bytes(RAW_BYTES - 100_000))), "damaged"),
        *((good + more, None) for more in (b"\0", good, frame(b""))),
        *((skippable + bytes(4) + rest, None) for rest in (b"", good)),
        *((skippable + b"\4\0\0\0abcd" + rest, None) for rest in (b"", good)),
        *((wrong, None) for wrong in (b"", bytes(RAW_BYTES))),
    ]
    for payload, words in cases:
        with pytest.raises(DecodeError, match=words):
            CODEC.decode(ZSTD + payload, NUMEL)
    for wrong in (b"", b"\2" + bytes(RAW_BYTES)):
        with pytest.raises(DecodeError):
            CODEC.decode(wrong, NUMEL)
    with pytest.raises(DecodeError, match="window"):
        CODEC.decode(b"\1" + frame(bytes(20_000_000), window_log=24), 5_000_000)


@pytest.mark.parametrize(("codec", "stage"), [("int4", "zstd"), ("e3m0", "zstd"), ("topk", "raw"), ("int8", "raw")])
def test_auto_asks_a_sample_whether_the_stage_pays(codec: str, stage: str) -> None:
    asks, tries = make_codec(f"{codec}+auto"), make_codec(f"{codec}+zstd")
    values = torch.randn(2_000_000 if codec != "topk" else 8_000_000, generator=torch.Generator().manual_seed(1))
    payload = asks.encode(values)
    assert stage_of(asks, payload) == stage
    assert asks.encode(values) == payload
    if stage == "zstd":
        assert payload == tries.encode(values)
    else:
        assert len(payload) == asks.payload_bytes_max(values.numel())
    assert torch.equal(
        asks.decode(payload, values.numel()), asks.plain.decode(asks.plain.encode(values), values.numel())
    )


def test_auto_looks_at_all_parts_of_a_payload() -> None:
    """Noise at the beginning does not hide that the rest shrinks, nor the other way round; a short one is tried."""
    noise = torch.randint(0, 2**30, (250_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    codec = make_codec("fp32+auto")
    for zeros, stage in ((250_000, "zstd"), (8_000, "raw")):
        values = torch.cat([noise, torch.zeros(zeros, dtype=torch.int32)]).view(torch.float32)
        assert stage_of(codec, codec.encode(values)) == stage
        assert stage_of(codec, codec.encode(values.flip(0))) == stage
    codec, values = make_codec("int8+auto"), drawn(60_000, 1)
    assert codec.encode(values) == make_codec("int8+zstd").encode(values)
    assert stage_of(codec, codec.encode(values)) == "zstd"
    assert stage_of(make_codec("int8"), make_codec("int8").encode(values)) is None


def test_the_last_piece_of_a_frame_may_only_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, values = make_codec("fp32+zstd"), drawn(1000, 1).numpy().tobytes()
    assert isinstance(codec, EntropyCodec)
    compressing = zstandard.ZstdCompressor().compressobj(size=len(values))
    body = compressing.compress(values) + compressing.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    monkeypatch.setattr(entropy, "FEED_BYTES", len(body))
    payload = ZSTD + body + compressing.flush()
    assert b"".join(codec.unpacked(io.BytesIO(payload), 1000)) == values == bytes(codec.opened(payload, 1000)[1])


def test_what_is_read_in_pieces_is_refused_where_the_whole_is_and_else_the_same() -> None:
    codec = make_codec("int4+zstd")
    assert isinstance(codec, EntropyCodec)
    payload = codec.encode(drawn(5000, 1).round())

    def read(pieces: Callable[[], bytes]) -> bytes | None:
        try:
            return pieces()
        except DecodeError:
            return None

    dice = random.Random(1)
    given = [payload[:-1], payload[:9], payload[:1], b"", payload + b"x", payload + payload[1:], b"\0" + payload[1:]]
    given.append(payload)
    for _ in range(300):
        at = dice.randrange(1, len(payload))
        given.append(payload[:at] + bytes([payload[at] ^ 1 << dice.randrange(8)]) + payload[at + 1 :])
    for number, each in enumerate(given):  # The first seven are cut, longer, or not what their flag says.
        whole = read(lambda each=each: bytes(codec.opened(each, 5000)[1]))
        assert read(lambda each=each: b"".join(codec.unpacked(io.BytesIO(each), 5000))) == whole, f"seed 1, {number}"
        assert whole is None or number >= 7
    with pytest.raises(DecodeError, match="declares"):
        list(codec.unpacked(io.BytesIO(payload), 5001 + 64))


def test_a_frame_that_becomes_more_than_it_says_is_stopped() -> None:
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(64 << 20)))
    size = (64 << 20).to_bytes(4, "little")
    at = frame.index(size)
    frame[at : at + 4] = (4 << 20).to_bytes(4, "little")
    come: list[int] = []
    with pytest.raises(DecodeError):
        come.extend(map(len, CODEC.unpacked(io.BytesIO(ZSTD + frame), 1 << 20)))
    assert sum(come) <= (4 << 20) + UNPACK_BYTES_MAX
