"""Units of one text leased to the processes that a user starts; one of them is killed for good."""

from __future__ import annotations

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
from tests.runs.processes import Place, place_in, wait_for

UNIT = 8
LEASED = (
    "data.leased=true",
    f"data.unit_sequences={UNIT}",
    "data.units_ahead=32",
    "data.unit_lease_s=2",
    "outer.site_timeout_s=4",
    "run.seconds=900",
)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with place_in(tmp_path) as made:
        yield made


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

    # The other draws what it is leased in order, so when more is merged than was leased by then, all of that is.
    wait_for(lambda: units_now()["given_back"] == 0, "the last of the units that are leased again", syncer.text)
    upto = max(epoch, units_now()["leased"])
    wait_for(lambda: units_now()["merged"] > upto, "the end of the epoch", syncer.text)
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
