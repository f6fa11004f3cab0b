"""What comes in pieces has the digest of the whole."""

from __future__ import annotations

import hashlib

from diloco.codec.digests import digest_of, hasher


def test_pieces_have_the_digest_of_the_whole() -> None:
    found = hasher()
    found.update(b"one ")
    found.update(memoryview(b"two"))
    assert found.text() == digest_of(b"one two") == hashlib.sha256(b"one two").hexdigest()
