"""How far a site got is known after any end of its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diloco.learner.odometer import Odometer

PROGRAM = """
import sys, time
from pathlib import Path
from diloco.learner.odometer import Odometer
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


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 17])
def test_a_file_of_another_size_is_begun_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odometer").write_bytes(content)
    odometer = Odometer(tmp_path / "odometer")
    assert odometer.read() == (0, 0)
    odometer.close()
