"""Two levels over real sockets: a syncer above, two regions that are its sites, two sites in each."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.launch.errors import ExitCode
from diloco.launch.eventlog import Event
from diloco.sync.upstream import standing
from tests.launch.processes import TINY, Place, Verb, place_in, wait_for
from tests.loopback.audit import History, audit, history
from tests.loopback.cluster import Log, Process, SiteThread, free_port
from tests.loopback.test_kill import BUDGET, EndedTooSoonError, begins, bound_s, dies, long_enough, seed_of, the_toy
from tests.loopback.toy import Toy

STEP_S = 0.004
LONG_S = 180.0
"""For seven processes that import torch at once."""
DEATHS = {
    "there and back": [("outbox.put", 2), ("pushed", 2), ("pulled", 2)],
    "receiving": [("spool.sync", 9), ("journal.sync", 22), ("journal.write", 61)],
    "going up": [("outbox.put", 2), ("outbox.put", 3), ("push", 2), ("pushed", 2), ("outbox.drop", 3)],
    "coming back": [("pulled", 2), ("spool.site", 4), ("merged", 9), ("syncer.publish", 11)],
    "keeping": [("snapshot.file", 41), ("snapshot.prune", 4), ("journal.prune", 3)],
}


def two_levels(folder: Path, seed: int, budget: int, **changes: object) -> tuple[Toy, dict[str, Toy]]:
    """The run above, with the budget, and those of its regions, without one."""
    rules = {"round_updates": 1, "staleness_max": 30}
    above = the_toy(folder / "above", seed, token_budget=budget, rules=rules, port=free_port(), **changes)
    # Dense versions of a region come at each update, and one of two sites may hear of many while it trains.
    below = replace(above, optimizer={"kind": "heavy_ball", "lr": 0.5, "momentum": 0.3})
    below.outer = {**above.outer, "token_budget": 0}
    names = ("region-a", "region-b")
    return above, {name: replace(below, folder=str(folder / name), port=free_port(), seed=seed + 1) for name in names}


def site_names(region: str) -> tuple[str, str]:
    return f"{region}-1", f"{region}-2"


def play(folder: Path, budget: int, seed: int, deaths: list[tuple[str, int]], **changes: object) -> None:
    """A whole run, in which region-a dies of ``deaths``, one after the other; everybody's books balance in the end."""
    toy, regions = two_levels(folder, seed, budget, **changes)
    address, bound = f"127.0.0.1:{toy.port}", bound_s(budget)
    logs: dict[str, list[Log]] = {name: [] for name in regions}
    sites: dict[str, list[SiteThread]] = {name: [] for name in regions}
    with ExitStack() as alive:
        top = alive.enter_context(Process("syncer", toy))
        top.log.wait_for("listening", 1, bound)

        def begin(name: str, death: tuple[str, int] | None = None) -> Process:
            life = alive.enter_context(Process("syncer", regions[name], death, site=name, above=address))
            begins(life, [site for each in sites.values() for site in each])
            logs[name].append(life.log)
            if not sites[name]:
                sites[name] = [
                    alive.enter_context(SiteThread(regions[name], site, f"127.0.0.1:{regions[name].port}", step_s=step))
                    for site, step in zip(site_names(name), (STEP_S, 1.7 * STEP_S), strict=True)
                ]
            return life

        last = {"region-b": begin("region-b")}
        for death in deaths:
            dies(begin("region-a", death), death, seed, budget)
        last["region-a"] = begin("region-a")
        finished = {site.site: site.join(bound) for each in sites.values() for site in each}
        for name, life in last.items():
            assert life.wait(bound) == 0, f"{name}: {life.errors}"
        assert top.wait(bound) == 0, top.errors
    told = {
        name: audit(
            regions[name],
            logs[name],
            {site: [each.log] for site, each in zip(site_names(name), sites[name], strict=True)},
            {site: finished[site] for site in site_names(name)},
        )
        for name in regions
    }
    both_levels_agree(history(toy), told)


def both_levels_agree(above: History, told: dict[str, History]) -> None:
    """What a region says that the one above has merged is what that says, and all it has merged itself is somewhere."""
    for name, below in told.items():
        found = standing(below.machine.state)
        assert found is not None
        assert found.ledger.balanced()
        line_tokens = [line.tokens_merged for line in above.machine.state.sites[name].lines]
        assert 0 <= found.ledger.merged - sum(line_tokens) // len(line_tokens) <= 1, "to rounding"
        assert found.ledger.processed >= below.machine.state.run_tokens() > 0
        assert found.ledger.refused == found.ledger.lost == 0, found
        assert found.ledger.in_flight == 0, found
        if min(found.versions) == 0:
            raise EndedTooSoonError(f"nothing came back to {name}")  # A longer run is to show that it does.
        assert above.machine.state.sites[name].status.value == "left"


@pytest.mark.slow
@pytest.mark.parametrize("chapter", DEATHS)
def test_a_region_dies_and_both_levels_go_on(tmp_path: Path, chapter: str) -> None:
    def once(folder: Path, budget: int) -> None:
        play(folder, budget, seed_of(chapter), DEATHS[chapter])

    long_enough(tmp_path, once, BUDGET // 2 if chapter == "there and back" else 2 * BUDGET)


@pytest.mark.slow
def test_a_region_goes_on_while_the_one_above_is_away(tmp_path: Path) -> None:
    seed = seed_of("away")
    toy, regions = two_levels(tmp_path, seed, 1_000_000)
    region, address = regions["region-a"], f"127.0.0.1:{toy.port}"
    with ExitStack() as alive:
        top = alive.enter_context(Process("syncer", toy))
        life = alive.enter_context(Process("syncer", region, site="region-a", above=address))
        here = f"127.0.0.1:{region.port}"
        site = alive.enter_context(SiteThread(region, "region-a-1", here, step_s=STEP_S))
        life.log.wait_for("upstream", 2, 60.0, where=lambda event: event["event"] == "pushed")
        top.kill()
        before = len(life.log)
        life.log.wait_for("published", 20, 60.0, since=before)
        assert site.toy_site.trained
        top = alive.enter_context(Process("syncer", toy))
        life.log.wait_for("upstream", 3, 60.0, since=before, where=lambda event: event["event"] == "pushed")
        time.sleep(0.1)
        assert life.wait(0.0) is None


def test_a_run_neither_becomes_a_region_nor_ceases_to_be_one(tmp_path: Path) -> None:
    toy, regions = two_levels(tmp_path, 1, 1_000_000)
    region, address = regions["region-a"], f"127.0.0.1:{toy.port}"
    here = f"127.0.0.1:{region.port}"
    with ExitStack() as alive:
        alive.enter_context(Process("syncer", toy))
        with (
            Process("syncer", region, site="region-a", above=address) as life,
            SiteThread(region, "s", here, step_s=STEP_S),
        ):
            life.log.wait_for("published", 3, 60.0)
        for given in ({}, {"site": "region-b", "above": address}):
            with Process("syncer", region, **given) as life:
                assert life.wait(60.0) == 1
                assert "region 'region-a' of a run above: it stays that" in life.errors
        here = f"127.0.0.1:{regions['region-b'].port}"
        with Process("syncer", regions["region-b"]) as life, SiteThread(region, "s", here, step_s=STEP_S):
            life.log.wait_for("published", 1, 60.0)
        with Process("syncer", regions["region-b"], site="region-b", above=address) as life:
            assert life.wait(60.0) == 1
            assert "has begun without a syncer above" in life.errors


@pytest.mark.slow
def test_the_verbs_make_a_run_of_two_levels_and_a_region_is_killed(tmp_path: Path) -> None:
    with place_in(tmp_path) as place:
        shared = ["run.seconds=100000", "outer.round_updates=1", "outer.staleness_max=30", "outer.final_wait_s=60"]
        top, address = place.syncer("top", *shared)
        ports = {name: free_port() for name in ("east", "west")}

        def region(name: str) -> Verb:
            upstream = [f"upstream.endpoint={address}", f"upstream.site_id={name}", "upstream.updates=4"]
            own = [f"cluster.syncer.listen=127.0.0.1:{ports[name]}", "outer.lr=0.5", "site.finish_timeout_s=60"]
            return place.start(f"region-{name}", "syncer", *TINY, f"run.name={name}", *shared, *own, *upstream)

        lives = {name: region(name) for name in ports}
        sites = [
            place.site(
                name,
                f"127.0.0.1:{port}",
                f"{name}-{number}",
                *shared,
                "outer.lr=0.5",
                f"site.index={2 * (name == 'west') + number}",
                "site.num_sites=4",
            )
            for name, port in ports.items()
            for number in (0, 1)
        ]
        wait_for(lambda: len(gone_up(place, "east")) >= 2, "updates above", lives["east"].text, LONG_S)
        lives["east"].kill()
        before = {name: len(gone_up(place, name)) for name in ports}
        lives["east"] = region("east")
        more = lambda: all(len(gone_up(place, name)) > before[name] + 1 for name in ports)  # noqa: E731
        wait_for(more, "more of them", lives["east"].text, LONG_S)
        top.signal(signal.SIGINT)
        for verb in (*sites, *lives.values(), top):
            assert verb.end(LONG_S) == ExitCode.DRAINED, f"{verb.name}: {verb.text()}"
        (_, again) = place.seen("east", "syncer", "syncer_started")
        assert again["versions"] != [0]
        losses = [event["loss"] for event in place.seen("east", "east-0", "step")]
        assert float(str(losses[-1])) < float(str(losses[0])) - 1, losses


def gone_up(place: Place, region: str) -> list[Event]:
    """The updates that a region has sent."""
    return [event for event in place.seen(region, "syncer", "upstream") if event["event"] == "pushed"]
