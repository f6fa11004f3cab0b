"""``make flips FLIPS=2000``: flip a random bit in a syncer's data folder, or truncate or remove a file.

``diloco journal verify`` or a start must name the file, unless no acknowledged data depends on the damaged bytes: then
the recovered state is the same to the bit.  A start after any damage is refused with a message, or recovers that same
state with every pending payload intact.  One case in four damages such a payload, and then a start is always tried.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from diloco.sync.journal import JournalError
from diloco.syncer.snapshots import SnapshotError
from diloco.syncer.spool import SpoolError
from diloco.syncer.store import StoreError, payloads_in, verify
from tests.hunts.cutting import State, check_waiting, copied, opened, quick_folder, record_syncer, state_of
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.syncer.building import update

START_EVERY = 10
"""In one of this many cases that ``verify`` found, a start is tried as well."""
WAITING_SHARE = 0.25


def damage(path: Path, dice: random.Random) -> str:
    """Flip a bit of the file, or truncate or remove it; return what was done."""
    data = path.read_bytes()
    kind = dice.random()
    if kind < 0.02:
        path.unlink()
        return "missing"
    if kind < 0.05 and data:
        path.write_bytes(data[: dice.randrange(len(data))])
        return "cut off"
    at, bit = dice.randrange(len(data)), dice.randrange(8)
    path.write_bytes(data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :])
    return f"bit {bit} of byte {at} flipped"


def looked_at(folder: Path) -> str:
    """Return the error that ``verify`` finds; "" if there is none."""
    try:
        verify(folder)
    except (JournalError, SnapshotError, SpoolError) as error:
        return str(error)
    return ""


def started(folder: Path, copy: Path, wanted: State) -> tuple[str, bool]:
    """Start on a copy; return what it says, and whether it refuses or recovers the acknowledged state."""
    try:
        with opened(copied(folder, copy)) as desk:
            check_waiting(desk)
            return "; ".join(desk.notes), state_of(desk) == wanted
    except StoreError as error:
        return str(error), True
    except SpoolError as error:
        return str(error), False


def let_wait(folder: Path) -> list[str]:
    """Push updates that are acknowledged but not merged, some of them waiting for a running outer step."""
    with opened(folder) as desk:
        desk.begin()
        version = desk.machine.state.fragments[0].version
        for site in "ab":
            for fragment in (0, 1):
                following = desk.machine.state.sites[site].lines[fragment].watermark + 1
                desk.push(*update(site, following, fragment, encoding="int8", base_version=version))
        return [f"spool/{reference}" for reference in sorted(payloads_in(desk.machine.snapshot()))]


@hunting(flips=(2000, "cases"))
def main(hunt: Hunt, asked: Namespace) -> Counts:
    dice, found = random.Random(f"flips/{asked.seed}"), Counter[str]()
    with quick_folder() as place:
        record_syncer(place, 2)
        folder, copy = place / "syncer", place / "copy"
        waiting = let_wait(folder)
        started(folder, copy, ())
        copied(copy, folder)  # A start has removed all files that are not needed.
        with opened(copy) as desk:
            wanted = state_of(desk)
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock"]
        for number in range(asked.flips):
            path = folder / dice.choice(waiting) if dice.random() < WAITING_SHARE else dice.choice(paths)
            before = path.read_bytes()
            what = damage(path, dice) if before else ""
            if not what:
                continue
            name = path.relative_to(folder).as_posix()
            said = looked_at(folder)
            named = path.name in said or path.parent.name in said
            if not named or number % START_EVERY == 0 or name in waiting:
                told, same = started(folder, copy, wanted)
                named = named or path.name in told
                if not same:
                    hunt.violated(f"{name}, {what}: a start recovers another state")
            found["named" if named else "harmless"] += 1
            found["still to be merged"] += name in waiting
            if not named:
                found[f"harmless in {path.name.split('-')[0]}"] += 1
            path.write_bytes(before)
    return {"files": len(paths), "found": dict(sorted(found.items()))}
