"""A model's values from files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import diloco
from diloco.cli.syncer import join_line
from diloco.config import build, build_syncer
from diloco.config.compose import compose, shared_config, tokenizer_of
from diloco.config.errors import ConfigError
from diloco.config.model_files import load_values, write_folder
from diloco.inner import checkpoint
from diloco.outer.fragments import gather, named_parameters_once
from tests.launch.serving import small_model


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
