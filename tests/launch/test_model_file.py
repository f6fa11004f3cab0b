"""A run whose model is a file's: what the syncer takes from it, and what makes one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import diloco
from diloco.launch import build, build_syncer
from diloco.launch.config import compose, shared_config
from diloco.launch.errors import ConfigError
from diloco.launch.syncer_main import join_line
from diloco.outer.fragments import gather, named_parameters_once
from tests.launch.serving import small_model

FILE = ["run.name=mine", "model.kind=file"]


def test_version_zero_is_what_the_model_held(tmp_path: Path) -> None:
    model = small_model(3)
    path = diloco.save_version0(model, tmp_path / "new" / "v0.safetensors")
    assert [each.name for each in path.parent.iterdir()] == ["v0.safetensors"]
    config = compose([*FILE, f"run.init_from={path}", "outer.num_fragments=2"])
    build_syncer.check(config)
    layout = build.layout_of(config)
    parameters = named_parameters_once(model)
    assert dict(layout.parameters) == {name: tuple(each.shape) for name, each in parameters.items()}
    for fragment, values in zip(layout.fragments, build.version_zero(config, layout), strict=True):
        assert torch.equal(values, gather(fragment, parameters))


def test_any_model_and_type_is_written_as_the_plain_one_in_fp32(tmp_path: Path) -> None:
    model = small_model().to(torch.bfloat16)
    model[2].weight = nn.Parameter(torch.randn(1, 16, dtype=torch.bfloat16).t().contiguous().t())
    model.register_buffer("counted", torch.zeros(3, dtype=torch.int64))
    wrapped = torch.compile(model, backend="eager")
    written = load_file(diloco.save_version0(wrapped, str(tmp_path / "v0.safetensors")))
    assert {name: each.dtype for name, each in written.items()} == dict.fromkeys(
        ["0.weight", "0.bias", "2.weight", "2.bias"], torch.float32
    )
    assert torch.equal(written["2.weight"], model[2].weight.float())


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model has no parameters"):
        diloco.save_version0(nn.Tanh(), tmp_path / "v0.safetensors")
    counting = nn.Module()
    counting.register_parameter("n", nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False))
    with pytest.raises(ValueError, match=r"model has n, which is torch.int64: only floating point is trained"):
        diloco.save_version0(counting, tmp_path / "v0.safetensors")
    save_file({"n": torch.zeros(2, dtype=torch.int64)}, tmp_path / "ids.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"\xff" * 9)
    for name, words in (
        ("ids.safetensors", "n is I64, and only parameters of floating point are exchanged"),
        ("torn.safetensors", "it cannot be read"),
        ("none.safetensors", "it cannot be read"),
    ):
        with pytest.raises(ConfigError, match=f"^run.init_from is '.*{name}': {words}"):
            build_syncer.check(compose([*FILE, f"run.init_from={tmp_path / name}"]))
    with pytest.raises(ConfigError, match=r"^run.init_from is null: .*diloco.save_version0\(model, FILE\) makes one"):
        build_syncer.check(compose(FILE))
    with pytest.raises(ConfigError, match=r"^model.kind is 'moe': one of transformer, file"):
        build_syncer.check(compose(["model.kind=moe"]))


def test_no_command_of_ours_trains_it(tmp_path: Path) -> None:
    path = diloco.save_version0(small_model(), tmp_path / "v0.safetensors")
    config = compose([*FILE, f"run.init_from={path}"])
    with pytest.raises(ConfigError, match=r"model.kind is 'file': .* join by diloco.join"):
        build.build_model(config)


def test_a_run_of_our_own_model_is_what_it_was_before_there_were_others() -> None:
    assert "model.kind" not in shared_config(compose([]))
    assert shared_config(compose(["model.kind=file"]))["model.kind"] == "file"


def test_the_syncer_says_how_a_loop_joins() -> None:
    line = join_line(compose(FILE), "10.0.0.1:7077", FILE, None)
    assert line == 'diloco.join(model, optimizer, syncer="10.0.0.1:7077", site="site-a", tokens_per_step=...)'
