"""``diloco export``, ``eval`` and ``generate``: what they say, what they leave behind, what they say of nonsense."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from unittest.mock import Mock

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from diloco.cli.main import main
from diloco.cli.model import size_of, texts
from diloco.config import build
from diloco.config.compose import compose, write
from diloco.config.model_files import read_options, read_values
from diloco.inner import checkpoint
from diloco.inner.evaluate import SamplingOptions, generate
from diloco.inner.tokenizer import make_tokenizer
from diloco.models.evaluate import Evaluator
from diloco.models.read import take
from diloco.observe.eventlog import read_events
from diloco.outer.fragments import named_parameters_once
from tests.cli.conftest import Cli
from tests.models.pasts import Hand, configured, with_a_past
from tests.runs.processes import TINY, Place
from tests.syncer.building import eventually, files


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_a_past(tmp_path_factory.mktemp("exported"))


pytestmark = pytest.mark.usefixtures("own_environment")


def test_a_version_of_a_run_becomes_a_folder_and_can_be_rounded_and_cut(run: Path, tmp_path: Path, cli: Cli) -> None:
    before = files(run)
    for name, version, dtype, asked in (
        ("third", 3, torch.float32, ["--version", "3"]),
        ("newest", 8, torch.bfloat16, ["--dtype", "bf16", "--shard-size", "20kB"]),
    ):
        out = tmp_path / name
        said = cli.out("export", str(run), "--to", str(out), *asked)
        assert f"{out}: version {version} of past, " in said
        assert ("bytes of bf16" in said) is (dtype == torch.bfloat16)
        found = read_values(str(out), read_options(str(out)))
        wanted = take(str(run), version=version).parameters
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name].to(dtype)) for name in wanted)
    assert len(list(out.glob("*.safetensors"))) > 1
    assert files(run) == before, "the run is only read"
    assert [size_of(text) for text in ("5GB", "1.5 MB", "20kB")] == [5 * 10**9, 1_500_000, 20_000]


@pytest.mark.parametrize("url", ["memory://models/otter", "file://HERE/models/otter/"])
def test_a_version_is_sent_to_a_url_whole_or_not_at_all(
    url: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    files, root = fsspec.core.url_to_fs(url := url.replace("HERE", str(tmp_path)))
    asked = ["export", str(run), "--shard-size", "20kB", "--to"]
    sent: list[str] = []

    def put(here: str, there: str) -> None:
        sent.append(there)
        if there.endswith("/config.json"):
            raise OSError("the store is full")
        files.pipe_file(there, Path(here).read_bytes())

    with monkeypatch.context() as patched:
        patched.setattr(files, "put_file", put)
        cli.refuses(1, f"--to is {url!r}: the store is full", *asked, url)
        patched.setattr(files, "put_file", Mock(side_effect=TimeoutError))
        cli.refuses(1, f"--to is {url!r}: TimeoutError", *asked, url)
    assert len(sent) > 4
    assert files.find(root) == []
    assert main([*asked, url]) == 0
    assert main([*asked, str(tmp_path / "model")]) == 0
    there = {Path(name).name: files.cat_file(name) for name in files.find(root)}
    assert there == {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    cli.refuses(2, "files are there already", *asked, url)


def test_a_syncer_says_of_which_model_its_values_are(here: Path, cli: Cli) -> None:
    hand = Hand(configured(here))
    asked = ["export", "--syncer", hand.address]
    with_file = [*asked, "--config", "past/config.yaml", "--to"]
    try:
        assert "version 0 of past" in cli.out(*with_file, "first")
        hand.join("a")
        hand.push("a", 0)
        assert "versions 1 0 of past" in cli.out(*asked, "--to", "model")
        cli.refuses(4, "model.heads is 2 in run past and 1 here", *asked, "--to", "other", "model.heads=1")
        cli.refuses(4, "by the settings here: give the run's own", *with_file, "other", "model.dim=64")
        cli.refuses(2, "--version is 2: a syncer serves only its newest", *with_file, "other", "--version", "2")
        generated = cli.out("generate", "--syncer", hand.address, "--tokens", "3", "a")
    finally:
        hand.stop()
    assert generated == wanted(here / "past", b"a", tokens=3)
    values = take("past").parameters
    found = read_values("model", read_options("model"))
    assert all(torch.equal(found[name], values[name]) for name in values)


def wanted(run: Path, prompt: bytes, version: int | None = None, **options: float) -> str:
    """The text by the parts that the verb is made of."""
    tokens = list(generate(take(str(run), version=version).model(), list(prompt), SamplingOptions(**options), 256))  # type: ignore[arg-type]
    return prompt.decode() + make_tokenizer("bytes").decode(tokens) + "\n"


def test_it_goes_on_with_the_prompt_and_without_one_a_text_begins(run: Path, cli: Cli) -> None:
    options = ["--version", "2", "--tokens", "9", "--seed", "4", "--top-k", "3", "--temperature", "0.5"]
    sampled = {"tokens": 9, "seed": 4, "top_k": 3, "temperature": 0.5}
    assert cli.out("generate", str(run), "x=1 the sites", *options) == wanted(run, b"x=1 the sites", 2, **sampled)
    assert len(cli.out("generate", str(run), "")) > 1


def test_letters_come_whole_and_nothing_is_held_for_ever() -> None:
    tokenizer = make_tokenizer("bytes")
    whole = "é日\U0001f600x"
    assert list(texts(whole.encode(), tokenizer)) == list(whole)
    assert list(texts(whole.encode()[:-2], tokenizer)) == ["é", "日", "�"]
    assert "".join(texts(b"\xff" * 9 + b"end", tokenizer)) == "�" * 9 + "end"
    bpe = make_tokenizer("bpe1024")
    ids = [int(token) for token in bpe.encode_batch(["def f(x):\n    return é + x\n"])[0]]
    parts = list(texts(iter(ids), bpe))
    assert "".join(parts) == "def f(x):\n    return é + x\n"
    assert len(parts) >= len(ids) - 1


@pytest.fixture
def ended(here: Path) -> Path:
    Place(here)
    config = compose([*TINY, "run.name=ended"])
    folder = here / "runs" / "ended"
    write(config, folder / "config.yaml")
    final = folder / "syncer" / "final"
    final.mkdir(parents=True)
    parameters = named_parameters_once(build.build_model(config))
    save_file({name: value.detach() for name, value in parameters.items()}, final / "model.safetensors")
    (final / "final.json").write_text(json.dumps({"versions": [7], "digests": ["0"]}))
    return folder


def test_a_finished_run_is_evaluated_on_the_whole_validation_split(ended: Path, cli: Cli) -> None:
    assert "versions 7: val loss 5.5" in cli.out("eval", str(ended), "--follow")
    (event,) = read_events(ended / "events.jsonl")
    assert (event["who"], event["what"], event["versions"], event["whole"]) == ("eval", "eval", [7], True)


def test_one_who_follows_begins_with_version_zero(ended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A quick run has left version 0 behind before it can be fetched."""
    final = ended / "syncer/final/final.json"
    hidden = final.rename(final.with_suffix(".later"))
    told = ended / "events.jsonl"

    def end() -> None:
        eventually(lambda: told.exists() and list(read_events(told)), "an evaluation", bound_s=60.0)
        hidden.rename(final)

    ending = threading.Thread(target=end)
    ending.start()
    assert main(["eval", str(ended), "--follow"]) == 0
    ending.join()
    events = list(read_events(told))
    assert [event["versions"] for event in events] == [[0], [7]]
    assert events[0]["val_loss"] == pytest.approx(5.5, abs=0.1)


def test_the_loss_is_of_the_model_that_the_syncer_says(tmp_path: Path, cli: Cli) -> None:
    Place(tmp_path)
    text = [
        "data=text",
        "data.validation_sequences=32",
        f"data.path={tmp_path / 'text'}",
        f"data.cache={tmp_path / 'cache'}",
    ]
    hand = Hand(configured(tmp_path / "runs", "model.rope_theta=70000", *text))
    try:
        found = cli.json("eval", "--syncer", hand.address, "inner.precision=fp32", *text)
        words = "model.rope_theta is 70000.0 in run past and 10000.0 here"
        cli.refuses(4, words, "eval", "--syncer", hand.address, "model.rope_theta=10000", *text)
        config = hand.config
    finally:
        hand.stop()
    score = Evaluator(config, build.corpus(config)).score(build.build_model(config))
    assert found["versions"] == [0, 0]
    assert found["val_loss"] == pytest.approx(score.val_loss, abs=1e-6)


def test_what_lies_in_files_has_the_loss_of_the_run(ended: Path, cli: Cli) -> None:
    values = load_file(ended / "syncer/final/model.safetensors")
    folder = ended.parent / "warm" / "train" / "checkpoints"
    checkpoint.save(folder, "step-0000000001", {f"model/{name}": value for name, value in values.items()}, {})
    (folder.parents[1] / "config.yaml").write_bytes((ended / "config.yaml").read_bytes())
    trained = str(folder)

    of_run = cli.json("eval", str(ended))
    assert of_run["versions"] == [7]
    cli.out("export", trained, "--to", "model")
    cli.out("export", trained, "--to", "parts", "--format", "dcp")
    text = ["data=text", "data.path=text", "data.cache=cache", "inner.precision=fp32"]
    for source, settings in ((trained, []), ("warm", []), ("model", text), ("parts", text)):
        found = cli.json("eval", source, *settings)
        assert found["whole"], source
        assert found["val_loss"] == pytest.approx(of_run["val_loss"], abs=1e-5), source
        assert found["val_bits_per_byte"] == pytest.approx(of_run["val_bits_per_byte"], abs=1e-5), source
    said = cli.out("eval", trained)
    assert f"val loss {found['val_loss']:.4f} nats/token" in said
    assert said.endswith("(whole validation split), of the text text text\n"), "which text it is judged on"
    assert len(list(read_events(ended / "events.jsonl"))) == 1, "only of the run itself"
    for words, more in (
        ("is evaluated once, from its files", ["--follow"]),
        ("is evaluated once, from its files", ["--syncer", "127.0.0.1:1"]),
        ("data: path is 'nowhere'", ["data.path=nowhere"]),
        ("of another model", ["model.dim=64"]),
    ):
        cli.refuses(2, words, "eval", trained, *more)


@pytest.mark.slow
def test_an_earlier_version_is_evaluated_too(tmp_path: Path, cli: Cli) -> None:
    Place(tmp_path)
    past = with_a_past(tmp_path / "runs", 2, f"data.path={tmp_path / 'text'}", f"data.cache={tmp_path / 'cache'}")
    losses = []
    for version in (0, 4):
        found = cli.json("eval", str(past), "--version", str(version))
        assert found["versions"] == [version, version]
        losses.append(found["val_loss"])
    assert losses[0] != losses[1]
