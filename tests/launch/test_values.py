"""A model's values from files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

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
