from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from diloco.codec.base import digest
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import Following, publish
from diloco.learner.tensors import SiteTensors
from diloco.learner.transfer import Incoming
from diloco.outer.fragments import plan_layout
from diloco.wire.messages import Frame, PullHeader
from tests.learner.held import held as model_of
from tests.syncer.building import LAYOUT, dice

if TYPE_CHECKING:
    from diloco.outer.fragments import Layout

RANGE = 1024
"""Values that are made at once where a test says so."""
LONG = plan_layout((("long", (24 * RANGE + 7,)),), 1)


class Ranges:
    """What is made, and when, in ranges so short that a small fragment has many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pause_s: float = 0.0) -> None:
        self.stops: list[int] = []
        self.crossed = 0
        """Times at which two threads were at it."""
        self._busy = threading.Lock()
        go_on = Following.go_on

        def watched(following: Following, stop: int) -> None:
            alone = self._busy.acquire(blocking=False)
            self.crossed += not alone
            time.sleep(pause_s)
            go_on(following, stop)
            self.stops.append(stop)
            if alone:
                self._busy.release()

        monkeypatch.setattr(Following, "go_on", watched)
        monkeypatch.setattr("diloco.codec.site_pass.AT_ONCE", RANGE)
        monkeypatch.setattr("diloco.codec.merging.RANGE_VALUES", RANGE)


def long_one() -> tuple[torch.Tensor, bytes, torch.Tensor]:
    """What is held, a payload of many ranges, and what is held after it."""
    generator = torch.Generator().manual_seed(8)
    held, theta = (torch.randn(LONG.fragments[0].numel, generator=generator) for _ in range(2))
    return held, *publish(theta, held, make_codec("int4:32"))


def tensors(held: torch.Tensor, layout: Layout = LAYOUT) -> SiteTensors:
    found = SiteTensors(
        layout, model_of({name: torch.zeros(shape) for name, shape in layout.parameters}), "rebase", 0.5
    )
    found.latest[0] = (3, held)
    return found


def pulled(incoming: Incoming, header: PullHeader, payload: bytes) -> torch.Tensor | None:
    """What comes of a pull that brings the last bytes first, and then the others."""
    incoming.sink.begin(header)
    middle = len(payload) // 2
    for offset, stop in ((middle, len(payload)), (0, middle)):
        incoming.sink.accept(Frame(offset, memoryview(payload)[offset:stop]))
    return incoming.values(incoming.sink.finish())


def header_of(after: torch.Tensor, *parts: bytes, encoding: str = "int4:32", version: int = 4) -> PullHeader:
    lengths = tuple(map(len, parts))
    return PullHeader(0, 3, version, False, encoding, after.numel(), sum(lengths), lengths, digest(after), 0, ())


@pytest.mark.parametrize("encoding", ["int4:32", "int4:32+zstd1", "fp32"])
def test_one_down_link_and_several_give_the_version(encoding: str) -> None:
    held, codec = dice("held", 0), make_codec(encoding)
    one, after = publish(dice("one", 0), held, codec)
    two, later = publish(dice("two", 0), after, codec)
    for header, payload, wanted in (
        (header_of(after, one, encoding=encoding), one, after),
        (header_of(later, one, two, encoding=encoding, version=5), one + two, later),
    ):
        found = pulled(Incoming(0, tensors(held)), header, payload)
        assert found is not None
        assert torch.equal(found, wanted)


def test_a_whole_version_needs_none_before_it() -> None:
    after, site = dice("after", 0), tensors(dice("held", 0))
    site.latest[0] = None
    payload = after.numpy().tobytes()
    header = replace(header_of(after, payload, encoding="fp32"), whole=True)
    found = pulled(Incoming(0, site), header, payload)
    assert found is not None
    assert torch.equal(found, after)


def test_other_bytes_than_were_told_are_nothing() -> None:
    held, codec = dice("held", 0), make_codec("int4:32")
    payload, after = publish(dice("one", 0), held, codec)
    other, _ = publish(dice("two", 0), held, codec)
    header = header_of(after, payload)
    assert pulled(Incoming(0, tensors(held)), header, other) is None
    assert pulled(Incoming(0, tensors(held)), replace(header, numel=header.numel - 1), payload) is None
    assert pulled(Incoming(0, tensors(held)), replace(header, from_version=2), payload) is None


def test_a_difference_to_a_version_that_was_left_meanwhile_is_nothing() -> None:
    held, site = dice("held", 0), tensors(dice("held", 0))
    payload, after = publish(dice("one", 0), held, make_codec("int4:32"))
    incoming = Incoming(0, site)
    incoming.sink.begin(header_of(after, payload))
    incoming.sink.accept(Frame(0, memoryview(payload)))
    site.latest[0] = (4, after)
    assert incoming.values(incoming.sink.finish()) is None


def test_one_that_breaks_off_for_a_newer_one_is_forgotten() -> None:
    held, codec = dice("held", 0), make_codec("int4:32")
    old, old_after = publish(dice("one", 0), held, codec)
    new, new_after = publish(dice("two", 0), held, codec)
    incoming = Incoming(0, tensors(held))
    incoming.sink.begin(header_of(old_after, old))
    incoming.sink.accept(Frame(0, memoryview(old)[:9]))
    found = pulled(incoming, header_of(new_after, new, version=5), new)
    assert found is not None
    assert torch.equal(found, new_after)


def test_its_memory_is_used_again() -> None:
    held, codec = dice("held", 0), make_codec("int4:32")
    payload, after = publish(dice("one", 0), held, codec)
    incoming = Incoming(0, tensors(held))
    incoming.sink.begin(header_of(after, payload))
    incoming.sink.accept(Frame(0, memoryview(payload)))
    taken = incoming.sink.finish()
    memory = taken.parts[0].obj
    assert incoming.values(taken) is not None
    incoming.sink.give_back(taken)
    incoming.sink.begin(header_of(after, payload))
    incoming.sink.accept(Frame(0, memoryview(payload)))
    assert incoming.sink.finish().parts[0].obj is memory


def test_values_are_made_before_the_last_byte_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    held, payload, after = long_one()
    ranges, incoming = Ranges(monkeypatch), Incoming(0, tensors(held, LONG))
    incoming.sink.begin(header_of(after, payload))
    ends = [len(payload) // 2, len(payload) - 1]
    for begin, end in zip([0, *ends], ends, strict=False):
        incoming.sink.accept(Frame(begin, memoryview(payload)[begin:end]))
    assert ranges.stops == list(range(RANGE, 25 * RANGE, RANGE))
    incoming.sink.accept(Frame(ends[1], memoryview(payload)[ends[1] :]))
    found = incoming.values(incoming.sink.finish())
    assert found is not None
    assert torch.equal(found, after)


def test_streams_of_several_threads_bring_it_and_one_at_a_time_makes_values(monkeypatch: pytest.MonkeyPatch) -> None:
    held, payload, after = long_one()
    ranges, incoming = Ranges(monkeypatch, pause_s=0.001), Incoming(0, tensors(held, LONG))
    more = len(payload) // 100
    frames = [Frame(at, memoryview(payload)[at : at + more]) for at in range(0, len(payload), more)]

    def bring(frame: Frame) -> None:
        time.sleep(0.001)
        incoming.sink.accept(frame)

    for _ in range(3):
        incoming.sink.begin(header_of(after, payload))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(bring, frames))
        assert len(ranges.stops) > 1
        found = incoming.values(incoming.sink.finish())
        assert found is not None
        assert torch.equal(found, after)
        ranges.stops.clear()
    assert not ranges.crossed


def test_one_that_broke_off_keeps_what_came_and_no_values_and_goes_on_from_there() -> None:
    held, payload, after = long_one()
    site, middle = tensors(held, LONG), len(payload) // 2
    incoming, kept = Incoming(0, site), weakref.ref(held)
    incoming.sink.begin(header_of(after, payload))
    incoming.sink.accept(Frame(0, memoryview(payload)[:middle]))
    incoming.sink.broke_off()
    site.latest[0], again = None, held.clone()
    del held
    gc.collect()
    assert kept() is None, "it would be kept until this fragment is pulled again"
    assert incoming.sink.bytes_held == middle
    site.latest[0] = (3, again)
    header = header_of(after, payload)
    assert incoming.sink.belongs(header)
    incoming.sink.begin(header)
    incoming.sink.accept(Frame(middle, memoryview(payload)[middle:]))
    found = incoming.values(incoming.sink.finish())
    assert found is not None
    assert torch.equal(found, after)
