"""Segments of the journal as the first release wrote them; ``sync/journal`` reads them still."""

from __future__ import annotations

import zlib

from diloco.sync.journal import FRAME_1, Record, encode_records


def encode_record(record: Record) -> bytes:
    """``record`` in the frame of format 1."""
    body = encode_records([record])
    return FRAME_1.pack(len(body), zlib.crc32(body)) + body
