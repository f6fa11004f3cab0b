"""A run whose fragments lie with two syncers, as the processes that a user starts, over real gRPC on loopback."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.config import build
from diloco.config.errors import ExitCode
from diloco.inner.data import TokenStream
from diloco.models.sources import past_of
from diloco.sync.data_units import common, size, without
from diloco.sync.fates import columns_of
from diloco.syncer.restoring import Kept
from diloco.wire.client import AdminClient
from diloco.wire.options import SecurityOptions
from tests.runs.processes import TINY, Place, Verb, place_in, wait_for

SYNCERS = ["outer.num_fragments=4", "outer.num_syncers=2"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with place_in(tmp_path) as made:
        yield made


def begun(place: Place, run: str, index: int, *settings: str) -> tuple[Verb, str]:
    """Syncer ``index`` of the run, and its address; started again it takes the address that it had."""
    number = sum(verb.name.startswith(f"{run}-syncer") for verb in place.verbs)
    own = [f"cluster.syncer.index={index}", *settings]
    verb = place.start(f"{run}-syncer-{number}", "syncer", *TINY, f"run.name={run}", *SYNCERS, *own)
    address = place.folder / "runs" / run / "syncers" / str(index) / "syncer.address"
    wait_for(lambda: address.is_file() or verb.process.poll() is not None, "the syncer", verb.text)
    assert address.is_file(), verb.text()
    return verb, address.read_text()


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
    any_port = "cluster.syncer.listen=127.0.0.1:0"
    pair = [begun(place, "two", index, *lock_step, any_port) for index in range(2)]
    sites = [
        place.site("two", "/".join(address for _, address in pair), name, *SYNCERS, *lock_step)
        for name in ("site-a", "site-b")
    ]
    assert [site.end() for site in sites] == [0, 0], sites[0].text() + sites[1].text()
    assert [syncer.end() for syncer, _ in pair] == [0, 0], pair[0][0].text() + pair[1][0].text()

    code, said = place.run("eval", "runs/two")
    assert code == 0, said
    assert "(whole validation split)" in said

    alone, address = place.syncer("one", *SYNCERS[:1], *lock_step)
    sites = [place.site("one", address, name, *SYNCERS[:1], *lock_step) for name in ("site-a", "site-b")]
    assert [site.end() for site in sites] == [0, 0], sites[0].text() + sites[1].text()
    assert alone.end() == 0, alone.text()

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
    any_port = "cluster.syncer.listen=127.0.0.1:0"
    (first, one), (second, other) = [begun(place, "pair", index, *settings, any_port) for index in range(2)]
    sites = [place.site("pair", f"{one}/{other}", name, *SYNCERS, *settings) for name in ("site-a", "site-b")]
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

    assert [site.end() for site in sites] == [0, 0], sites[0].text() + sites[1].text()
    assert first.end() == 0, first.text()
    assert second.end() == 0, second.text()
    for name in ("site-a", "site-b"):
        (done,) = place.seen("pair", name, "site_done")
        ledger = dict(done["ledger"])  # type: ignore[call-overload]
        processed = ledger.pop("tokens_processed")
        assert sum(ledger.values()) == processed
        assert ledger["tokens_lost"] == ledger["tokens_refused"] == 0, "what was acknowledged is merged"
        # What was trained for one syncer after the other's part had ended.
        assert ledger["tokens_merged"] >= 0.8 * processed
    for index in range(2):
        code, said = place.run("journal", "verify", f"runs/pair/syncers/{index}")
        assert code == 0, said


@pytest.mark.slow
def test_whoever_mixes_the_syncers_up_is_told_so(place: Place) -> None:
    pair = [begun(place, "mixed", index, "cluster.syncer.listen=127.0.0.1:0") for index in range(2)]
    (first, one), (_, other) = pair
    code, said = place.run("status", "runs/mixed")
    assert code == 0, said
    assert "run mixed on 2 syncers  0% of the run  versions 0:0,1:0,2:0,3:0  0 tokens merged" in said
    swapped = place.site("mixed", f"{other}/{one}", "site-a", *SYNCERS)
    assert swapped.end() == 4, swapped.text()
    assert "cluster.syncer.index is 0 at the site and 1 at the syncer (syncer 0)" in swapped.text()
    weighed = place.site("mixed", f"{one}/{other}", "site-a", *SYNCERS, "outer.syncer_mbps=[3,1]")
    assert weighed.end() == 4, weighed.text()
    assert "outer.syncer_mbps is not set in run mixed and [3.0, 1.0] here: leave that setting out" in weighed.text()
    single = place.site("mixed", one, "site-a", *SYNCERS)
    assert single.end() == 2, single.text()
    assert f"site.syncer is '{one}': 2 addresses with / between, one for each of outer.num_syncers" in single.text()
    first.kill()
    code, said = place.run("status", f"{one}/{other}")
    assert code == 3, said
    assert f"DOES NOT ANSWER: {one}" in said
    assert "holds fragments" in said


@pytest.mark.slow
def test_up_runs_two_syncers_and_one_that_is_killed_comes_back(place: Place) -> None:
    (place.folder / "faults.yaml").write_text("- {at_s: 2, do: kill, target: syncer-1, for_s: 3}")
    sites = ["cluster=one", "cluster.sites.site-b.slowdown=1.3", "network.rtt_ms=20"]
    settings = [*TINY, *sites, *SYNCERS, "run.name=otter", "run.seconds=12", "scenario=faults.yaml"]
    code, text = place.run("up", *settings, bound_s=120.0)
    assert code == 0, text
    assert "otter: ok" in text
    summary = json.loads((place.folder / "runs/otter/summary.json").read_text())
    assert summary["status"] == "ok"
    assert len(summary["versions"]) == 4
    assert min(summary["versions"]) > 0
    assert summary["global"]["val_loss"] < summary["global"]["val_loss_start"]
    assert [fault["target"] for fault in summary["faults"]] == ["syncer-1"]
    for index in range(2):
        assert (place.folder / f"runs/otter/syncers/{index}/syncer/final/model.safetensors").is_file()
    for site in summary["sites"].values():
        assert site["tokens_merged"] > 0
        assert site["bytes_up"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_ranks_of_a_site_hold_the_same_of_both_syncers(place: Place, parallel: str) -> None:
    settings = ["run.tokens=8000", "site.nproc=2", "inner.batch_sequences=2", f"site.parallel={parallel}"]
    pair = [begun(place, "ranks", index, *settings, "cluster.syncer.listen=127.0.0.1:0") for index in range(2)]
    site = place.site("ranks", "/".join(address for _, address in pair), "site-a", *SYNCERS, *settings)
    assert site.end(90.0) == 0, site.text()
    assert [syncer.end() for syncer, _ in pair] == [0, 0]
    compared = place.seen("ranks", "site-a", "ranks_compared")
    assert len(compared) == (parallel == "ddp")  # Of parts no two ranks have the same.
    assert all(len(set(each["digests"])) == 1 for each in compared)  # type: ignore[call-overload]
    assert newest(place, "ranks", (0, 1, 2, 3)) >= 2


# --- Units of one text leased to the processes that a user starts; one of them is killed for good --------------------

UNIT = 8
LEASED = (
    "data.leased=true",
    f"data.unit_sequences={UNIT}",
    "data.units_ahead=32",
    "data.unit_lease_s=2",
    "outer.site_timeout_s=4",
    "run.seconds=900",
)


def notes(place: Place) -> list[object]:
    return [event["what"] for event in place.events("units") if event["who"] == "syncer"]


@pytest.mark.slow
def test_what_a_site_that_is_killed_for_good_had_is_merged_by_another_and_nothing_twice(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.folder)
    syncer, address = place.syncer("units", *LEASED, "cluster.syncer.heartbeat_s=0.2")
    sites = {name: place.site("units", address, name, *LEASED) for name in ("site-a", "site-b")}
    lost = sites["site-b"]
    wait_for(lambda: len(place.seen("units", "site-b", "adopted")) >= 4, "versions", lost.text)
    lost.kill()
    wait_for(lambda: "units_reissued" in notes(place), "units that are leased again", syncer.text)
    past = past_of("runs/units")
    epoch = TokenStream(build.corpus(past.config), "train", 32, 4).sequences_per_epoch // UNIT

    operator = AdminClient(address, SecurityOptions())

    def units_now() -> Any:
        told: Any = operator.status()["units"]
        assert told["leased"] == told["merged"] + told["partly"] + told["in_hand"] + told["given_back"]
        return told

    # The other draws what it is leased in order, so when more is merged than was leased by then, all of that is.  What
    # it has in hand itself is given back too while it is silent, as on a loaded machine, and then comes later.
    upto: dict[int, int] = {}

    def is_over() -> bool:
        told, given_back = units_now(), notes(place).count("units_given_back")
        if told["given_back"]:
            return False
        return bool(told["merged"] > upto.setdefault(given_back, max(epoch, told["leased"])))

    wait_for(is_over, "the end of the epoch", syncer.text)
    operator.drain()
    operator.close()
    assert sites["site-a"].end() == ExitCode.DRAINED, sites["site-a"].text()
    assert syncer.end() == ExitCode.DRAINED, syncer.text()

    machine = Kept(past.data).replay(past.rules(), shortest=True).machine
    units = machine.state.units
    assert units is not None
    found = columns_of(machine.options, machine.state)
    assert found.balanced(), found
    assert found.reissued > 0, "what the lost site had in hand went to the other"
    assert units.repeated == 0, "nothing was merged twice; a site that was too fast drew its own over again, unnamed"
    missed = without([(0, epoch)], units.over)
    assert missed == common(missed, units.begun), "a unit of the epoch is neither merged nor begun by the lost site"
    assert size(missed) <= 4, "no more than it had begun"
