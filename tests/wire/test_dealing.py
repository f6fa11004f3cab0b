from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from diloco.wire.chunks import TAIL_BYTES_MIN
from diloco.wire.handlers import DEALS_KEPT, Deals
from diloco.wire.messages import KIB, MIB, PullAsk
from tests.wire.fake_syncer import RUN
from tests.wire.samples import PULL

if TYPE_CHECKING:
    from diloco.wire.chunks import Span

ASK = PullAsk(RUN, "site-a", 3, 7, deal=5)
LONG = replace(PULL, payload_bytes=20 * MIB + 7)


def test_streams_bring_each_byte_once_and_end_together() -> None:
    deals = Deals()
    joined = [deals.join("site-a", ASK, LONG) for _ in range(3)]

    def bring(index: int) -> list[Span]:
        return list(iter(lambda: joined[index].next(256 * KIB), None))

    with ThreadPoolExecutor(3) as pool:
        spans = sorted(span for brought in pool.map(bring, range(3)) for span in brought)
    assert spans[0][0] == 0
    assert spans[-1][1] == LONG.payload_bytes
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert max(end - begin for begin, end in spans) == 256 * KIB
    assert spans[-1][1] - spans[-1][0] <= TAIL_BYTES_MIN
    assert deals.join("site-a", ASK, LONG).next(MIB) is None, "whoever comes late brings nothing twice"


def test_another_asker_another_number_and_another_version_are_other_deals() -> None:
    deals = Deals()
    whole = (0, LONG.payload_bytes)
    assert deals.join("site-a", ASK, LONG).next(LONG.payload_bytes) == whole
    for asker, ask, header in (
        ("site-b", ASK, LONG),
        ("site-a", replace(ASK, deal=6), LONG),
        ("site-a", ASK, replace(LONG, version=10)),
    ):
        assert deals.join(asker, ask, header).next(LONG.payload_bytes) == whole


def test_so_many_of_an_asker_are_remembered() -> None:
    deals = Deals()
    for number in range(1, DEALS_KEPT + 2):
        deals.join("site-a", replace(ASK, deal=number), LONG).next(LONG.payload_bytes)
    assert deals.join("site-a", replace(ASK, deal=2), LONG).next(MIB) is None
    assert deals.join("site-a", replace(ASK, deal=1), LONG).next(MIB) is not None


def test_all_streams_of_a_deal_keep_to_its_rate_together() -> None:
    deals = Deals()
    first, second = (deals.join("site-a", replace(ASK, bytes_per_s=1 << 20), LONG) for _ in range(2))
    assert first.pacer is second.pacer
    assert first.pacer.chunk_bytes(MIB) < MIB
