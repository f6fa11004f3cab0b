"""What a site says about itself goes over the wire at any time, and balances."""

from __future__ import annotations

from diloco.learner.heartbeat import meter_fields, report_info
from diloco.learner.meter import Meter
from diloco.sync.events import StepDone, VersionFetched
from diloco.wire.convert import pack_report, unpack_report
from diloco.wire.messages import LinkInfo
from tests.sync.driving_site import Site

LINK = LinkInfo(80_000_000, 12_500_000, 25_000_000)


class Traffic:
    bytes_up = 5
    bytes_down = 7


def test_a_site_without_a_first_version_can_send_a_heartbeat() -> None:
    """Over a slow line the heartbeat comes long before every fragment is here."""
    site = Site(cold=True, num_fragments=2)
    site.join()
    state, reading = site.machine.state, Meter().read()
    assert report_info("run", "a", state, reading, Traffic(), (0, 0), LINK).versions == ()  # type: ignore[arg-type]
    site.handle(VersionFetched(0, 0, ()))
    site.boundary()
    report = report_info("run", "a", state, reading, Traffic(), (0, 0), LINK)  # type: ignore[arg-type]
    assert unpack_report(pack_report(report)) == report
    site.handle(VersionFetched(1, 0, ()))
    site.boundary()
    assert report_info("run", "a", state, reading, Traffic(), (0, 0), LINK).versions == (0, 0)  # type: ignore[arg-type]


def test_the_figures_are_those_of_ledger_meter_and_traffic() -> None:
    site, meter = Site(), Meter()
    for step in range(1, 6):
        site.handle(StepDone(step, 10, 1_000_000, step))
        meter.step(1_000_000, 10, float("nan"))
    report = report_info("run", "a", site.machine.state, meter.read(), Traffic(), (7,), LINK)  # type: ignore[arg-type]
    found = unpack_report(pack_report(report))
    assert found.digests == (7,)
    assert found.link == LINK
    assert found.loss is None, "a loss that is no number travels as unknown"
    assert (found.step, found.tokens_processed, found.tokens_unsent, found.bytes_up, found.bytes_down) == (
        5,
        50,
        50,
        5,
        7,
    )
    fields = meter_fields(site.machine.state, meter.read(), Traffic(), LINK)  # type: ignore[arg-type]
    assert (fields["inner_steps"], fields["tokens"], fields["in_flight"], fields["staleness"]) == (5, 50, 0, 0)
    assert fields["incarnation"] == 1
    assert (fields["link_rtt_ns"], fields["link_up_bytes_per_s"]) == (80_000_000, 12_500_000)
