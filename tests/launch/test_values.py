"""A model's values from files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from diloco.launch import build
from diloco.launch.config import compose
from diloco.launch.errors import ConfigError
from diloco.launch.values import load_values
from diloco.outer.fragments import named_parameters_once


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
