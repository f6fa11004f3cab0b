"""Readers of models and tokenizers that others have made: whatever is in their files, one exception comes out.

The values of a safetensors file have no digest: what is taken of a spoiled one may be other values, of the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from diloco.config.errors import ConfigError
from diloco.config.model_files import read_options, read_values, write_folder
from diloco.inner.model import ModelOptions, Transformer
from diloco.inner.tokenizer import make_tokenizer
from tests.hunts.inputs import Reader
from tests.hunts.inputs_folders import Words, replaced

OPTIONS = ModelOptions(vocab_size=257, layers=1, dim=8, heads=2, ffn_dim=32, context=8)


def models(folder: Path) -> Iterator[tuple[str, Reader]]:
    """Every file of a folder of the field's form."""
    whole, parts = folder / "whole", folder / "parts"
    for where, shard_bytes in ((whole, 1 << 20), (parts, 4096)):
        values = {name: value.detach() for name, value in Transformer(OPTIONS).named_parameters()}
        write_folder(where, values, OPTIONS, make_tokenizer("bytes"), shard_bytes=shard_bytes)

    def taken(where: Path) -> Callable[[], object]:
        def read() -> object:
            shapes = {name: value.shape for name, value in read_values(str(where), OPTIONS).items()}
            assert shapes.keys() == {name for name, _ in Transformer(OPTIONS).named_parameters()}
            return shapes

        return read

    def words() -> object:
        found = make_tokenizer(str(whole / "tokenizer.json"))
        return [found.decode(ids.tolist()) for ids in found.encode_batch(["a b\n", "é"])]

    refused: Words = (ConfigError,)
    yield "config.json", replaced(whole / "config.json", lambda: read_options(str(whole)), refused, 0.5)
    yield "config.json of values", replaced(whole / "config.json", taken(whole), refused, 0.5)
    yield "model.safetensors", replaced(whole / "model.safetensors", taken(whole), refused, 0.5)
    yield "a part of a model", replaced(min(parts.glob("*.safetensors")), taken(parts), refused, 0.5)
    yield "model.safetensors.index.json", replaced(parts / "model.safetensors.index.json", taken(parts), refused, 0.5)
    yield "tokenizer.json", replaced(whole / "tokenizer.json", words, (ValueError,), 0.5)
    yield "tokenizer_config.json", replaced(whole / "tokenizer_config.json", words, (ValueError,), 0.5)
