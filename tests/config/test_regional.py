"""A region from settings: what it asks the syncer above, and every way in which it cannot be one, in words."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diloco.cli.syncer import join_line
from diloco.config import build, build_syncer
from diloco.config.compose import compose
from diloco.config.errors import ConfigError, ExitCode, VerbError
from diloco.config.regional import FOLDER, above_of, is_region, upward_options
from diloco.config.run_dir import RunDir
from diloco.config.schema import RunConfig
from diloco.learner.region import Upward
from diloco.wire.messages import Refused
from tests.models.pasts import syncer_of

SMALL = ["model.layers=1", "model.dim=16", "model.heads=2", "model.context=16", "data.tokenizer=bytes"]
SMALL.append("run.tokens=100")
REGION = ["upstream.endpoint=127.0.0.1:1", "upstream.site_id=region-a"]
TWO = ["outer.num_fragments=2", "outer.num_syncers=2"]


@contextmanager
def above(folder: Path, *settings: str, name: str = "top") -> Iterator[str]:
    """The syncer of a run called ``name``, and where it is."""
    config = compose([*SMALL, f"run.name={name}", "cluster.syncer.listen=127.0.0.1:0", *settings])
    syncer = syncer_of(config, RunDir(folder))
    try:
        yield syncer.start()
    finally:
        syncer.stop(0.0)


def region(address: str, *settings: str) -> RunConfig:
    return compose([*SMALL, f"upstream.endpoint={address}", "upstream.site_id=region-a", *settings])


def speaker(config: RunConfig, data: Path) -> Upward:
    make = above_of(config, data, build_syncer.plan(config, build.layout_of(config)), lambda what, fields: None)
    assert make is not None
    return make()


def test_what_the_papers_preset_has_that_others_have_not() -> None:
    config = compose(["experiment=halos"])
    assert upward_options(config, Path(), "fp32", 1).from_blend
    assert not upward_options(compose(SMALL), Path(), "fp32", 1).from_blend
    assert build.learner_options(config).dynamic_rounding == "up"
    assert build.learner_options(compose(["experiment=async_dn"])).dynamic_rounding == "down"
    top = compose(["experiment=halos", "outer=halos_global"]).outer
    assert (top.kind, top.window, top.momentum, top.lr) == ("delayed_nesterov", 2, 0.5, 0.15 * 2)
    assert top.final_wait_s > config.outer.final_wait_s


def test_a_region_is_told_when_the_run_is_over_and_says_nothing_of_its_own_to_its_sites(tmp_path: Path) -> None:
    alone, ruled = compose(SMALL), compose([*SMALL, *REGION, "run.seconds=5", "run.name=mine"])
    assert build.outer_options(alone).token_budget == 100
    assert (build.outer_options(ruled).token_budget, build.outer_options(ruled).run_ns) == (0, 0)
    assert not is_region(alone)
    assert is_region(ruled)
    assert above_of(alone, Path(), build_syncer.plan(alone, build.layout_of(alone)), lambda what, fields: None) is None
    line = join_line(ruled, ["127.0.0.1:7"], [*SMALL, *REGION], None)
    assert "upstream" not in line
    for address, settings, words in (
        ("nowhere", [], r"upstream\.endpoint"),
        ("127.0.0.1:1", [f"site.token_file={tmp_path / 'none'}"], r"site\.token_file"),
    ):
        with pytest.raises(ConfigError, match=words):
            speaker(region(address, *settings), tmp_path / "data")


def test_what_the_one_above_told_is_kept_for_when_it_is_away(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with above(tmp_path / "top", "codec.up=int8", "outer.updates_in_flight_max=3", "outer.lr=0.3") as address:
        config = region(address, "codec.up=fp32", "site.join_timeout_s=0.1")
        first = speaker(config, data)
        first.close()
    again = speaker(config, data)
    again.close()
    for made in (first, again):
        assert made.listener._agreement.run_id == "top"
        assert (made._options.up_codec, made._options.in_flight_max) == ("int8", 3)
        assert made.listener._agreement.shared["outer.lr"] == "0.3"
        assert made._options.folder == str(data)
    (data / FOLDER / "run.json").write_text('{"endpoinu": "')
    words = r"run\.json is damaged: remove it, and the settings are fetched from the syncer above again"
    with pytest.raises(VerbError, match=words):
        speaker(config, data)
    shutil.rmtree(data)
    with pytest.raises(VerbError, match="did not send its run's settings") as refused:
        speaker(config, data)
    assert refused.value.code is ExitCode.UNREACHABLE


def test_each_of_several_syncers_is_a_site_of_the_one_above_of_its_number(tmp_path: Path) -> None:
    with (
        above(tmp_path / "0", *TWO) as first,
        above(tmp_path / "1", *TWO, "cluster.syncer.index=1") as second,
        above(tmp_path / "alone", TWO[0], name="alone") as alone,
        above(tmp_path / "fast", *TWO, "outer.syncer_mbps=[2,1]", name="fast") as fast,
    ):
        for index, own in enumerate((first, second)):
            data = tmp_path / f"region-{index}"
            made = speaker(region(f"{first}/{second}", *TWO, f"cluster.syncer.index={index}"), data)
            made.listener.attempt()
            made.close()
            assert own in (data / FOLDER / "run.json").read_text()
            mixed = speaker(region(f"{second}/{first}", *TWO, f"cluster.syncer.index={index}"), tmp_path / "mixed")
            with pytest.raises(Refused, match=f"syncer.index is {index} at the site and {1 - index} at the syncer"):
                mixed.listener.attempt()
            mixed.close()
        for address, words in (
            (alone, "outer.num_syncers is 2 in this region and 1 in the run above"),
            (fast, r"outer.syncer_mbps is \[\] in this region and \[2.0, 1.0\] in the run above"),
        ):
            with pytest.raises(VerbError, match=words):
                speaker(region(f"{address}/{address}", *TWO), tmp_path / "none")


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (["model.dim=32"], [], "model.dim is 16 in this region and 32 in the run above"),
        (["outer.num_fragments=2"], [], "outer.num_fragments is 1 in this region and 2 in the run above"),
        (["data.leased=true"], [], "data.leased is True in the run above"),
        (["codec.feedback=0.5", "outer.adopt=overwrite"], [], "codec.feedback is 0.5 in the run above"),
    ],
)
def test_a_run_above_that_it_cannot_be_part_of_is_refused_and_nothing_of_it_kept(
    tmp_path: Path, theirs: list[str], ours: list[str], words: str
) -> None:
    with above(tmp_path / "top", *theirs) as address, pytest.raises(VerbError) as refused:
        speaker(region(address, *ours), tmp_path / "data")
    assert words in str(refused.value)
    assert refused.value.code is ExitCode.MISMATCH
    assert not (tmp_path / "data").exists()


def test_the_run_above_may_move_but_another_one_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for place in ("top", "moved"):
        with above(tmp_path / place) as address:
            speaker(region(address), data).close()
    with above(tmp_path / "other", name="other") as address:
        with pytest.raises(VerbError, match="is of run other, and this is a region of run top") as refused:
            speaker(region(address), data)
        assert refused.value.code is ExitCode.MISMATCH
