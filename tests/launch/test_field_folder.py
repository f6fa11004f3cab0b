"""Folders of the field's form, without ``transformers``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diloco.config import model_files
from diloco.config.errors import ConfigError
from diloco.config.model_files import is_folder, read_options, read_values, write_folder
from diloco.durable import Disk, Step
from diloco.inner.model import ModelOptions, Transformer
from diloco.inner.tokenizer import END, make_tokenizer

OPTIONS = ModelOptions(vocab_size=257, layers=2, dim=16, heads=4, kv_heads=2, ffn_dim=32, context=32)


def written(folder: Path, **other: Any) -> dict[str, torch.Tensor]:
    model = Transformer(OPTIONS, seed=9)
    values = {name: value.detach() for name, value in model.named_parameters()}
    write_folder(folder, values, OPTIONS, make_tokenizer("bytes"), **{"shard_bytes": 10**9, **other})
    return values


@pytest.mark.parametrize("shard_bytes", [10**9, 5000, 1])
def test_what_was_written_is_read(shard_bytes: int, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    values = written(folder, shard_bytes=shard_bytes)
    assert is_folder(str(folder))
    assert not is_folder(str(tmp_path))
    assert not is_folder(None)
    assert read_options(str(folder)) == OPTIONS
    found = read_values(str(folder), OPTIONS)
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], values[name]) for name in values)
    files = sorted(folder.glob("*.safetensors"))
    if shard_bytes == 10**9:
        assert [file.name for file in files] == ["model.safetensors"]
        return
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * value.numel() for value in values.values())
    assert {file.name for file in files} == set(index["weight_map"].values())
    for file in files:
        held = load_file(file)
        assert len(held) == 1 or sum(4 * value.numel() for value in held.values()) <= shard_bytes
        assert all(index["weight_map"][name] == file.name for name in held)
    assert len(files) == (len(values) if shard_bytes == 1 else 7)


def test_values_can_be_rounded_to_bf16(tmp_path: Path) -> None:
    values = written(tmp_path / "model", dtype=torch.bfloat16)
    found = read_values(str(tmp_path / "model"), OPTIONS)
    assert all(torch.equal(found[name], values[name].bfloat16()) for name in values)
    assert json.loads((tmp_path / "model/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_end_of_a_text_is_said_where_it_is_looked_for(tmp_path: Path) -> None:
    written(tmp_path / "model")
    told = {name: json.loads((tmp_path / f"model/{name}.json").read_text()) for name in
            ("config", "generation_config", "tokenizer_config")}  # fmt: skip
    assert told["config"]["eos_token_id"] == told["generation_config"]["eos_token_id"] == 256
    assert told["tokenizer_config"]["eos_token"] == END
    assert make_tokenizer(str(tmp_path / "model/tokenizer.json")).end_of_file == 256
    values = {name: value.detach() for name, value in Transformer(OPTIONS).named_parameters()}
    write_folder(tmp_path / "endless", values, OPTIONS, make_tokenizer("bytes", False), shard_bytes=10**9)
    assert "eos_token" not in (tmp_path / "endless/tokenizer_config.json").read_text()


class FullAt(Disk):
    """A disk without room for the ``left``-th file."""

    def __init__(self, left: int) -> None:
        self.left = left

    def make(self, path: Path, write: Any, step: Step) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(28, "No space left on device")
        super().make(path, write, step)


@pytest.mark.parametrize("left", range(6))
def test_it_is_there_whole_or_not_at_all(left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "PLAIN_DISK", FullAt(left))
    if left < 5:
        with pytest.raises(OSError, match="No space"):
            written(tmp_path / "model")
        assert list(tmp_path.iterdir()) == []
    else:
        written(tmp_path / "model")
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    written(folder, shard_bytes=5000)
    with pytest.raises(ConfigError, match=r"hidden_size is 16 there and model\.dim is 32 here; model=imported takes"):
        read_values(str(folder), ModelOptions(vocab_size=257, layers=2, dim=32, heads=4, kv_heads=2, ffn_dim=32))
    index = folder / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    for name, file in told["weight_map"].items():
        if name == "lm_head.weight":
            save_file({"other": torch.ones(1)}, folder / file)
    with pytest.raises(ConfigError, match=r"has no lm_head\.weight"):
        read_values(str(folder), OPTIONS)
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../model.safetensors"}}))
    with pytest.raises(ConfigError, match="outside of the folder"):
        read_values(str(folder), OPTIONS)
    index.write_text("{}")
    with pytest.raises(ConfigError, match="has no weight_map"):
        read_values(str(folder), OPTIONS)
    index.unlink()
    with pytest.raises(ConfigError, match=r"cannot be taken in: .*model\.safetensors"):
        read_values(str(folder), OPTIONS)
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(ConfigError, match="cannot be taken in"):
        read_values(str(folder), OPTIONS)
    for text, words in (("[]", "is no JSON object"), ("{", "Expecting"), ('{"model_type": "gpt2"}', "model_type is")):
        (folder / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_options(str(folder))
