"""The presets of ``configs/experiment``: what each paper says, in numbers, and that every one of them trains."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest

from diloco.config import build_syncer
from diloco.config.compose import choices, compose, folder, from_shared, shared_config
from diloco.lab import experiment as labs
from diloco.lab.cell import run_cell
from tests.lab.laboratories import rows, written
from tests.sooner import sooner

FP32 = {"codec.up": "fp32", "codec.down": "fp32"}
ADAMW = {"inner.optimizer": "adamw"}
EVERYBODY = {"outer.quorum": "all", "outer.round_updates": 0, "outer.weights": "uniform"}
ONE_BY_ONE = {"outer.quorum": "1", "outer.round_updates": 1, "outer.grace": "fixed", "outer.grace_s": 0.0}
WHOLE = {"outer.num_fragments": 1}

# Of each preset the paper that it cites, and every value that is the paper's.
PAPERS: dict[str, tuple[str, dict[str, object]]] = {
    "diloco": (
        "2311.08105",  # Algorithm 1 and the defaults: H 500, Nesterov 0.7 / 0.9, AdamW under a cosine, lock-step.
        {
            **FP32, **ADAMW, **EVERYBODY, **WHOLE, "outer.kind": "nesterov", "outer.lr": 0.7, "outer.momentum": 0.9,
            "outer.inner_steps": 500, "inner.schedule": "cosine", "outer.lock_step": True, "outer.adopt": "overwrite",
        },
    ),
    "streaming": (
        "2501.18512",  # H 30 or 100, Nesterov 0.4 / 0.9, tau 1, alpha 0.5, E3M0 for what is not reduced yet.
        {
            **ADAMW, **EVERYBODY, "outer.kind": "nesterov", "outer.lr": 0.4, "outer.momentum": 0.9,
            "outer.inner_steps": 30, "site.overlap_steps": 1, "outer.adopt": "blend", "outer.adopt_alpha": 0.5,
            "outer.measure_from": "published", "codec.up": "e3m0:128+zstd1", "outer.lock_step": False,
        },
    ),
    "eager": (
        "2502.12996",  # One whole outer step late, the own share fresh; AdamW and H as on Streaming DiLoCo's bench.
        {
            **FP32, **ADAMW, **EVERYBODY, **WHOLE, "outer.kind": "nesterov", "outer.inner_steps": 30,
            "outer.adopt": "eager", "outer.lock_step": False,
        },
    ),
    "decoupled": (
        "2604.21428",  # As reproductions quote it: H 24, tau 2, K 1 and grace, tokens^2/steps, overwritten.
        {
            **ADAMW, "outer.kind": "nesterov", "outer.inner_steps": 24,
            "outer.overlap_steps": 2, "outer.quorum": "1", "outer.grace": "adaptive", "outer.round_updates": 0,
            "outer.weights": "tokens2_per_step", "outer.merge": "mean", "outer.adopt": "overwrite",
        },
    ),
    "async_dn": (
        "2401.09135",  # c 0, N the number of workers, H 50 for the fastest, DyLU, 0.7 / 0.9 of the synchronous base.
        {
            **FP32, **ADAMW, **ONE_BY_ONE, **WHOLE, "outer.kind": "delayed_nesterov", "outer.lr": 0.7,
            "outer.momentum": 0.9, "outer.window": 3, "outer.share_ahead": 0.0, "outer.inner_steps": 50,
            "outer.dynamic_steps": True, "outer.weights": "uniform",
        },
    ),
    "async": (
        "2401.09135",  # The same without momentum: asynchronous, AdamW inside, SGD outside.
        {
            **FP32, **ADAMW, **ONE_BY_ONE, **WHOLE, "outer.kind": "sgd", "outer.momentum": 0.0,
            "outer.inner_steps": 50, "outer.dynamic_steps": False,
        },
    ),
    "buffered": (
        "2106.06639",  # A buffer is a round, each update a term of (1 + staleness)^-1/2; H and AdamW are 2401.09135's.
        {
            **FP32, **ADAMW, **WHOLE, "outer.kind": "sgd", "outer.momentum": 0.0, "outer.round_updates": 3,
            "outer.merge_by": "update", "outer.weights": "uniform", "outer.gate_power": 0.5,
            "outer.staleness_power": 0.0, "outer.inner_steps": 50,
        },
    ),
    "heloco": (
        "2606.00271",  # The correction, Nesterov's EMA form, nothing older than 15; DyLU did not help it.
        {
            **FP32, **ADAMW, **ONE_BY_ONE, **WHOLE, "outer.kind": "nesterov_ema", "outer.correction": "heloco",
            "outer.staleness_max": 15, "outer.dynamic_steps": False,
        },
    ),
    "muloco": (
        "2505.23725",  # Muon 0.02 inside, H 30, Nesterov 0.7 / 0.6.
        {
            **FP32, **EVERYBODY, **WHOLE, "inner.optimizer": "muon", "inner.muon_lr": 0.02, "outer.kind": "nesterov",
            "outer.lr": 0.7, "outer.momentum": 0.6, "outer.inner_steps": 30, "outer.lock_step": True,
        },
    ),
    "sparseloco": (
        "2508.15706",  # 64 of 4096 in 2 bits, alpha 1, no momentum, H 30, AdamW 0.9 / 0.95, 0.1; 2603.08163: lengths.
        {
            **ADAMW, **EVERYBODY, **WHOLE, "codec.up": "topk:4096x64", "outer.kind": "sgd", "outer.lr": 1.0,
            "outer.momentum": 0.0, "outer.inner_steps": 30, "outer.merge": "clamp", "inner.betas": [0.9, 0.95],
            "inner.weight_decay": 0.1, "outer.lock_step": True,
        },
    ),
    "halos": (
        "2506.04531",  # The region: 0.2 x 16, beta 0.9, N 16, H 8 by speed, K 32, a 0.25; AdamW 1e-3.
        {
            **FP32, **ADAMW, **ONE_BY_ONE, **WHOLE, "outer.kind": "delayed_nesterov", "outer.lr": 0.2 * 16,
            "outer.momentum": 0.9, "outer.window": 16, "outer.inner_steps": 8, "outer.dynamic_steps": True,
            "outer.dynamic_rounding": "up", "upstream.counted_from": "blend",
            "upstream.updates": 32, "upstream.alpha": 0.25, "inner.lr": 1e-3, "inner.betas": [0.9, 0.95],
            "inner.weight_decay": 0.1, "inner.clip": 1.0,
        },
    ),
}  # fmt: skip
# Those that are ours: no paper's, but what it is made of is cited.
OURS: dict[str, tuple[str, dict[str, object]]] = {
    "default": (
        "2604.21428",  # Its quorum, grace and weights; four bits both ways, all progress kept, a period of 24 to 100.
        {
            **ADAMW, "codec.up": "int4:32+zstd1", "codec.down": "int4:32+zstd1", "outer.kind": "nesterov",
            "outer.lr": 0.7, "outer.momentum": 0.7, "outer.inner_steps": 30, "outer.num_fragments": 4,
            "outer.share_weighted": True, "outer.grace_period_percent": 90,
            "outer.overlap_steps": 2, "site.adapt": True, "site.overlap_steps": 2, "site.overlap_steps_max": 5,
            "outer.quorum": "1", "outer.grace": "adaptive", "outer.grace_share_percent": 80, "outer.merge": "mean",
            "outer.weights": "tokens2_per_step", "outer.staleness_max": 4, "outer.staleness_power": 0.0,
            "outer.adopt": "rebase", "inner.clip": 1.0,
        },
    ),
}  # fmt: skip
PRESETS = PAPERS | OURS
DEMO = "demo"
TOKENS = 3072
SMALL = (
    f"run.tokens={TOKENS}", "data=text", "data.tokenizer=bytes", "model.layers=1", "model.dim=16", "model.heads=2",
    "model.context=16", "inner.batch_sequences=2", "inner.precision=fp32", "inner.warmup_steps=0",
    "outer.inner_steps=12", "data.validation_sequences=16",
)  # fmt: skip


def test_every_preset_has_a_row() -> None:
    assert {*choices()["experiment"]} == {*PRESETS, DEMO}


@pytest.mark.parametrize("preset", PAPERS)
def test_19_a_preset_of_a_paper_takes_whole_steps(preset: str) -> None:
    assert not compose([f"experiment={preset}"]).outer.share_weighted


@pytest.mark.parametrize("settings", [[], ["outer=nesterov"], ["experiment=default"], ["experiment=demo"]])
def test_19_ours_take_the_share_that_a_round_is(settings: list[str]) -> None:
    assert compose(settings).outer.share_weighted


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_what_its_paper_says(preset: str) -> None:
    paper, values = PRESETS[preset]
    config = compose([f"experiment={preset}"])
    assert {key: attrgetter(key)(config) for key in values} == values
    text = (folder() / "experiment" / f"{preset}.yaml").read_text(encoding="utf-8")
    head = "".join(line for line in text.splitlines() if line.startswith("#"))
    assert f"arXiv {paper}" in head
    build_syncer.check(config)


def test_the_demo_is_what_runs_without_a_word() -> None:
    assert compose([f"experiment={DEMO}"]) == compose([])


@pytest.mark.parametrize("preset", [*PRESETS, DEMO])
def test_a_site_learns_the_run_from_what_is_shared(preset: str) -> None:
    run = compose([f"experiment={preset}", "run.tokens=5e6", "model.layers=3", "outer.lr=0.9", "site.nproc=3"])
    told = shared_config(run)
    here = from_shared(told, {"run.name": "otter", "site.id": "fra", "site.join_timeout_s": 3})
    assert shared_config(here) == told
    assert (here.run.name, here.site.id, here.site.join_timeout_s, here.site.nproc) == ("otter", "fra", 3.0, 1)


@pytest.mark.parametrize("preset", sooner([*PRESETS, DEMO], DEMO))
def test_a_preset_trains(tmp_path: Path, preset: str) -> None:
    (tmp_path / "text").mkdir()
    for index in range(32):
        (tmp_path / "text" / f"{index}.txt").write_text(f"{index}: the sites train alone and meet. " * 20)
    here = (*SMALL, f"data.path={tmp_path / 'text'}", f"data.cache={tmp_path / 'cache'}")
    lab = replace(labs.read(written(tmp_path, rows("row"))), settings=here, speeds=(1.0, 0.8, 0.6), points=1)
    (cell,) = labs.cells(lab, (f"experiment={preset}",), (0,), ())
    found = run_cell(cell, tmp_path)
    assert found.tokens >= TOKENS
    assert found.versions >= 1
    assert found.loss < 5.5, "log(257), which it begins with, is 5.55"
