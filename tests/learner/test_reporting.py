"""What a site says about itself goes over the wire at any time, and balances."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

from diloco.learner.agent import Meter, Touch
from diloco.sync.events import StepDone, VersionFetched
from diloco.wire.convert import pack_report, unpack_report
from diloco.wire.messages import LinkInfo, ReportInfo, ReportReply
from tests.sync.driving_site import Site

LINK = LinkInfo(80_000_000, 12_500_000, 25_000_000)


class Speaker:
    """A site as the thread that sends heartbeats knows it, and its client; keeps what was said."""

    run_id, site_id = "run", "a"
    left = False

    def __init__(self, site: Site) -> None:
        self.machine, self.meter, self.changed = site.machine, Meter(), threading.Condition()
        self.known = site.machine.state
        self.client = self.owners = self.link = self.tensors = self
        self.base = [None] * len(site.machine.state.fragments)
        self.told_base = [""] * len(self.base)
        self.reports: list[ReportInfo] = []
        self.said: list[tuple[str, dict[str, Any]]] = []

    def traffic(self) -> tuple[int, int]:
        return 5, 7

    def digests(self, own: tuple[int, ...], state: object) -> tuple[int, ...]:
        return tuple(7 for _ in own)

    def info(self, step_ns: int) -> LinkInfo:
        return LINK

    def control(self) -> nullcontext[None]:
        return nullcontext()

    def report(self, info: ReportInfo) -> ReportReply:
        self.reports.append(info)
        return ReportReply(1, 0, 0, True, None)

    def emit(self, what: str, facts: dict[str, Any]) -> None:
        self.said.append((what, facts))


def reported(speaker: Speaker) -> ReportInfo:
    touch: Any = Touch(speaker, 1.0)  # type: ignore[arg-type]
    touch._report()
    return speaker.reports[-1]


def test_a_site_without_a_first_version_can_send_a_heartbeat() -> None:
    """Over a slow line the heartbeat comes long before every fragment is here."""
    site = Site(cold=True, num_fragments=2)
    site.join()
    speaker = Speaker(site)
    assert reported(speaker).versions == ()
    site.handle(VersionFetched(0, 0, ()))
    site.boundary()
    report = reported(speaker)
    assert unpack_report(pack_report(report)) == report
    assert (report.versions, report.digests) == ((), ())
    site.handle(VersionFetched(1, 0, ()))
    site.boundary()
    assert (reported(speaker).versions, reported(speaker).digests) == ((0, 0), (7, 7))


def test_the_figures_are_those_of_ledger_meter_and_traffic() -> None:
    site = Site()
    speaker = Speaker(site)
    for step in range(1, 6):
        site.handle(StepDone(step, 10, 1_000_000, step))
        speaker.meter.step(1_000_000, 10, float("nan"))
    found = unpack_report(pack_report(reported(speaker)))
    assert found.digests == (7,)
    assert found.link == LINK
    assert found.loss is None, "a loss that is no number travels as unknown"
    told = (found.step, found.tokens_processed, found.tokens_unsent, found.bytes_up, found.bytes_down)
    assert told == (5, 50, 50, 5, 7)
    Touch(speaker, 1.0).emit_meter()  # type: ignore[arg-type]
    ((what, fields),) = speaker.said
    assert what == "meter"
    assert (fields["inner_steps"], fields["tokens"], fields["in_flight"], fields["staleness"]) == (5, 50, 0, 0)
    assert (fields["incarnation"], fields["bytes_up"], fields["bytes_down"]) == (1, 5, 7)
    assert (fields["link_rtt_ns"], fields["link_up_bytes_per_s"]) == (80_000_000, 12_500_000)
