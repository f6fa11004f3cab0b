"""A model's values from files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from diloco.inner import checkpoint
from diloco.launch import build
from diloco.launch.config import compose, tokenizer_of
from diloco.launch.errors import ConfigError
from diloco.launch.field_folder import write_folder
from diloco.launch.values import load_values
from diloco.outer.fragments import named_parameters_once


@pytest.mark.slow
def test_a_model_of_the_field_may_be_of_less_precision(tmp_path: Path) -> None:
    config = compose(["model=tiny", "run.seed=1", "model.layers=1"])
    model = build.build_model(config)
    values = {name: value.detach() for name, value in named_parameters_once(model).items()}
    folder = tmp_path / "model"
    write_folder(folder, values, model.options, tokenizer_of(config), dtype=torch.bfloat16, shard_bytes=10**9)
    other = build.build_model(compose(["model=tiny", "run.seed=2", "model.layers=1"]))
    load_values(str(folder), other)
    for name, value in named_parameters_once(other).items():
        assert value.dtype == torch.float32
        assert torch.equal(value, values[name].bfloat16().float())
    with pytest.raises(ConfigError, match=r"num_hidden_layers is 1 there and model\.layers is 2 here"):
        load_values(str(folder), build.build_model(compose(["model=tiny", "model.layers=2"])))


def test_the_parts_of_several_syncers_make_a_model(tmp_path: Path) -> None:
    config = compose(["model=tiny", "run.seed=1"])
    values = {name: value.detach() for name, value in named_parameters_once(build.build_model(config)).items()}
    names = sorted(values)
    for part, mine in (("one", names[::2]), ("other", names[1::2])):
        save_file({name: values[name] for name in mine}, tmp_path / f"{part}.safetensors")
    model = build.build_model(compose(["model=tiny", "run.seed=2"]))
    load_values(str(tmp_path / "one.safetensors"), model, [str(tmp_path / "other.safetensors")])
    for name, value in named_parameters_once(model).items():
        assert torch.equal(value, values[name])
    with pytest.raises(ConfigError, match=f"{names[1]} is .* here and nothing there"):
        load_values(str(tmp_path / "one.safetensors"), model)


def test_what_version_zero_cannot_be_made_of_is_refused_by_its_headers(tmp_path: Path) -> None:
    """Before anything starts; values are read by the syncer alone, and once."""
    config = compose(["model=tiny", "model.layers=1"])
    model = build.build_model(config)
    values = {name: value.detach() for name, value in named_parameters_once(model).items()}
    save_file(values, tmp_path / "file.safetensors")
    write_folder(tmp_path / "field", values, model.options, tokenizer_of(config), shard_bytes=100_000)
    for name in ("00000001", "00000002"):
        named = {f"{part}/{key}": value.clone() for key, value in values.items() for part in ("model", "adopted")}
        checkpoint.save(tmp_path / "checkpoints", name, named, {})
    (tmp_path / "text.safetensors").write_text("text")
    there = ("file.safetensors", "field", "checkpoints", "checkpoints/00000001")
    for source in there:
        config.run.init_from = str(tmp_path / source)
        build.check_version_zero(config)
        for changed in ("model.layers=2", "model.dim=64"):
            other = compose(["model=tiny", "model.layers=1", changed, f"run.init_from={config.run.init_from}"])
            with pytest.raises(ConfigError, match=r"of another model|num_hidden_layers|hidden_size"):
                build.check_version_zero(other)
    for source, words in (("none", "neither a"), ("text.safetensors", "it cannot be read"), (".", "cannot be read")):
        config.run.init_from = str(tmp_path / source)
        with pytest.raises(ConfigError, match=f"run.init_from is '.*': .*{words}"):
            build.check_version_zero(config)
