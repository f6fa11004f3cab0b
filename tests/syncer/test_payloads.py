"""What is read of a payload on the disk: some values of one that grows, or all of one that is whole."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from diloco.codec.base import Buffers
from diloco.codec.registry import make_codec
from diloco.syncer.spool import CutShortError, Mapped, opened, read_part

VALUES = torch.randn(1000, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4:64"])
@pytest.mark.parametrize("begin", [0, 1])
def test_a_part_is_the_payload_of_its_values(tmp_path: Path, name: str, begin: int) -> None:
    codec = make_codec(name)
    (tmp_path / "file").write_bytes(b"x" * begin + codec.encode(VALUES))
    with (tmp_path / "file").open("rb") as file:
        part = read_part(file.fileno(), codec, 1000, 128, 768, begin, Buffers(0))
        rest = read_part(file.fileno(), codec, 1000, 768, 1000, begin, Buffers(0))
    assert bytes(part) == codec.encode(VALUES[128:768])
    assert bytes(rest) == codec.encode(VALUES[768:])


def test_a_part_lies_in_memory_that_is_used_again(tmp_path: Path) -> None:
    codec, buffers, seen = make_codec("int8"), Buffers(1), set()
    (tmp_path / "file").write_bytes(codec.encode(VALUES))
    with (tmp_path / "file").open("rb") as file:
        for start in (0, 256, 512):
            part = read_part(file.fileno(), codec, 1000, start, start + 256, 0, buffers)
            assert bytes(part) == codec.encode(VALUES[start : start + 256])
            seen.add(np.frombuffer(part, dtype=np.uint8).ctypes.data)
            del part
    assert len(seen) == 1


def test_a_file_that_ends_too_early_is_said_to(tmp_path: Path) -> None:
    codec = make_codec("int8")
    (tmp_path / "file").write_bytes(codec.encode(VALUES)[:-1])
    with (tmp_path / "file").open("rb") as file, pytest.raises(CutShortError, match="ends at byte 1015"):
        read_part(file.fileno(), codec, 1000, 896, 1000, 0, Buffers(0))


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


@pytest.mark.parametrize("name", ["fp32", "int4+zstd", "fp32+zstd", "int4"])
def test_an_entropy_stage_is_taken_off_beside_the_file_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    path, codec = tmp_path / "file", make_codec(name)
    even = VALUES if name.startswith("fp32") else torch.zeros(1000)  # One of them does not get shorter.
    path.write_bytes(codec.encode(even))
    plain, mapped = opened(path, codec, 1000)
    assert plain is codec.plain
    assert bytes(mapped.payload) == plain.encode(even)
    mapped.let_go()
    assert torch.equal(plain.decode(mapped.payload, 1000), codec.decode(codec.encode(even), 1000))
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
