from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from diloco.codec.registry import make_codec
from diloco.config import build, build_syncer
from diloco.config.build import (
    WINDOW_BYTES,
    adapt_options,
    check_kernels,
    check_spreading,
    preparing,
    spread,
    up_codecs,
)
from diloco.config.compose import choices, compose, from_shared, shared_config
from diloco.config.errors import ConfigError
from diloco.config.placing import at
from diloco.config.run_dir import RunDir
from diloco.config.schema import RunConfig
from diloco.inner import checkpoint
from diloco.inner.parallel import SiteGroup
from diloco.inner.trainer import model_tensors
from diloco.outer.fragments import named_parameters_once
from diloco.outer.optimizer import OuterOptimizerOptions
from diloco.sync.options import CORPUS
from diloco.syncer.snapshots import full_parameters
from diloco.wire.messages import STREAMS_MAX
from tests.runs.processes import TINY
from tests.sooner import sooner

TWO = "outer.num_fragments=4 outer.num_syncers=2"
REGION = "upstream.endpoint=127.0.0.1:1 upstream.site_id=region-a"
SECOND = "site.nodes=2 site.nproc=1 site.rendezvous=a:1"
SMALL = ["model.layers=2", "model.dim=16", "model.heads=2", "run.name=x"]


def small(*settings: str) -> RunConfig:
    return compose([*SMALL, *settings])


@pytest.mark.parametrize("model", sooner(sorted({*choices()["model"]} - {"imported"}), "tiny", "1b"))
def test_every_model_has_a_layout_without_being_allocated(model: str) -> None:
    layout = build.layout_of(compose([f"model={model}", "outer.num_fragments=4"]))
    wanted = {"tiny": 7e5, "small": 5e6, "15m": 15e6, "60m": 60e6, "150m": 150e6, "1b": 1e9}[model]
    assert wanted * 0.7 < layout.numel < wanted * 1.3
    assert len(layout.fragments) == 4


def test_the_layout_is_that_of_the_model() -> None:
    for settings in ([], ["model.tied=true"], ["model.kv_heads=1", "outer.num_fragments=3"]):
        config = small(*settings)
        shapes = {name: tuple(value.shape) for name, value in named_parameters_once(build.build_model(config)).items()}
        assert dict(build.layout_of(config).parameters) == shapes


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("model.heads=3", "model.heads is 3: a divisor of dim=16"),
        ("inner.lr=-1", "inner.lr is -1.0: positive and finite"),
        ("inner.precision=fp8", "inner.precision is 'fp8': one of auto, bf16, fp32"),
        ("inner.sequence_length=999", "inner.sequence_length is 999: from 1 to model.context=128"),
        ("inner.checkpoint_every_steps=-1", "inner.checkpoint_every_steps is -1: 0 (none) or more"),
        ("inner.activation_checkpoint=some", "inner.activation_checkpoint is 'some': one of none, full, selective"),
        ("inner.loss_chunk=-1", "inner.loss_chunk is -1: 0"),
        ("inner.kernels=cuda", "inner.kernels is 'cuda': one of torch, liger"),
        ("site.slowdown=0.5", "site.slowdown is 0.5: 1 (full speed) or more"),
        ("site.join_timeout_s=0", "site.join_timeout_s is 0.0: positive"),
        ("site.peak_tflops=0", "site.peak_tflops is 0.0: positive and finite, or null"),
        ("outer.kind=foo", "outer.kind is 'foo'"),
        ("outer.lr=0", "outer.lr is 0.0: positive and finite"),
        ("outer.grace_s=-1", "outer.grace_s is -1.0: seconds, not negative"),
        ("outer.grace_s=nan", "outer.grace_s is nan: seconds, not"),
        ("outer.site_timeout_s=0", "outer.site_timeout_s is 0.0: seconds, at least 0.001"),
        ("outer.quorum=most", "outer.quorum is 'most': a number of sites, or all"),
        ("outer.quorum=0", "outer.quorum is 0: at least 1"),
        ("outer.quorum=17", "outer.quorum is 17: at most outer.sites_max=16, since"),
        ("outer.adopt=keep", "outer.adopt is 'keep': one of rebase, overwrite, blend"),
        ("outer.adopt_alpha=2", "outer.adopt_alpha is 2.0: from 0 to 1"),
        ("outer.measure_from=above", "outer.measure_from is 'above': one of adopted, published"),
        ("outer=eager outer.adopt=blend", "outer.adopt_alpha is null: from 0 to 1, with outer.adopt=blend"),
        ("outer.dynamic_rounding=near", "outer.dynamic_rounding is 'near': one of down, up"),
        ("outer.merge_by=round", "outer.merge_by is 'round': one of site, update"),
        ("outer=eager outer.merge_by=update", "outer.adopt_alpha is null: from 0 to 1, with outer.merge_by=update"),
        ("outer=eager outer.kind=gpa", "outer.adopt_alpha is null: from 0 to 1, with outer.kind=gpa, whose steps"),
        ("outer=async outer.correction=heloco", "outer.correction is 'heloco': kind 'sgd' has no momentum"),
        ("codec.feedback=2", "codec.feedback is 2.0: from 0 to 1"),
        ("codec.feedback=0.5", "codec.feedback is 0.5: with outer.adopt=rebase what codec.up rounds off stays"),
        ("codec=fp32 outer=streaming codec.feedback=1", "codec.feedback is 1.0: codec.up=fp32 rounds nothing off"),
        ("outer.num_fragments=500", "outer.num_fragments is 500: must be from 1 to the"),
        ("codec.up=int5", "codec.up is 'int5': one of fp32, bf16, int8, int4"),
        ("codec.down=int4:0", "codec.down is 'int4:0'"),
        ("codec.up_allowed=[int5]", "codec.up_allowed has 'int5': one of"),
        ("codec.up=int8 codec.up_allowed=[int8]", "codec.up_allowed has 'int8' twice, or repeats codec.up"),
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
        ("data.leased=true data.unit_sequences=0", "data.unit_sequences is 0"),
        ("data.leased=true data.units_ahead=5000", "data.units_ahead is 5000"),
        ("data.leased=true data.unit_lease_s=0", "data.unit_lease_s is 0"),
        ("site.adapt=true outer.lock_step=true", "site.adapt is True: under outer.lock_step"),
        ("site.adapt=true outer.adopt=overwrite", "site.adapt is True: with outer.adopt=overwrite"),
        ("site.overlap_steps=-1", "site.overlap_steps is -1: from 0 to less than outer.inner_steps="),
        ("site.overlap_steps=30 outer.inner_steps=30", "site.overlap_steps is 30: from 0 to less than"),
        ("site.overlap_steps=1 outer.lock_step=true", "site.overlap_steps is 1: under outer.lock_step"),
        (
            "site.adapt=true site.overlap_steps=3 site.overlap_steps_max=2 outer.inner_steps=30",
            "site.overlap_steps_max is 2: from site.overlap_steps=3 to less than outer.inner_steps=30",
        ),
        ("site.adapt=true site.overlap_steps_max=30 outer.inner_steps=30", "site.overlap_steps_max is 30: from"),
        ("site.adapt=false site.overlap_steps_max=9", "site.overlap_steps_max is 9: only under site.adapt=true"),
        ("site.parallel=zero", "site.parallel is 'zero': one of ddp, fsdp, hsdp, tp, tp+fsdp"),
        ("site.parallel=hsdp site.nproc=4", "site.shard_ranks is 0: at least 1 for hsdp"),
        ("site.parallel=hsdp site.shard_ranks=3 site.nproc=4", "site.shard_ranks is 3: a divisor of 4"),
        ("site.parallel=tp site.nproc=4", "site.tensor_ranks is 4: a divisor of the model's heads=2"),
        ("site.parallel=tp site.nproc=2 inner.compile=true", "inner.compile is true: not with site.parallel=tp,"),
        ("site.parallel=tp site.nproc=2 inner.kernels=liger", "inner.kernels is 'liger': torch with site.para"),
        ("site.parallel=tp+fsdp site.tensor_ranks=2", "site.tensor_ranks is 2: a divisor of the site's 1 rank"),
        (f"site.parallel=hsdp {SECOND}", "site.shard_ranks is 1: at least 2; copies alone are ddp"),
        (f"site.parallel=tp {SECOND}", "site.tensor_ranks is 2: a divisor of the 1 rank(s) of one machine"),
        ("cluster.sites.a.parallel=tp cluster.sites.a.nproc=3", "cluster.sites.a.tensor_ranks is 3: a divisor of"),
        ("outer.num_syncers=0", "outer.num_syncers is 0: at least 1"),
        ("outer.num_fragments=1 outer.num_syncers=2", "outer.num_syncers is 2: at most outer.num_fragments=1"),
        (f"{TWO} outer.syncer_mbps=[1,2,3]", "outer.syncer_mbps is [1.0, 2.0, 3.0]: one for each of num_syncers=2"),
        (f"{TWO} outer.syncer_mbps=[1,-2]", "outer.syncer_mbps is [1.0, -2.0]: rates has -2.0: positive"),
        (f"{TWO} outer.syncer_mbps=[1000,1]", "syncer 1 of 2 would hold none of 4 fragments"),
        (f"{TWO} cluster.syncer.index=2", "cluster.syncer.index is 2: from 0 to 1, with outer.num_syncers=2"),
        ("cluster.syncer.index=1", "cluster.syncer.index is 1: from 0 to 0, with outer.num_syncers=1"),
        ("upstream.site_id=region-a", "upstream.site_id is 'region-a', and upstream.endpoint is null"),
        ("upstream.endpoint=127.0.0.1:1", "upstream.site_id is None"),
        ("upstream.endpoint=127.0.0.1:1 upstream.site_id=a/b", "upstream.site_id is 'a/b'"),
        (f"{REGION} upstream.endpoint=a:1/b:2", "upstream.endpoint is 'a:1/b:2': one address, since outer.num_syncers"),
        (f"{REGION} {TWO}", "upstream.endpoint is '127.0.0.1:1': 2 addresses with / between, one for each of outer.nu"),
        (f"{REGION} upstream.updates=0", "upstream.updates is 0: at least 1"),
        (f"{REGION} upstream.counted_from=now", "upstream.counted_from is 'now': one of start, blend"),
        (f"{REGION} upstream.alpha=0.0", "upstream.alpha is 0.0: above 0, to 1"),
        (f"{REGION} outer.lock_step=true", "outer.lock_step is True: not built for a region"),
        (f"{REGION} data.leased=true", "data.leased is True: not built for a region"),
        (f"{REGION} outer.kind=gpa outer.momentum=0.9", "outer.kind is 'gpa': not built for a region"),
    ],
)
def test_a_value_that_cannot_work_is_named_with_its_section(settings: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_syncer.check(small(*settings.split()))
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


def test_version_zero_is_the_seed_or_what_was_given(tmp_path: Path) -> None:
    config = small("run.seed=5", "outer.num_fragments=3")
    layout = build.layout_of(config)
    seeded = full_parameters(layout, build.version_zero(config, layout))
    for name, value in named_parameters_once(build.build_model(config)).items():
        assert torch.equal(seeded[name], value)

    trained = build.build_model(small("run.seed=6"))
    tensors = {f"model/{name}": value.clone() for name, value in model_tensors(trained).items()}
    checkpoint.save(tmp_path / "checkpoints", "step-1", tensors, {})
    values = {name: value.detach() for name, value in named_parameters_once(trained).items()}
    save_file(values, tmp_path / "m.safetensors")
    for source in ("checkpoints", "checkpoints/step-1", "m.safetensors"):
        config.run.init_from = str(tmp_path / source)
        given = full_parameters(layout, build.version_zero(config, layout))
        assert all(torch.equal(given[name], value) for name, value in values.items()), source


def test_what_cannot_be_version_zero_is_named(tmp_path: Path) -> None:
    config = small()
    layout = build.layout_of(config)
    other = named_parameters_once(build.build_model(small("model.layers=1")))
    save_file({name: value.detach() for name, value in other.items()}, tmp_path / "o.safetensors")
    (tmp_path / "notes.safetensors").write_text("no tensors in here")
    tensors = {f"model/{name}": value.clone() for name, value in model_tensors(build.build_model(config)).items()}
    saved = checkpoint.save(tmp_path / "checkpoints", "step-1", tensors, {})
    damaged = bytearray((saved / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (saved / "model.safetensors").write_bytes(damaged)
    for source, words in (
        ("o.safetensors", "blocks.1"),
        ("nothing", "neither a .safetensors file nor a folder"),
        ("notes.safetensors", "run.init_from is "),
        ("checkpoints/step-1", "run.init_from is "),
        ("checkpoints", "run.init_from is "),
    ):
        config.run.init_from = str(tmp_path / source)
        with pytest.raises(ConfigError, match=words):
            build.version_zero(config, layout)


def test_sites_draw_different_shares() -> None:
    shares = [build.site_share(small(f"site.id=site-{letter}")) for letter in "abc"]
    assert shares == [(0, 3), (1, 3), (2, 3)]
    assert build.site_share(small("site.id=late", "site.index=3", "site.num_sites=4")) == (3, 4)
    assert build.site_share(small("site.id=late")) == (0, 1)
    with pytest.raises(ConfigError, match=r"site\.index is null, with site\.num_sites=4: give both, or neither"):
        build.site_share(small("site.id=late", "site.num_sites=4"))
    with pytest.raises(ConfigError, match=r"site\.index is 3: from 0 to 2"):
        build.site_share(small("site.id=late", "site.index=3"))


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
        build.corpus(small("data.kind=hf", *here, "data.split=''"))


@pytest.mark.slow
def test_who_cuts_no_model_does_not_pay_for_what_does() -> None:
    """torch's DTensor is a third of the start of a syncer, a region and every command."""
    asked = "import sys, diloco.config.build; sys.exit('torch.distributed.tensor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False, timeout=120).returncode == 0


ALLOWED = ["codec.up=int8", "codec.up_allowed=[int4,'topk']"]


def test_without_it_there_is_one_way_and_the_syncer_takes_what_is_allowed(tmp_path: Path) -> None:
    config = compose([*TINY, *ALLOWED])
    layout = build.layout_of(config)
    assert [way.codec for way in adapt_options(config, layout).ways] == ["int8"]
    fixed = adapt_options(compose([*TINY, "site.data_channels=3"]), layout)
    assert (fixed.channels, fixed.channels_max) == (3, 3)
    assert up_codecs(config) == ["int8", "int4", "topk"]
    assert build_syncer.syncer_options(config, RunDir(tmp_path)).up_codecs == ["int8", "int4", "topk"]
    assert build.agent_options(config, tmp_path).choices().ways[0].codec == "int8"


def test_with_it_a_way_has_the_bytes_of_all_fragments(tmp_path: Path) -> None:
    config = compose([*TINY, *ALLOWED, "site.adapt=true", "outer.num_fragments=2", "outer.inner_steps=7"])
    layout = build.layout_of(config)
    options = adapt_options(config, layout, tmp_path / "nowhere")
    numels = [fragment.numel for fragment in layout.fragments]
    for way in options.ways:
        assert way.update_bytes == sum(make_codec(way.codec).payload_bytes_max(numel) for numel in numels)
    assert (options.num_fragments, options.inner_steps, options.window_bytes) == (2, 7, WINDOW_BYTES)
    assert (options.channels, options.channels_max) == (1, STREAMS_MAX)
    assert build.agent_options(config, tmp_path).choices() == adapt_options(config, layout)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ([], (0, 0)),
        (["site.overlap_steps=2"], (2, 2)),
        (["site.adapt=true"], (0, 3)),
        (["site.adapt=true", "site.overlap_steps=4"], (4, 4)),
        (["site.adapt=true", "site.overlap_steps=1", "site.overlap_steps_max=29"], (1, 29)),
        (["site.adapt=true", "site.overlap_steps_max=0"], (0, 0)),
    ],
)
def test_the_overlap_is_fixed_or_has_a_range(settings: list[str], steps: tuple[int, int]) -> None:
    config = compose([*TINY, "outer.inner_steps=30", *settings])
    options = adapt_options(config, build.layout_of(config))
    assert (options.overlap_steps, options.overlap_steps_max) == steps


@pytest.mark.parametrize(
    ("told", "window"), [("4096\t16384\t4194304\n", 4194304), ("", WINDOW_BYTES), ("a b c", WINDOW_BYTES)]
)
def test_the_window_is_what_the_kernel_says(tmp_path: Path, told: str, window: int) -> None:
    (tmp_path / "tcp_wmem").write_text(told)
    config = compose(TINY)
    assert adapt_options(config, build.layout_of(config), tmp_path / "tcp_wmem").window_bytes == window


def test_what_is_allowed_is_shared_and_what_a_site_does_with_it_is_not() -> None:
    plain, allowed = shared_config(compose(TINY)), shared_config(compose([*TINY, "codec.up_allowed=[int8]"]))
    assert "codec.up_allowed" not in plain
    assert allowed["codec.up_allowed"] == '["int8"]'
    assert shared_config(compose([*TINY, "site.adapt=true"])) == plain


def test_a_machine_that_cannot_compile_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small("inner.compile=true", "site.peak_tflops=989")
    build_syncer.check(config)
    assert build.trainer_options(config).peak_tflops == 989

    def lacking(function: object) -> object:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("torch.compile", lacking)
    with pytest.raises(
        ConfigError, match=r"^inner\.compile is true: torch\.compile does not work here on cpu: no comp"
    ):
        spread(config, build.build_model(config), SiteGroup(device="cpu"))


def test_what_fits_is_taken() -> None:
    for settings in ([], ["site.parallel=tp+fsdp", "site.tensor_ranks=2", "site.nproc=4"], ["site.parallel=fsdp"]):
        config = small(*settings)
        check_spreading(config, build.model_options(config))
    several = ["site.nodes=3", "site.nproc=2", "site.parallel=hsdp"]
    assert build._parallel_options(small(*several).site).sizes(6) == (3, 2, 1), "a copy for each machine"
    assert build._parallel_options(small(*several, "site.shard_ranks=6").site).sizes(6) == (1, 6, 1)
    config = small("site.parallel=fsdp")
    model = build.build_model(config)
    assert spread(config, model, SiteGroup(device="cpu")).module is model
    config.site.shard_ranks = -1
    with pytest.raises(ConfigError, match=r"site\.shard_ranks is -1"):
        spread(config, model, SiteGroup(device="cpu"))


def shown(terminal: bool, *told: tuple[str, int, int]) -> str:
    out = io.StringIO()
    with preparing(Console(file=out, force_terminal=terminal, width=100)) as report:
        for each in told:
            report(*each)
    return out.getvalue()


def test_kernels_for_an_accelerator_are_refused_on_a_cpu_and_where_they_are_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = small("inner.kernels=liger")
    build_syncer.check(config)  # A site may be started elsewhere.
    words = r"^inner\.kernels is 'liger': its kernels are for accelerators, and this is"
    with pytest.raises(ConfigError, match=words):
        spread(config, build.build_model(config), SiteGroup(device="cpu"))
    for device, told in (("cpu", words), ("tpu", r"^site\.device is 'tpu': one of auto, cpu, cuda")):
        config.site.device = device
        with pytest.raises(ConfigError, match=told):
            check_kernels(config)
    config.inner.kernels = "torch"
    check_kernels(config)  # What nobody asks for may be missing.
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match=r"^inner\.kernels is 'liger': liger-kernel is not installed"):
        check_kernels(small("inner.kernels=liger"))


def test_what_is_prepared_has_a_bar_at_a_terminal_and_nowhere_else() -> None:
    text = shown(True, ("train", 0, 4_000_000), ("train", 4_000_000, 4_000_000), ("validation", 10, 20))
    for words in ("tokens of train", "4.0/4.0 MB", "tokens of validation"):
        assert words in text
    assert "3.0/? MB" in shown(True, ("the stream", 3_000_000, 0)), "its length is not known before its end"
    assert "5.0/5.0 MB" in shown(True, ("the stream", 3_000_000, 0), ("the stream", 5_000_000, 5_000_000))
    assert shown(True) == ""
    assert shown(False, ("train", 1, 2)).strip() == ""
