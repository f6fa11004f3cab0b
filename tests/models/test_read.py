from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from diloco.codec.base import digest
from diloco.config import build
from diloco.config import compose as configs
from diloco.config.errors import ConfigError, VerbError
from diloco.config.model_files import write_folder
from diloco.config.schema import RunConfig
from diloco.inner import checkpoint
from diloco.inner.evaluate import SamplingOptions, evaluate, generate
from diloco.inner.tokenizer import make_tokenizer
from diloco.models.read import Taken, take, take_from_syncer
from diloco.outer.fragments import gather, named_parameters_once
from tests.models.pasts import Hand, configured


def digests_of(taken: Taken) -> list[str]:
    """Of the fragments, as they are published."""
    return [digest(gather(part, taken.parameters), "") for part in build.whole_layout(taken.config).fragments]


Past = tuple[Path, dict[int, list[str]]]


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Past:
    """A run stopped at version 6 of both fragments, and the digests of its versions."""
    root = tmp_path_factory.mktemp("runs")
    hand = Hand(configured(root))
    hand.join("a")
    told = {0: hand.digests()}
    for version in range(1, 7):
        for fragment in range(2):
            hand.push("a", fragment)
        told[version] = hand.digests()
        if version == 4:
            hand.syncer.api.snapshot()
    hand.stop()
    return root / "past", told


def test_any_version_that_is_kept_can_be_taken(past: Past) -> None:
    run, published = past
    for version, number in ((None, 6), (5, 5), (4, 4), (0, 0)):
        for source in (run, run / "syncer"):
            taken = take(str(source), ["site.device=cpu"], version=version)
            assert taken.versions == (number, number)
            assert taken.called == f"version {number} of past"
            assert digests_of(taken) == published[number]
    values = named_parameters_once(taken.model())
    assert all(torch.equal(values[name], taken.parameters[name]) for name in values)


@pytest.mark.gpu
def test_a_model_is_computed_on_the_device_of_its_settings(past: Past) -> None:
    on_gpu, on_cpu = (take(str(past[0]), [f"site.device={device}"]).model() for device in ("auto", "cpu"))
    assert [next(model.parameters()).device.type for model in (on_gpu, on_cpu)] == ["cuda", "cpu"]
    options = SamplingOptions(tokens=20, temperature=0.0)
    assert list(generate(on_gpu, [1, 2, 3], options)) == list(generate(on_cpu, [1, 2, 3], options))
    batches = [(torch.arange(8).view(2, 4), torch.arange(1, 9).view(2, 4))]
    losses = [evaluate(model, batches, precision="fp32") for model in (on_gpu, on_cpu)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_device_that_is_not_there_is_refused_by_name(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^site\.device is 'cuda': torch finds no CUDA device here"):
        take(str(past[0]), ["site.device=cuda"]).model()


def test_a_running_syncer_gives_its_newest(tmp_path: Path) -> None:
    hand = Hand(configured(tmp_path))
    try:
        hand.join("a")
        hand.push("a", 0)
        taken = take_from_syncer(hand.address, hand.config)
        assert taken.versions == (1, 0)
        assert taken.called == "versions 1 0 of past"
        assert digests_of(taken) == digests_of(take(str(tmp_path / "past")))
    finally:
        hand.stop()


def checkpointed(folder: Path, config: RunConfig, seed: int) -> dict[str, torch.Tensor]:
    model = build.build_model(config)
    values = {name: value.detach() + seed for name, value in named_parameters_once(model).items()}
    checkpoint.save(folder, f"step-{seed:010d}", {f"model/{name}": value for name, value in values.items()}, {})
    return values


def test_what_was_trained_can_be_taken_also_with_a_configuration_from_elsewhere(tmp_path: Path) -> None:
    config = configured(tmp_path)
    folder = tmp_path / "past" / "train" / "checkpoints"
    checkpointed(folder, config, 1)
    values = checkpointed(folder, config, 2)
    for source in (folder, folder.parents[1], folder / "step-0000000002", folder.parent):
        taken = take(str(source))
        assert taken.parameters.keys() == values.keys()
        assert all(torch.equal(taken.parameters[name], values[name]) for name in values)
    older = take(str(folder / "step-0000000001"))
    assert not torch.equal(older.parameters["norm.weight"], values["norm.weight"])
    file = tmp_path / "past" / "model.safetensors"
    save_file(values, file)
    assert torch.equal(take(str(file)).parameters["norm.weight"], values["norm.weight"])
    with pytest.raises(ConfigError, match=r"--version is 3: .*has no versions"):
        take(str(file), version=3)
    with pytest.raises(VerbError, match="does not say what was published"):
        take(str(folder.parent), version=2)

    elsewhere = (tmp_path / "past" / "config.yaml").rename(tmp_path / "elsewhere.yaml")
    with pytest.raises(ConfigError, match=r"no config\.yaml above it describes the model"):
        take(str(folder))
    assert take(str(folder), file=elsewhere).parameters


def test_a_folder_of_the_field_is_taken_with_its_model(past: Past, tmp_path: Path) -> None:
    taken = take(str(past[0]))
    options = build.model_options(taken.config)
    folder = tmp_path / "out's"
    write_folder(folder, taken.parameters, options, make_tokenizer("bytes"), shard_bytes=10**9)
    again = take(str(folder))
    assert build.model_options(again.config).dim == options.dim
    assert configs.tokenizer_of(again.config).end_of_file == 256
    assert all(torch.equal(again.parameters[name], value) for name, value in taken.parameters.items())
    with pytest.raises(ConfigError, match="is a folder with one model"):
        take(str(folder), version=1)
    with pytest.raises(ConfigError, match=r"--config is mine\.yaml: .* has its own settings"):
        take(str(folder), file=Path("mine.yaml"))


def test_a_run_whose_settings_are_missing_is_said(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(ConfigError, match="the run's settings are missing"):
        take(str(tmp_path))
