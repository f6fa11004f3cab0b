"""How a rank's process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.inner.parallel import OpenStore

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import atexit, sys
import torch
from diloco.inner.parallel import SiteGroup
from diloco.launch.rank_exit import end_process

# Whoever waits for the interpreter's lock gets it only when this thread waits for something.
sys.setswitchinterval(1000)
atexit.register(lambda: print("at the end"))
rank, world, port = map(int, sys.argv[1:])
group = SiteGroup(rank, rank, world, "127.0.0.1", port, "cpu", 60.0)
try:
    for _ in range(100):
        torch.distributed.all_reduce(torch.ones(4), async_op=True)  # What it is given is gloo's to let go of.
except RuntimeError:
    pass  # The other has ended already.
print("trained", end=" ")
end_process(3)
"""


WORLD = 2


@pytest.mark.slow
def test_a_process_that_was_a_rank_ends_with_its_code() -> None:
    store = OpenStore()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(WORLD), str(store.port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        told = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [rank.returncode for rank in ranks] == [3] * WORLD, "no thread of gloo's has aborted it"
    assert [out for out, _ in told] == ["trained at the end\n"] * WORLD
