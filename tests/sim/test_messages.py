"""What a site is told over its stream."""

from __future__ import annotations

from random import Random

from diloco.sim.world import Direction, Feed, Heap, Link, Weather
from diloco.sync.events import Ending, FinalAnnounced


def test_a_message_that_is_lost_breaks_the_stream() -> None:
    heap, told, broken = Heap(), [], []
    link = Link(heap, Random(1), Weather())
    feed = Feed(1, link, told.append, lambda: broken.append(heap.now_ns))
    feed.tell(FinalAnnounced(Ending.DRAINED))
    heap.run_until(10**9, lambda: False)
    assert told == [FinalAnnounced(Ending.DRAINED)]
    link.cut(Direction.DOWN)
    for _ in range(200):
        feed.tell(FinalAnnounced(Ending.FINISHED))
    heap.run_until(2 * 10**9, lambda: False)
    assert len(told) == 1
    assert broken, "what no longer fits into a cut line is lost, and its reader knows"
