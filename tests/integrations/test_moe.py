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
SHARE_MAX = 0.05
"""By how much the loss of two sites may be above that of one process, as a share of it: .029 and .041 here."""


def run(folder: Path, name: str, *words: str) -> Verb:
    return Verb(folder, name, list(words), script=str(ROOT / "examples/moe.py"))


def said(verb: Verb, site: str) -> tuple[float, list[list[int]]]:
    """The final loss, and each layer's share of choices by expert, in percent."""
    (line,) = re.findall(rf"^{site}: loss (.+) router (.+)$", verb.text(), re.MULTILINE)
    return float(line[0]), [[int(share) for share in layer.split()] for layer in line[1].split("|")]


@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_two_sites_learn_what_one_process_learns(tmp_path: Path, kind: str) -> None:
    made = run(tmp_path, "init", kind, "init", "v0.safetensors")
    assert made.end(BOUND_S) == 0, made.text()
    alone = run(tmp_path, "alone", kind, "alone", str(STEPS * ROUNDS), "2")
    assert alone.end(BOUND_S) == 0, alone.text()
    rules = ("outer.lr=1", "outer.lock_step=true", "outer.quorum=2", "codec.up=int4:32+zstd1", PATIENT)
    length = (f"run.tokens={STEPS * ROUNDS * STEP_TOKENS}", f"outer.inner_steps={STEPS}")
    with serving_file(tmp_path, tmp_path / "v0.safetensors", *length, *rules) as served:
        sites = [
            run(tmp_path, site, kind, served.address, site, str(at), "2") for at, site in enumerate(("fra", "iad"))
        ]
        for site in sites:
            assert site.end(BOUND_S) == 0, site.text()
            assert "the run is finished; {" in site.text()
        assert [each.version for each in served.syncer.holdings.values] == [ROUNDS]
    (loss, shares), theirs, (wanted, _) = said(sites[0], "fra"), said(sites[1], "iad"), said(alone, "alone")
    assert (loss, shares) == theirs, "the final version is the same at both"
    assert loss <= (1 + SHARE_MAX) * wanted
    assert [len(layer) for layer in shares] == [8, 8]
    assert all(abs(sum(layer) - 100) <= 4 for layer in shares), "rounded to whole percents"


@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_an_expert_that_no_token_chose_costs_its_site_no_bytes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site with so little text that it touches half of the experts at most: two tokens, two experts for each."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = import_module("moe")
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
