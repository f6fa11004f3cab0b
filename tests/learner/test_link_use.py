from __future__ import annotations

from diloco.learner.transfer import LinkUse
from diloco.sync.events import Fate, FateTold, Outcome, OverlapChosen, PushAnswered
from diloco.sync.link import AdaptOptions, Way
from diloco.wire.messages import LinkInfo
from tests.learner.participant import Recorder

STEP_NS = 100_000_000
WAYS = (Way("int8", 8_000_000), Way("int4", 4_000_000))


class Traffic:
    bytes_up = 0
    bytes_down = 0

    def __init__(self) -> None:
        self.channels: list[int] = []

    def use_channels(self, count: int) -> None:
        self.channels.append(count)


def using(ways: tuple[Way, ...] = WAYS) -> tuple[LinkUse, Recorder]:
    site = Recorder()
    options = AdaptOptions(ways=ways, version_bytes=4_000_000, inner_steps=20)
    return LinkUse(site, Traffic(), options), site  # type: ignore[arg-type]


def carried(use: LinkUse, up: int) -> None:
    use._estimator.answered(10_000_000)
    for _ in range(3):
        use._estimator.carried(up, 1_010_000_000, up=True)
        use._estimator.carried(10_000_000, 1_010_000_000, up=False)


def test_before_anything_is_measured_it_is_as_configured() -> None:
    use, site = using()
    assert [use.codec(STEP_NS) for _ in range(4)] == ["int8"] * 4
    assert use.info(STEP_NS) == LinkInfo(up_codec="int8", channels=1)
    assert site.events.all == []


def test_a_change_is_told_once_with_its_reason_and_stays_to_be_seen() -> None:
    use, site = using()
    carried(use, 4_000_000)
    assert [use.codec(STEP_NS) for _ in range(5)] == ["int8", "int4", "int4", "int4", "int4"]
    (facts,) = site.events.all
    assert (facts["what"], facts["codec"], facts["channels"]) == ("adapted", "int4", 1)
    info = use.info(STEP_NS)
    assert info.why == facts["why"]
    assert (info.up_codec, info.up_bytes_per_s, info.down_bytes_per_s) == ("int4", 4_000_000, 10_000_000)
    assert info.exchange_steps == 15  # One second up, 0.4 down, three round trips, in steps of a tenth.
    carried(use, 40_000_000)
    assert [use.codec(STEP_NS) for _ in range(3)] == ["int4", "int8", "int8"]
    assert [facts["codec"] for facts in site.events.of("adapted")] == ["int4", "int8"]


def test_connections_are_opened_where_their_windows_bound_the_link() -> None:
    traffic, site = Traffic(), Recorder()
    options = AdaptOptions(ways=WAYS[:1], inner_steps=20, channels_max=6, window_bytes=100_000)
    use = LinkUse(site, traffic, options)  # type: ignore[arg-type]
    carried(use, 6_000_000)  # 6 MB/s over 10 ms are 60 kB on the way, where one window has room for 65.
    for _ in range(6):
        use.codec(STEP_NS)
    assert traffic.channels == [facts["channels"] for facts in site.events.all] == [2]
    assert use.info(STEP_NS).channels == 2


def test_the_overlap_is_that_of_an_exchange_with_the_round_that_was_seen_and_the_machine_is_told() -> None:
    site = Recorder()
    options = AdaptOptions(
        ways=WAYS[1:], version_bytes=4_000_000, inner_steps=20, overlap_steps=1, overlap_steps_max=12
    )
    use = LinkUse(site, Traffic(), options)  # type: ignore[arg-type]
    use.begin()
    carried(use, 10_000_000)  # 0.4 s up and 0.4 s down, and three times 10 ms.
    assert [use.codec(STEP_NS) for _ in range(3)] == ["int4"] * 3
    assert site.told == [OverlapChosen(1), OverlapChosen(9)]
    use._rounds.heard(PushAnswered(0, 1, Outcome.ACCEPTED, None), 1_000_000_000)
    use._rounds.heard(FateTold(Fate(0, 1, 1, 10, "d")), 1_200_000_000)
    use.codec(STEP_NS)
    use.codec(STEP_NS)
    assert site.told[2:] == [OverlapChosen(11)]
    assert [facts["overlap_steps"] for facts in site.events.all] == [9, 11]
    info = use.info(STEP_NS)
    assert (info.overlap_steps, info.exchange_steps, info.round_ns) == (11, 11, 200_000_000)
    assert info.why == (
        "an exchange takes 1.03 s, 0.2 of it at the syncer, and an inner step 0.1 s: a version is adopted 11 steps "
        "after its update (1 to 12 allowed)"
    )


def test_a_round_is_heard_of_by_the_sites_own_clock() -> None:
    use, _ = using()
    use.heard(PushAnswered(0, 1, Outcome.ACCEPTED, None))
    assert use.info(STEP_NS).round_ns == 0
    use.heard(FateTold(Fate(0, 1, 1, 10, "d")))
    assert use.info(STEP_NS).round_ns > 0


def test_without_a_choice_the_link_is_told_all_the_same() -> None:
    use, site = using(WAYS[:1])
    carried(use, 1_000_000)
    assert {use.codec(STEP_NS) for _ in range(9)} == {"int8"}
    assert (use.info(STEP_NS).why, use.info(STEP_NS).rtt_ns, site.events.all) == ("", 10_000_000, [])
