"""Who is in a run and who is not: sites that come late, leave, start twice, or are cold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from diloco.syncer.server import Syncer
from diloco.wan.link import LinkOptions
from diloco.wan.process import RelayProcess
from diloco.wire.client import AdminClient
from tests.loopback.audit import audit, history
from tests.loopback.cluster import Log, Process, SiteThread, eventually, serving
from tests.loopback.toy import TOKENS_PER_STEP, Toy

BOUND_S = 30.0
STEP_S = 0.005


@dataclass
class Run:
    """A syncer in this process, an operator, and whatever sites a test adds."""

    toy: Toy
    syncer: Syncer
    address: str
    log: Log
    operator: AdminClient
    alive: ExitStack

    def site(self, name: str, address: str = "") -> SiteThread:
        return self.alive.enter_context(SiteThread(self.toy, name, address or self.address, step_s=STEP_S))

    def sites(self) -> dict[str, dict[str, Any]]:
        found: Any = self.operator.status()["sites"]
        return dict(found)

    def merged(self, site: str) -> int:
        return int(self.sites().get(site, {"tokens_merged": 0})["tokens_merged"])

    def merges(self, site: str) -> None:
        """Wait until 100 tokens more of the site are merged."""
        wanted = self.merged(site) + 100
        eventually(lambda: self.merged(site) >= wanted, BOUND_S, f"{site} merges 100 tokens more")


@contextmanager
def running(folder: Path) -> Iterator[Run]:
    # A round is an update of one site: how many versions pass another meanwhile is up to the machine.
    outer = {"grace": "fixed", "grace_ns": 0, "num_fragments": 2, "staleness_max": 100, "fates_kept_max": 204}
    toy = Toy(folder=str(folder), outer=outer, snapshot_every=1_000_000, codec="int8")
    with serving(toy) as (syncer, address, log), AdminClient(address) as operator, ExitStack() as alive:
        yield Run(toy, syncer, address, log, operator, alive)


def test_one_that_was_never_seen_joins_in_mid_run_and_one_leaves_for_good(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        first = run.site("a")
        run.merges("a")
        late = run.site("late")
        (joined,) = late.log.wait_for("joined", 1, BOUND_S)
        assert 0 not in joined["versions"], "the run was under way"  # type: ignore[operator]
        run.merges("late")
        first.toy_site.agent.leave_soon()
        gone = first.join(BOUND_S)
        assert gone.ending == "left"
        assert gone.ledger["merged"] == gone.ledger["processed"] == TOKENS_PER_STEP * first.toy_site.trained
        assert run.sites()["a"]["status"] == "left"
        run.merges("late")
        run.operator.drain()
        done = late.join(BOUND_S)
    audit(run.toy, [run.log], {"a": [first.log], "late": [late.log]}, {"a": gone, "late": done})


def test_a_process_of_another_folder_waits_for_the_silence_of_a_live_one_unless_it_takes_over(tmp_path: Path) -> None:
    """One that starts in the same folder does not: a site that was killed goes on at once (``tests/hunts/soak.py``)."""
    with running(tmp_path) as run:
        older = run.site("a")
        run.merges("a")
        second = replace(run.toy, folder=str(tmp_path / "second"))
        with Process("site", second, None, site="a", address=run.address, step_s=STEP_S) as waiting:
            (told,) = waiting.log.wait_for("note", 1, BOUND_S, 0, lambda event: event["note"] == "join_refused")
            assert "another process, started in another folder, speaks for site a: stop that one" in str(told["why"])
            run.merges("a")
            assert run.sites()["a"]["incarnation"] == 1
            waiting.kill()
        elsewhere = replace(run.toy, folder=str(tmp_path / "elsewhere"), takeover=True)
        with Process("site", elsewhere, None, site="a", address=run.address, step_s=STEP_S) as newer:
            newer.log.wait_for("adopted", 3, BOUND_S, 0, lambda event: event["merged"])
            gone = older.join(BOUND_S)
            assert gone.ending == "failed"
            # Whichever it hears first: that its stream is ended, or that its push is fenced.
            assert "started twice" in gone.why or "fenced" in gone.why, gone.why
            run.merges("a")
            assert run.sites()["a"]["incarnation"] == 2
            run.operator.drain()
            assert newer.wait(BOUND_S) == 0, newer.errors
    history(run.toy)


def test_invariant_16_a_cold_site_is_never_a_source_of_state(tmp_path: Path) -> None:
    """A toy site has NaN everywhere until it is given values, and over a slow link that takes its time."""
    with running(tmp_path) as run, RelayProcess() as relay:
        warm = run.site("warm")
        run.merges("warm")
        slow = relay.add("cold", LinkOptions(mbps=0.05), run.address)
        before = tracked(run)
        cold = run.site("cold", slow)
        cold.log.wait_for("joined", 1, BOUND_S)
        assert cold.toy_site.trained == 0
        run.merges("warm")
        assert cold.toy_site.trained == 0, "no step without a base"
        assert all(bool(values.isnan().any()) for values in cold.toy_site.parameters.values()), "it is still cold"
        assert tracked(run) == before, "and nothing in the syncer came from it"
        relay.set("cold", mbps=0.0)
        run.merges("cold")
        run.operator.drain()
        done = {site.site: site.join(BOUND_S) for site in (warm, cold)}
        (joined, *_) = cold.log.of("joined")
        versions: Any = joined["versions"]
        for event in cold.log.of("sealed"):
            assert int(str(event["base_version"])) >= versions[int(str(event["fragment"]))]
        assert not run.log.of("refused")
        assert all(bool(torch.isfinite(values.published).all()) for values in run.syncer.holdings.values)
    audit(run.toy, [run.log], {"warm": [warm.log], "cold": [cold.log]}, done)


def tracked(run: Run) -> list[tuple[int, ...]]:
    """What the syncer has of the cold site: nothing, whether it knows it or not."""
    lines = run.syncer.core.ask(
        lambda machine: machine.state.sites["cold"].lines if "cold" in machine.state.sites else []
    )
    found = [(line.watermark, len(line.undecided), line.tokens_merged) for line in lines]
    return [each for each in found if any(each)]
