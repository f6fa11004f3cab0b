from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from diloco.inner import checkpoint
from diloco.inner.parallel import SiteGroup
from diloco.inner.saving import model_tensors
from diloco.launch import build, build_syncer
from diloco.launch.config import choices, compose, from_shared, shared_config
from diloco.launch.errors import ConfigError
from diloco.launch.placing import at
from diloco.launch.schema import RunConfig
from diloco.launch.site_rank import in_words
from diloco.outer.fragments import named_parameters_once
from diloco.outer.optimizer import OuterOptimizerOptions
from diloco.sync.agreement import CORPUS
from diloco.syncer.images import full_parameters
from tests.sooner import sooner

SMALL = ["model.layers=2", "model.dim=16", "model.heads=2", "run.name=x"]


def small(*settings: str) -> RunConfig:
    return compose([*SMALL, *settings])


@pytest.mark.parametrize("model", sooner(sorted({*choices()["model"]} - {"imported"}), "tiny", "1b"))
def test_every_model_has_a_layout_without_being_allocated(model: str) -> None:
    layout = build.layout_of(compose([f"model={model}", "outer.num_fragments=4"]))
    wanted = {"tiny": 1e6, "small": 5e6, "15m": 15e6, "60m": 60e6, "150m": 150e6, "1b": 1e9}[model]
    assert wanted * 0.7 < layout.numel < wanted * 1.3
    assert len(layout.fragments) == 4


def test_a_text_that_is_not_there_is_a_matter_of_the_data(tmp_path: Path) -> None:
    config = small("data=text", "data.path=nowhere", f"data.cache={tmp_path}")
    with pytest.raises(ConfigError, match=r"^data: path is 'nowhere': there is no such file or folder"), in_words():
        build.build_trainer(config, SiteGroup(device="cpu"), (0, 1), None, lambda *told: None, None)


def test_the_layout_is_that_of_the_model() -> None:
    for settings in ([], ["model.tied=true"], ["model.kv_heads=1", "outer.num_fragments=3"]):
        config = small(*settings)
        shapes = {name: tuple(value.shape) for name, value in named_parameters_once(build.build_model(config)).items()}
        assert dict(build.layout_of(config).parameters) == shapes


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.heads=3", "model.heads is 3: a divisor of dim=16"),
        ("inner.lr=-1", "inner.lr is -1.0: positive and finite"),
        ("inner.precision=fp8", "inner.precision is 'fp8': one of auto, bf16, fp32"),
        ("inner.sequence_length=999", "inner.sequence_length is 999: from 1 to model.context=128"),
        ("inner.checkpoint_every_steps=-1", "inner.checkpoint_every_steps is -1: 0 (none) or more"),
        ("site.slowdown=0.5", "site.slowdown is 0.5: 1 (full speed) or more"),
        ("site.join_timeout_s=0", "site.join_timeout_s is 0.0: positive"),
        ("outer.lr=0", "outer.lr is 0.0: must be above 0"),
        ("outer.grace_s=-1", "outer.grace_s is -1.0: seconds, not negative"),
        ("outer.site_timeout_s=0", "outer.site_timeout_s is 0.0: seconds, at least 0.001"),
        ("outer.quorum=most", "outer.quorum is 'most': a number of sites, or all"),
        ("outer.quorum=0", "outer.quorum is 0: at least 1"),
        ("outer.adopt=keep", "outer.adopt is 'keep': one of rebase, overwrite, blend"),
        ("outer.adopt_alpha=2", "outer.adopt_alpha is 2.0: from 0 to 1"),
        ("outer.measure_from=above", "outer.measure_from is 'above': one of adopted, published"),
        ("outer=eager outer.adopt=blend", "outer.adopt_alpha is null: from 0 to 1, with outer.adopt=blend"),
        ("outer.dynamic_rounding=near", "outer.dynamic_rounding is 'near': one of down, up"),
        ("outer.merge_by=round", "outer.merge_by is 'round': one of site, update"),
        ("outer=eager outer.merge_by=update", "outer.adopt_alpha is null: from 0 to 1, with outer.merge_by=update"),
        ("outer=eager outer.kind=gpa", "outer.adopt_alpha is null: from 0 to 1, with outer.kind=gpa, whose steps"),
        ("codec.feedback=2", "codec.feedback is 2.0: from 0 to 1"),
        ("codec.feedback=0.5", "codec.feedback is 0.5: with outer.adopt=rebase what codec.up rounds off stays"),
        ("outer.num_fragments=500", "outer.num_fragments is 500: must be from 1 to the"),
        ("codec.up=int5", "codec.up is 'int5': one of fp32, bf16, int8, int4"),
        ("codec.down=int4:0", "codec.down is 'int4:0'"),
        ("network.mbps=-3", "network.mbps is -3.0: 0 (no bound)"),
        ("cluster.sites.site-b.link.rtt_ms=-1", "cluster.sites.site-b.link.rtt_ms is -1.0"),
        ("cluster.syncer.snapshot_every=0", "cluster.syncer.snapshot_every is 0: at least 1"),
        ("cluster.syncer.tls_cert=a.pem", "cluster.syncer.tls_cert is 'a.pem' and tls_key '': give both or neither"),
        ("cluster.syncer.memory_check_s=-1", "cluster.syncer.memory_check_s is -1.0: not negative"),
        ("site.canary_every_s=-1", "site.canary_every_s is -1.0: 0 (never) or more"),
        ("site.canary_steps=0", "site.canary_steps is 0: at least 1"),
        ("site.data_channels=7", "site.data_channels is 7: 1 to 6"),
        ("site.up_mbps=-1", "site.up_mbps is -1.0: 0, or 0.1 to 1000000.0"),
        ("site.down_mbps=0.01", "site.down_mbps is 0.01: 0, or 0.1"),
        ("data.kind=books", "data.kind is 'books': one of stdlib, text, jsonl"),
        ("data.validation_sequences=0", "data.validation_sequences is 0: at least 1"),
    ],
)
def test_a_value_that_cannot_work_is_named_with_its_section(setting: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_syncer.check(small(*setting.split()))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "feedback"),
    [
        (["codec=topk"], 0.0),
        (["codec=topk", "outer=decoupled"], 0.95),
        (["experiment=sparseloco"], 0.95),
        (["codec=int2", "outer=streaming"], 1.0),
        (["codec=sign", "outer=streaming", "codec.feedback=0.5"], 0.5),
        (["codec=sign", "outer=streaming", "codec.feedback=0"], 0.0),
        (["codec=e3m0", "outer=streaming"], 0.0),
        (["codec=int4", "outer=streaming", "codec.feedback=1"], 1.0),
    ],
)
def test_what_is_rounded_off_is_fed_back_as_usual_or_as_told(settings: list[str], feedback: float) -> None:
    config = compose(settings)
    build_syncer.check(config)
    assert build.agent_options(config, Path()).feedback == feedback


def test_what_is_ahead_under_eager_follows_from_the_outer_step_unless_a_share_is_given() -> None:
    of_preset = build.agent_options(compose(["outer=eager", "outer.lr=0.6"]), Path()).ahead
    assert of_preset == OuterOptimizerOptions(kind="nesterov", lr=0.6, momentum=0.9)
    given = build.agent_options(compose(["outer=eager", "outer.adopt_alpha=0.25"]), Path())
    assert (given.ahead, given.adopt_alpha) == (None, 0.25)
    assert build.agent_options(compose(["outer=eager", "outer.adopt=rebase"]), Path()).ahead is None
    told = shared_config(compose(["outer=eager"]))
    assert from_shared(told, {}).outer.adopt_alpha is None


def test_19_a_share_and_a_long_grace_are_left_where_they_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"outer.adopt_alpha is null: from 0 to 1, with outer.share_weighted=true"):
        build.ahead(compose(["outer=eager", "outer.share_weighted=true"]))
    window = compose(["outer=nesterov", "outer.kind=delayed_nesterov", "outer.window=3"])
    assert not build.outer_options(window).share_weighted
    for setting, percent in ("outer.adopt=rebase", 90), ("outer.adopt=overwrite", 0), ("outer.lock_step=true", 0):
        assert build.outer_options(compose(["outer=nesterov", setting])).grace_period_percent == percent


def test_19_each_update_is_a_term_of_its_own_in_the_buffered_preset_and_where_nothing_says_so_a_site_is() -> None:
    for overrides, by, power in (["experiment=buffered"], "update", 0.5), (["outer.round_updates=3"], "site", 0.0):
        config = compose(overrides)
        assert build.outer_options(config).merge_by == by
        assert build.rule(config, build.layout_of(config)).gate.power == power
        told = shared_config(config)
        assert (told.get("outer.merge_by", "site"), float(told.get("outer.gate_power", 0))) == (by, power)


def test_a_blend_is_measured_from_the_version_in_the_preset_and_from_the_blended_values_where_nothing_says_so() -> None:
    for overrides, wanted in (["outer=streaming"], "published"), (["outer.adopt=blend"], "adopted"):
        config = compose(overrides)
        assert build.agent_options(config, Path()).measure_from == wanted
        assert shared_config(config).get("outer.measure_from", "adopted") == wanted


def test_feedback_without_a_residual_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"codec\.feedback is 1\.0: codec\.up=fp32 rounds nothing off"):
        build_syncer.check(compose(["codec=fp32", "outer=streaming", "codec.feedback=1"]))


def test_version_zero_is_the_seed_or_what_was_given(tmp_path: Path) -> None:
    config = small("run.seed=5", "outer.num_fragments=3")
    layout = build.layout_of(config)
    seeded = full_parameters(layout, build.version_zero(config, layout))
    for name, value in named_parameters_once(build.build_model(config)).items():
        assert torch.equal(seeded[name], value)

    trained = build.build_model(small("run.seed=6"))
    tensors = {f"model/{name}": value.clone() for name, value in model_tensors(trained).items()}
    checkpoint.save(tmp_path / "checkpoints", "step-1", tensors, {})
    save_file(
        {name: value.detach() for name, value in named_parameters_once(trained).items()}, tmp_path / "m.safetensors"
    )
    for source in ("checkpoints", "checkpoints/step-1", "m.safetensors"):
        config.run.init_from = str(tmp_path / source)
        given = full_parameters(layout, build.version_zero(config, layout))
        for name, value in named_parameters_once(trained).items():
            assert torch.equal(given[name], value), (source, name)


def test_what_cannot_be_version_zero_is_named(tmp_path: Path) -> None:
    config = small()
    layout = build.layout_of(config)
    other = build.build_model(small("model.layers=1"))
    save_file(
        {name: value.detach() for name, value in named_parameters_once(other).items()}, tmp_path / "o.safetensors"
    )
    for source, words in (("o.safetensors", "blocks.1"), ("nothing", "neither a .safetensors file nor a folder")):
        config.run.init_from = str(tmp_path / source)
        with pytest.raises(ConfigError, match=words):
            build.version_zero(config, layout)


def test_a_damaged_version_zero_is_named(tmp_path: Path) -> None:
    config = small()
    layout = build.layout_of(config)
    (tmp_path / "notes.safetensors").write_text("no tensors in here")
    tensors = {f"model/{name}": value.clone() for name, value in model_tensors(build.build_model(config)).items()}
    saved = checkpoint.save(tmp_path / "checkpoints", "step-1", tensors, {})
    damaged = bytearray((saved / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (saved / "model.safetensors").write_bytes(damaged)
    for source in ("notes.safetensors", "checkpoints/step-1", "checkpoints"):
        config.run.init_from = str(tmp_path / source)
        with pytest.raises(ConfigError, match=f"run.init_from is '{config.run.init_from}'"):
            build.version_zero(config, layout)


def test_sites_draw_different_shares() -> None:
    shares = [build.site_share(small(f"site.id=site-{letter}")) for letter in "abc"]
    assert shares == [(0, 3), (1, 3), (2, 3)]
    assert build.site_share(small("site.id=late", "site.index=3", "site.num_sites=4")) == (3, 4)
    with pytest.raises(ConfigError, match=r"site\.index and site\.num_sites"):
        build.site_share(small("site.id=late"))
    with pytest.raises(ConfigError, match=r"site\.index is 3: from 0 to 2"):
        build.site_share(small("site.id=late", "site.index=3"))


def test_both_ends_agree_when_they_mean_the_same_run() -> None:
    from diloco.sync.agreement import disagreement

    here, there = small("site=h100x8", "network=loopback"), small("site.id=site-b")
    ours = build_syncer.plan(here, build.layout_of(here)).agreement
    assert disagreement(ours, build.agreement(there, build.layout_of(there))) is None
    other = small("outer.inner_steps=7")
    assert disagreement(ours, build.agreement(other, build.layout_of(other))) == (
        f"outer.inner_steps is 7 at the site and {here.outer.inner_steps} at the syncer"
    )


@pytest.mark.parametrize("setting", ["data.unit_sequences=0", "data.units_ahead=5000", "data.unit_lease_s=0"])
def test_units_that_cannot_be_are_refused_by_their_setting(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.replace("=", " is ")):
        build_syncer.check(compose(["run.name=x", "data.leased=true", setting]))


def test_a_site_asks_for_the_units_of_two_steps_at_least() -> None:
    site = ["run.name=x", "data.leased=true", "data.unit_sequences=8", "inner.batch_sequences=10", "site.nproc=2"]
    ahead = {
        given: build.learner_options(compose([*site, *given])).units_ahead
        for given in ((), ("inner.accumulation=20",), ("inner.accumulation=20", "data.units_ahead=200"))
    }
    assert list(ahead.values()) == [64, 100, 200]
    with pytest.raises(ConfigError, match=r"data\.unit_sequences is 8: two steps of this site draw 10000 units, more"):
        build.learner_options(compose([*site, "inner.accumulation=2000"]))


def test_the_first_of_several_syncers_leases() -> None:
    config = compose(["run.name=x", "data.leased=true", "outer.num_fragments=2", "outer.num_syncers=2"])
    assert [build.outer_options(at(config, index)).unit_sequences for index in range(2)] == [64, 0]
    assert [build.learner_options(at(config, index)).unit_sequences for index in range(2)] == [64, 0]


@pytest.mark.slow
def test_a_data_set_of_hugging_faces_is_data_as_any_other(tmp_path: Path) -> None:
    rows = ({"body": f"document {number} " + "word " * 9} for number in range(60))
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    here = [f"data.path={tmp_path / 'set.jsonl'}", "data.field=body", f"data.cache={tmp_path / 'cache'}"]
    config = small("data.kind=hf", *here, "data.leased=true")
    made = build.corpus(config)
    assert (made.kind, made.train.documents + made.validation.documents) == ("hf", 60)
    layout = build.layout_of(config)
    assert build.site_agreement(config, layout, layout).shared[CORPUS] == made.identity, "what all sites agree on"
    with pytest.raises(ConfigError, match=r"data\.split is '': a name"):
        build.data_options(small("data.kind=hf", *here, "data.split=''"))


@pytest.mark.slow
def test_who_cuts_no_model_does_not_pay_for_what_does() -> None:
    """torch's DTensor is a third of the start of a syncer, a region and every command."""
    asked = "import sys, diloco.launch.build; sys.exit('torch.distributed.tensor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False, timeout=120).returncode == 0
