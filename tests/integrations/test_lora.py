"""``examples/lora.py``: two sites exchange an adapter and nothing else, end with the same one, and merge it."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from diloco.codec.registry import make_codec
from diloco.observe.eventlog import read_events
from tests.integrations.serving import PATIENT, serving_file
from tests.runs.processes import ROOT, Verb

pytestmark = pytest.mark.slow  # Importing transformers and peft alone takes its time.

CODEC = "int4:32"
BOUND_S = 180.0


def run(folder: Path, name: str, *words: str) -> Verb:
    return Verb(folder, name, list(words), script=str(ROOT / "examples/lora.py"))


def loss_of(folder: Path, model: str) -> float:
    verb = run(folder, f"loss-{Path(model).parent.name or model}", "loss", model)
    assert verb.end(BOUND_S) == 0, verb.text()
    return float(verb.text().rpartition(f"{model}: loss ")[2].split()[0])


def test_an_adapter_is_all_that_is_exchanged_and_the_same_at_both_ends_and_merges(tmp_path: Path) -> None:
    made = run(tmp_path, "init", "init", "base", "v0.safetensors")
    assert made.end(BOUND_S) == 0, made.text()
    first = tmp_path / "v0.safetensors"
    assert all("lora_" in name for name in load_file(first))
    outer = ("outer=nesterov", "outer.inner_steps=20", f"codec.up={CODEC}", f"codec.down={CODEC}")
    with serving_file(tmp_path, first, "run.tokens=100000", PATIENT, *outer) as served:
        sites = [
            run(tmp_path, site, "base", served.address, site, str(index), "2")
            for index, site in enumerate(("fra", "iad"))
        ]
        for site in sites:
            assert site.end(BOUND_S) == 0, site.text()
            assert "the run is finished; {" in site.text()
        numel = served.syncer.plan.layout.numel
        assert numel == sum(each.numel() for each in load_file(first).values())
        assert numel < 0.4 * sum(each.numel() for each in load_file(tmp_path / "base/model.safetensors").values())

    # A round: what is sent of one update, and what is taken of one version; the first is taken whole, in fp32.
    bound = 1.05 * make_codec(CODEC).payload_bytes(numel)
    for site in ("fra", "iad"):
        events, _ = read_events(tmp_path / f"runs/mine/sites/{site}/events.jsonl")
        meter = [event for event in events if event["what"] == "meter"][-1]
        updates = sum(event["what"] == "sealed" for event in events)
        versions = sum(event["what"] in ("adopted", "retaken") for event in events) - 1
        assert updates >= 2
        assert meter["bytes_up"] / updates <= bound
        assert (meter["bytes_down"] - 4 * numel) / versions <= bound

    fra, iad = (load_file(tmp_path / f"runs/lora/{site}/merged/model.safetensors") for site in ("fra", "iad"))
    assert fra.keys() == load_file(tmp_path / "base/model.safetensors").keys(), "no adapter is left in it"
    assert all(fra[name].equal(iad[name]) for name in fra)
    assert loss_of(tmp_path, "runs/lora/fra/merged") < 0.8 * loss_of(tmp_path, "base")
