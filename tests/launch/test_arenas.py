"""How many pools of memory a process with many threads has, by the C library's own count."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.launch.arenas import ARENAS_MAX

COUNT = """
import ctypes, sys, threading
from diloco.launch.arenas import limit_arenas
if sys.argv[2] == "limited":
    limit_arenas()
meet, blocks = threading.Barrier(20), []
def allocate():
    meet.wait()
    blocks.append(bytes(100_000))
    meet.wait()
threads = [threading.Thread(target=allocate) for _ in range(20)]
for thread in threads: thread.start()
for thread in threads: thread.join()
library = ctypes.CDLL(None)
library.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(library.fopen(sys.argv[1].encode(), b"w"))
library.malloc_info(0, file)
library.fclose(file)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="this C library has no such pools")
def test_threads_share_few_pools_of_memory(tmp_path: Path) -> None:
    found = {}
    for how in ("limited", "as it likes"):
        told = tmp_path / how
        subprocess.run([sys.executable, "-c", COUNT, str(told), how], check=True, timeout=60)
        found[how] = told.read_text().count("<heap nr=")
    assert found["limited"] <= ARENAS_MAX < found["as it likes"], found
