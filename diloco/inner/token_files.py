"""Token ids that somebody else has made: plain little-endian files, read where they lie.

``prepare_tokens`` reads them once, to know their digests and that every id is one of the tokenizer's, and keeps a
manifest; the files are mapped into memory as those that ``prepare_corpus`` writes are.  A file whose name begins with
"val" is validation, every other one training.  A folder that ``prepare_corpus`` has written is taken as it is.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from diloco.inner.corpus import SPLITS, DataError, source_files
from diloco.inner.data import (
    CorpusManifest,
    DataOptions,
    SplitManifest,
    key_of,
    load_manifest,
    made_once,
    write_manifest,
)
from diloco.inner.shards import Shard
from diloco.inner.tokenizer import Tokenizer, make_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

READ_TOKENS = 1 << 22
"""That are looked at in one piece; bounds memory."""
FORMAT = 1


def prepare_tokens(options: DataOptions, cache_dir: Path) -> CorpusManifest:
    """The manifest of the files at ``options.path``; later calls find it by their names, sizes and times.

    Raises DataError in words.
    """
    tokenizer = make_tokenizer(options.tokenizer, options.end_of_file)
    if (Path(options.path).expanduser() / "manifest.json").is_file():
        return _ours(Path(options.path).expanduser(), tokenizer)
    files = source_files("tokens", options.path, options.pattern_used)
    root = files[0].parent if Path(options.path).expanduser().is_file() else Path(options.path).expanduser()
    how = [FORMAT, options.dtype, tokenizer.digest, options.end_of_file]
    key = f"tokens-{options.dtype}-{key_of(how, files)[:16]}"
    return made_once(
        cache_dir,
        key,
        options.lock_wait_s,
        lambda folder: write_manifest(_manifest(options, tokenizer, root, files), folder),
    )


def _ours(directory: Path, tokenizer: Tokenizer) -> CorpusManifest:
    found = load_manifest(directory)
    if found.tokenizer_sha256 != tokenizer.digest:
        made = f"{directory} was made by the tokenizer {found.tokenizer}"
        raise DataError(f"{made}, and data.tokenizer is {tokenizer.name}, or another of that name")
    return found


def _manifest(options: DataOptions, tokenizer: Tokenizer, root: Path, files: Sequence[Path]) -> CorpusManifest:
    splits = {}
    for name in SPLITS:
        mine = [file for file in files if file.name.startswith("val") == (name == "validation")]
        if not mine:
            wanted = 'one whose name begins with "val"' if name == "validation" else "one that does not begin so"
            raise DataError(f"path is {options.path!r}: no file of it is for {name}: {wanted} is wanted")
        shards = tuple(_shard(file, root, options.dtype, tokenizer) for file in mine)
        tokens = sum(shard.tokens for shard in shards)
        text_bytes = _text_bytes(mine, options.dtype, tokenizer) if name == "validation" else 0
        splits[name] = SplitManifest(0, text_bytes, tokens, shards)
    digests = sorted(shard.sha256 for split in splits.values() for shard in split.shards)
    return CorpusManifest(
        directory=root.resolve(),
        kind="tokens",
        tokenizer=tokenizer.name,
        tokenizer_sha256=tokenizer.digest,
        end_of_file=options.end_of_file,
        vocab_size=tokenizer.vocab_size,
        corpus_sha256=hashlib.sha256("".join(digests).encode()).hexdigest(),
        num_duplicates=0,
        num_not_text=0,
        train=splits["train"],
        validation=splits["validation"],
        dtype=options.dtype,
        source=str(root.resolve()),
    )


def _shard(file: Path, root: Path, dtype: str, tokenizer: Tokenizer) -> Shard:
    size, width = file.stat().st_size, np.dtype(dtype).itemsize
    if size == 0 or size % width:
        raise DataError(f"{file} has {size} bytes: a multiple of {width}, more than 0, is wanted (data.dtype={dtype})")
    tokens, hashed = _tokens(file, dtype), hashlib.sha256()
    for at in range(0, len(tokens), READ_TOKENS):
        piece = tokens[at : at + READ_TOKENS]
        hashed.update(piece.tobytes())
        largest = int(piece.max())
        if largest >= tokenizer.vocab_size:
            raise DataError(
                f"{file} has the id {largest}, and the tokenizer {tokenizer.name} has {tokenizer.vocab_size}: give the "
                "tokenizer that made it (data.tokenizer), and the width of an id (data.dtype)"
            )
    return Shard(str(file.relative_to(root)), len(tokens), hashed.hexdigest())


def _tokens(file: Path, dtype: str) -> NDArray[np.uint16 | np.uint32]:
    return np.memmap(file, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")


def _text_bytes(files: Sequence[Path], dtype: str, tokenizer: Tokenizer) -> int:
    """Bytes of UTF-8 that the files decode to; a letter that is cut where a piece ends counts as what stands for it."""
    found = 0
    for file in files:
        tokens = _tokens(file, dtype)
        for at in range(0, len(tokens), READ_TOKENS):
            found += len(tokenizer.decode(tokens[at : at + READ_TOKENS].tolist()).encode())
    return found
