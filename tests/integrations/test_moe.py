"""``examples/moe.py``: two sites learn what one process learns, and a site pays for the experts that it touched."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.codec.registry import make_codec
from diloco.config.schema import CodecSection
from diloco.outer.fragments import gather, named_parameters_once, plan_layout
from tests.integrations.serving import PATIENT, serving_file
from tests.runs.processes import ROOT, Verb

pytestmark = pytest.mark.slow  # Importing transformers alone takes its time.

BOUND_S = 240.0
STEPS, ROUNDS = 5, 20
STEP_TOKENS = 2 * 16 * 64
"""Of both sites."""
SHARE_MAX = 0.01
"""By how much the loss of two sites may be above that of one process, as a share of it."""


def run(folder: Path, name: str, *words: str) -> Verb:
    return Verb(folder, name, list(words), script=str(ROOT / "examples/moe.py"))


def said(text: str) -> tuple[float, list[list[int]]]:
    """The final loss, and each layer's share of choices by expert, in percent."""
    (line,) = re.findall(r"^\w+: loss (.+) router (.+)$", text, re.MULTILINE)
    return float(line[0]), [[int(share) for share in layer.split()] for layer in line[1].split("|")]


def in_one_process(example: Any, kind: str) -> float:
    """The loss of one process, each of whose steps reads what the two sites read."""
    model, shares = example.make(kind), [example.text(index, 3) for index in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(STEPS * ROUNDS):
        example.train_step(model, optimizer, torch.cat([example.batch(share, step)[0] for share in shares]))
    return said(f"alone: {example.evaluate(model, 2)}")[0]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return import_module("moe")


@pytest.mark.hunt
@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_two_sites_learn_what_one_process_learns(kind: str, tmp_path: Path, example: Any) -> None:
    made = run(tmp_path, "init", kind, "init", "v0.safetensors")
    assert made.end(BOUND_S) == 0, made.text()
    rules = (
        "outer.kind=nesterov",
        "outer.lr=0.7",
        "outer.momentum=0.5",
        "outer.lock_step=true",
        "outer.quorum=2",
        "codec.up=int4:32+zstd1",
        PATIENT,
    )
    length = (f"run.tokens={STEPS * ROUNDS * STEP_TOKENS}", f"outer.inner_steps={STEPS}")
    with serving_file(tmp_path, tmp_path / "v0.safetensors", *length, *rules) as served:
        sites = [
            run(tmp_path, site, kind, served.address, site, str(at), "2") for at, site in enumerate(("fra", "iad"))
        ]
        for site in sites:
            assert site.end(BOUND_S) == 0, site.text()
            assert "the run is finished; {" in site.text()
        assert [each.version for each in served.syncer.holdings.values] == [ROUNDS]
    (loss, shares), theirs = said(sites[0].text()), said(sites[1].text())
    assert (loss, shares) == theirs, "the final version is the same at both"
    alone = in_one_process(example, kind)
    print(f"two sites {loss}, one process {alone}: {loss / alone - 1:+.2%}")
    assert loss <= (1 + SHARE_MAX) * alone
    assert [len(layer) for layer in shares] == [8, 8]
    assert all(abs(sum(layer) - 100) <= 4 for layer in shares), "rounded to whole percents"


@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_an_expert_that_no_token_chose_costs_its_site_no_bytes(kind: str, example: Any) -> None:
    """A site with so little text that it touches half of the experts at most: two tokens, two experts for each."""
    model = example.make(kind)
    before = {name: each.detach().clone() for name, each in named_parameters_once(model).items()}
    chosen: set[int] = set()
    gate = model.model.layers[0].mlp.gate
    gate.register_forward_hook(lambda _, inputs, out: chosen.update(out[-1].flatten().tolist()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(3):
        example.train_step(model, optimizer, torch.tensor([[65, 66]]))
    assert 2 <= len(chosen) < example.EXPERTS

    after: dict[str, Any] = named_parameters_once(model)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    changed = (before[name] != after[name]).flatten(1).any(1).nonzero().flatten().tolist()
    assert set(changed) <= chosen
    layout = plan_layout([(name, tuple(before[name].shape))], 1)
    update = gather(layout.fragments[0], before) - gather(layout.fragments[0], after)
    codec = make_codec(CodecSection().up)
    assert len(codec.encode(update)) <= len(changed) / example.EXPERTS * codec.payload_bytes(len(update)) + 200
