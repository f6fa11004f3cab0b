"""How far a site got is known after any end of its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diloco.learner.seal import FIELDS, Odometer
from diloco.learner.seal import _read_slots as read_slots

PROGRAM = """
import sys, time
from pathlib import Path
from diloco.learner.seal import Odometer
odometer = Odometer(Path(sys.argv[1]))
for step in range(1, 1001):
    odometer.write(step, 10 * step)
print("there", flush=True)
time.sleep(60)
"""


def test_a_new_one_stands_at_nought_and_what_was_written_is_read(tmp_path: Path) -> None:
    odometer = Odometer(tmp_path / "site" / "odometer")
    assert odometer.read() == (0, 0)
    for reading in ((1, 10), (7, 1 << 40), (1 << 63, (1 << 64) - 1)):
        odometer.write(*reading)
        assert odometer.read() == reading
    odometer.close()
    again = Odometer(tmp_path / "site" / "odometer")
    assert again.read() == (1 << 63, (1 << 64) - 1)
    again.close()


def test_it_survives_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "odometer"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        process.kill()
        assert process.wait(10.0) == -9
    odometer = Odometer(path)
    assert odometer.read() == (1000, 10_000)
    odometer.close()


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 17, b"x" * 48])
def test_a_file_that_is_none_is_said_and_begun_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odometer").write_bytes(content)
    notes = list[str]()
    odometer = Odometer(tmp_path / "odometer", note=notes.append)
    assert odometer.read() == (0, 0)
    odometer.close()
    assert notes == [f"{tmp_path / 'odometer'} is damaged: how far the site got is taken from its checkpoint"]
    Odometer(tmp_path / "odometer", note=notes.append).close()
    assert len(notes) == 1


def test_no_flipped_bit_is_believed(tmp_path: Path) -> None:
    """One in a file without a checksum made 70 million million tokens of 16."""
    odometer = Odometer(tmp_path / "odometer")
    odometer.write(1, 16)
    odometer.write(2, 32)
    odometer.close()
    whole = (tmp_path / "odometer").read_bytes()
    readings = set()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        reading, damage = read_slots(bytes(damaged))
        readings.add(reading)
        assert damage or reading == (2, 32), "a bit in the padding is nobody's"
    assert readings == {(1, 16), (2, 32)}
    (tmp_path / "odometer").write_bytes(whole[:24] + whole[24:32] + b"\xff" + whole[33:])
    notes = list[str]()
    again = Odometer(tmp_path / "odometer", note=notes.append)
    assert again.read() == (1, 16)
    again.close()
    assert notes == [
        f"{tmp_path / 'odometer'} is damaged in one of its two readings: the other one's 16 tokens are taken"
    ]


def test_one_of_the_release_before_is_read_and_said_to_have_no_checksum(tmp_path: Path) -> None:
    (tmp_path / "odometer").write_bytes(FIELDS.pack(7, 7168))
    notes = list[str]()
    odometer = Odometer(tmp_path / "odometer", note=notes.append)
    assert odometer.read() == (7, 7168)
    odometer.write(8, 8192)
    odometer.close()
    (note,) = notes
    assert "is of an earlier release, without a checksum: 7,168 tokens are taken from it" in note
    again = Odometer(tmp_path / "odometer", note=notes.append)
    assert again.read() == (8, 8192)
    again.close()
    assert len(notes) == 1
