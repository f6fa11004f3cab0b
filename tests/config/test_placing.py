"""Several syncers in the configuration, and where one of several writes its events."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.config import build, build_syncer
from diloco.config.compose import compose
from diloco.config.errors import ConfigError
from diloco.config.placing import (
    backup_of,
    has_several,
    in_whole_order,
    number_of,
    placement_of,
    shared_by_part,
    syncer_configs,
    syncer_dir,
    syncer_dirs,
    syncer_name,
    towards,
)
from diloco.config.run_dir import RunDir
from diloco.observe.console import syncer_log
from diloco.observe.eventlog import read_events
from diloco.sync.options import disagreement

TWO = ["outer.num_fragments=4", "outer.num_syncers=2", "run.name=otter"]


def test_with_one_syncer_nothing_is_different() -> None:
    config = compose(["outer.num_fragments=4", "run.name=otter", "cluster.syncer.backup=vault"])
    whole = build.whole_layout(config)
    assert not has_several(config)
    assert placement_of(config, whole) == ((0, 1, 2, 3),)
    assert shared_by_part(config, whole) == {}
    assert build.layout_of(config) == whole
    assert [part.site.syncer for part in towards(config)] == [config.site.syncer]
    assert syncer_configs(config) == [config]
    assert syncer_dir(config).root == Path("runs/otter")
    assert backup_of(config) == "vault"
    assert number_of(config) is None
    assert build.learner_options(config).offsets == (3, 7, 11, 0)


def test_each_of_two_has_its_own_fragments_at_their_own_times() -> None:
    config = compose([*TWO, "cluster.syncer.backup=vault/"])
    build_syncer.check(config)
    whole, parts = build.whole_layout(config), syncer_configs(config)
    placement = placement_of(config, whole)
    assert sorted(index for mine in placement for index in mine) == [0, 1, 2, 3]
    offsets = build.learner_options(compose(TWO[:1])).offsets
    for index, (part, mine) in enumerate(zip(parts, placement, strict=True)):
        layout = build.layout_of(part)
        plan = build_syncer.plan(part, layout)
        assert [fragment.pieces for fragment in layout.fragments] == [whole.fragments[place].pieces for place in mine]
        assert plan.held == mine
        assert plan.outer.num_fragments == len(mine)
        assert build.learner_options(part).offsets == tuple(offsets[place] for place in mine)
        assert [value.numel() for value in build.version_zero(part, layout)] == [f.numel for f in layout.fragments]
        assert plan.agreement.shared["cluster.syncer.index"] == str(index)
        assert number_of(part) == index
        assert backup_of(part) == f"vault/syncer-{index}"
    assert [run_dir.root for run_dir in syncer_dirs(config, RunDir(Path("runs/otter")))] == [
        Path(f"runs/otter/syncers/{index}") for index in (0, 1)
    ]
    assert [syncer_name(index) for index in range(2)] == ["syncer", "syncer-1"]
    ours, theirs = (build_syncer.plan(part, build.layout_of(part)).agreement for part in parts)
    assert disagreement(ours, theirs) == "cluster.syncer.index is 1 at the site and 0 at the syncer"


def test_a_site_has_an_address_for_each() -> None:
    config = compose([*TWO, "site.syncer=a:1,b:1/c:2"])
    assert [part.site.syncer for part in towards(config)] == ["a:1,b:1", "c:2"]
    assert [part.cluster.syncer.index for part in towards(config)] == [0, 1]
    assert in_whole_order(((0, 2), (1, 3)), ([10, 12], [11, 13])) == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([*TWO, "site.syncer=a:1"], "site.syncer is 'a:1': 2 addresses with / between, one for each"),
        (["site.syncer=a:1/b:2"], "site.syncer is 'a:1/b:2': one address, since outer.num_syncers=1"),
    ],
)
def test_too_few_or_too_many_addresses_are_named(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        towards(compose(settings))


def test_a_syncers_own_numbers_and_the_whole_models(tmp_path: Path) -> None:
    config = compose(["outer.num_fragments=4", "outer.num_syncers=2", "run.name=x", f"run.dir={tmp_path}"])
    config.cluster.syncer.index = 1
    held = build.held_of(config)
    with ExitStack() as stack:
        log = syncer_log(config, stack)
        log.emit("published", {"fragment": 1, "version": 7})
        log.emit("syncer_started", {"versions": [5, 6]})
    own, _ = read_events(tmp_path / "x/syncers/1/events.jsonl")
    whole, _ = read_events(tmp_path / "x/events.jsonl")
    assert [event["who"] for event in own + whole] == ["syncer-1"] * 4
    assert [event.get("fragment") for event in own] == [1, None]
    assert [event.get("fragment") for event in whole] == [held[1], None]
    assert whole[1]["fragments"] == list(held)
    assert {event["of_syncer"] for event in whole} == {1}
