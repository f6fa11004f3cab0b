"""Does the result of a run depend on which of its sites arrive together?

The same run is made ``--starts`` times: a syncer and two equal sites of ``examples/plain_loop.py``, each in its own
process, with the same text, version 0 and settings (by default those of ``outer=nesterov outer.inner_steps=10``).  The
processes' start-up and step times vary, so that each start has other phases.  ``spread`` is the largest minus the
smallest validation loss of the published model, over the median.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from benchmarks.record import finish, parser_of, record
from diloco.observe.eventlog import read_events
from diloco.observe.text import number
from tests.hunts.examples import BOUND_S, CACHE, EXAMPLE, SITES, loss_of, version0
from tests.runs.processes import Verb, place_in, wait_for

if TYPE_CHECKING:
    from tests.runs.processes import Place

SPREAD_MAX = 0.02


def start(place: Place, name: str, settings: list[str], seed: int) -> dict[str, Any]:
    """Train once; return the final loss, the number of versions, and the mean number of sites in each."""
    run = place.folder / "runs" / name
    shared = [f"run.name={name}", f"run.seed={seed}", *settings, f"data.cache={CACHE}"]
    shared += ["model.kind=file", "run.init_from=v0.safetensors"]
    syncer = place.start(f"{name}-syncer", "syncer", *shared, "cluster.syncer.listen=127.0.0.1:0")
    address = run / "syncer.address"
    wait_for(lambda: address.is_file() or syncer.process.poll() is not None, "the syncer", syncer.text, BOUND_S)
    assert address.is_file(), syncer.text()
    sites = []
    for index, site in enumerate(SITES):
        words = [address.read_text(), site, str(index), str(len(SITES))]
        sites.append(Verb(place.folder, f"{name}-{site}", words, script=EXAMPLE.format("plain_loop")))
        place.verbs.append(sites[-1])
    for verb in [*sites, syncer]:
        assert verb.end(BOUND_S) == 0, f"{verb.name}: {verb.text()}\n{syncer.text()}"
    events = list(read_events(run / "events.jsonl"))
    sites_of = [event["sites"] for event in events if event["what"] == "outer_step"]
    tokens = max(number(event, "run_tokens") or 0 for event in events if event["what"] == "published")
    per_version = fmean(len(sites) for sites in sites_of if isinstance(sites, dict))
    final = loss_of(place, run / "syncer/final/model.safetensors")
    return {"final_loss": final, "versions": len(sites_of), "sites_per_version": per_version, "tokens": tokens}


def main() -> None:
    """Make all runs and print the record."""
    parser = parser_of(__doc__)
    parser.add_argument("--starts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=400_000, help="tokens of each run (default 400000)")
    parser.add_argument("--set", action="append", default=[], help="another setting, such as outer.momentum=0.5")
    given = parser.parse_args()
    starts, tokens = (2, 60_000) if given.quick else (given.starts, given.tokens)
    settings = [f"run.tokens={tokens}", "outer=nesterov", "outer.inner_steps=10", *given.set]
    rows = []
    with tempfile.TemporaryDirectory(prefix="arrivals-") as folder, place_in(Path(folder)) as place:
        version0(place)
        for number in range(starts):
            rows.append(start(place, f"start-{number}", settings, given.seed))
            print(f"start {number}: {rows[-1]}", flush=True)
    final = [row["final_loss"] for row in rows]
    found = {"final": final, "spread": (max(final) - min(final)) / median(final), "limit": SPREAD_MAX}
    finish({**record("arrivals", {"settings": settings}, rows, given.seed, repeats=starts), **found}, save=given.save)


if __name__ == "__main__":
    main()
