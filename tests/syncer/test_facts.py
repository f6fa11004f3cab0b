"""Events in plain values, which JSON can carry."""

from __future__ import annotations

import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from diloco.codec.base import digest, digest_of
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import follow, publish
from diloco.outer.optimizer import NOTHING
from diloco.sync.effects import Contribution, StartOuterStep, TellFate, UpdateRef
from diloco.sync.events import Ending, Fate, JoinRequested, Reason
from diloco.sync.options import OuterOptions
from diloco.sync.state import FragmentState, Line, OuterState, Phase, Site
from diloco.sync.state import Status as SiteStatus
from diloco.sync.syncer import OuterSync
from diloco.syncer.outer_step import OuterResult, merged_into, outer_step_facts, refusal_facts, start_facts
from diloco.syncer.publish import Holdings
from diloco.syncer.snapshots import FragmentValues
from diloco.wire.handlers import PullSource
from diloco.wire.messages import PullAsk, Refusal, Status


def test_a_start_says_where_the_run_stands_and_whether_it_is_over() -> None:
    machine = OuterSync(OuterOptions(num_fragments=2))
    machine.state.epoch, machine.state.fragments[1].version = 3, 7
    assert start_facts(machine) == ({"epoch": 3, "versions": [0, 7], "tokens_merged": {}}, None)
    machine.handle(JoinRequested(1, "a", "0123abcd"), 0)
    for line, tokens in zip(machine.state.sites["a"].lines, (5, 30), strict=True):
        line.tokens_merged = tokens
    assert start_facts(machine)[0]["tokens_merged"] == {"a": 35}
    machine.state.phase, machine.state.ending = Phase.ENDED, Ending.DRAINED
    assert start_facts(machine)[1] is Ending.DRAINED


def test_a_refusal_says_which_update_and_why() -> None:
    told = TellFate("a", Fate(1, 5, 9, 100, "digest", Reason.STALE))
    assert refusal_facts(told) == {"site": "a", "fragment": 1, "sequence": 5, "reason": "stale"}


def test_an_outer_step_says_who_was_in_it_and_how_stale() -> None:
    update = UpdateRef(4, "payload", "fp32", "digest")
    command = StartOuterStep(0, 6, (Contribution("a", 0.25, 5, (update,)), Contribution("b", 0.75, 3, (update,))))
    result = OuterResult(None, b"", "", 1.5, 0.125)  # type: ignore[arg-type]
    facts = outer_step_facts(command, result, {"read_s": 0.5})
    assert facts == json.loads(json.dumps(facts))
    assert (facts["sites"], facts["staleness"]) == ({"a": 0.25, "b": 0.75}, {"a": 0, "b": 2})
    assert facts["read_s"] == 0.5
    again = (*command.contributions, Contribution("b", 0.125, 4, (update,)))
    of_three = outer_step_facts(StartOuterStep(0, 6, again), result, {})
    assert (of_three["sites"], of_three["staleness"]) == ({"a": 0.25, "b": 0.875}, {"a": 0, "b": 2})
    assert (facts["version"], facts["norm"], facts["seconds"]) == (6, pytest.approx(1.5), 0.125)


# --- What is sent ----------------------------------------------------------------------------------------------------

NUMEL = 4096


def theta(version: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(version))


def moved(old: FragmentValues, codec: str) -> OuterResult:
    new = theta(old.version + 1)
    downlink, published = publish(new, old.published, make_codec(codec))
    values = FragmentValues(old.version + 1, new, published, NOTHING, digest(published))
    return OuterResult(values, downlink, digest_of(downlink), 1.0, 0.1)


def history(codec: str, versions: int, kept: int = 32) -> tuple[Holdings, list[FragmentValues]]:
    first = FragmentValues(0, theta(0), theta(0), NOTHING, digest(theta(0)))
    holdings, values = Holdings([first], codec, kept), [first]
    for _ in range(versions):
        result = moved(values[-1], codec)
        holdings.take(0, result)
        values.append(result.values)
    return holdings, values


def pull(holdings: Holdings, have: int, want: int = 0, offset: int = 0, fates: tuple[Fate, ...] = ()) -> PullSource:
    return holdings.choose(PullAsk("run", "a", 0, have, want, offset), fates, OuterState([FragmentState()]))


def received(source: PullSource, held: Tensor | None) -> Tensor:
    header = source.header
    assert header.part_bytes == tuple(len(part) for part in source.parts)
    assert header.payload_bytes == sum(header.part_bytes)
    assert header.payload_crc32 == 0
    if header.whole:
        assert header.from_version == header.version
        return make_codec("fp32").decode(source.parts[0], header.numel)
    assert held is not None
    for part in source.parts:
        held = follow(held, part, make_codec(header.encoding))
    return held


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4:32+zstd1"])
def test_whatever_a_site_has_it_gets_the_same_bits(codec: str) -> None:
    holdings, values = history(codec, 9)
    for have in range(-1, 10):
        source = pull(holdings, have)
        assert source.header.version == 9
        assert source.header.digest == values[9].digest
        found = received(source, values[have].published if have >= 0 else None)
        assert torch.equal(found.view(torch.int32), values[9].published.view(torch.int32)), (codec, have)
        assert source.header.payload_bytes <= NUMEL * 4


def test_a_chain_is_sent_where_it_is_shorter_and_the_whole_where_it_is_not() -> None:
    holdings, values = history("int8", 12)
    link = make_codec("int8").payload_bytes(NUMEL)
    longest = (NUMEL * 4 - 1) // link
    for have in range(12):
        header = pull(holdings, have).header
        assert header.whole == (12 - have > longest), have
        assert header.encoding == ("fp32" if header.whole else "int8")
    assert pull(holdings, -1).header.whole
    lossless, _ = history("fp32", 3)
    assert pull(lossless, 2).header.whole, "the difference is as long as the fragment"
    del values


def test_who_has_the_newest_gets_its_fates_and_no_bytes() -> None:
    holdings, values = history("int8", 2)
    fate = Fate(0, 1, 2, 10, "0" * 64)
    source = pull(holdings, 2, fates=(fate,))
    assert (source.header.from_version, source.header.version, list(source.parts)) == (2, 2, [])
    assert source.header.fates == (fate,)
    assert source.header.digest == values[2].digest
    assert not source.header.whole


def test_a_pull_goes_on_with_the_version_that_it_began_or_is_told_that_it_cannot() -> None:
    holdings, values = history("int8", 5)
    began = pull(holdings, 3)
    holdings.take(0, moved(values[5], "int8"))
    again = pull(holdings, 3, want=5, offset=7)
    assert (again.header.version, again.header.digest) == (5, began.header.digest)
    assert [bytes(part) for part in again.parts] == [bytes(part) for part in began.parts], (
        "all of it, whatever the offset"
    )
    whole = pull(holdings, -1, want=6)
    assert whole.header.whole
    for have, want in ((-1, 5), (3, 7), (6, 5), (0, 99)):
        with pytest.raises(Refusal, match=f"version {want} of fragment 0 cannot be sent any more") as raised:
            pull(holdings, have, want)
        assert raised.value.status is Status.NOT_FOUND


def test_a_site_that_is_ahead_gets_what_there_is() -> None:
    holdings, values = history("int8", 2)
    source = pull(holdings, 7)
    assert source.header.whole
    assert torch.equal(received(source, None), values[2].published)


def test_a_gap_between_recalled_and_taken_links_is_never_a_chain() -> None:
    holdings, values = history("int8", 1)
    third = moved(values[1], "int8")
    fourth = moved(third.values, "int8")
    holdings = Holdings([third.values], "int8", 32)
    holdings.take(0, fourth)
    assert not pull(holdings, 2).header.whole
    assert pull(holdings, 1).header.whole


@pytest.mark.parametrize(("codec", "most"), [("fp32", 0), ("bf16", 4), ("int8", 7), ("int4", 14)])
def test_no_more_is_kept_than_twice_the_fragment_and_no_old_values(codec: str, most: int) -> None:
    """Links hold bytes only: with their values, 32 versions of a fragment would take 96 times its memory."""
    holdings, values = history(codec, 20)
    links = holdings._downlinks[0]
    assert len(links) == most
    assert sum(len(link.payload) for link in links) <= 2 * NUMEL * 4
    assert not any(
        isinstance(getattr(link, name), Tensor | FragmentValues) for link in links for name in link.__slots__
    )
    short, _ = history(codec, 20, kept=2)
    assert len(short._downlinks[0]) == min(2, most)
    del values


@pytest.mark.parametrize("want", [3_000_000, 1 << 62])
def test_a_version_that_is_far_away_costs_nothing_to_refuse(want: int) -> None:
    """Seen: every version in between was listed, so that one small message took all memory that there was."""
    holdings, _ = history("int8", 3)
    tracemalloc.start()
    try:
        for have in (0, 2, min(want - 1, 1_000_000)):
            with pytest.raises(Refusal) as raised:
                pull(holdings, have, want=want)
            assert raised.value.status is Status.NOT_FOUND
            assert tracemalloc.get_traced_memory()[1] < 1 << 20, "refused, and dearly"
    finally:
        tracemalloc.stop()


def test_a_version_is_of_the_sites_whose_updates_it_holds() -> None:
    """By their number a site knows how much of a version is its own."""
    fates = {
        "a": [Fate(0, 1, 2, 10, ""), Fate(0, 2, 3, 20, ""), Fate(0, 3, 3, 30, "")],
        "b": [Fate(0, 1, 3, 40, "", Reason.STALE)],
        "c": [],
        "d": [Fate(0, 1, 3, 50, "")],
    }
    state = OuterState([FragmentState()])
    for name, decided in fates.items():
        state.sites[name] = Site(1, name, SiteStatus.LIVE, [Line(fates=decided)])
    assert merged_into(state, 0, 3) == {"a": (50, 2), "d": (50, 1)}
    assert merged_into(state, 0, 2) == {"a": (10, 1)}
    assert merged_into(state, 0, 4) == {}


def test_who_waits_for_a_version_is_woken_when_it_is_made() -> None:
    holdings, values = history("fp32", 0)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(holdings.has_newer, 0, 0, 20.0)
        holdings.take(0, moved(values[-1], "fp32"))
        assert found.result(20)
    assert not holdings.has_newer(0, 1, 0.01)
