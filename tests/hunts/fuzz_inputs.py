"""``make fuzz-inputs N=1000000``: give every reader of bytes mutated input, in this process.

The readers: codecs, both journal formats, the wire's converters, layouts, certificates' names, all our files, also
those of the first release, and foreign models.  Each raises only its documented exception, in bounded time and memory,
and what it accepts equals what was written.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

from tests.hunts.inputs import Reader, codecs, files, folders, journals, messages, models, texts
from tests.hunts.mutating import spoiled
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting

PIECE = 5000
SECONDS_MAX = 2.0
"""The most CPU time of one input; all are short, and the machine may be loaded."""
HANG_S = 60
WORDS_MAX = 1000
"""The most characters of an error message, beyond the input that it may quote."""
GROWTH_BYTES_MAX = 192 << 20
"""The most growth after a process's first inputs: a 1 MiB frame, a 1.25 MiB join 44 times over, and a margin."""


@dataclass
class Piece:
    """The results of one piece of the inputs; ``taken`` and ``refused`` are by reader."""

    seed: int
    taken: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    growth_bytes: int = 0


def readers(folder: Path) -> dict[str, Reader]:
    """Return all readers by name, with numbers for repeated names of messages."""
    found: dict[str, Reader] = {}
    everywhere = (*codecs(), *journals(), *messages(), *texts())
    for name, reader in (*everywhere, *files(folder), *folders(folder), *models(folder / "models")):
        found[name if name not in found else f"{name} ({len(found)})"] = reader
    return found


class Hung(BaseException):
    """An input took longer than allowed."""


def run_piece(seed: int, count: int) -> Piece:
    """Run ``count`` inputs drawn from ``seed``."""
    torch.set_num_threads(1)
    piece = Piece(seed)
    home = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=home) as folder:
        found = readers(Path(folder))
        names, chance = sorted(found), random.Random(seed)
        weights = [found[name].weight for name in names]
        others = [chance.choice(found[name].samples)[:4096] for name in names]
        before = 0
        for turn, name in enumerate(chance.choices(names, weights, k=count)):
            if turn == min(1000, count // 2):
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            _one(piece, name, found[name], others, chance, turn)
        piece.growth_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return piece


def _one(piece: Piece, name: str, reader: Reader, others: list[bytes], chance: random.Random, turn: int) -> None:
    raw = chance.choice(reader.samples)
    if reader.spoil is not None and chance.random() < 0.5:
        raw = reader.spoil(raw, chance)
    elif chance.random() < 0.97:
        raw = spoiled(raw, others, chance)
    signal.signal(signal.SIGALRM, _hung)
    signal.alarm(HANG_S)
    began_s = time.process_time()
    try:
        reader.read(raw)
        piece.taken[name] += 1
    except reader.words as error:
        piece.refused[name] += 1
        if len(str(error)) > len(raw) + WORDS_MAX:
            piece.failures.append(f"turn {turn}, {name}: a message of {len(str(error))} characters for {raw[:60]!r}")
    except (Exception, Hung) as error:
        piece.failures.append(f"turn {turn}, {name}: {type(error).__name__}: {str(error)[:200]} for {raw[:120]!r}")
    finally:
        signal.alarm(0)
    took_s = time.process_time() - began_s
    piece.slowest_s = max(piece.slowest_s, took_s)
    if took_s > SECONDS_MAX:
        piece.failures.append(f"turn {turn}, {name}: {took_s:.1f} s for {raw[:120]!r}")


def _hung(number: int, frame: FrameType | None) -> None:
    raise Hung(f"more than {HANG_S} s")


@hunting(n=(20_000, "inputs"), jobs=(len(os.sched_getaffinity(0)), "processes"))
def main(hunt: Hunt, asked: Namespace) -> Counts:
    sizes = [min(PIECE, asked.n - at) for at in range(0, asked.n, PIECE)]
    taken: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    slowest_s, growth_bytes = 0.0, 0
    with ProcessPoolExecutor(asked.jobs) as pool:
        for piece in pool.map(run_piece, range(asked.seed, asked.seed + len(sizes)), sizes):
            taken += piece.taken
            refused += piece.refused
            slowest_s, growth_bytes = max(slowest_s, piece.slowest_s), max(growth_bytes, piece.growth_bytes)
            for failure in piece.failures:
                hunt.violated(failure, seed=piece.seed, n=PIECE)
    if growth_bytes > GROWTH_BYTES_MAX:
        hunt.violated(f"memory grew by {growth_bytes} bytes")
    counts = {"inputs": taken.total() + refused.total(), "taken": taken.total(), "refused": refused.total()}
    limits = {"slowest_s": round(slowest_s, 3), "growth_mib": round(growth_bytes / 2**20, 1)}
    return {**counts, "readers": len(taken | refused), **limits}
