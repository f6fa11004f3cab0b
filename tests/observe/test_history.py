from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.observe.eventlog import Event
from diloco.observe.history import SERIES_MAX, RunHistory, Series, SiteHistory
from diloco.observe.summary import closing_lines, summarize, unfinished
from tests.observe.recorded import FRAGMENTS, SITES, STEP_TOKENS, Recorder, told


def event(at: float, who: str, what: str, **more: object) -> Event:
    return {"at": float(at), "who": who, "what": what, **more}


def taking(history: RunHistory) -> Callable[..., None]:
    at = iter(range(100))
    return lambda who, what, **fields: history.take(event(next(at), who, what, **fields))


def test_it_knows_sites_versions_rounds_faults_and_bytes(recorder: Recorder) -> None:
    history = told(recorder.events)
    assert sorted(history.sites) == sorted(SITES)
    assert history.versions == recorder.versions
    assert len(history.rounds) == history.num_rounds == sum(recorder.versions)
    assert all(round_.published_s is not None and round_.met_s is not None for round_ in history.rounds)
    assert {name: site.merges for name, site in history.sites.items()} == recorder.sequence
    assert history.run_tokens == recorder.run_tokens
    assert (history.ending, history.progress, history.epoch) == ("finished", 1.0, 2)
    assert history.units["leased"] == sum(history.units[name] for name in ("merged", "partly", "in_hand", "given_back"))
    assert history.units["merged"] == 40 * 59, "as was said last"
    faults = [(fault.what, fault.target, fault.seconds) for fault in history.faults]
    assert faults == [("kill", "site-b", 6.0), ("partition", "link:site-c", 10.0), ("kill", "syncer", 3.0)]
    assert [(fault.healed_s or 0) - fault.at_s for fault in history.faults] == pytest.approx([6.0, 10.0, 3.0])
    # The syncer's death is everybody's last fault: 18 whole seconds of one round each come after it.
    assert {site.merges_since_fault for site in history.sites.values()} == {18}
    sent = [event for event in recorder.events if event["what"] in ("pushed", "fetched")]
    assert history.bytes_fp32 == sum(4 * FRAGMENTS[int(str(event["fragment"]))] for event in sent)
    assert history.bytes_data_parallel() == sum(recorder.steps.values()) * 2 * 2 * 4 * sum(FRAGMENTS) // 3


def test_a_site_is_one_over_its_processes(recorder: Recorder) -> None:
    site = told(recorder.events).sites["site-b"]
    assert (site.restarts, sorted(site.meters), len(site.spans)) == (1, [1, 2], 2)
    assert site.meter("inner_steps") == recorder.steps["site-b"]
    assert None in site.losses.points, "the line is drawn across the death"
    points = [point for point in site.losses.whole() if point is not None]
    assert [point[1] for point in points] == sorted(point[1] for point in points)
    assert site.tokens == site.step * STEP_TOKENS == points[-1][1], "what a restart does again is counted again"
    site = SiteHistory()
    assert (site.meter("stall_s"), site.meter_max("step_s_max"), site.meter_by_steps("step_s_p50")) == (0, 0, 0)
    site.meters = {
        1: {"inner_steps": 30.0, "stall_s": 1.0, "step_s_p50": 0.1, "step_s_max": 0.9},
        2: {"inner_steps": 10.0, "stall_s": 0.5, "step_s_p50": 0.5, "step_s_max": 0.7},
    }
    assert (site.meter("stall_s"), site.meter_max("step_s_max")) == (1.5, 0.9)
    assert site.meter_by_steps("step_s_p50") == pytest.approx(0.2)


def test_staleness_is_versions_behind_and_an_outer_step_that_a_restart_repeats_counts_once() -> None:
    started = event(0, "syncer", "syncer_started", epoch=1, versions=[5, 7], recovered=0)
    history = told([started, event(1, "site-a", "joined", incarnation=1, versions=[5, 4])])
    assert history.staleness(history.sites["site-a"]) == 3
    step = {"fragment": 0, "version": 1, "sites": {"site-a": 1.0}, "staleness": {"site-a": 0}}
    history = told([event(at, "syncer", "outer_step", **step) for at in (1, 2)])
    assert (len(history.rounds), history.sites["site-a"].merges) == (1, 1)


def test_the_time_between_two_commands_and_that_of_an_evaluation_afterwards_are_left_out() -> None:
    history = told(
        [
            event(0, "up", "run", state="started", sites=["site-a"]),
            event(5, "up", "link", site="site-a", bytes_up=10, bytes_down=1),
            event(10, "up", "run", state="ended", status="drained"),
            event(5000, "up", "eval", tokens=1, val_loss=1.0),
            event(9000, "up", "run", state="started", sites=["site-a"]),
            event(9004, "up", "link", site="site-a", bytes_up=7, bytes_down=2),
        ]
    )
    assert (history.seconds, history.evaluations[0].at_s) == (pytest.approx(14), pytest.approx(10))
    assert (history.sites["site-a"].bytes_up, history.sites["site-a"].bytes_down) == (17, 3)
    killed = [event(0, "up", "run", state="started", sites=["site-a"]), event(10, "site-a", "step", step=1, tokens=1)]
    by_hand = [event(0, "syncer", "syncer_started", epoch=1), event(10, "syncer", "final", ending="drained")]
    for events in (killed, by_hand):
        history = told([*events, event(9000, "eval", "eval", tokens=1, val_loss=1.0)])
        assert (history.seconds, history.evaluations[0].at_s) == (pytest.approx(10), pytest.approx(10))
    more = [event(9500, "syncer", "syncer_started", epoch=2), event(9507, "syncer", "final", ending="finished")]
    assert told([*by_hand, *more]).seconds == pytest.approx(17), "a syncer that goes on after a pause"


@pytest.mark.parametrize("had", [{}, {"had": -1}], ids=["an earlier release", "today's"])
def test_what_a_site_fetches_whole_is_a_join_where_it_held_none_or_was_too_far_behind(had: dict[str, int]) -> None:
    recorder = Recorder()
    recorder.say(0, "up", "layout", fragments=[100])
    recorder.say(1, "site-a", "fetched", fragment=0, version=3, bytes=400, whole=True, **had)
    recorder.say(2, "site-a", "fetched", fragment=0, version=4, bytes=60, whole=False)
    recorder.say(3, "site-a", "pushed", fragment=0, sequence=1, outcome="refused", bytes=60)
    history = told(recorder.events)
    assert (history.bytes_joins, history.bytes_fp32) == (400, 400)
    recorder.say(4, "syncer", "published", fragment=0, version=5, bytes=400)
    recorder.say(5, "site-a", "fetched", fragment=0, version=5, had=4, bytes=400, whole=True)
    history = told(recorder.events)
    assert (history.bytes_joins, history.bytes_fp32) == (400, 800), "its codec sends it whole"
    recorder.say(6, "syncer", "published", fragment=0, version=6, bytes=60)
    recorder.say(7, "site-a", "fetched", fragment=0, version=9, had=5, bytes=400, whole=True)
    assert told(recorder.events).bytes_joins == 800, "it was too far behind for what the codec had made"


def test_states_of_a_site(recorder: Recorder) -> None:
    seen: dict[str, list[str]] = {name: [] for name in SITES}
    history = RunHistory()
    for event in sorted(recorder.events, key=lambda event: float(str(event["at"]))):
        history.take(event)
        for name, site in history.sites.items():
            if seen[name][-1:] != [site.state()]:
                seen[name].append(site.state())
    start = ["waiting", "starting", "training"]
    assert seen["site-a"] == [*start, "done"]
    assert seen["site-b"] == [*start, "killed", "starting", "training", "done"]
    assert seen["site-c"] == [*start, "alone", "training", "done"]


@pytest.mark.parametrize("seed", range(20))
def test_any_loss_of_events_and_fields_can_be_read(seed: int) -> None:
    chance = random.Random(seed)
    events = Recorder(20).record()
    torn: list[Event] = []
    for event in events:
        if chance.random() < 0.7:
            kept = {name: value for name, value in event.items() if chance.random() < 0.8}
            torn.append({name: None if chance.random() < 0.1 else value for name, value in kept.items()})
    RunHistory(torn)


def test_the_events_of_one_site_are_a_part_of_the_run_whose_whole_is_at_its_syncer() -> None:
    take = taking(history := RunHistory())
    take("fra", "joined", incarnation=1, versions=[4], syncer="10.0.0.1:7077")
    assert history.whole_at == "10.0.0.1:7077"
    for sequence in (1, 2):
        take("fra", "sealed", fragment=0, sequence=sequence, tokens=100)
    take("fra", "adopted", fragment=0, version=5, merged=[1])
    take("fra", "meter", incarnation=1, inner_steps=25, tokens=250, train_s=5.0)
    found = summarize(history, None, {})
    assert found["status"] == "only this machine's part; the whole run is at its syncer, 10.0.0.1:7077"
    assert found["versions"] == [5]
    fra = found["sites"]["fra"]  # type: ignore[index]
    counts = {name: fra[f"tokens_{name}"] for name in ("processed", "merged", "in_flight", "lost")}
    assert counts == {"processed": 250, "merged": 100, "in_flight": 150, "lost": 0}, "it cannot know what is lost"
    assert fra["updates_merged"] == 1
    assert closing_lines(found, history, Path("runs/first"))[2] == "merged  100 of 250 tokens in 5 outer steps"
    take("syncer", "syncer_started", epoch=1, versions=[5])
    assert history.whole_at == "", "the syncer keeps its events in this folder too"
    take = taking(history := RunHistory())
    take("standby", "connected", anew=True, syncer="10.0.0.1:7077")
    take("standby", "disconnected", why="gone")
    assert (history.sites, history.whole_at) == ({}, "10.0.0.1:7077"), "a standby is no site"
    assert "tokens" not in "".join(closing_lines(summarize(history, None, {}), history, Path("runs/first")))


def test_a_run_of_two_syncers_ends_when_both_have() -> None:
    take = taking(history := RunHistory())
    take("up", "run", state="started", sites=["site-a"], syncers=2)
    take("syncer", "syncer_started", epoch=1, versions=[3, 4], fragments=[0, 2], of_syncer=0)
    take("syncer-1", "syncer_started", epoch=1, versions=[5], fragments=[1], of_syncer=1)
    assert history.versions == [3, 5, 4]
    take("site-a", "joined", incarnation=1, versions=[5], fragments=[1], of_syncer=1)
    take("site-a", "joined", incarnation=1, versions=[3, 4], fragments=[0, 2], of_syncer=0)
    assert history.sites["site-a"].base_versions == {0: 3, 1: 5, 2: 4}
    take("site-a", "disconnected", why="gone", of_syncer=0)
    take("site-a", "disconnected", why="gone", of_syncer=1)
    take("site-a", "connected", of_syncer=0)
    assert history.sites["site-a"].state() == "alone"
    take("site-a", "connected", of_syncer=1)
    assert history.sites["site-a"].state() == "training"
    one = {"versions": [5], "fragments": [1], "of_syncer": 1}
    for who, what, fields, seen in (
        ("up", "process", {"name": "syncer", "state": "started"}, {"syncer_up": False}),
        ("up", "process", {"name": "syncer-1", "state": "started"}, {"syncer_up": True}),
        ("up", "process", {"name": "syncer-1", "state": "ended"}, {"syncer_up": False}),
        ("syncer", "last_round", {"why": "tokens"}, {"last_round": False}),
        ("syncer", "final", {"ending": "finished"}, {"ending": None}),
        ("syncer-1", "last_round", {"why": "tokens"}, {"last_round": True}),
        ("syncer-1", "final", {"ending": "drained"}, {"ending": "drained"}),
        ("syncer-1", "syncer_started", {**one, "epoch": 2}, {"ending": None}),
        ("syncer-1", "final", {"ending": "finished"}, {}),  # Read again from its journal as it starts.
        ("syncer-1", "syncer_started", {**one, "epoch": 3, "ending": "finished"}, {"ending": "finished"}),
        ("syncer-1", "final", {"ending": "finished"}, {"ending": "finished"}),
    ):
        take(who, what, **fields)
        assert {name: getattr(history, name) for name in seen} == seen, (who, what, fields)


def test_tokens_merged_are_what_syncers_began_with_and_have_published_since() -> None:
    take = taking(history := RunHistory())
    take("up", "run", state="started", sites=["site-a", "site-b"], syncers=2)
    take("up", "layout", fragments=[4, 4, 4, 4])
    assert history.tokens_merged("site-a") == 0
    take("syncer", "syncer_started", versions=[3, 4], fragments=[0, 2], tokens_merged={"site-a": 800})
    take("syncer-1", "syncer_started", versions=[5, 5], fragments=[1, 3], tokens_merged={"site-a": 600, "site-b": 40})
    assert (history.tokens_merged("site-a"), history.tokens_merged("site-b")) == (350, 10)
    for _ in range(2):  # Said again after a restart that had it in its journal.
        take("syncer", "published", fragment=2, version=5, merged={"site-a": [200, 1], "site-b": [80, 2]})
    take("syncer-1", "published", fragment=1, version=6, merged={"site-b": [80, 1]})
    assert (history.tokens_merged("site-a"), history.tokens_merged("site-b")) == (400, 50)
    take("syncer", "restored", lineage=2, versions=[1, 1], fragments=[0, 2])
    take("syncer", "syncer_started", versions=[1, 1], fragments=[0, 2], tokens_merged={"site-a": 200})
    assert (history.tokens_merged("site-a"), history.tokens_merged("site-b")) == (200, 30)
    take("syncer", "syncer_started", versions=[1, 1], fragments=[0, 2])
    assert history.tokens_merged("site-a") == 200, "one of an earlier release does not say it"
    take = taking(history := RunHistory())
    take("syncer", "syncer_started", versions=[0, 0], tokens_merged={})
    for fragment in (0, 1):
        take("syncer", "published", fragment=fragment, version=1, merged={"site-a": [300, 1]})
    assert history.tokens_merged("site-a") == 300, "a mean over the fragments, also where no layout was said"


def test_a_long_series_is_thinned_and_a_short_one_is_kept_whole() -> None:
    series = Series()
    for number in range(10 * SERIES_MAX):
        series.add(float(number), 1.0)
        if number == 100:
            series.cut()
    points = series.whole()
    assert SERIES_MAX / 4 < len(points) < SERIES_MAX + 2
    assert points[-1] == (10 * SERIES_MAX - 1.0, 1.0)
    assert None in points
    firsts = [point[0] for point in points if point is not None]
    assert firsts == sorted(firsts)
    short = Series()
    short.add(1.0, 2.0)
    short.cut()
    short.cut()
    short.add(2.0, 1.0)
    assert short.whole() == [(1.0, 2.0), None, (2.0, 1.0)]


# --- A run by hand: the sites' own events are kept elsewhere ---------------------------------------------------------


def reported(at: float, site: str, step: int, incarnation: int = 7, **more: object) -> dict[str, object]:
    told = {"loss": 3.0, "tokens_per_s": 90.0, "tokens_processed": 100 * step, "tokens_in_flight": 100}
    counts = {"train_s": 10.0, "stall_s": 0.1, "bytes_up": 500, "bytes_down": 700, "versions": [1]}
    fields = {"site": site, "step": step, "incarnation": incarnation, **told, **counts, **more}
    return event(at, "syncer", "reported", **fields)


def test_heartbeats_that_the_syncer_recorded_stand_for_a_sites_own_events() -> None:
    history = RunHistory(
        [
            event(0, "syncer", "syncer_started", epoch=1, versions=[0]),
            event(0, "syncer", "layout", fragments=[1000]),
            event(1, "syncer", "site_joined", site="fra", why="new"),
            event(1, "iad", "joined", incarnation=3, versions=[0]),
            event(2, "iad", "step", step=1, tokens=10, loss=4.0),
            reported(5, "fra", 10),
            reported(5, "iad", 99, incarnation=3),
            event(6, "syncer", "outer_step", fragment=0, version=1, sites={"fra": 1.0}, staleness={"fra": 0}),
            event(6, "syncer", "published", fragment=0, version=1, merged={"fra": [800, 1]}, run_tokens=800, bytes=50),
            reported(10, "fra", 12, incarnation=8, train_s=2.0),
            event(12, "syncer", "site_left", site="fra", why="it said goodbye"),
        ]
    )
    fra, iad = history.sites["fra"], history.sites["iad"]
    assert history.by_hand
    assert (iad.step, iad.tokens) == (1, 10), "its own events are here, and count"
    assert (fra.step, fra.tokens, fra.restarts, fra.meter("inner_steps")) == (12, 1200, 1, 12)
    assert fra.losses.whole() == [(5.0, 1000, 3.0), None, (10.0, 1200, 3.0)]
    assert [(span.start_s, span.end_s) for span in fra.spans] == [(1.0, 12.0)]
    assert [(span.start_s, span.end_s) for span in history.syncer_spans] == [(0.0, None)]
    assert history.bytes_fp32 == 2 * 4 * 1000
    found = summarize(history, None, {})
    ledger = {name: value for name, value in found["sites"]["fra"].items() if name.startswith("tokens_")}  # type: ignore[index]
    assert (ledger["tokens_processed"], ledger["tokens_merged"], ledger["tokens_in_flight"]) == (1200, 800, 100)
    assert (ledger["tokens_refused"], ledger["tokens_lost"]) == (300, 0), "it left, and said that it lost nothing"
    history.take(event(13, "syncer", "final", ending="finished", versions=[1]))
    assert summarize(history, None, {})["status"] == "ok", "nobody was asked to evaluate it"


def test_a_site_that_moves_to_another_folder_goes_on_by_its_heartbeats_and_loses_nothing_while_the_run_goes_on() -> (
    None
):
    here = [
        event(0, "syncer", "syncer_started", epoch=1, versions=[0]),
        event(1, "fra", "joined", incarnation=1, versions=[0]),
        *(event(1 + step, "fra", "step", step=step, tokens=100, loss=4.0) for step in range(1, 31)),
        event(32, "fra", "meter", incarnation=1, inner_steps=30, train_s=30.0, tokens=3000),
        reported(33, "fra", 30, incarnation=1),
    ]
    assert unfinished(told(here).sites["fra"], {"tokens_merged": 2000}, told(here))["in_flight"] == 1000
    fra = told([*here, reported(50, "fra", 1, 2, train_s=1.0), reported(90, "fra", 41, 2, train_s=40.0)]).sites["fra"]
    assert (fra.restarts, fra.meter("inner_steps"), fra.meter("train_s"), fra.tokens) == (1, 70, 70.0, 4100)


def test_what_joins_anew_or_at_another_syncer_is_no_restart_and_counts_once() -> None:
    fra = told([reported(5, "fra", 10), reported(6, "fra", 11, incarnation=9, train_s=11.0, bytes_up=600)]).sites["fra"]
    assert (fra.restarts, fra.meter("train_s"), fra.bytes_up, fra.meter("inner_steps")) == (0, 11.0, 600, 11)
    both = [reported(5 * turn, "fra", turn, incarnation=7 + of, of_syncer=of) for turn in (1, 2, 3) for of in (0, 1)]
    fra = told(both).sites["fra"]
    assert (fra.restarts, fra.step, fra.meter("inner_steps"), fra.bytes_up, fra.bytes_down) == (0, 3, 3, 1000, 1400)
