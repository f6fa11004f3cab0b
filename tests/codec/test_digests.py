from __future__ import annotations

import hashlib
import random

import pytest

from diloco.codec.base import Hasher, digest_of, digits, is_sha256, shorter

DATA = random.Random(4).randbytes(100_003)
SHA256 = hashlib.sha256(DATA).hexdigest()


def test_the_form_of_today_is_known_to_the_bit() -> None:
    """From the reference vectors of XXH3: files that were written today are to be read in ten years."""
    assert digest_of(b"") == "xxh3:99aa06d3014798d86001c324468d497f"
    assert digest_of(b"diloco") == digest_of(bytearray(b"diloco")) == digest_of(memoryview(b"diloco"))
    assert len(digits(digest_of(DATA))) == 32


@pytest.mark.parametrize("like", ["", "xxh3:" + "0" * 32, "0" * 64])
@pytest.mark.parametrize("piece", [1, 240, 241, 65_536, 100_003])
def test_pieces_make_the_same_as_the_whole_in_either_form(like: str, piece: int) -> None:
    data = DATA[: 50 * piece]
    found = Hasher(like)
    for begin in range(0, len(data), piece):
        found.update(memoryview(data)[begin : begin + piece])
    assert found.text() == digest_of(data, like)
    assert is_sha256(found.text()) == (like == "0" * 64)


def test_the_form_of_earlier_versions_is_sha256() -> None:
    assert digest_of(DATA, like=SHA256) == SHA256
    assert is_sha256(SHA256)
    assert not is_sha256("")
    assert (digits(SHA256), shorter(SHA256)) == (SHA256, SHA256[:12])
    assert shorter(digest_of(b"")) == "xxh3:99aa06d30147"


def test_every_flipped_bit_changes_it() -> None:
    data, found = bytearray(DATA[:300]), set()
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        found.add(digest_of(data))
        data[bit // 8] ^= 1 << bit % 8
    assert len(found) == 8 * len(data)
    assert digest_of(data) not in found
