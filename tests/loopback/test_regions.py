"""Two levels over real sockets: a syncer above, two regions that are its sites, two sites in each."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from diloco.config import build
from diloco.config.compose import compose
from diloco.config.errors import ExitCode
from diloco.config.placing import at
from diloco.config.schema import RunConfig
from diloco.durable import Disk, Step
from diloco.learner.region import Upward
from diloco.observe.eventlog import Event
from diloco.sync.region import Standing, standing
from diloco.sync.rounds import Selection
from diloco.sync.state import OuterState, Phase
from diloco.sync.syncer import OuterSync
from diloco.syncer.snapshots import Snapshots
from diloco.wire.client import AdminClient
from tests.loopback.audit import History, audit, history, one_run
from tests.loopback.cluster import Log, Process, SiteThread, drain, eventually, files_under, free_port
from tests.loopback.speaker import speaker
from tests.loopback.test_again import CLOCK_S, restore_without
from tests.loopback.test_kill import BOUND_S, dies, seed_of, the_toy
from tests.loopback.toy import Toy
from tests.runs.processes import TINY, Place, Verb, all_end, wait_for

STEP_S, BUDGET = 0.004, 4000
LONG_S = 180.0
"""For seven processes that import torch at once."""
DEATHS = {
    "there and back": [("outbox.put", 2), ("pushed", 2), ("pulled", 2)],
    "receiving": [("spool.sync", 9), ("journal.sync", 22), ("journal.write", 61)],
    "going up": [("outbox.put", 2), ("outbox.put", 3), ("push", 2), ("pushed", 2), ("outbox.drop", 3)],
    "coming back": [("pulled", 2), ("spool.site", 4), ("merged", 9), ("syncer.publish", 11)],
    "keeping": [("snapshot.file", 41), ("snapshot.prune", 4), ("journal.prune", 3)],
}


HEIRS = {
    "going up": [("outbox.put", 3), ("outbox.put", 2), ("outbox.drop", 2)],
    "coming back": [("spool.sync", 3), ("syncer.merge", 3), ("syncer.publish", 5)],
    "lossy": [("outbox.put", 3)],
}
"""Each of them from when the standby has everything on."""


def two_levels(folder: Path, seed: int, budget: int = 0, **changes: object) -> tuple[Toy, dict[str, Toy]]:
    """The run above, with the budget, and those of its regions, without one."""
    rules: dict[str, object] = {"round_updates": 1, "staleness_max": 30}
    above = the_toy(folder / "above", seed, {**rules, "token_budget": budget}, port=free_port(), **changes)
    # Dense versions of a region come at each update, and one of two sites may hear of many while it trains.
    below = replace(above, optimizer={"kind": "heavy_ball", "lr": 0.5, "momentum": 0.3})
    below.outer = {**above.outer, "token_budget": 0}
    names = ("region-a", "region-b")
    return above, {name: replace(below, folder=str(folder / name), port=free_port(), seed=seed + 1) for name in names}


def two_sites_of(alive: ExitStack, region: Toy, name: str, address: str) -> list[SiteThread]:
    steps = {f"{name}-1": STEP_S, f"{name}-2": 1.7 * STEP_S}
    return [alive.enter_context(SiteThread(region, site, address, step_s=each)) for site, each in steps.items()]


def versions_come_back(life: Process) -> None:
    """Wait until a region's syncer has taken a later version of each fragment from above."""
    (listening,) = life.log.wait_for("listening", 1, BOUND_S)
    with AdminClient(str(listening["address"])) as operator:
        above: Any = lambda: operator.status()["upstream"]  # noqa: E731
        eventually(lambda: min(above()["base_versions"]) > 0, BOUND_S, "versions of both fragments from above")


def balanced(region: OuterState) -> Standing:
    """Where a region stands, whose books balance."""
    found = standing(region)
    assert found is not None
    assert found.ledger.balanced()
    return found


def levels_agree(above: OuterState, below: OuterState, name: str, *, restored: bool = False) -> Standing:
    """What a region says that the one above has merged is what that says, and all it has merged itself is somewhere."""
    found = balanced(below)
    line_tokens = [line.tokens_merged for line in above.sites[name].lines]
    assert 0 <= found.ledger.merged - sum(line_tokens) // len(line_tokens) <= 1, "to rounding"
    if not restored:  # A later lineage knows of the earlier ones what is merged above.
        assert found.ledger.processed >= below.run_tokens() > 0
    assert found.ledger.refused == found.ledger.lost == found.ledger.in_flight == 0, found
    assert min(found.versions) > 0, f"nothing came back to {name}"
    assert above.sites[name].status.value == "left"
    return found


def both_levels_agree(above: History, told: dict[str, History]) -> None:
    for name, below in told.items():
        levels_agree(above.machine.state, below.machine.state, name, restored=bool(below.began))


@pytest.mark.slow
@pytest.mark.parametrize(
    "chapter",
    [
        "there and back",
        "coming back",
        *(pytest.param(name, marks=pytest.mark.hunt) for name in ("receiving", "going up", "keeping")),
    ],
)
def test_a_region_dies_and_both_levels_go_on(tmp_path: Path, chapter: str) -> None:
    """Everybody's books balance in the end."""
    toy, regions = two_levels(tmp_path, seed_of(chapter))
    address = f"127.0.0.1:{toy.port}"
    logs: dict[str, list[Log]] = {name: [] for name in regions}
    with ExitStack() as alive:
        top = alive.enter_context(Process("syncer", toy))

        def begin(name: str, death: tuple[str, int] | None = None) -> Process:
            life = alive.enter_context(Process("syncer", regions[name], death, site=name, above=address))
            logs[name].append(life.log)
            return life

        sites = {name: two_sites_of(alive, each, name, f"127.0.0.1:{each.port}") for name, each in regions.items()}
        last = [begin("region-b")]
        for death in DEATHS[chapter]:
            dies(begin("region-a", death), death)
        last.append(begin("region-a"))
        for life in last:
            versions_come_back(life)
        for site in [site for each in sites.values() for site in each]:  # A region waits for no stranger.
            site.log.wait_for("adopted", 1, BOUND_S, where=lambda event: event["merged"])
        drain(address)
        finished = {name: {site.site: site.join(BOUND_S) for site in sites[name]} for name in regions}
        for life in (*last, top):
            assert life.wait(BOUND_S) == 0, life.errors
    told = {}
    for name, region in regions.items():
        told[name] = audit(region, logs[name], {site.site: [site.log] for site in sites[name]}, finished[name])
    both_levels_agree(history(toy), told)


@pytest.mark.slow
@pytest.mark.parametrize(("chapter", "by"), [("coming back", "word"), ("going up", "lease"), ("lossy", "lossy")])
def test_a_region_s_standby_goes_on_with_all_that_was_on_its_way_or_in_a_new_lineage_with_the_values_above(
    tmp_path: Path, chapter: str, by: str
) -> None:
    """Its syncers die one after the other, each when its standby has everything, which then takes its place.

    It does so ``by`` an operator's word, by a "lossy" one, or by the "lease".
    """
    deaths, (toy, regions) = HEIRS[chapter], two_levels(tmp_path, seed_of(chapter))
    region = replace(regions["region-a"], replication={"mode": "sync", "timeout_s": 3.0, "alive_s": 0.2})
    if by == "lease":
        region = replace(region, lease=str(tmp_path / "lease.json"))
    if by == "lossy":  # What a lineage began with is kept for the audit.
        region = replace(region, retain_steps=4096)
    above, ports = f"127.0.0.1:{toy.port}", (free_port(), free_port())
    addresses = [f"127.0.0.1:{port}" for port in ports]
    nodes: list[Process] = []
    with ExitStack() as alive:
        top = alive.enter_context(Process("syncer", toy))

        def begin(death: tuple[str, int] | None) -> None:
            """The next syncer: the first leads, each later one follows the one before."""
            number = len(nodes)
            mine: dict[str, object] = {"data": f"node-{number}", "port": ports[number % 2], "late": True}
            if number:
                mine["primary"] = addresses[(number - 1) % 2]
            role = "standby" if number else "syncer"
            nodes.append(alive.enter_context(Process(role, region, death, site="region-a", above=above, **mine)))
            nodes[-1].log.wait_for("standing" if number else "listening", 1, BOUND_S)

        for death in [*deaths, None][:2]:
            begin(death)
        sites = two_sites_of(alive, region, "region-a", ",".join(addresses))
        for number, death in enumerate(deaths):
            leads, follows = nodes[number], nodes[number + 1]
            leads.log.wait_for("upstream", 1, BOUND_S, where=lambda event: event["event"] == "pushed")
            if by == "lease":
                heir = f"names node-{number + 1}-"
                leads.log.wait_for("note", 1, BOUND_S, where=lambda note, heir=heir: heir in str(note.get("why")))
            leads.send(signal.SIGUSR2)
            dies(leads, death)
            if by != "lease":
                with AdminClient(addresses[(number + 1) % 2]) as operator:
                    operator.promote(lossy=by == "lossy")
            follows.log.wait_for("listening", 1, BOUND_S)
            begin(deaths[number + 2] if number + 2 < len(deaths) else None)
            follows.log.wait_for("standby_attached", 1, BOUND_S)
            follows.log.wait_for("published", len(follows.log.of("published")) + 2, BOUND_S)
        led = nodes[: len(deaths) + 1]
        versions_come_back(led[-1])
        drain(above)
        finished = {site.site: site.join(BOUND_S) for site in sites}
        for life in (led[-1], top):
            assert life.wait(BOUND_S) == 0, life.errors
    whole = one_run(Path(region.folder), [f"node-{number}" for number in range(len(led))])
    logs = {site.site: [site.log] for site in sites}
    told = audit(replace(region, folder=str(whole)), [node.log for node in led], logs, finished)
    both_levels_agree(history(toy), {"region-a": told})
    retaken = [event["why"] for node in led for event in node.log.of("upstream_retaken")]
    first = ["first version of a new site"] * toy.fragments
    assert by == "lossy" or retaken == first, "what was not above yet is not overwritten"


@pytest.mark.slow
def test_a_standby_sends_the_last_update_of_a_region_that_has_ended(tmp_path: Path) -> None:
    """The one above says that the run is over, and takes nothing until the region's syncer is dead."""
    toy, regions = two_levels(tmp_path, seed_of("last"), BUDGET)
    region = replace(regions["region-a"], replication={"mode": "sync", "timeout_s": 3.0, "alive_s": 0.2}, linger_s=2.0)
    above, ports = f"127.0.0.1:{toy.port}", (free_port(), free_port())
    first, second = (f"127.0.0.1:{port}" for port in ports)
    mine = {"site": "region-a", "above": above}
    with ExitStack() as alive:
        top = alive.enter_context(Process("syncer", toy))
        leads = alive.enter_context(Process("syncer", region, data="node-0", port=ports[0], **mine))
        leads.log.wait_for("listening", 1, BOUND_S)
        standby = {"data": "node-1", "port": ports[1], "primary": first}
        follows = alive.enter_context(Process("standby", region, **standby, **mine))
        site = alive.enter_context(SiteThread(region, "region-a-1", f"{first},{second}", step_s=STEP_S))
        leads.log.wait_for("last_round", 1, BOUND_S)
        top.send(signal.SIGSTOP)
        finished = site.join(BOUND_S)
        leads.log.wait_for("final", 1, BOUND_S)
        leads.kill()
        with AdminClient(second) as operator:
            operator.promote()
        follows.log.wait_for("listening", 1, BOUND_S)
        top.send(signal.SIGCONT)
        assert follows.wait(BOUND_S) == 0, follows.errors
        assert top.wait(BOUND_S) == 0, top.errors
    whole = replace(region, folder=str(one_run(Path(region.folder), ["node-0", "node-1"])))
    told = audit(whole, [leads.log, follows.log], {site.site: [site.log]}, {site.site: finished})
    both_levels_agree(history(toy), {"region-a": told})
    assert balanced(told.machine.state).ledger.unsent == 0
    assert "pushed" in [event["event"] for event in follows.log.of("upstream")]


@pytest.mark.slow
def test_a_region_that_has_ended_goes_on_after_a_restore_above_and_else_stays_so(tmp_path: Path) -> None:
    toy, regions = two_levels(tmp_path, seed_of("restored"), BUDGET, retain_steps=10**6)
    region = regions["region-a"]
    mine = {"site": "region-a", "above": f"127.0.0.1:{toy.port}"}

    def play_to_the_end() -> tuple[Process, Process]:
        """Start everything, what was there already as well, and wait for the end; the two syncers."""
        with ExitStack() as alive:
            top = alive.enter_context(Process("syncer", toy))
            top.log.wait_for("listening", 1, BOUND_S)
            here = f"127.0.0.1:{region.port}"
            site = alive.enter_context(SiteThread(region, "region-a-1", here, step_s=STEP_S))
            life = alive.enter_context(Process("syncer", region, **mine))
            assert site.join(BOUND_S).ending == "finished"
            assert life.wait(BOUND_S) == 0, life.errors
            assert top.wait(BOUND_S) == 0, top.errors
        return top, life

    top, _ = play_to_the_end()
    with Process("syncer", region, **mine) as life:  # Nobody above says anything.
        assert life.wait(BOUND_S) == 0, life.errors
        assert [note["note"] for note in life.log.of("note")] == ["stays_finished"]
        assert life.log.of("ended") == [{"what": "ended", "ending": "finished"}]
    last = max(int(str(event["version"])) for event in top.log.of("published"))
    restore_without(toy, [Selection("region-a", "versions", last - 1, last)])
    top, life = play_to_the_end()
    assert life.log.of("resumed")
    whys = {str(event["why"]) for event in life.log.of("upstream_retaken")}
    assert whys == {f"the run was restored: lineage {CLOCK_S}"}
    assert any(event["merged"] for event in top.log.of("published")), "the region has sent more"
    state, below = history(toy).machine.state, history(region).machine.state
    assert (state.phase, below.phase) == (Phase.ENDED, Phase.ENDED)
    assert state.run_tokens() >= BUDGET
    balanced(below)
    assert state.sites["region-a"].status.value == "left"


def test_a_run_neither_becomes_a_region_nor_ceases_to_be_one(tmp_path: Path) -> None:
    toy, regions = two_levels(tmp_path, 1, 1_000_000)
    region, address = regions["region-a"], f"127.0.0.1:{toy.port}"
    here = f"127.0.0.1:{region.port}"
    with ExitStack() as alive:
        alive.enter_context(Process("syncer", toy))
        begun = Process("syncer", region, site="region-a", above=address)
        with begun as life, SiteThread(region, "s", here, step_s=STEP_S):
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


# --- As the processes that a user starts -----------------------------------------------------------------------------

LEVELS = ["run.seconds=100000", "outer.round_updates=1", "outer.staleness_max=30", "site.slowdown=4"]
WAITS = "outer.final_wait_s=60"
EAST = ["run.name=east", "outer.lr=0.5", "site.finish_timeout_s=60", "upstream.site_id=east", "upstream.updates=4"]


def serves(place: Place, name: str, *settings: str) -> Verb:
    """A syncer with these settings, once it serves."""
    verb = place.start(f"{name}-{len(place.verbs)}", "syncer", *TINY, *LEVELS, *settings)
    wait_for(lambda: "listening on" in verb.text(), name, verb.text)
    return verb


def two_sites(place: Place, address: str, *settings: str) -> list[Verb]:
    """Both sites of the region."""
    shared = [*LEVELS, "outer.lr=0.5", "site.num_sites=2", *settings]
    return [place.site("east", address, f"east-{each}", *shared, f"site.index={each}") for each in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "source", [("--from-site", "runs/east/sites/east-0"), ("--from", "vault")], ids=["site", "backup"]
)
def test_a_region_whose_disk_is_lost_is_restored(place: Place, source: tuple[str, str]) -> None:
    top, address = place.syncer("top", *LEVELS, WAITS)
    here = f"127.0.0.1:{free_port()}"
    own = [*EAST, WAITS, f"upstream.endpoint={address}", f"cluster.syncer.listen={here}"]
    own += ["cluster.syncer.backup=vault", "cluster.syncer.backup_every_s=1"]
    first = serves(place, "region", *own)
    sites = two_sites(place, here, WAITS)
    checkpoints = lambda: place.seen("east", "east-0", "checkpoint")  # noqa: E731
    wait_for(lambda: len(gone_up(place, "east")) >= 2, "updates above", first.text, LONG_S)
    seen = len(checkpoints())
    wait_for(lambda: len(checkpoints()) > seen + 1, "a checkpoint of a site", sites[0].text, LONG_S)
    wait_for(lambda: place.seen("east", "syncer", "backup"), "a backup", first.text, LONG_S)
    first.kill()
    shutil.rmtree(place.folder / "runs/east/syncer")
    code, said = place.run("syncer", *TINY, *LEVELS, *own, bound_s=LONG_S)
    assert code == ExitCode.FAILED
    assert "diloco restore restores it from a backup or a warm site" in said
    code, said = place.run("restore", "runs/east", *source, bound_s=LONG_S)
    assert code == 0, said
    assert "takes the values of the run above" in said
    before, again = len(gone_up(place, "east")), serves(place, "region", *own)
    again.until(lambda: len(gone_up(place, "east")) > before + 1, "more updates above", LONG_S)
    # A restored syncer does not wait for a site that has not come back: that one would not hear of the end.
    back = lambda: all(len(place.seen("east", name, "joined")) > 1 for name in ("east-0", "east-1"))  # noqa: E731
    wait_for(back, "both sites again", again.text, LONG_S)
    top.signal(signal.SIGINT)
    all_end(*sites, again, top, code=ExitCode.DRAINED, bound_s=LONG_S)
    for number in (0, 1):
        assert place.seen("east", f"east-{number}", "started_over"), "it has heard of the new lineage"
    above, below = (last_state(compose([*TINY, *LEVELS]), place.folder / "runs" / run) for run in ("top", "east"))
    found = levels_agree(above, below, "east", restored=True)
    assert found.ledger.merged == above.sites["east"].lines[0].tokens_merged


@pytest.mark.slow
def test_each_of_two_syncers_of_a_region_is_a_site_of_the_one_above_of_its_number(place: Place) -> None:
    """One of the region's is killed on the way; the run above ends by itself, and each pair's books balance."""
    two = ["run.seconds=null", "run.tokens=20000", "outer.num_fragments=4", "outer.num_syncers=2"]
    ports = {run: (free_port(), free_port()) for run in ("top", "east")}
    addresses = {run: "/".join(f"127.0.0.1:{port}" for port in both) for run, both in ports.items()}
    own = {"top": ["run.name=top", WAITS], "east": [*EAST, f"upstream.endpoint={addresses['top']}"]}

    def syncer(run: str, index: int) -> Verb:
        mine = [f"cluster.syncer.index={index}", f"cluster.syncer.listen=127.0.0.1:{ports[run][index]}"]
        return serves(place, f"{run}-{index}", *two, *own[run], *mine)

    top = [syncer("top", index) for index in range(2)]
    east = [syncer("east", index) for index in range(2)]
    sites = two_sites(place, addresses["east"], *two)
    up = lambda: len(gone_up(place, "east", "syncer-1"))  # noqa: E731
    wait_for(lambda: up() >= 2, "updates above", sites[0].text, LONG_S)
    east[1].kill()
    before, east[1] = up(), syncer("east", 1)
    wait_for(lambda: up() > before + 1, "more of them", east[1].text, LONG_S)
    all_end(*sites, *east, *top, bound_s=LONG_S)
    (_, again) = place.seen("east", "syncer-1", "syncer_started")
    assert again["versions"] != [0, 0]
    losses = [event["loss"] for event in place.seen("east", "east-0", "step")]
    assert float(str(losses[-1])) < float(str(losses[0])) - 1, losses
    for index in range(2):
        config = at(compose([*TINY, *LEVELS, *two]), index)
        above, below = (last_state(config, place.folder / "runs" / run / "syncers" / str(index)) for run in ports)
        found = levels_agree(above, below, "east")
        assert len(found.versions) == len(above.fragments) == 2
        assert sum(line.tokens_merged for line in above.sites["east"].lines) >= 2 * 20_000, "over two fragments"


@pytest.mark.slow
def test_the_sites_of_a_region_go_on_and_its_standby_takes_over_while_the_one_above_is_away(place: Place) -> None:
    top, first, second = (f"127.0.0.1:{free_port()}" for _ in range(3))
    own = [*EAST, WAITS, f"upstream.endpoint={top}", "cluster.replication.mode=sync", "cluster.replication.timeout_s=2"]
    above = ["run.name=top", WAITS, f"cluster.syncer.listen={top}"]
    follows = ["standby", "follow", *TINY, *LEVELS]
    follows += [f"cluster.syncer.listen={second}", f"cluster.standby.primary={first}"]
    life = serves(place, "top", *above)
    region = serves(place, "east", *own, f"cluster.syncer.listen={first}")
    plain = [text for text in own if not text.startswith("upstream.")]
    code, said = place.run(*follows, *plain, "cluster.standby.name=wrong")
    assert code == ExitCode.MISMATCH, said
    assert "upstream.endpoint is null, and this run is the region 'east' of a run above" in said
    standby = place.start("standby", *follows, *own)
    sites = two_sites(place, f"{first},{second}", WAITS)
    wait_for(lambda: len(gone_up(place, "east")) >= 2, "updates above", region.text, LONG_S)
    life.kill()
    region.kill()
    code, said = place.run("standby", "promote", second)
    assert code == 0, said
    published = lambda: len(place.seen("east", "syncer", "published"))  # noqa: E731
    before = published()
    wait_for(lambda: published() > before + 4, "versions for the region's sites", standby.text, LONG_S)
    before, life = len(gone_up(place, "east")), serves(place, "top", *above)
    wait_for(lambda: len(gone_up(place, "east")) > before + 1, "more updates above", standby.text, LONG_S)
    life.signal(signal.SIGINT)
    all_end(*sites, standby, life, code=ExitCode.DRAINED, bound_s=LONG_S)
    whys = [event["why"] for event in place.seen("east", "syncer", "upstream_retaken")]
    assert whys == ["first version of a new site"]
    code, said = place.run("journal", "verify", "runs/east")
    assert code == 0, said


def last_state(config: RunConfig, folder: Path) -> OuterState:
    """What the syncer in ``folder`` remembered when it stopped."""
    snapshots = Snapshots(folder / "syncer" / "snapshots")
    plain = snapshots.load(snapshots.numbers()[-1], whole=False).state
    return OuterSync.restore(build.outer_options(config), plain).state


def gone_up(place: Place, region: str, syncer: str = "syncer") -> list[Event]:
    """The updates that a region has sent."""
    return [event for event in place.seen(region, syncer, "upstream") if event["event"] == "pushed"]


class NoRoom(Disk):
    """While it is ``full``, a disk without room for an update, a version above or a record of the journal."""

    def __init__(self) -> None:
        self.full = False

    def reached(self, step: Step) -> None:
        if self.full and step in (Step.SPOOL_WRITE, Step.SPOOL_SYNC, Step.OUTBOX_PUT, Step.JOURNAL_WRITE):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open(self, path: Path, mode: str, step: Step, buffering: int = -1) -> BinaryIO:
        """Open ``path`` whether or not there is room: a file that is open by then must not be lost by an error."""
        file: BinaryIO = path.open(mode, buffering)  # type: ignore[assignment]
        return file


@pytest.mark.slow
def test_while_a_region_s_disk_is_full_what_waits_does_not_grow_with_the_versions_above(tmp_path: Path) -> None:
    toy, regions = two_levels(tmp_path, seed_of("full"), 1_000_000)
    region, address, disk, log = regions["region-a"], f"127.0.0.1:{toy.port}", NoRoom(), Log()
    made: list[Upward] = []

    def speaks() -> Upward:
        made.append(speaker(region, "region-a", address, log.emit, disk))
        return made[0]

    syncer = region.syncer(log.emit, disk, above=speaks)
    with ExitStack() as alive:
        top = alive.enter_context(Process("syncer", toy))
        top.log.wait_for("listening", 1, 60.0)
        here = syncer.start()
        alive.callback(syncer.stop)
        alive.enter_context(SiteThread(region, "region-a-1", here, step_s=STEP_S))
        log.wait_for("upstream", 2, 60.0, where=lambda event: event["event"] == "pushed")
        other = alive.enter_context(SiteThread(toy, "alone", address, step_s=STEP_S))
        other.log.wait_for("pushed", 2, 60.0)

        def waiting() -> int:
            (above,) = made
            queues = (syncer.core._inbox, above.fetcher.queue, above.sealer.queue, above.sender.queue)
            files = files_under(Path(region.folder, "syncer"))
            return sum(each.qsize() for each in queues) + len(above._sent) + len(files)

        disk.full = True
        eventually(lambda: syncer.core.held is not None, 60.0, "the region waits for room")
        top.log.wait_for("published", 20, 60.0, since=len(top.log))
        before = waiting()
        top.log.wait_for("published", 200, 120.0, since=len(top.log))
        assert waiting() <= before + 2 * region.fragments
        disk.full = False
        eventually(lambda: syncer.core.held is None, 60.0, "it goes on")
        sent = len(log)
        log.wait_for("upstream", 2, 60.0, since=sent, where=lambda event: event["event"] == "pushed")
        newest = max(int(str(event["version"])) for event in top.log.of("published"))
        bases = lambda: syncer.core.ask(lambda machine: standing(machine.state), early=True)  # noqa: E731
        eventually(lambda: min(getattr(bases(), "versions", (0,))) >= newest - 20, 60.0, "the newest is taken")
