"""A small cluster without faults, for tests that look at one process."""

from __future__ import annotations

from random import Random
from typing import Any

from diloco.sim.checkers import Checkers
from diloco.sim.cluster import Cluster
from diloco.sim.outer_process import OuterProcess
from diloco.sim.site_checkers import CHECKERS
from diloco.sim.site_process import SiteProcess
from diloco.sim.site_state import SitePlan
from diloco.sim.world import MILLISECOND_NS, Lease, Link, OuterPlan, OuterRule, ReplicationPlan, Weather
from diloco.sync.options import SECOND_NS, LearnerOptions, OuterOptions


def a_pair(**changes: Any) -> ReplicationPlan:
    """A standby that is near, and a lease of two seconds."""
    near = Weather(10 * MILLISECOND_NS)
    return ReplicationPlan(**{"between": near, "to_lease": near, **changes})


class Small:
    """Sites ``a``, ``b``... at one step per 100 ms, two fragments, an update of each every four steps; after so many
    ``seconds``."""

    def __init__(
        self,
        seconds: float = 0,
        *,
        sites: int = 2,
        learner: dict[str, Any] | None = None,
        replication: ReplicationPlan | None = None,
        **outer: Any,
    ) -> None:
        options = OuterOptions(num_fragments=2, grace_ns=0, grace="fixed", **outer)
        plan = OuterPlan(options, OuterRule(), merge_ns=5 * MILLISECOND_NS, replication=replication)
        self.cluster = Cluster([plan], [Checkers(plan, CHECKERS)], [Random("disk")])
        (self.syncers,) = self.cluster.syncers
        self.syncers.start()
        given = {"num_fragments": 2, "inner_steps": 4} | (learner or {})
        site = SitePlan(
            options=LearnerOptions(**given),
            step_ns=100 * MILLISECOND_NS,
            step_jitter=0.0,
            tokens=10,
            transfer_ns=0,
            encode_ns=MILLISECOND_NS,
            quantum=1,
            alpha_tenths=5,
            checkpoint_steps=5,
            checkpoint_ns=MILLISECOND_NS,
            report_ns=options.site_timeout_ns // 3,
        )
        for name in "abcde"[:sites]:
            self.cluster.add_site(name, [site], Weather(10 * MILLISECOND_NS), [Random(name)])
            self.cluster.start_site(name)
        self.run(seconds)

    def run(self, seconds: float) -> None:
        heap = self.cluster.heap
        heap.run_until(heap.now_ns + int(seconds * SECOND_NS), lambda: False)

    @property
    def outer(self) -> OuterProcess:
        """The syncer that leads."""
        assert self.syncers.outer is not None
        return self.syncers.outer

    @property
    def between(self) -> Link:
        """What joins the syncer and its standby."""
        assert self.syncers.between is not None
        return self.syncers.between

    @property
    def lease(self) -> Lease:
        assert self.syncers.lease is not None
        return self.syncers.lease

    def link(self, site: str) -> Link:
        return self.cluster.sites[site].sides[0].link

    def versions(self) -> list[int]:
        return self.syncers.versions()

    def process(self, name: str) -> SiteProcess:
        """That lives there, or did last."""
        (found,) = self.cluster.sites[name].parts
        return found
