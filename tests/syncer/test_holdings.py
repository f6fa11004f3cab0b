"""What is sent of a fragment: the same bits to every site, by the shortest way that is kept."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from diloco.codec.base import digest, digest_of
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import follow, publish
from diloco.outer.optimizer import NOTHING
from diloco.sync.events import Fate
from diloco.sync.state import FragmentState, OuterState
from diloco.syncer.outer_step import OuterResult
from diloco.syncer.publish import Holdings
from diloco.syncer.snapshots import FragmentValues
from diloco.wire.handlers import PullSource
from diloco.wire.messages import PullAsk, Status
from tests.syncer.building import refused

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
    for part in source.parts:
        held = follow(held, part, make_codec(header.encoding))
    return held


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4:32+zstd1"])
def test_whatever_a_site_has_it_gets_the_same_bits(codec: str) -> None:
    holdings, values = history(codec, 9)
    for have in [*range(-1, 10), 12]:
        source = pull(holdings, have)
        assert (source.header.version, source.header.digest) == (9, values[9].digest)
        found = received(source, values[have].published if 0 <= have <= 9 else None)
        assert torch.equal(found.view(torch.int32), values[9].published.view(torch.int32)), (codec, have)
        assert source.header.payload_bytes <= NUMEL * 4
    fate = Fate(0, 1, 2, 10, "0" * 64)
    newest = pull(holdings, 9, fates=(fate,))
    assert (newest.header.from_version, list(newest.parts), newest.header.whole) == (9, [], False)
    assert newest.header.fates == (fate,)


def test_a_chain_is_sent_where_it_is_shorter_and_the_whole_where_it_is_not() -> None:
    holdings, _ = history("int8", 12)
    link = make_codec("int8").payload_bytes(NUMEL)
    longest = (NUMEL * 4 - 1) // link
    for have in range(12):
        header = pull(holdings, have).header
        assert header.whole == (12 - have > longest), have
        assert header.encoding == ("fp32" if header.whole else "int8")
    # The last one's difference is as long as the fragment.
    for lacking, have in ((holdings, -1), (holdings, 99), (history("fp32", 3)[0], 2)):
        assert pull(lacking, have).header.whole


def test_a_pull_goes_on_with_the_version_that_it_began_or_is_told_that_it_cannot() -> None:
    holdings, values = history("int8", 5)
    began = pull(holdings, 3)
    holdings.take(0, moved(values[5], "int8"))
    again = pull(holdings, 3, want=5, offset=7)
    assert (again.header.version, again.header.digest) == (5, began.header.digest)
    assert list(map(bytes, again.parts)) == list(map(bytes, began.parts)), "all of it, whatever the offset"
    assert pull(holdings, -1, want=6).header.whole
    for have, want in ((-1, 5), (3, 7), (6, 5), (0, 99)):
        with refused(Status.NOT_FOUND, f"version {want} of fragment 0 cannot be sent any more"):
            pull(holdings, have, want)


@pytest.mark.parametrize(("codec", "most"), [("fp32", 0), ("bf16", 4), ("int8", 7), ("int4", 14)])
def test_no_more_is_kept_than_twice_the_fragment_and_no_old_values(codec: str, most: int) -> None:
    """Links hold bytes only: with their values, 32 versions of a fragment would take 96 times its memory."""
    for kept, wanted in ((32, most), (2, min(2, most))):
        links = history(codec, 20, kept)[0]._downlinks[0]
        assert len(links) == wanted
        assert sum(len(link.payload) for link in links) <= 2 * NUMEL * 4
        held = [getattr(link, name) for link in links for name in link.__slots__]
        assert not any(isinstance(each, Tensor | FragmentValues) for each in held)


@pytest.mark.parametrize("want", [3_000_000, 1 << 62])
def test_a_version_that_is_far_away_costs_nothing_to_refuse(want: int) -> None:
    """Seen: every version in between was listed, so that one small message took all memory that there was."""
    holdings, _ = history("int8", 3)
    tracemalloc.start()
    try:
        for have in (0, 2, min(want - 1, 1_000_000)):
            with refused(Status.NOT_FOUND):
                pull(holdings, have, want=want)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20, "refused, and dearly"
    finally:
        tracemalloc.stop()


def test_who_waits_for_a_version_is_woken_when_it_is_made() -> None:
    holdings, values = history("fp32", 0)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(holdings.has_newer, 0, 0, 20.0)
        holdings.take(0, moved(values[-1], "fp32"))
        assert found.result(20)
    assert not holdings.has_newer(0, 1, 0.01)
