"""Folders of the field's form, without ``transformers``."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Size, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import diloco
from diloco.cli.syncer import join_line
from diloco.config import build, build_syncer, model_files
from diloco.config.compose import compose, shared_config, tokenizer_of
from diloco.config.errors import ConfigError
from diloco.config.model_files import load_values, read_options, read_values, write_folder
from diloco.durable import Disk, Step
from diloco.inner import checkpoint
from diloco.inner.llama import to_llama
from diloco.inner.model import ModelOptions, Transformer
from diloco.inner.parallel import SiteGroup
from diloco.inner.tokenizer import END, make_tokenizer
from diloco.outer.fragments import gather, named_parameters_once
from tests.integrations.serving import small_model
from tests.layouts import LAYOUTS, Odd, dice, fill, heard, ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # Torch's own save and load say so.
OPTIONS = ModelOptions(vocab_size=257, layers=2, dim=16, heads=4, kv_heads=2, ffn_dim=32, context=32)


def written(folder: Path, **other: Any) -> dict[str, torch.Tensor]:
    model = Transformer(OPTIONS, seed=9)
    values = {name: value.detach() for name, value in model.named_parameters()}
    write_folder(folder, values, OPTIONS, make_tokenizer("bytes"), **{"shard_bytes": 10**9, **other})
    return values


def test_what_was_written_is_read_from_one_file_or_several_and_may_be_rounded(tmp_path: Path) -> None:
    for name, shard_bytes, dtype in (
        ("whole", 10**9, torch.float32),
        ("cut", 5000, torch.float32),
        ("rounded", 10**9, torch.bfloat16),
    ):
        values = written(tmp_path / name, shard_bytes=shard_bytes, dtype=dtype)
        assert read_options(str(tmp_path / name)) == OPTIONS
        found = read_values(str(tmp_path / name), OPTIONS)
        assert found.keys() == values.keys()
        assert all(torch.equal(found[name], values[name].to(dtype)) for name in values)
    assert [file.name for file in (tmp_path / "whole").glob("*.safetensors")] == ["model.safetensors"]
    files = sorted((tmp_path / "cut").glob("*.safetensors"))
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * value.numel() for value in values.values())
    assert {file.name for file in files} == set(index["weight_map"].values())
    for file in files:
        held = load_file(file)
        assert len(held) == 1 or sum(4 * value.numel() for value in held.values()) <= 5000
        assert all(index["weight_map"][name] == file.name for name in held)
    assert len(files) == 7
    assert json.loads((tmp_path / "rounded/config.json").read_text())["torch_dtype"] == "bfloat16"
    other = Transformer(OPTIONS, seed=2)
    load_values(str(tmp_path / "rounded"), other)
    for name, value in other.named_parameters():
        assert value.dtype == torch.float32
        assert torch.equal(value, values[name].bfloat16().float())


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


@pytest.mark.parametrize(("dcp", "files"), [(False, 5), (True, 4)])
def test_it_is_there_whole_or_not_at_all(
    dcp: bool, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for left in range(files):
        monkeypatch.setattr(model_files, "PLAIN_DISK", FullAt(left))
        with pytest.raises(OSError, match="No space"):
            written(tmp_path / "model", dcp=dcp)
        assert list(tmp_path.iterdir()) == [], left
    monkeypatch.setattr(model_files, "PLAIN_DISK", FullAt(2 * files))
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, usual[1]))  # As a disk that is full in the middle of a file.
        with pytest.raises(OSError, match="File too large"):
            written(tmp_path / "model", dcp=dcp)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert list(tmp_path.iterdir()) == []
    written(tmp_path / "model", dcp=dcp)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    written(folder, shard_bytes=5000)
    index = folder / "model.safetensors.index.json"

    def refused(words: str, options: ModelOptions = OPTIONS) -> None:
        with pytest.raises(ConfigError, match=words):
            read_values(str(folder), options)

    wider = replace(OPTIONS, dim=32)
    refused(r"hidden_size is 16 there and model\.dim is 32 here; model=imported takes", wider)
    with_head = folder / json.loads(index.read_text())["weight_map"]["lm_head.weight"]
    save_file({"other": torch.ones(1)}, with_head)
    refused(r"has no lm_head\.weight")
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../model.safetensors"}}))
    refused("outside of the folder")
    index.write_text("{}")
    refused("has no weight_map")
    index.unlink()
    refused(r"cannot be read: .*model\.safetensors")
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    refused("cannot be read")
    for text, words in (("[]", "is no JSON object"), ("{", "Expecting"), ('{"model_type": "gpt2"}', "model_type is")):
        (folder / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_options(str(folder))


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
    write_folder(tmp_path / "parallel", values, model.options, tokenizer_of(config), dcp=True, shard_bytes=100_000)
    for name in ("step-00000001", "step-00000002"):
        named = {f"{part}/{key}": value.clone() for key, value in values.items() for part in ("model", "adopted")}
        checkpoint.save(tmp_path / "checkpoints", name, named, {})
    (tmp_path / "text.safetensors").write_text("text")
    there = ("file.safetensors", "field", "parallel", "checkpoints", "checkpoints/step-00000001")
    for source in there:
        config.run.init_from = str(tmp_path / source)
        build.check_version_zero(config)
        for changed in ("model.layers=2", "model.dim=64"):
            other = compose(["model=tiny", "model.layers=1", changed, f"run.init_from={config.run.init_from}"])
            with pytest.raises(ConfigError, match=r"of another model|num_hidden_layers|hidden_size"):
                build.check_version_zero(other)
    for source, words in (("none", "neither a"), ("text.safetensors", "it cannot be read"), (".", "neither a")):
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
    with pytest.raises(
        ConfigError, match=r"run\.init_from is '.*': a folder, and model\.kind=file takes a file; diloco\."
    ):
        build.layout_of(compose([*FILE, f"run.init_from={tmp_path}"]))


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


def write_shards(group: SiteGroup, tell: Callable[[Any], None], folder: Path) -> None:
    model = LAYOUTS["fsdp"](Odd(), group.world)
    fill(named_parameters_once(model), dice("first"))
    tell(diloco.save_version0(model, folder / "v0.safetensors").is_file())


def test_several_ranks_write_what_all_hold_to_one_file(tmp_path: Path) -> None:
    with ranks(write_shards, 2, tmp_path) as ends:
        assert [heard(end) for end in ends] == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["v0.safetensors"]
    written, wanted = load_file(tmp_path / "v0.safetensors"), dice("first")
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], each) for name, each in wanted.items())


def test_of_frozen_parameters_a_file_has_the_digest_of_their_values_in_whatever_type(tmp_path: Path) -> None:
    def saved(model: nn.Sequential) -> tuple[dict[str, torch.Tensor], str]:
        model[0].requires_grad_(False)
        path = diloco.save_version0(model, tmp_path / "v0.safetensors")
        layout = build.layout_of(compose([*FILE, f"run.init_from={path}"]))
        assert layout.numel == 17, "what is exchanged"
        return load_file(path), layout.frozen

    model = small_model()
    model[0].to(torch.bfloat16)
    values, digest = saved(model)
    assert sorted(values) == ["2.bias", "2.weight"]
    model[0].float()
    assert saved(model)[1] == digest, "the same values"
    with torch.no_grad():
        model[2].weight.mul_(2)
    assert saved(model)[1] == digest, "what is trained is another matter"
    quantised = nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)
    model[0].register_parameter("codes", quantised)
    with_codes = saved(model)[1]
    with torch.no_grad():
        quantised[3] = 9
    others = saved(model)[1]
    model[0].register_parameter("codes", nn.Parameter(quantised.view(2, 4), requires_grad=False))
    assert len({digest, with_codes, others, saved(model)[1]}) == 4, "values and shapes count"
    assert "frozen" not in (safe_open(diloco.save_version0(small_model(), tmp_path / "all"), "pt").metadata() or {})


def test_of_buffers_a_run_exchanges_those_that_its_settings_name(tmp_path: Path) -> None:
    path = diloco.save_version0(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), tmp_path / "v0.safetensors")
    names = ["0.bias", "0.running_mean", "0.running_var", "0.weight", "1.bias", "1.weight"]
    assert sorted(load_file(path)) == names, "a counter is none of them"
    plain = [*FILE, f"run.init_from={path}"]
    assert [name for name, _ in build.layout_of(compose(plain)).parameters] == [n for n in names if "running" not in n]
    config = compose([*plain, "outer.publish=*.running_mean,*_var", "outer.inner_steps=2"])
    build_syncer.check(config)
    layout = build.layout_of(config)
    assert [name for name, _ in layout.parameters] == names
    assert layout.buffers == ("0.running_mean", "0.running_var")
    assert build.version_zero(config, layout)[1].tolist() == [0, 0, 0, 1, 1, 1]
    assert build.outer_options(config).num_fragments == build.learner_options(config).num_fragments == 2
    assert build.learner_options(config).due_at == (0, 1), "the parameters as without buffers, these a step before"
    words = r"outer\.publish has '\*_tracked': no floating-point buffer of run\.init_from=.*; these are there: 0\.run"
    with pytest.raises(ConfigError, match=words):
        build.layout_of(compose([*plain, "outer.publish=*_tracked"]))
    with pytest.raises(ConfigError, match=r"^outer\.inner_steps is 1: at least one step for each of num_fragments=2"):
        build_syncer.check(compose([*plain, "outer.publish=*_var", "outer.inner_steps=1", "site.overlap_steps=0"]))


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    turning = nn.Module()
    turning.register_parameter("n", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    empty = small_model()
    empty.register_parameter("none", nn.Parameter(torch.zeros(0, 3)))
    for model, words in (
        (nn.Tanh(), "model has no parameters"),
        (empty, r"model has none of shape \(0, 3\): it has no values to exchange; freeze it"),
        (turning, "model has n, which is torch.complex64: only floating point is trained"),
        (small_model().requires_grad_(False), r"model has no parameters that are trained \(requires_grad\)"),
    ):
        with pytest.raises(ValueError, match=words):
            diloco.save_version0(model, tmp_path / "v0.safetensors")
    save_file({"n": torch.zeros(2, dtype=torch.int64)}, tmp_path / "ids.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"\xff" * 9)
    for settings, words in (
        ([f"run.init_from={tmp_path}/ids.safetensors"], "n is I64, and only parameters of floating point"),
        ([f"run.init_from={tmp_path}/torn.safetensors"], "run.init_from is '.*torn.safetensors': it cannot be read"),
        ([], r"^run.init_from is null: .*diloco.save_version0\(model, FILE\) makes one"),
        (["model.kind=moe"], r"^model.kind is 'moe': one of transformer, file"),
    ):
        with pytest.raises(ConfigError, match=words):
            build_syncer.check(compose([*FILE, *settings]))


def test_no_command_of_ours_trains_it_and_the_syncer_says_how_a_loop_joins(tmp_path: Path) -> None:
    path = diloco.save_version0(small_model(), tmp_path / "v0.safetensors")
    config = compose([*FILE, f"run.init_from={path}"])
    with pytest.raises(ConfigError, match=r"model.kind is 'file': .* call diloco.join"):
        build.build_model(config)
    assert "model.kind" not in shared_config(compose([])), "a run of our own model is what it was before"
    assert shared_config(config)["model.kind"] == "file"
    line = join_line(compose(FILE), ["10.0.0.1:7077"], FILE, None)
    assert line == 'diloco.join(model, optimizer, syncer="10.0.0.1:7077", site="site-a", tokens_per_step=...)'


# --- Distributed checkpoints of torch --------------------------------------------------------------------------------


def named_as_others_do() -> dict[str, torch.Tensor]:
    return to_llama({name: value.detach() for name, value in Transformer(OPTIONS, seed=9).named_parameters()}, OPTIONS)


def test_torch_loads_the_distributed_checkpoint_that_was_written(tmp_path: Path) -> None:
    options = replace(OPTIONS, tied=True)
    values = {name: value.detach() for name, value in named_parameters_once(Transformer(options, seed=9)).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_folder(tmp_path / "model", values, options, make_tokenizer("bytes"), dcp=True, shard_bytes=1)
    names = {".metadata", "__0_0.distcp", "config.json", "generation_config.json", "tokenizer.json"}
    assert {path.name for path in (tmp_path / "model").iterdir()} == names | {"tokenizer_config.json"}
    wanted = to_llama(values, options) | {"lm_head.weight": values["embedding.weight"]}
    state = {name: torch.zeros_like(value) for name, value in wanted.items()}
    dcp.load(state, checkpoint_id=tmp_path / "model", no_dist=True)
    assert all(torch.equal(state[name], value) for name, value in wanted.items())
    assert read_options(str(tmp_path / "model")) == options
    found = read_values(str(tmp_path / "model"), options)
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], value) for name, value in values.items())


@pytest.mark.parametrize("below", ["", "model."])
def test_a_distributed_checkpoint_of_others_is_version_zero(below: str, tmp_path: Path) -> None:
    """By its names as they are or below ``model``; what else a training keeps in it is left."""
    state = {"optim": {"state": {"model.norm.weight": torch.ones(3)}}, "step": 3}
    folder = tmp_path / "step-7"
    named = named_as_others_do()
    dcp.save({**({"model": named} if below else named), **state}, checkpoint_id=folder, no_dist=True)
    model = Transformer(OPTIONS, seed=2)
    load_values(str(folder), model)
    for name, value in named_parameters_once(Transformer(OPTIONS, seed=9)).items():
        assert torch.equal(named_parameters_once(model)[name], value)
    with torch.device("meta"):
        other = Transformer(replace(OPTIONS, ffn_dim=16))
    said = rf"run\.init_from is '{folder}': of another model, blocks\.0\.feed_forward\.down\.weight is \(16, 16\) here"
    with pytest.raises(ConfigError, match=said):
        load_values(str(folder), other, shapes_only=True)
    with torch.device("meta"):
        other = Transformer(replace(OPTIONS, layers=3))
    with pytest.raises(ConfigError, match=r"run\.init_from is .*parameter model\.layers\.2\.\S+ is missing"):
        load_values(str(folder), other, shapes_only=True)


def saves_with_others(group: SiteGroup, tell: Callable[[object], None], folder: Path) -> None:
    mesh = init_device_mesh("cpu", (group.world,))
    state = {name: distribute_tensor(value, mesh) for name, value in named_as_others_do().items()}
    dcp.save(state, checkpoint_id=folder)
    tell("saved")


@pytest.mark.slow
def test_the_parts_of_two_ranks_are_one_model(tmp_path: Path) -> None:
    with ranks(saves_with_others, 2, tmp_path / "model") as ends:
        assert [heard(end) for end in ends] == ["saved"] * 2
    assert len(list((tmp_path / "model").glob("*.distcp"))) == 2
    found = read_values(str(tmp_path / "model"), OPTIONS)
    values = named_parameters_once(Transformer(OPTIONS, seed=9))
    assert all(torch.equal(found[name], value) for name, value in values.items())
    (tmp_path / "model" / "__1_0.distcp").unlink()
    with pytest.raises(ConfigError, match=r"parameter lm_head\.weight: .*No such file.*__1_0\.distcp"):
        read_values(str(tmp_path / "model"), OPTIONS, shapes_only=True)


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


def test_a_hostile_distributed_checkpoint_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save(named_as_others_do(), checkpoint_id="model", no_dist=True)
    good = dcp.FileSystemReader("model").read_metadata()
    for bad in (Hostile(), replace(good, planner_data=Hostile()), replace(good, storage_data={"x": Hostile()})):
        Path("model/.metadata").write_bytes(pickle.dumps(bad))
        with pytest.raises(ConfigError, match=r"run\.init_from is 'model': .*\.metadata: it names \w+\.mkdir, which"):
            load_values("model", Transformer(OPTIONS))
    # Nothing of this process is changed: here the name of every path.
    harm = b"\x80\x02cpathlib\nPurePosixPath\nN(X\x04\0\0\0nameX\x04\0\0\0evild\x86b."
    Path("model/.metadata").write_bytes(harm)
    with pytest.raises(ConfigError, match=r"it changes <class 'pathlib\.PurePosixPath'>, which is no part"):
        load_values("model", Transformer(OPTIONS))
    assert PurePosixPath("a/b").name == "b"
    # Of torch's own functions too only those that describe tensors.
    Path("model/.metadata").write_bytes(pickle.dumps(torch.load))
    with pytest.raises(ConfigError, match=r"it names torch\.serialization\.load, which"):
        load_values("model", Transformer(OPTIONS))
    Path("model/.metadata").write_bytes(b"\x80\x04Nr\xff\xff\xff\x0f.")  # Its memo is to have 2**28 places.
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"\.metadata: "):
        load_values("model", Transformer(OPTIONS))
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()
    # A shard is read by torch's own guard, weights_only.
    index, place = next((i, p) for i, p in good.storage_data.items() if i.fqn == "lm_head.weight")
    torch.save([torch.ones(257, 16), Hostile()], "model/bad.distcp")
    length = Path("model/bad.distcp").stat().st_size
    good.storage_data[index] = replace(place, relative_path="bad.distcp", offset=0, length=length)
    Path("model/.metadata").write_bytes(pickle.dumps(good))
    with pytest.raises(ConfigError, match=r"parameter lm_head\.weight: bad\.distcp .* has more than a tensor"):
        load_values("model", Transformer(OPTIONS))
    assert not Path("harmed").exists()


def test_what_is_wrong_with_a_distributed_checkpoint_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    dcp.save(named_as_others_do(), checkpoint_id=folder, no_dist=True)
    file, good = folder / "__0_0.distcp", dcp.FileSystemReader(folder).read_metadata()
    raw, described = file.read_bytes(), (folder / ".metadata").read_bytes()
    index, place = next((i, p) for i, p in good.storage_data.items() if i.fqn == "lm_head.weight")
    about = good.state_dict_metadata["lm_head.weight"]
    assert isinstance(about, TensorStorageMetadata)

    def refused(words: str, *, shapes_only: bool = True, of: str = r"parameter lm_head\.weight: ") -> None:
        said = rf"run\.init_from is '{folder}': it cannot be read: {of}{words}"
        with pytest.raises(ConfigError, match=said), torch.device("meta" if shapes_only else "cpu"):
            load_values(str(folder), Transformer(OPTIONS), shapes_only=shapes_only)

    file.write_bytes(raw[: place.offset + 9])
    refused(r"__0_0\.distcp is cut short")
    file.write_bytes(raw[: place.offset] + bytes(place.length) + raw[place.offset + place.length :])
    refused(r"", shapes_only=False)
    file.unlink()
    refused(r".*No such file.*__0_0\.distcp")
    file.write_bytes(raw)
    huge, half, turned = Size([1 << 40, 16]), Size([128, 16]), Size([16, 257])
    whole, of_complex = about.chunks[0], replace(about.properties, dtype=torch.complex64)
    other = next(p for i, p in good.storage_data.items() if i.fqn == "model.embed_tokens.weight")
    there = {"offset": other.offset, "length": other.length}
    in_place = r"__0_0\.distcp has \(257, 16\) of torch\.float32 in place of "
    for words, shapes_only, tensor, part in (
        (r"it has 0 of 4112 values", True, {"chunks": []}, {}),
        (r"__0_0\.distcp is cut short", False, {"size": huge, "chunks": [replace(whole, sizes=huge)]}, {}),
        (rf"{in_place}\(128, 16\)", False, {"size": Size([256, 16]), "chunks": [replace(whole, sizes=half)] * 2}, {}),
        (r"two parts have the values at \(0, 0\)", False, {"size": Size([514, 16]), "chunks": [whole, whole]}, {}),
        (r"a part at \(-1, 0\) of \(257, 16\) lies", True, {"chunks": [replace(whole, offsets=Size([-1, 0]))]}, {}),
        (r"it is of torch\.complex64: no floating-point numbers", True, {"properties": of_complex}, {}),
        (r"'\.\./__0_0\.distcp' is outside of the folder", True, {}, {"relative_path": "../__0_0.distcp"}),
        (r"__0_0\.distcp is compressed", True, {}, {"transform_descriptors": ["zstd"]}),
        (rf"{in_place}\(16, 257\)", False, {"size": turned, "chunks": [replace(whole, sizes=turned)]}, there),
    ):
        places = good.storage_data | {index: replace(place, **part)}
        tensors = good.state_dict_metadata | {"lm_head.weight": replace(about, **tensor)}
        told = replace(good, storage_data=places, state_dict_metadata=tensors)
        (folder / ".metadata").write_bytes(pickle.dumps(told))
        refused(words, shapes_only=shapes_only)
    (folder / ".metadata").write_bytes(described[:-9])
    refused(r"", of=r"\.metadata: ")
    (folder / ".metadata").write_bytes(pickle.dumps(3))
    refused(r"", of=r"\.metadata: ")
    shutil.rmtree(folder)
    dcp.save({"tok_embeddings.weight": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    refused(r"no parameter has Hugging Face's name, .*; it has tok_embeddings\.weight", of=r"\.metadata: ")
