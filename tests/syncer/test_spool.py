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
from diloco.syncer.spool import Mapped, PartialUpdate, Spool, SpoolError, read_part
from diloco.wire.messages import PushHeader
from tests.syncer.building import files, no_room, stored, update


def kept(spool: Spool, header: PushHeader, payload: bytes) -> tuple[str, PartialUpdate]:
    """The reference of an update that came whole, and how it came."""
    partial = spool.open_partial(header)
    partial.write(memoryview(payload)[partial.offset :])
    reference = spool.keep(partial)
    partial.close()
    return reference, partial


def begun(spool: Spool, header: PushHeader, payload: bytes) -> PartialUpdate:
    """An update, of which ``payload`` has come."""
    partial = spool.open_partial(header)
    partial.write(memoryview(payload)[partial.offset :])
    partial.close()
    return partial


def test_a_push_is_resumed_at_every_offset(tmp_path: Path) -> None:
    header, payload = update()
    for cut in range(len(payload) + 2):  # What is longer than declared is begun anew.
        begun(Spool(tmp_path), header, (payload + b"m")[:cut])
        again = Spool(tmp_path).open_partial(header)  # As after a restart.
        assert again.offset == (cut if cut <= len(payload) else 0)
        again.write(memoryview(payload)[again.offset :])
        assert again.hash.text() == header.digest
        assert again.path.read_bytes() == payload
        again.discard()
        assert files(tmp_path) == {}


def test_a_site_of_any_name_that_the_wire_permits_leaves_at_most_one_update_of_a_fragment_half_way(
    tmp_path: Path,
) -> None:
    spool, sites = Spool(tmp_path), ("a-0", "a", "partial", "lock", "x.update")  # One may begin as another does.
    for sequence in range(1, 4):
        for fragment in (0, 1):
            for site in sites:
                header, payload = update(site, sequence, fragment)
                begun(spool, header, payload[:9])
    left = files(tmp_path)
    assert len(left) == 2 * len(sites), left
    assert all("-3-" in name for name in left)
    for site in sites:
        for fragment in (0, 1):
            header, payload = update(site, 3, fragment)
            reference, _ = kept(spool, header, payload)
            assert stored(spool, reference, header.digest) == payload
    spool.sweep(set())
    assert files(tmp_path) == {}


def test_fragments_of_one_new_site_may_come_at_the_same_instant(tmp_path: Path) -> None:
    spool, gate = Spool(tmp_path), threading.Barrier(4)

    def keep(site: str, fragment: int) -> None:
        header, payload = update(site)
        partial = begun(spool, replace(header, fragment=fragment), payload)
        gate.wait(10.0)
        spool.keep(partial)

    with ThreadPoolExecutor(4) as pushing:
        for group in range(8):
            list(pushing.map(keep, [f"s{group}"] * 4, range(4)))


def test_a_sweep_keeps_what_is_needed_and_what_is_on_its_way(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    references = [kept(spool, *update(sequence=sequence))[0] for sequence in (1, 2, 3)]
    header, payload = update(sequence=4)
    partial = begun(spool, header, payload[:5])
    half = tmp_path / "a" / ".0-1-0123456789abcdef.update.tmp"  # Of a standby that died while it copied.
    half.write_bytes(b"half")
    spool.sweep({references[1], "", "b/gone.update"})
    assert files(tmp_path).keys() == {references[1], str(partial.path.relative_to(tmp_path))}


@pytest.mark.parametrize("first", ["given back", "dropped", "kept"])
@pytest.mark.parametrize("second", ["given back", "dropped", "kept"])
def test_of_two_attempts_at_an_update_neither_takes_the_others_payload(tmp_path: Path, first: str, second: str) -> None:
    """A site that gave a push up sends it again, and the first is decided while the second is being so, or before."""
    header, payload = update()
    spool = Spool(tmp_path)

    def settle(how: str, partial: PartialUpdate) -> None:
        spool.settle(reference, keep=how == "kept", back=partial if how == "given back" else None)

    (reference, partial), (again, later) = kept(spool, header, payload), kept(spool, header, payload)
    assert reference == again
    settle(first, partial)
    assert stored(spool, reference, header.digest) == payload, "the second attempt may be the one that is accepted"
    settle(second, later)
    accepted = "kept" in (first, second)
    assert (tmp_path / reference).exists() == accepted
    assert later.path.exists() == (not accepted and second == "given back")
    if accepted:
        _, last = kept(spool, header, payload)
        settle(second, last)
        assert stored(spool, reference, header.digest) == payload


@pytest.mark.parametrize("there_is_room", [True, False])
def test_a_payload_is_opened_also_where_there_is_no_room_to_unpack_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there_is_room: bool
) -> None:
    values, codec = torch.zeros(5000), make_codec("int4+zstd")
    header, payload = update(values=values, encoding="int4+zstd")
    spool = Spool(tmp_path)
    reference, _ = kept(spool, header, payload)

    if not there_is_room:
        monkeypatch.setattr(tempfile, "TemporaryFile", no_room)
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
def test_a_part_is_the_payload_of_its_values(tmp_path: Path, name: str) -> None:
    codec, buffers, seen = make_codec(name), Buffers(1), []
    whole = codec.encode(VALUES)
    for begin in (0, 1):
        (tmp_path / "file").write_bytes(b"x" * begin + whole)
        with (tmp_path / "file").open("rb") as file:
            for start, stop in ((128, 384), (384, 640), (896, 1000)):
                part = read_part(file.fileno(), codec, 1000, start, stop, begin, buffers)
                assert bytes(part) == codec.encode(VALUES[start:stop])
                seen.append(np.frombuffer(part, dtype=np.uint8).ctypes.data)
                del part
            end = begin + len(whole) - 1
            os.truncate(file.name, end)
            with pytest.raises(OSError, match=f"ends at byte {end}"):
                read_part(file.fileno(), codec, 1000, 896, 1000, begin, buffers)
    assert seen[0] == seen[1], "it lies in memory that is used again"


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
    part = mapped.payload[:3]
    del mapped
    assert part == data[:3], "whoever holds a part holds it all"
    del part
    assert str(path) not in Path("/proc/self/maps").read_text("utf-8")
