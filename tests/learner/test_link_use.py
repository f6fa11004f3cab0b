from __future__ import annotations

from diloco.learner.link_use import LinkUse
from diloco.sync.adapting import AdaptOptions, Way
from diloco.wire.messages import LinkInfo

STEP_NS = 100_000_000
WAYS = (Way("int8", 8_000_000), Way("int4", 4_000_000))


class Traffic:
    bytes_up = 0
    bytes_down = 0

    def __init__(self) -> None:
        self.channels: list[int] = []

    def use_channels(self, count: int) -> None:
        self.channels.append(count)


def using(ways: tuple[Way, ...] = WAYS) -> tuple[LinkUse, list[tuple[str, dict[str, object]]]]:
    said: list[tuple[str, dict[str, object]]] = []
    options = AdaptOptions(ways=ways, version_bytes=4_000_000, inner_steps=20)
    return LinkUse(Traffic(), options, lambda name, facts: said.append((name, facts))), said  # type: ignore[arg-type]


def carried(use: LinkUse, up: int) -> None:
    use.link._estimator.answered(10_000_000)
    for _ in range(3):
        use.link._estimator.carried_up(up, 1_010_000_000)
        use.link._estimator.carried_down(10_000_000, 1_010_000_000)


def test_before_anything_is_measured_it_is_as_configured() -> None:
    use, said = using()
    assert [use.codec(STEP_NS) for _ in range(4)] == ["int8"] * 4
    assert use.info(STEP_NS) == LinkInfo(up_codec="int8", channels=1)
    assert said == []


def test_a_change_is_told_once_with_its_reason_and_stays_to_be_seen() -> None:
    use, said = using()
    carried(use, 4_000_000)
    assert [use.codec(STEP_NS) for _ in range(5)] == ["int8", "int4", "int4", "int4", "int4"]
    ((name, facts),) = said
    assert (name, facts["codec"], facts["channels"]) == ("adapted", "int4", 1)
    info = use.info(STEP_NS)
    assert info.why == facts["why"]
    assert (info.up_codec, info.up_bytes_per_s, info.down_bytes_per_s) == ("int4", 4_000_000, 10_000_000)
    assert info.exchange_steps == 15  # One second up, 0.4 down, three round trips, in steps of a tenth.
    carried(use, 40_000_000)
    assert [use.codec(STEP_NS) for _ in range(3)] == ["int4", "int8", "int8"]
    assert [facts["codec"] for _, facts in said] == ["int4", "int8"]


def test_connections_are_opened_where_their_windows_bound_the_link() -> None:
    traffic, said = Traffic(), []
    options = AdaptOptions(ways=WAYS[:1], inner_steps=20, channels_max=6, window_bytes=100_000)
    use = LinkUse(traffic, options, lambda name, facts: said.append(facts["channels"]))  # type: ignore[arg-type]
    carried(use, 6_000_000)  # 6 MB/s over 10 ms are 60 kB on the way, where one window has room for 65.
    for _ in range(6):
        use.codec(STEP_NS)
    assert traffic.channels == said == [2]
    assert use.info(STEP_NS).channels == 2


def test_without_a_choice_the_link_is_told_all_the_same() -> None:
    use, said = using(WAYS[:1])
    carried(use, 1_000_000)
    assert {use.codec(STEP_NS) for _ in range(9)} == {"int8"}
    assert (use.info(STEP_NS).why, use.info(STEP_NS).rtt_ns, said) == ("", 10_000_000, [])
