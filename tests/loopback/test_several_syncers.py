"""A run whose fragments lie with two syncers, as the processes that a user starts, over real gRPC on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from random import Random
from typing import Any

import pytest

from diloco.observe.summary import complaints
from diloco.runs.process import DEATHS_MAX, PEACE_S
from tests.loopback.cluster import free_port
from tests.runs.processes import TINY, Place, Verb, all_end, balanced, wait_for

SITES = ("site-a", "site-b")
KILLS = 10
SYNCERS = ["outer.num_fragments=4", "outer.num_syncers=2"]


def begun(place: Place, run: str, index: int, *settings: str) -> tuple[Verb, str]:
    """Syncer ``index`` of the run, and its address; started again it takes the address that it had."""
    number = sum(verb.name.startswith(f"{run}-syncer") for verb in place.verbs)
    own = [f"cluster.syncer.index={index}", *settings]
    verb = place.start(f"{run}-syncer-{number}", "syncer", *TINY, f"run.name={run}", *SYNCERS, *own)
    address = place.folder / "runs" / run / "syncers" / str(index) / "syncer.address"
    verb.until(address.is_file, "the syncer")
    return verb, address.read_text()


def pair_of(place: Place, run: str, *settings: str) -> tuple[list[Verb], list[str]]:
    """Both syncers of the run, and their addresses."""
    both = [begun(place, run, index, *settings, "cluster.syncer.listen=127.0.0.1:0") for index in range(2)]
    return [verb for verb, _ in both], [address for _, address in both]


def one_command(place: Place, *settings: str) -> tuple[Verb, str]:
    """One verb that runs both syncers of the run ``both``, and where a site joins."""
    port = free_port(in_a_row=2)
    own = ["cluster.syncer.processes=2", f"cluster.syncer.listen=127.0.0.1:{port}"]
    both = place.start("both", "syncer", *TINY, "run.name=both", *SYNCERS, *settings, *own)
    both.until(lambda: "a site joins with" in both.text(), "both")
    return both, f"127.0.0.1:{port}/127.0.0.1:{port + 1}"


def lives(place: Place, name: str) -> list[int]:
    """The ids of the processes that were the syncer ``name`` of the run ``both``."""
    log = place.folder / f"runs/both/logs/{name}.log"
    return [int(each) for each in re.findall(r"\(process (\d+)\)", log.read_text())] if log.is_file() else []


def digests(place: Place, run: str) -> dict[tuple[int, int], str]:
    """Of every version of every fragment that was published, in the whole model's numbers."""
    told = [event for event in place.events(run) if event["what"] == "published"]
    return {(int(str(e["fragment"])), int(str(e["version"]))): str(e["digest"]) for e in told}


def newest(place: Place, run: str, fragments: tuple[int, ...]) -> int:
    known = digests(place, run)
    return min(max((v for f, v in known if f == fragment), default=0) for fragment in fragments)


@pytest.mark.slow
def test_two_syncers_make_the_bits_of_one(place: Place) -> None:
    lock_step = ["run.tokens=20000", "outer.quorum=2", "outer.lock_step=true", "outer.inner_steps=8"]
    lock_step += ["inner.deterministic=true", "inner.schedule=constant", "outer.kind=nesterov", "outer.momentum=0.9"]
    pair, addresses = pair_of(place, "two", *lock_step)
    all_end(*[place.site("two", "/".join(addresses), name, *SYNCERS, *lock_step) for name in SITES], *pair)
    code, said = place.run("eval", "runs/two")
    assert code == 0, said
    assert "(whole validation split)" in said
    alone, address = place.syncer("one", *SYNCERS[:1], *lock_step)
    all_end(*[place.site("one", address, name, *SYNCERS[:1], *lock_step) for name in SITES], alone)
    ones, twos = digests(place, "one"), digests(place, "two")
    last = {fragment: min(max(v for f, v in told if f == fragment) for told in (ones, twos)) for fragment in range(4)}
    # Each syncer ends when its own fragments have the tokens, so that only the last versions may be of other steps.
    both = [(fragment, version) for fragment, end in last.items() for version in range(1, end)]
    assert len(both) >= 4 * 6
    assert {key: twos[key] for key in both} == {key: ones[key] for key in both}


@pytest.mark.slow
def test_one_of_two_syncers_dies_and_the_others_fragments_go_on(place: Place) -> None:
    settings = ["run.tokens=60000", "outer.quorum=1", "outer.staleness_max=60", "site.slowdown=3"]
    settings += ["outer.updates_in_flight_max=1", "inner.checkpoint_every_steps=0"]
    (first, second), (one, other) = pair_of(place, "pair", *settings)
    sites = [place.site("pair", f"{one}/{other}", name, *SYNCERS, *settings) for name in SITES]
    wait_for(lambda: newest(place, "pair", (0, 1, 2, 3)) >= 2, "versions of all fragments", sites[0].text)

    second.kill()
    time.sleep(0.2)
    held, went_on = newest(place, "pair", (1, 3)), newest(place, "pair", (0, 2))
    wait_for(lambda: newest(place, "pair", (0, 2)) >= went_on + 3, "the other's fragments to go on", sites[0].text)
    assert newest(place, "pair", (1, 3)) == held, "nobody publishes them"
    (place.folder / "runs/pair/syncers/1/syncer.address").unlink()
    second, again = begun(place, "pair", 1, *settings, f"cluster.syncer.listen={other}")
    assert again == other
    wait_for(lambda: newest(place, "pair", (1, 3)) >= held + 2, "its own fragments to catch up", second.text)
    all_end(*sites, first, second)
    for name in SITES:
        (done,) = place.seen("pair", name, "site_done")
        ledger = balanced(done)
        assert ledger["tokens_lost"] == ledger["tokens_refused"] == 0, "what was acknowledged is merged"
        # What was trained for one syncer after the other's part had ended.
        assert ledger["tokens_merged"] >= 0.8 * ledger["tokens_processed"]
    for index in range(2):
        code, said = place.run("journal", "verify", f"runs/pair/syncers/{index}")
        assert code == 0, said


@pytest.mark.slow
def test_one_command_runs_both_syncers_and_starts_again_the_one_that_dies(place: Place) -> None:
    settings = ["run.tokens=40000", "outer.quorum=1", "outer.staleness_max=60", "site.slowdown=3"]
    settings += ["outer.updates_in_flight_max=1"]
    both, addresses = one_command(place, *settings)
    [line] = re.findall(r"a site joins with: .*", both.text())
    assert f" site.syncer={addresses} " in line
    site = place.site("both", addresses, SITES[0], *SYNCERS, *settings)
    wait_for(lambda: newest(place, "both", (0, 1, 2, 3)) >= 2, "versions of all fragments", site.text)
    [first] = lives(place, "syncer-1")
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: len(lives(place, "syncer-1")) == 2, "it again", both.text)
    assert "syncer-1 was ended by signal 9" in both.text()
    all_end(site, both)
    (done,) = place.seen("both", SITES[0], "site_done")
    assert balanced(done)["tokens_lost"] == 0
    for index in range(2):
        assert (place.folder / f"runs/both/syncers/{index}/syncer/final/model.safetensors").is_file()


@pytest.mark.hunt
@pytest.mark.parametrize("seed", range(10))
def test_kills_of_one_commands_syncers_lose_nothing_and_send_little_again(place: Place, seed: int) -> None:
    random = Random(seed)
    settings = ["run.tokens=1e12", "run.seconds=7200", "outer.quorum=1", "outer.inner_steps=4", "model.dim=256"]
    settings += ["outer.staleness_max=200", "codec.up=fp32", "site.up_mbps=50"]
    both, addresses = one_command(place, *settings)
    sites = [place.site("both", addresses, name, *SYNCERS, *settings) for name in SITES]
    killed, lives_since_s = [0, 0], [0.0, 0.0]

    def serving(which: int) -> int:
        """The id of the process that took the place of the last killed one."""
        name = ("syncer", "syncer-1")[which]
        wait_for(lambda: len(lives(place, name)) == killed[which] + 1, "it again", both.text)
        return lives(place, name)[-1]

    def may_die(which: int) -> bool:
        """Whether its death would not be one in a row too many: then it would be given up."""
        rested = time.monotonic() - lives_since_s[which] > PEACE_S + 1.0
        return rested or killed[which] % DEATHS_MAX != DEATHS_MAX - 1

    wait_for(lambda: newest(place, "both", (0, 1, 2, 3)) >= 2, "versions of all fragments", sites[0].text)
    while sum(killed) < KILLS:
        if not (victims := [which for which in range(2) if may_die(which)]):
            time.sleep(0.2)
            continue
        which = random.choice(victims)
        pid = serving(which)
        time.sleep(random.expovariate(1.0))
        os.kill(pid, signal.SIGKILL)
        killed[which] += 1
        serving(which)
        lives_since_s[which] = time.monotonic()
    assert all(serving(which) for which in range(2))
    held = newest(place, "both", (0, 1, 2, 3))
    wait_for(lambda: newest(place, "both", (0, 1, 2, 3)) >= held + 2, "versions after the last kill", both.text)
    both.signal(signal.SIGINT)
    assert both.end(90.0) == 75, both.text()
    for name, site in zip(SITES, sites, strict=True):
        assert site.end(90.0) in (0, 75), site.text()
        (done,) = place.seen("both", name, "site_done")
        ledger = balanced(done)
        assert ledger["tokens_lost"] == ledger["tokens_refused"] == 0, ledger
        pushed = sum(int(str(event["bytes"])) for event in place.seen("both", name, "pushed") if event["bytes"])
        sent = int(str(place.seen("both", name, "meter")[-1]["bytes_up"]))
        print(f"{name}: killed {killed}, {sent} bytes sent, {pushed} in {ledger['tokens_merged']} merged tokens")
        assert pushed <= sent <= 1.05 * pushed
    for index in range(2):
        code, said = place.run("journal", "verify", f"runs/both/syncers/{index}")
        assert code == 0, said


@pytest.mark.slow
def test_up_runs_two_syncers_and_a_syncer_and_a_site_that_are_killed_come_back(place: Place) -> None:
    faults = "- {at_s: 1, do: kill, target: site-b, for_s: 0.5}\n- {at_s: 2, do: kill, target: syncer-1, for_s: 3}"
    (place.folder / "faults.yaml").write_text(faults)
    sites = ["cluster=one", "cluster.sites.site-a.slowdown=4", "cluster.sites.site-b.slowdown=5", "network.rtt_ms=20"]
    settings = [*TINY, *sites, *SYNCERS, "run.name=otter", "run.seconds=30", "scenario=faults.yaml"]
    code, text = place.run("up", *settings, bound_s=120.0)
    assert code == 0, text
    assert "otter: ok" in text
    run = place.folder / "runs/otter"
    summary = json.loads((run / "summary.json").read_text())
    assert complaints(summary) == []
    assert summary["status"] == "ok"
    assert len(summary["versions"]) == 4
    assert min(summary["versions"]) > 0
    assert summary["global"]["val_loss"] < summary["global"]["val_loss_start"]
    assert [fault["target"] for fault in summary["faults"]] == ["site-b", "syncer-1"]
    assert summary["sites"]["site-b"]["restarts"] == 1
    for name, site in summary["sites"].items():
        assert site["updates_merged_since_fault"] > 0, (name, text)
        assert site["tokens_merged"] > 0
        assert site["bytes_up"] > 0 < site["bytes_down"]
    wire = summary["wire"]
    assert wire["bytes_up"] + wire["bytes_down"] > wire["bytes_joins"] > 0 < wire["bytes_fp32_equivalent"]
    for index in range(2):
        assert (run / f"syncers/{index}/syncer/final/model.safetensors").is_file()
    assert (place.folder / "runs/latest").resolve() == run.resolve()
    assert (run / "report.html").is_file()


@pytest.mark.slow
def test_the_ranks_of_a_site_hold_the_same_of_both_syncers(place: Place) -> None:
    settings = ["run.tokens=8000", "site.nproc=2", "inner.batch_sequences=2", "site.parallel=ddp"]
    pair, addresses = pair_of(place, "ranks", *settings)
    all_end(place.site("ranks", "/".join(addresses), "site-a", *SYNCERS, *settings), *pair)
    (compared,) = place.seen("ranks", "site-a", "ranks_compared")
    digests: Any = compared["digests"]
    assert len(digests) == 2
    assert len(set(digests)) == 1
    assert newest(place, "ranks", (0, 1, 2, 3)) >= 2
