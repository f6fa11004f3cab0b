from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from diloco.config import build_syncer
from diloco.config import compose as configs
from diloco.config.compose import (
    ALWAYS_SHARED,
    GROUPS,
    choices,
    compose,
    folder,
    from_shared,
    of_values,
    read,
    settle,
    shared_config,
    shared_digest,
    write,
)
from diloco.config.errors import ConfigError, ExitCode, VerbError, advice
from diloco.config.schema import OuterSection, RunConfig
from diloco.inner.llama import config_of
from diloco.inner.model import ModelOptions
from diloco.inner.tokenizer import make_tokenizer
from diloco.lab import experiment as labs
from diloco.lab.training import run_cell
from diloco.sync.options import MAY_CHANGE
from tests.lab.laboratories import rows, written
from tests.sooner import sooner

OPTIONS = ModelOptions(vocab_size=2000, layers=3, dim=48, heads=6, kv_heads=2, ffn_dim=96, context=64, tied=True)
LLAMA = config_of(replace(OPTIONS, rope_theta=5e5, norm_eps=1e-5), dtype="float32", end_of_file=None)
"""A ``config.json``."""


CHOICES = {group: choices()[group] for group in GROUPS if group != "experiment"}
"""Those of the experiments are composed below."""


@pytest.mark.parametrize("number", sooner(range(max(map(len, CHOICES.values()))), 0, 1, 2))
def test_every_choice_of_every_group_composes(number: int, tmp_path: Path) -> None:
    """The choices of this number, and of a group that has fewer its first ones once more."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    chosen = [f"{group}={names[number % len(names)]}" for group, names in CHOICES.items()]
    needs = ["data.path=.", *([f"run.init_from={tmp_path}"] if "model=imported" in chosen else [])]
    config = compose([*chosen, *needs])
    assert config.model.vocab_size
    assert config.run.seconds


def test_what_is_null_of_the_model_is_what_its_folder_says(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    config = compose(["model=imported", f"run.init_from={tmp_path}", "model.context=32"])
    model = config.model
    assert (model.vocab_size, model.layers, model.dim, model.heads, model.kv_heads) == (2000, 3, 48, 6, 2)
    assert (model.ffn_dim, model.tied, model.rope_theta, model.norm_eps) == (96, True, 5e5, 1e-5)
    assert (model.context, config.inner.sequence_length) == (32, 32), "what was said stands"
    write(config, tmp_path / "config.yaml")
    (tmp_path / "config.json").unlink()
    assert read(tmp_path / "config.yaml") == config, "who reads what was resolved needs no folder"
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "hidden_act": "gelu"}))
    with pytest.raises(ConfigError, match=r"config\.json: hidden_act is 'gelu': 'silu'"):
        compose(["model=imported", f"run.init_from={tmp_path}"])


def test_a_tokenizer_of_a_file_is_shared_by_its_content(tmp_path: Path) -> None:
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "tokenizer.json").write_text(make_tokenizer("bytes").field_form().to_str())
    one, same = (
        compose([f"data.tokenizer={tmp_path / place}/tokenizer.json", "data.end_of_file=false"])
        for place in ("here", "there")
    )
    assert one.model.vocab_size == 257
    assert shared_digest(one) == shared_digest(same)
    assert shared_digest(one) != shared_digest(compose(["data.tokenizer=bytes", "data.end_of_file=false"]))


def test_every_yaml_file_is_short_and_reached_by_a_group() -> None:
    reached = {folder() / group / f"{name}.yaml" for group in GROUPS for name in choices()[group]} | {
        folder() / "config.yaml"
    }
    files = {
        path
        for path in folder().rglob("*.yaml")
        if not {"scenario", "monitoring", "lab"} & set(path.relative_to(folder()).parts)
    }
    assert files == reached
    assert all(len(path.read_text().splitlines()) <= 15 for path in files)


def test_settings_land_where_they_say() -> None:
    config = compose(
        [
            *("seed=3", "tokens=1e6", "+inner.lr=0.5", "outer.quorum=2", "cluster.sites.site-z.slowdown=2"),
            *("cluster.sites.site-z.link.mbps=5", "inner.betas=[0.8,0.9]", "scenario=faults.yaml", "data=stdlib_bytes"),
        ]
    )
    assert (config.run.seed, config.run.tokens, config.run.seconds, config.inner.lr) == (3, 1_000_000, None, 0.5)
    assert compose(["seconds=60"]).run.seconds == 60
    assert (config.outer.quorum, config.inner.betas, config.scenario) == ("2", [0.8, 0.9], "faults.yaml")
    assert list(config.cluster.sites) == ["site-a", "site-b", "site-c", "site-z"]
    late = config.cluster.sites["site-z"]
    assert (late.slowdown, late.link.mbps) == (2.0, 5.0)
    assert (config.model.vocab_size, config.data.cache) == (257, "runs/.data")
    assert config.inner.sequence_length == config.model.context


def test_text_that_the_grammar_of_overrides_lacks_or_takes_for_a_number_needs_no_second_quotes(tmp_path: Path) -> None:
    for text in ("diloco[gpu]==0.1.0", "diloco>=1", "/runs/a [old]/b", "no", "007", "1.10", "2026_11_24", "1e3"):
        config = compose([f"launch.package={text}"])
        assert config.launch.package == compose([f'launch.package="{text}"']).launch.package == text
        write(config, tmp_path / "config.yaml")
        assert read(tmp_path / "config.yaml", [f"launch.package={text}"]).launch.package == text


def test_a_written_configuration_reads_the_same_without_hydra(tmp_path: Path) -> None:
    config = compose(["experiment=streaming", "cluster=local4", "run.name=nimble-otter", "data=text", "data.path=x y"])
    path = tmp_path / "config.yaml"
    write(config, path)
    assert "${" not in path.read_text()
    assert read(path) == config
    code = (
        "import sys; from pathlib import Path; from diloco.config.compose import read, to_yaml;"
        f"config = read(Path({str(path)!r}), ['site.id=site-b', 'site.slowdown=2']);"
        "assert 'hydra' not in sys.modules and 'torch' not in sys.modules;"
        "print(config.site.id, config.site.slowdown, config.outer.adopt)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert told.stdout.split() == ["site-b", "2.0", "blend"], told.stderr


@pytest.mark.parametrize(
    ("text", "override", "words"),
    [
        (b"outer: {lrr: 1}", "", "unknown key outer.lrr: did you mean outer.lr?"),
        (b"outer: {num_fragments: true}", "", "outer.num_fragments is True: a whole number"),  # its default is 1
        (b"outer: [1]", "", "outer is [1]: a section"),
        (b"[1]", "", "a section"),
        (b"a: [", "", "config.yaml cannot be read at line 2"),
        (b"run:\n  tokens: 1\n  tokens: 2\n", "", "at line 3, column 3: found duplicate key tokens"),
        (b"run: &itself {name: *itself}", "", "cannot be read: it is nested too deeply, or holds itself"),
        (b"\xff\xfe\x00", "", "config.yaml cannot be read"),
        (None, "", "config.yaml cannot be read"),
        (b"{}", "outter.lr=1", "unknown key outter.lr"),
        (b"{}", "outer=diloco", "outer=diloco chooses a group, and --config"),
        (b"{}", "site.id", "is no setting"),
        (b"{}", "inner.betas=[0.8", "'inner.betas=[0.8' cannot be read"),
        (b"{}", "inner.lr=fast", "inner.lr is 'fast': a number"),
        (b"{}", "run.tokens=1.5e0", "run.tokens is 1.5: a whole number"),
    ],
)
def test_a_file_is_checked_like_a_command_line(tmp_path: Path, text: bytes | None, override: str, words: str) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError) as refused:
        read(path, [override] if override else [])
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_run_card_of_an_earlier_release_is_still_that_of_the_same_settings() -> None:
    """Both digests are of the first release that wrote a card; outer=merge and model=tiny had these values then."""
    assert (
        shared_digest(compose(["outer.lr=0.6", "outer.share_weighted=false", "model.layers=4"]))
        == "fa0cd71e8a82775c65006ccaaf83d5382f0fac9cf5b8832a172d3b447a234cc2"
    )
    assert shared_digest(settle(RunConfig())) == "7e1104164cea206874501772c79907418decefb3bd5827742574fb4402629a8c"
    assert set(shared_config(compose([]))) >= set(ALWAYS_SHARED.split())


def test_only_settings_of_the_list_may_change_on_a_running_run_and_unnamed_they_stay_as_it_has_them(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.yaml"
    one, now = compose([]), compose(["outer.sites_max=40"])
    configs.write(compose(["outer.sites_max=20"]), path)
    configs.require_same(now, path)
    for key, value in (("outer.quorum", "2"), ("outer.site_timeout_s", "9"), ("run.seconds", "5")):
        with pytest.raises(VerbError, match=f"{key} is .* now and"):
            configs.require_same(compose(["outer.sites_max=40", f"{key}={value}"]), path)
    assert {"outer.sites_max"} == MAY_CHANGE
    assert shared_digest(one) == shared_digest(now) == shared_digest(one, earlier=True)
    assert shared_digest(one) != shared_digest(now, earlier=True)
    assert set(ALWAYS_SHARED.split()) >= MAY_CHANGE, "or it were left out at its default, and the digest another"
    kept, changed = configs.keep_run_settings(one, path, {"outer.lr"})
    assert (kept.outer.sites_max, changed) == (20, ["outer.sites_max=20"])
    assert configs.keep_run_settings(now, path, {"outer.sites_max"}) == (now, [])


def test_19_a_run_that_began_without_a_setting_goes_on_without_it(tmp_path: Path) -> None:
    """Nor did its file know it, at first; what this release's preset says is no word of the user's."""
    path = tmp_path / "config.yaml"
    configs.write(compose(["outer.lr=0.6", "outer.share_weighted=false"]), path)
    now = compose(["outer.lr=0.6"])
    with pytest.raises(VerbError, match=r"outer.share_weighted is true now and not set in") as refused:
        configs.require_same(now, path)
    assert refused.value.code is ExitCode.MISMATCH
    begun, changed = configs.keep_run_settings(now, path, {"outer.lr"})
    assert (begun.outer.share_weighted, changed) == (False, ["outer.share_weighted=false"])
    configs.require_same(begun, path)
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "share_weighted" not in line))
    assert configs.keep_run_settings(now, path, {"outer.lr"}) == (begun, changed)
    assert configs.keep_run_settings(now, path, {"outer.share_weighted"}) == (now, [])
    with pytest.raises(VerbError, match=r"outer.lr is 1.5 now and 0.6 in .*: give outer.lr=0.6 to resume, or take"):
        configs.require_same(compose([]), path)


def test_a_run_that_should_last_longer_is_sent_to_its_final_model(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    configs.write(compose(["run.tokens=1000"]), path)
    final = tmp_path / "syncer" / "final" / "model.safetensors"
    final.parent.mkdir(parents=True)
    final.touch()
    with pytest.raises(VerbError, match=f"or take another run.name with run.init_from={final}"):
        configs.require_same(compose(["run.tokens=2000"]), path)


def test_a_setting_of_a_later_release_makes_another_run_only_where_it_is_used() -> None:
    @dataclass(kw_only=True, slots=True)
    class Later(OuterSection):
        damping: float = 0.5

    before = compose([])
    kept, used = (replace(before, outer=Later(**asdict(before.outer), damping=damping)) for damping in (0.5, 0.25))
    assert shared_config(kept) == shared_config(before)
    assert shared_digest(kept) == shared_digest(before)
    assert shared_config(used) == {**shared_config(before), "outer.damping": "0.25"}


def test_shared_settings_differ_only_by_what_is_shared() -> None:
    one = compose(["run.name=a"])
    for same in (
        ["site=h100x8", "cluster=local4", "network=wan_bad", "inner=adamw", "data=jsonl", "data.path=/x"],
        ["run.name=b", "run.dir=elsewhere", "run.log_every=3", "run.resume=must", "site.id=site-q", "scenario=x"],
        ["inner.sequence_length=64", "cluster.syncer.listen=127.0.0.1:1", "run.init_from=x", "site.adapt=true"],
    ):
        assert shared_config(compose(same)) == shared_config(one), same
    shared = shared_config(one)
    different = "model.dim=64 outer.lr=0.1 codec.up=fp32 run.tokens=5000 run.seconds=5 data.end_of_file=false"
    for setting in different.split():
        key, other = setting.partition("=")[0], compose([setting])
        assert shared_config(other).keys() == shared.keys()
        assert shared_config(other)[key] != shared[key]
        assert shared_digest(other) != shared_digest(one)


def test_a_site_may_have_several_addresses() -> None:
    for text in ("site.syncer=fra:7077,iad:7077", "site.syncer='fra:7077,iad:7077'"):
        assert compose([text]).site.syncer == "fra:7077,iad:7077"


def test_who_leases_units_must_agree_on_what_they_are() -> None:
    plain = shared_config(compose(["run.name=x"]))
    assert not [key for key in plain if "lease" in key or "unit" in key]
    told = shared_config(compose(["run.name=x", "data.leased=true", "data.unit_sequences=8"]))
    assert {key: told[key] for key in told.keys() - plain.keys()} == {
        "data.leased": "true",
        "data.unit_sequences": "8",
        "data.unit_lease_s": "300.0",
        "inner.sequence_length": "128",
    }


def test_a_run_that_this_release_would_understand_as_another_is_refused() -> None:
    whole = shared_config(compose([]))
    for key, text, words in (
        ("outer.from_a_later_release", "1", "unknown key outer.from_a_later_release"),
        ("outer.lr", "fast", "outer.lr is 'fast': a number"),
        ("outer.quorum", "${oc.env:NOWHERE}", r"outer\.quorum is '\$\{oc\.env:NOWHERE\}'"),
        ("site.nproc", "1", "site.nproc is 1 at the syncer, and this release reads nothing: "),
        ("codec.feedback", "null", "codec.feedback is null at the syncer, and this release reads nothing: "),
    ):
        with pytest.raises(ConfigError, match=words):
            from_shared({**whole, key: text}, {})
    with pytest.raises(ConfigError, match=r"outer.lr is not set at the syncer, and this release reads 0.7"):
        from_shared({key: text for key, text in whole.items() if key != "outer.lr"}, {})


@pytest.mark.parametrize("make", [lambda: compose([]), lambda: of_values({})])
def test_what_is_done_to_a_configuration_does_not_come_back_with_the_next(make: Callable[[], RunConfig]) -> None:
    """The files and the defaults behind them are put together once in a process."""
    spoilt, wanted = make(), repr(make())
    spoilt.cluster.sites.clear()
    spoilt.inner.betas.append(7.0)
    spoilt.outer.lr = 9.0
    compose(["outer.lr=0.123", "cluster.sites.late.slowdown=2"])
    assert repr(make()) == wanted


def test_a_file_says_numbers_as_the_command_line_does_and_a_name_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("run: {tokens: 1e6, name: 2026-11-24}\nouter: {lr: 5e-1}\n")
    found = read(path)
    assert (found.run.tokens, found.run.name, found.outer.lr) == (1_000_000, "2026-11-24", 0.5)
    found = read(path, ["tokens=2e6", "inner.lr=1e-4", "inner.betas=[8e-1,0.9]"])
    assert (found.run.tokens, found.inner.lr, found.inner.betas) == (2_000_000, 1e-4, [0.8, 0.9]), "on top of it"
    for name in ("1e3", "0e5", "2026-11-24", "yes", "017", "null", "nan"):
        found.run.name = name
        write(found, path)
        assert read(path).run.name == name


# --- The presets of ``configs/experiment`` ---------------------------------------------------------------------------

FP32, ADAMW, WHOLE = "codec.up=fp32 codec.down=fp32", "inner.optimizer=adamw", "outer.num_fragments=1"
EVERYBODY = "outer.quorum=all outer.round_updates=0 outer.weights=uniform"
ONE_BY_ONE = "outer.quorum=1 outer.round_updates=1 outer.grace=fixed outer.grace_s=0"

# Of each preset the paper that it cites, and every value that is the paper's.
PAPERS = {
    # Algorithm 1 and the defaults: H 500, Nesterov 0.7 / 0.9, AdamW under a cosine, lock-step.
    "diloco": f"""2311.08105 {FP32} {ADAMW} {EVERYBODY} {WHOLE} outer.kind=nesterov outer.lr=0.7 outer.momentum=0.9
        outer.inner_steps=500 inner.schedule=cosine outer.lock_step=true outer.adopt=overwrite""",
    # H 30 or 100, Nesterov 0.4 / 0.9, tau 1, alpha 0.5, E3M0 for what is not reduced yet.
    "streaming": f"""2501.18512 {ADAMW} {EVERYBODY} outer.kind=nesterov outer.lr=0.4 outer.momentum=0.9
        outer.inner_steps=30 site.overlap_steps=1 outer.adopt=blend outer.adopt_alpha=0.5
        outer.measure_from=published codec.up=e3m0:128+zstd1 outer.lock_step=false""",
    # One whole outer step late, the own share fresh; AdamW and H as on Streaming DiLoCo's bench.
    "eager": f"""2502.12996 {FP32} {ADAMW} {EVERYBODY} {WHOLE} outer.kind=nesterov outer.inner_steps=30
        outer.adopt=eager outer.lock_step=false""",
    # As reproductions quote it: H 24, tau 2, K 1 and grace, tokens^2/steps, overwritten.
    "decoupled": f"""2604.21428 {ADAMW} outer.kind=nesterov outer.inner_steps=24 outer.overlap_steps=2 outer.quorum=1
        outer.grace=adaptive outer.round_updates=0 outer.weights=tokens2_per_step outer.merge=mean
        outer.adopt=overwrite""",
    # c 0, N the number of workers, H 50 for the fastest, DyLU, 0.7 / 0.9 of the synchronous base.
    "async_dn": f"""2401.09135 {FP32} {ADAMW} {ONE_BY_ONE} {WHOLE} outer.kind=delayed_nesterov outer.lr=0.7
        outer.momentum=0.9 outer.window=3 outer.share_ahead=0 outer.inner_steps=50 outer.dynamic_steps=true
        outer.weights=uniform""",
    # The same without momentum: asynchronous, AdamW inside, SGD outside.
    "async": f"""2401.09135 {FP32} {ADAMW} {ONE_BY_ONE} {WHOLE} outer.kind=sgd outer.momentum=0 outer.inner_steps=50
        outer.dynamic_steps=false""",
    # A buffer is a round, each update a term of (1 + staleness)^-1/2; H and AdamW are 2401.09135's.
    "buffered": f"""2106.06639 {FP32} {ADAMW} {WHOLE} outer.kind=sgd outer.momentum=0 outer.round_updates=3
        outer.merge_by=update outer.weights=uniform outer.gate_power=0.5 outer.staleness_power=0
        outer.inner_steps=50""",
    # The correction, Nesterov's EMA form, nothing older than 15; DyLU did not help it.
    "heloco": f"""2606.00271 {FP32} {ADAMW} {ONE_BY_ONE} {WHOLE} outer.kind=nesterov_ema outer.correction=heloco
        outer.staleness_max=15 outer.dynamic_steps=false""",
    # Muon 0.02 inside, H 30, Nesterov 0.7 / 0.6.
    "muloco": f"""2505.23725 {FP32} {EVERYBODY} {WHOLE} inner.optimizer=muon inner.muon_lr=0.02 outer.kind=nesterov
        outer.lr=0.7 outer.momentum=0.6 outer.inner_steps=30 outer.lock_step=true""",
    # 64 of 4096 in 2 bits, alpha 1, no momentum, H 30, AdamW 0.9 / 0.95, 0.1; 2603.08163: lengths.
    "sparseloco": f"""2508.15706 {ADAMW} {EVERYBODY} {WHOLE} codec.up=topk:4096x64 outer.kind=sgd outer.lr=1
        outer.momentum=0 outer.inner_steps=30 outer.merge=clamp inner.betas=[0.9,0.95] inner.weight_decay=0.1
        outer.lock_step=true""",
    # The region: 0.2 x 16, beta 0.9, N 16, H 8 by speed, K 32, a 0.25; AdamW 1e-3.
    "halos": f"""2506.04531 {FP32} {ADAMW} {ONE_BY_ONE} {WHOLE} outer.kind=delayed_nesterov outer.lr=3.2
        outer.momentum=0.9 outer.window=16 outer.inner_steps=8 outer.dynamic_steps=true outer.dynamic_rounding=up
        upstream.counted_from=blend upstream.updates=32 upstream.alpha=0.25 inner.lr=1e-3 inner.betas=[0.9,0.95]
        inner.weight_decay=0.1 inner.clip=1""",
}
# Those that are ours: no paper's, but what it is made of is cited.
OURS = {
    # Its quorum, grace and weights; four bits both ways, all progress kept, a period of 24 to 100.
    "default": f"""2604.21428 {ADAMW} codec.up=int4:32+zstd1 codec.down=int4:32+zstd1 outer.kind=nesterov outer.lr=0.7
        outer.momentum=0.7 outer.inner_steps=30 outer.num_fragments=4 outer.share_weighted=true
        outer.grace_period_percent=90 outer.overlap_steps=2 site.adapt=true site.overlap_steps=2
        site.overlap_steps_max=5 outer.quorum=1 outer.grace=adaptive outer.grace_share_percent=80 outer.merge=mean
        outer.weights=tokens2_per_step outer.staleness_max=4 outer.staleness_power=0 outer.adopt=rebase
        inner.clip=1""",
}
PRESETS = PAPERS | OURS
DEMO = "demo"
TOKENS = 3072
SMALL = (
    f"run.tokens={TOKENS}", "data=text", "data.tokenizer=bytes", "model.layers=1", "model.dim=16", "model.heads=2",
    "model.context=16", "inner.batch_sequences=2", "inner.precision=fp32", "inner.warmup_steps=0",
    "outer.inner_steps=12", "data.validation_sequences=16",
)  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_what_its_paper_says(preset: str) -> None:
    paper, *values = PRESETS[preset].split()
    config = compose([f"experiment={preset}"])
    assert compose([f"experiment={preset}", *values]) == config, "they are its values already"
    text = (folder() / "experiment" / f"{preset}.yaml").read_text(encoding="utf-8")
    head = "".join(line for line in text.splitlines() if line.startswith("#"))
    assert f"arXiv {paper}" in head
    assert config.outer.share_weighted is (preset in OURS), "a paper takes whole steps"
    assert advice(config) == []
    build_syncer.check(config)


def test_every_preset_has_a_row_and_the_demo_is_what_runs_without_a_word() -> None:
    assert {*choices()["experiment"]} == {*PRESETS, DEMO}
    assert compose([f"experiment={DEMO}"]) == compose([])
    assert compose([]).outer.share_weighted
    assert advice(compose([])) == []


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
