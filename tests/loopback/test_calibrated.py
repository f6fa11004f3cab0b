"""A run over emulated links and its simulation come to the same: rounds and bytes within 10 %, idle time within 2
points of wall time.

The simulation is told what only the run can say (what a step and an outer step took, when each site came, what the
codec made of an update), and finds the rest.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.runs.processes import TINY, Place

# Sites that sleep most of the time leave the cores to each other, so that a step takes what it takes.
SLOW = [f"cluster.sites.{name}.slowdown={times}" for name, times in (("site-a", 3), ("site-b", 4), ("site-c", 5))]
SETTINGS = [
    *TINY,
    *SLOW,
    "cluster=one",
    "network=wan",
    "model.dim=64",
    "inner.batch_sequences=8",
    "outer.inner_steps=15",
]
RUN = ["run.name=otter", "outer.final_wait_s=5", "run.seconds=60", "scenario=none"]
BOUND_S = 240.0


def likened(place: Place, *settings: str) -> dict[str, Any]:
    """A run, and what ``diloco sim`` says of it."""
    code, text = place.run("up", *SETTINGS, *RUN, *settings, bound_s=BOUND_S)
    assert code == 0, text
    code, text = place.run("sim", "--like", "runs/otter", "--json", bound_s=BOUND_S)
    assert code == 0, text
    told = json.loads(text)
    assert isinstance(told, dict)
    return told["like"]  # type: ignore[no-any-return]


pytestmark = pytest.mark.hunt  # Idle time is compared: nothing else may take the cores meanwhile.


@pytest.mark.parametrize("outer", ["diloco", "decoupled"])
def test_a_run_and_its_simulation_agree(place: Place, outer: str) -> None:
    like = likened(place, f"outer={outer}")
    versions = like["versions"]
    assert versions["simulation"] == pytest.approx(versions["run"], rel=0.1)
    for name, both in like["sites"].items():
        run, simulation = both["run"], both["simulation"]
        for figure in ("steps", "updates_merged", "bytes_up", "bytes_down"):
            assert simulation[figure] == pytest.approx(run[figure], rel=0.1), (name, figure, like)
        assert simulation["idle_share"] == pytest.approx(run["idle_share"], abs=0.02), (name, like)
    idle = [both["run"]["idle_share"] for both in like["sites"].values()]
    assert max(idle) > 0.2 or outer != "diloco", "there is something to agree on"


FAULTS = """
- {at_s: 12, do: kill, target: site-b, for_s: 4}
- {at_s: 30, do: partition, target: "link:site-c", for_s: 8}
- {at_s: 44, do: kill, target: syncer, for_s: 2}
"""


def test_what_goes_wrong_in_a_run_goes_wrong_in_its_simulation(place: Place) -> None:
    """What is sent twice because a process died is not simulated, so nothing is said of bytes."""
    (place.folder / "faults.yaml").write_text(FAULTS)
    like = likened(place, "outer=merge", "scenario=faults.yaml")
    assert like["versions"]["simulation"] == pytest.approx(like["versions"]["run"], rel=0.1, abs=2)
    for name, both in like["sites"].items():
        run, simulation = both["run"], both["simulation"]
        assert simulation["steps"] == pytest.approx(run["steps"], rel=0.1), (name, like)
        assert simulation["updates_merged"] == pytest.approx(run["updates_merged"], rel=0.1, abs=2), (name, like)
