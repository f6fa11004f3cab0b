from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

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
from tests.config.test_refusals import SMALL
from tests.runs.processes import TINY


def small(*settings: str) -> RunConfig:
    return compose([*SMALL, *settings])


def test_every_model_has_the_layout_of_its_size_without_being_allocated() -> None:
    sizes = {"tiny": 7e5, "small": 5e6, "15m": 15e6, "60m": 60e6, "150m": 150e6, "1b": 1e9}
    assert sizes.keys() == {*choices()["model"]} - {"imported"}
    for model, wanted in sizes.items():
        layout = build.layout_of(compose([f"model={model}", "outer.num_fragments=4"]))
        assert wanted * 0.7 < layout.numel < wanted * 1.3
        assert len(layout.fragments) == 4
    for settings in (["model.tied=true"], ["model.kv_heads=1", "outer.num_fragments=3"]):
        config = small(*settings)
        shapes = {name: tuple(value.shape) for name, value in named_parameters_once(build.build_model(config)).items()}
        assert dict(build.layout_of(config).parameters) == shapes


def test_what_is_rounded_off_is_fed_back_as_usual_or_as_told() -> None:
    for settings, feedback in (
        ("codec=topk", 0.0),  # Under rebase it stays in the parameters.
        ("codec=topk outer=decoupled", 0.95),
        ("codec=sign outer=streaming", 1.0),
        ("codec=sign outer=streaming codec.feedback=0", 0.0),
        ("codec=e3m0 outer=streaming", 0.0),
        ("codec=int4 outer=streaming codec.feedback=0.5", 0.5),
    ):
        config = compose(settings.split())
        build_syncer.check(config)
        assert build.agent_options(config, Path()).feedback == feedback, settings


def test_what_is_ahead_under_eager_follows_from_the_outer_step_unless_a_share_is_given() -> None:
    of_preset = build.agent_options(compose(["outer=eager", "outer.lr=0.6"]), Path()).ahead
    assert of_preset == OuterOptimizerOptions(kind="nesterov", lr=0.6, momentum=0.9)
    given = build.agent_options(compose(["outer=eager", "outer.adopt_alpha=0.25"]), Path())
    assert (given.ahead, given.adopt_alpha) == (None, 0.25)
    assert build.agent_options(compose(["outer=eager", "outer.adopt=rebase"]), Path()).ahead is None
    told = shared_config(compose(["outer=eager"]))
    assert from_shared(told, {}).outer.adopt_alpha is None


def test_19_a_share_and_a_long_grace_are_left_where_they_cannot_be() -> None:
    window = compose(["outer=nesterov", "outer.kind=delayed_nesterov", "outer.window=3"])
    assert not build.outer_options(window).share_weighted
    for setting, percent in ("outer.adopt=rebase", 90), ("outer.adopt=overwrite", 0), ("outer.lock_step=true", 0):
        assert build.outer_options(compose(["outer=nesterov", setting])).grace_period_percent == percent


def test_19_what_a_preset_says_of_terms_and_of_a_blend_is_shared_and_without_it_the_first_rule_holds() -> None:
    for overrides, by, power in (["experiment=buffered"], "update", 0.5), (["outer.round_updates=3"], "site", 0.0):
        config = compose(overrides)
        assert build.outer_options(config).merge_by == by
        assert build.rule(config, build.layout_of(config)).gate.power == power
        told = shared_config(config)
        assert (told.get("outer.merge_by", "site"), float(told.get("outer.gate_power", 0))) == (by, power)
    for overrides, wanted in (["outer=streaming"], "published"), (["outer.adopt=blend"], "adopted"):
        config = compose(overrides)
        assert build.agent_options(config, Path()).measure_from == wanted
        assert shared_config(config).get("outer.measure_from", "adopted") == wanted


def test_version_zero_is_the_seed_or_what_was_given_and_what_cannot_be_is_named(tmp_path: Path) -> None:
    config = small("run.seed=5", "outer.num_fragments=3")
    layout = build.layout_of(config)
    seeded = full_parameters(layout, build.version_zero(config, layout))
    for name, value in named_parameters_once(build.build_model(config)).items():
        assert torch.equal(seeded[name], value)

    trained = build.build_model(small("run.seed=6"))
    tensors = {f"model/{name}": value.clone() for name, value in model_tensors(trained).items()}
    saved = checkpoint.save(tmp_path / "checkpoints", "step-1", tensors, {})
    values = {name: value.detach() for name, value in named_parameters_once(trained).items()}
    save_file(values, tmp_path / "m.safetensors")
    for source in ("checkpoints", "checkpoints/step-1", "m.safetensors"):
        config.run.init_from = str(tmp_path / source)
        given = full_parameters(layout, build.version_zero(config, layout))
        assert all(torch.equal(given[name], value) for name, value in values.items()), source

    damaged = bytearray((saved / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (saved / "model.safetensors").write_bytes(damaged)
    for source in ("checkpoints/step-1", "checkpoints"):
        config.run.init_from = str(tmp_path / source)
        with pytest.raises(ConfigError, match=r"run\.init_from is "):
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


def test_a_link_has_one_way_or_all_that_are_allowed_each_with_its_bytes_and_its_overlap(tmp_path: Path) -> None:
    plain = compose([*TINY, *ALLOWED])
    layout = build.layout_of(plain)
    assert [way.codec for way in adapt_options(plain, layout).ways] == ["int8"]
    fixed = adapt_options(compose([*TINY, "site.data_channels=3"]), layout)
    assert (fixed.channels, fixed.channels_max) == (3, 3)
    assert (
        up_codecs(plain) == build_syncer.syncer_options(plain, RunDir(tmp_path)).up_codecs == ["int8", "int4", "topk"]
    )

    config = compose([*TINY, *ALLOWED, "site.adapt=true", "outer.num_fragments=2", "outer.inner_steps=7"])
    layout = build.layout_of(config)
    options = adapt_options(config, layout, tmp_path / "nowhere")
    numels = [fragment.numel for fragment in layout.fragments]
    for way in options.ways:
        assert way.update_bytes == sum(make_codec(way.codec).payload_bytes_max(numel) for numel in numels)
    assert (options.num_fragments, options.inner_steps, options.window_bytes) == (2, 7, WINDOW_BYTES)
    assert (options.channels, options.channels_max) == (1, STREAMS_MAX)
    assert build.agent_options(config, tmp_path).adapt == adapt_options(config, layout)
    kernels = tmp_path / "tcp_wmem"
    for text, window in (("4096\t16384\t4194304\n", 4194304), ("", WINDOW_BYTES), ("a b c", WINDOW_BYTES)):
        kernels.write_text(text)
        assert adapt_options(config, layout, kernels).window_bytes == window
    for settings, steps in (
        ("site.overlap_steps=2", (2, 2)),
        ("site.adapt=true", (0, 3)),
        ("site.adapt=true site.overlap_steps=4", (4, 4)),
        ("site.adapt=true site.overlap_steps=1 site.overlap_steps_max=29", (1, 29)),
    ):
        options = adapt_options(compose([*TINY, "outer.inner_steps=30", *settings.split()]), layout)
        assert (options.overlap_steps, options.overlap_steps_max) == steps, settings


def test_a_model_is_spread_as_its_site_says() -> None:
    for settings in ([], ["site.parallel=tp+fsdp", "site.tensor_ranks=2", "site.nproc=4"]):
        check_spreading(small(*settings))
    several = ["site.nodes=3", "site.nproc=2", "site.parallel=hsdp"]
    assert build._parallel_options(small(*several).site).sizes(6) == (3, 2, 1), "a copy for each machine"
    assert build._parallel_options(small(*several, "site.shard_ranks=6").site).sizes(6) == (1, 6, 1)
    config = small("site.parallel=fsdp", "site.peak_tflops=989")
    assert build.trainer_options(config).peak_tflops == 989
    model = build.build_model(config)
    assert spread(config, model, SiteGroup(device="cpu")).module is model
    config.site.shard_ranks = -1
    with pytest.raises(ConfigError, match=r"site\.shard_ranks is -1"):
        spread(config, model, SiteGroup(device="cpu"))


def test_a_machine_that_lacks_a_compiler_or_an_accelerator_for_its_kernels_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled, liger, here = small("inner.compile=true"), small("inner.kernels=liger"), SiteGroup(device="cpu")
    monkeypatch.setattr("torch.compile", Mock(side_effect=RuntimeError("no compiler")))
    lacking = r"^inner\.compile is true: torch\.compile does not work here on cpu: no comp"
    words = r"^inner\.kernels is 'liger': its kernels are for accelerators, and this is"
    for config, told in (compiled, lacking), (liger, words):
        build_syncer.check(config)  # A site may be started elsewhere.
        with pytest.raises(ConfigError, match=told):
            spread(config, build.build_model(config), here)
    liger.site.device = "tpu"
    with pytest.raises(ConfigError, match=r"^site\.device is 'tpu': one of auto, cpu, cuda"):
        check_kernels(liger)
    liger.inner.kernels = "torch"
    check_kernels(liger)  # What nobody asks for may be missing.
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match=r"^inner\.kernels is 'liger': liger-kernel is not installed"):
        check_kernels(small("inner.kernels=liger"))


def test_what_is_prepared_has_a_bar_at_a_terminal_and_nowhere_else() -> None:
    def shown(terminal: bool, *told: tuple[str, int, int]) -> str:
        out = io.StringIO()
        with preparing(Console(file=out, force_terminal=terminal, width=100)) as report:
            for each in told:
                report(*each)
        return out.getvalue()

    text = shown(True, ("train", 0, 4_000_000), ("train", 4_000_000, 4_000_000), ("validation", 10, 20))
    for words in ("tokens of train", "4.0/4.0 MB", "tokens of validation"):
        assert words in text
    assert "3.0/? MB" in shown(True, ("the stream", 3_000_000, 0)), "its length is not known before its end"
    assert "5.0/5.0 MB" in shown(True, ("the stream", 3_000_000, 0), ("the stream", 5_000_000, 5_000_000))
    assert shown(True) == ""
    assert shown(False, ("train", 1, 2)).strip() == ""
