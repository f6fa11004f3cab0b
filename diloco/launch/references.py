"""Bits per byte of the validation text under ordinary compressors: references for a loss."""

from __future__ import annotations

import lzma
import zlib
from typing import TYPE_CHECKING

from diloco.inner.corpus import read_corpus, read_text, source_files

if TYPE_CHECKING:
    from diloco.launch.schema import DataSection

TEXT_BYTES_MAX = 4_000_000


def reference_bits(data: DataSection) -> dict[str, float]:
    """Return the bits per byte of the validation split, compressed in one piece; empty for any other corpus.

    Only for the built-in corpus: reading all of a user's text for a comparison could take longer than the run.
    """
    if data.kind != "stdlib":
        return {}
    documents = read_corpus(data.kind, source_files(data.kind, data.path, data.pattern)).split("validation")
    text = "\n".join(read_text(data.kind, document) for document in documents).encode()[:TEXT_BYTES_MAX]
    sizes = {"zlib -9": len(zlib.compress(text, 9)), "xz": len(lzma.compress(text))}
    return {name: round(8 * size / len(text), 4) for name, size in sizes.items()}
