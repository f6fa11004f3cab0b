"""The same folders by the library that they are made for; one file, since importing it takes seconds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.functional import cross_entropy

from diloco.cli.main import main
from diloco.config import build, model_files
from diloco.config.compose import compose
from diloco.config.model_files import load_values
from diloco.inner.evaluate import evaluate
from diloco.inner.model import ModelOptions, Transformer
from diloco.inner.tokenizer import make_tokenizer
from diloco.models.evaluate import Evaluator
from diloco.observe.eventlog import read_events
from diloco.outer.fragments import named_parameters_once
from diloco.outer.fragments import scatter as put_fragment
from tests.runs.processes import TINY, Place

TEXT = "def f(x):\n\treturn x  # héllo\r\n  日本語 \x00 \U0001f600 <s>  "


@pytest.fixture(autouse=True)
def transformers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The library, quiet, offline and imported only where a test of this file runs."""
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    monkeypatch.setattr(os, "environ", os.environ.copy())
    transformers.utils.logging.disable_progress_bar()
    yield transformers
    transformers.utils.logging.enable_progress_bar()


def trained(options: ModelOptions) -> Transformer:
    """A model whose values are as large as those of one that has learned something."""
    model = Transformer(options, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            parameter.mul_(1.5).add_(noise, alpha=0.02)
    return model


OTHER = {"tied": True, "heads": 4, "kv_heads": 2, "rope_theta": 5e5, "norm_eps": 1e-5, "vocab_size": 300}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("tokenizer", "other"), [("bpe1024", {"context": 512}), ("bytes", OTHER)])
def test_an_exported_model_gives_the_same_logits(
    tokenizer: str, other: dict[str, Any], tmp_path: Path, transformers: Any
) -> None:
    ours = make_tokenizer(tokenizer)
    options = ModelOptions(**{"vocab_size": ours.vocab_size, "layers": 3, "dim": 64, **other})
    model, folder = trained(options), tmp_path / "model"
    values = {name: value.detach() for name, value in model.named_parameters()}
    model_files.write_folder(folder, values, options, ours, shard_bytes=100_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is transformers.LlamaForCausalLM
    tokens = torch.randint(0, options.vocab_size, (4, options.context), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = (loaded(tokens).logits - model(tokens)).abs().max()
    assert float(difference) <= 1e-5
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ids = theirs(TEXT)["input_ids"]
    assert ids == ours.encode_batch([TEXT])[0].tolist()
    assert theirs.decode(ids) == TEXT
    assert theirs.eos_token_id == loaded.generation_config.eos_token_id == ours.end_of_file
    # The same by torch's own reader of a distributed checkpoint.
    model_files.write_folder(tmp_path / "dcp", values, options, ours, dcp=True, shard_bytes=1)
    other = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path / "dcp"))
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(other.eval()(tokens).logits, loaded(tokens).logits)


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transformers: Any) -> Iterator[tuple[Path, Any]]:
    """A Llama as others make and save one, in several files, with a tokenizer; and the same in memory."""
    monkeypatch.chdir(tmp_path)
    Place(tmp_path)
    torch.manual_seed(4)
    sizes = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 70_000.0}}
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, **shape, **rope, initializer_range=0.2, eos_token_id=256)
    ).eval()
    folder = tmp_path / "foreign"
    llama.save_pretrained(folder, max_shard_size="40KB")
    (folder / "tokenizer.json").write_text(make_tokenizer("bytes").field_form().to_str())
    return folder, llama


IMPORTED = [
    *(text for text in TINY if not text.startswith(("model.", "data.tokenizer"))),
    "model=imported",
    "run.init_from=foreign",
    "data.tokenizer=foreign/tokenizer.json",
]


class Named(torch.nn.Module):
    """Their model with our manners: the mean loss of tokens and their targets."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.theirs = theirs

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.theirs(tokens).logits.flatten(0, 1), targets.flatten())


def test_an_imported_model_begins_at_its_own_loss(foreign: tuple[Path, Any]) -> None:
    folder, llama = foreign
    assert len(list(folder.glob("*.safetensors"))) > 1
    config = compose(IMPORTED)
    assert (config.model.dim, config.model.kv_heads, config.model.rope_theta) == (32, 2, 70_000.0)
    assert config.model.vocab_size == 264
    # The loss that their code has on the validation text.
    wanted = Evaluator(config, build.corpus(config)).score(Named(llama), whole=False).val_loss  # type: ignore[arg-type]
    model = build.build_model(config)
    load_values("foreign", model)
    batches = Evaluator(config, build.corpus(config))._part
    assert evaluate(model, batches, precision="fp32") == pytest.approx(wanted, abs=1e-5)
    # As version 0 of a run, and as the beginning of a training of its own.
    layout = build.whole_layout(config)
    fresh = build.build_model(config)
    for fragment, values in zip(layout.fragments, build.version_zero(config, layout), strict=True):
        put_fragment(fragment, values, named_parameters_once(fresh))
    assert evaluate(fresh, batches, precision="fp32") == pytest.approx(wanted, abs=1e-5)
    assert main(["train", *IMPORTED, "run.name=on", "run.tokens=256", "run.seconds=null"]) == 0
    summary = json.loads(Path("runs/on/summary.json").read_text())
    assert summary["global"]["val_loss_start"] == pytest.approx(wanted, abs=1e-5)
    assert summary["global"]["val_loss"] != pytest.approx(wanted, abs=1e-3)
    assert [event["what"] for event in read_events(Path("runs/on/events.jsonl"))].count("step") == 2


def test_a_foreign_model_goes_out_as_it_came(
    foreign: tuple[Path, Any], capsys: pytest.CaptureFixture[str], transformers: Any
) -> None:
    llama = foreign[1]
    assert main(["export", "foreign", "--to", "again"]) == 0
    assert "the model in foreign" in capsys.readouterr().out
    again = transformers.AutoModelForCausalLM.from_pretrained("again").state_dict()
    assert all(torch.equal(again[name], value) for name, value in llama.state_dict().items())
