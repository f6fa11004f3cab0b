"""Payloads on disk: resumed at any byte, refused when they are not what was declared, never under a false name."""

from __future__ import annotations

import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from diloco.codec.base import Buffers
from diloco.codec.registry import make_codec
from diloco.syncer.spool import CutShortError, Mapped, PartialUpdate, Settled, Spool, SpoolError, read_part
from diloco.wire.messages import PushHeader
from tests.syncer.building import files, stored, update


def kept(spool: Spool, header: PushHeader, payload: bytes) -> tuple[str, PartialUpdate]:
    """The reference of an update that came whole, and how it came."""
    partial = spool.open_partial(header)
    partial.write(memoryview(payload)[partial.offset :])
    reference = spool.keep(partial)
    partial.close()
    return reference, partial


def test_a_push_is_resumed_at_every_offset(tmp_path: Path) -> None:
    header, payload = update(values=None)
    spool = Spool(tmp_path)
    for cut in range(len(payload) + 1):
        first = spool.open_partial(header)
        assert first.offset == 0
        first.write(memoryview(payload)[:cut])
        first.close()
        again = Spool(tmp_path).open_partial(header)  # As after a restart.
        assert again.offset == cut
        again.write(memoryview(payload)[cut:])
        assert again.hash.text() == header.digest
        assert again.path.read_bytes() == payload
        again.discard()
    assert files(tmp_path) == {}
    partial = spool.open_partial(header)  # What is longer than declared is begun anew.
    partial.write(memoryview(payload + b"more"))
    partial.close()
    again = spool.open_partial(header)
    assert again.offset == 0
    again.write(memoryview(payload))
    assert again.hash.text() == header.digest
    again.discard()


def test_a_site_and_fragment_leaves_at_most_one_update_half_way(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for sequence in range(1, 6):
        for fragment in (0, 1):
            for site in ("a", "a-0"):  # One name is the beginning of the other.
                header, payload = update(site=site, sequence=sequence, fragment=fragment)
                partial = spool.open_partial(header)
                partial.write(memoryview(payload)[:9])
                partial.close()
    left = sorted(files(tmp_path))
    assert len(left) == 4, left
    assert all("-5-" in name for name in left)


def test_a_site_may_have_any_name_that_the_wire_permits(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for site in ("partial", "spool", "lock", "x.update"):
        header, payload = update(site=site)
        reference, _ = kept(spool, header, payload)
        assert stored(spool, reference, header.digest) == payload
    assert spool.sweep(set()) == 4
    assert files(tmp_path) == {}


def test_fragments_of_one_new_site_may_come_at_the_same_instant(tmp_path: Path) -> None:
    spool, gate = Spool(tmp_path), threading.Barrier(4)

    def keep(site: str, fragment: int) -> None:
        header, payload = update(site=site)
        partial = spool.open_partial(replace(header, fragment=fragment))
        partial.write(memoryview(payload))
        gate.wait(10.0)
        spool.keep(partial)
        partial.close()

    with ThreadPoolExecutor(4) as pushing:
        for group in range(8):
            list(pushing.map(keep, [f"s{group}"] * 4, range(4)))


def test_a_sweep_keeps_what_is_needed_and_what_is_on_its_way(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    references = [kept(spool, *update(sequence=sequence))[0] for sequence in (1, 2, 3)]
    header, payload = update(sequence=4)
    partial = spool.open_partial(header)
    partial.write(memoryview(payload)[:5])
    partial.close()
    half = tmp_path / "a" / ".0-1-0123456789abcdef.update.tmp"  # Of a standby that died while it copied.
    half.write_bytes(b"half")
    assert spool.sweep({references[1], "", "b/gone.update"}) == 2
    assert sorted(files(tmp_path)) == sorted([references[1], str(partial.path.relative_to(tmp_path))])


@pytest.mark.parametrize("second", [Settled.GIVEN_BACK, Settled.DROPPED])
def test_an_attempt_that_comes_to_nothing_takes_no_payload_of_an_earlier_one(tmp_path: Path, second: Settled) -> None:
    """Its process may have been replaced between the admission of the push and its end, the update accepted before."""
    header, payload = update()
    spool = Spool(tmp_path)
    for settled in (Settled.KEPT, second):
        reference, partial = kept(spool, header, payload)
        spool.settle(reference, settled, partial)
        assert stored(spool, reference, header.digest) == payload


@pytest.mark.parametrize("first", [Settled.GIVEN_BACK, Settled.DROPPED, Settled.KEPT])
@pytest.mark.parametrize("second", [Settled.GIVEN_BACK, Settled.DROPPED, Settled.KEPT])
def test_of_two_attempts_at_an_update_neither_takes_the_others_payload(
    tmp_path: Path, first: Settled, second: Settled
) -> None:
    """A site that gave a push up sends it again, and the first is decided while the second is being so."""
    header, payload = update()
    spool = Spool(tmp_path)
    (reference, partial), (again, later) = kept(spool, header, payload), kept(spool, header, payload)
    assert reference == again
    spool.settle(reference, first, partial)
    assert stored(spool, reference, header.digest) == payload, "the second attempt may be the one that is accepted"
    spool.settle(reference, second, later)
    accepted = Settled.KEPT in (first, second)
    assert (tmp_path / reference).exists() == accepted
    assert later.path.exists() == (not accepted and second is Settled.GIVEN_BACK)


@pytest.mark.parametrize("there_is_room", [True, False])
def test_a_payload_is_opened_also_where_there_is_no_room_to_unpack_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there_is_room: bool
) -> None:
    values, codec = torch.zeros(5000), make_codec("int4+zstd")
    header, payload = update(values=values, encoding="int4+zstd")
    spool = Spool(tmp_path)
    reference, _ = kept(spool, header, payload)

    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    if not there_is_room:
        monkeypatch.setattr(tempfile, "TemporaryFile", full)
    reads, mapped = spool.opened(reference, header.digest, codec, 5000)
    assert (reads is codec.plain) == there_is_room
    assert torch.equal(reads.decode(mapped.payload, 5000), values)
    mapped.let_go()
    assert torch.equal(reads.decode(mapped.payload, 5000), values)
    assert [*files(tmp_path)] == [reference], "what was unpacked beside it leaves nothing"
    with pytest.raises(SpoolError, match="damaged"):
        spool.opened(reference, "xxh3:" + "0" * 32, codec, 5000)


# --- What is read of a payload on the disk ---------------------------------------------------------------------------

VALUES = torch.randn(1000, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4:64"])
@pytest.mark.parametrize("begin", [0, 1])
def test_a_part_is_the_payload_of_its_values(tmp_path: Path, name: str, begin: int) -> None:
    codec, buffers, seen = make_codec(name), Buffers(1), []
    (tmp_path / "file").write_bytes(b"x" * begin + codec.encode(VALUES))
    with (tmp_path / "file").open("rb") as file:
        for start, stop in ((128, 384), (384, 640), (640, 896), (896, 1000)):
            part = read_part(file.fileno(), codec, 1000, start, stop, begin, buffers)
            assert bytes(part) == codec.encode(VALUES[start:stop])
            seen.append(np.frombuffer(part, dtype=np.uint8).ctypes.data)
            del part
        end = begin + len(codec.encode(VALUES)) - 1
        os.truncate(file.name, end)
        with pytest.raises(CutShortError, match=f"ends at byte {end}"):
            read_part(file.fileno(), codec, 1000, 896, 1000, begin, buffers)
    assert len(set(seen[:3])) == 1, "it lies in memory that is used again"


def resident(path: Path) -> int:
    """Kilobytes of ``path`` that are resident in this process."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            ours = line.endswith(str(path))
        elif ours and words[0] == "Rss:":
            total += int(words[1])
    return total


def test_what_was_looked_at_is_let_go_of_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = os.urandom(8 << 20)
    path.write_bytes(data)
    with path.open("rb") as file:
        mapped = Mapped(file)
    assert bytes(mapped.payload) == data
    assert resident(path) > 8000
    mapped.let_go()
    assert resident(path) == 0
    assert mapped.payload[-5:] == data[-5:]
    assert 0 < resident(path) <= 4096, "the kernel brings neighbours along"
    part = mapped.payload[:3]
    del mapped
    assert part == data[:3], "whoever holds a part holds it all"
    del part
    assert str(path) not in Path("/proc/self/maps").read_text("utf-8")
