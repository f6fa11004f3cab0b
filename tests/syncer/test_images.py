"""Images: what is written comes back to the bit, and every damage is named; what is kept of the past; memory."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from diloco.codec.base import digest
from diloco.durable import Disk, DiskFullError, Step
from diloco.outer.optimizer import NOTHING, OuterState
from diloco.sync.events import LineageBegan
from diloco.sync.journal import JournalError, canonical
from diloco.syncer.journal_files import JournalFiles
from diloco.syncer.snapshots import (
    FragmentValues,
    Image,
    Lineages,
    MemoryCheck,
    MemoryDamaged,
    Point,
    Retention,
    Snapshot,
    SnapshotError,
    Snapshots,
    choose,
    full_parameters,
    read_image,
    same_values,
    write_image,
)
from diloco.wire.messages import Refusal, Status
from tests.syncer.building import (
    LAYOUT,
    Events,
    dice,
    eventually,
    files,
    new_syncer,
    push,
    refused,
    serving,
    update,
    version_zero,
)
from tests.syncer.desk import CARD
from tests.syncer.test_server import merged
from tests.syncer.test_store import harm, telling


def of_a_run(folder: Path) -> Image:
    with telling(folder, 2) as story:
        story.tell(40)
    values = tuple(story.desk.values)
    assert all(each.optimizer.tensors for each in values)
    return Image(asdict(CARD), values, {("a", 1): (300, 3)}, {"from": "a test", "left_out": [1, 2]})


@pytest.mark.parametrize("momentum", [True, False])
def test_it_comes_back_to_the_bit_and_the_parameters_lie_beside_it_for_people(tmp_path: Path, momentum: bool) -> None:
    written = of_a_run(tmp_path / "run")
    if not momentum:
        bare = tuple(replace(values, optimizer=NOTHING) for values in written.fragments)
        written = replace(written, fragments=bare)
    parameters = full_parameters(LAYOUT, version_zero())
    write_image(tmp_path / "image", written, parameters)
    found = read_image(tmp_path / "image")
    assert (found.card, found.held, found.facts) == (written.card, written.held, written.facts)
    assert all(same_values(one, other) for one, other in zip(found.fragments, written.fragments, strict=True))
    assert json.loads((tmp_path / "image" / "image.json").read_bytes())["momentum"] is momentum
    assert sorted(path.name for path in tmp_path.iterdir()) == ["image", "run"]
    beside = load_file(tmp_path / "image" / "model.safetensors")
    assert all(bool((beside[name] == values).all()) for name, values in parameters.items())
    with pytest.raises(SnapshotError, match="exists already"):
        write_image(tmp_path / "image", written)


def test_damage_to_an_image_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "image"
    with pytest.raises(SnapshotError, match=r"is no image: .*image\.json is missing"):
        read_image(tmp_path)
    write_image(folder, of_a_run(tmp_path / "run"))
    for path in sorted(folder.iterdir()):  # ``test_snapshots`` has every flipped byte and every cut.
        whole = harm(path, "flipped")
        with pytest.raises(SnapshotError, match=str(path if path.suffix != ".json" else folder)):
            read_image(folder)
        path.write_bytes(whole)
    manifest = folder / "image.json"
    told = json.loads(manifest.read_bytes())
    for changed, said in (
        ({"held": [["a", 1, 301, 3]]}, r"image\.json is damaged: its own digest does not match"),
        ({"digests": [told["digests"][0], "0" * 64]}, "is not the version"),
        ({"versions": [told["versions"][0], 99]}, "is not the version 99"),
        ({"format": 7}, "has format 7: 2 wanted"),
        ({"files": []}, "is damaged: TypeError"),
    ):
        lying = {**told, **changed}
        if not said.endswith("does not match"):  # It was written so, and it is whole.
            del lying["sha256"]
            lying["sha256"] = hashlib.sha256(canonical(lying)).hexdigest()
        manifest.write_text(json.dumps(lying, sort_keys=True, indent=1))
        with pytest.raises(SnapshotError, match=said):
            read_image(folder)
    manifest.write_text(json.dumps(told, sort_keys=True, indent=1))
    (folder / "fragment-1.safetensors").unlink()
    with pytest.raises(SnapshotError, match=r"fragment-1\.safetensors is missing"):
        read_image(folder)


# --- Snapshots that find no room are put off and come later; the run goes on, and any other failure ends it ----------


def full(*_: object) -> None:
    raise DiskFullError(28, "No space left on device")


@pytest.mark.parametrize("where", [(Snapshots, "write"), (JournalFiles, "rotate")])
def test_a_snapshot_without_room_is_said_once_and_comes_with_a_later_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str], events: Events
) -> None:
    with serving(tmp_path, events, sites="a", snapshot_every=1) as syncer:
        before = syncer.store.snapshots.numbers()
        with monkeypatch.context() as patch:
            patch.setattr(*where, full)
            merged(syncer, 3)
            with refused(Status.UNAVAILABLE, "disk full: No space left on device"):
                syncer.api.snapshot()
        (note,) = [each for each in events.of("note") if each["note"] == "snapshot_put_off"]
        assert note["why"] == "disk full: No space left on device"
        assert syncer.store.snapshots.numbers() == before
        push(syncer, *update(sequence=4, base_version=3))
        eventually(lambda: syncer.store.snapshots.numbers() != before, "the next version is kept")
        syncer.api.snapshot()
        assert syncer.failed is None
        monkeypatch.setattr(*where, full)
        merged(syncer, 1, begin=5)  # A stop on a full disk is a stop.
    monkeypatch.undo()
    with serving(tmp_path, events) as again:
        assert again.holdings.values[0].version == 5
        assert events.of("syncer_started")[-1]["recovered"] > 0, "from the journal"


def test_a_snapshot_that_finds_no_room_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    class NoRoom(Disk):
        kept = 0

        def keep(self, path: Path, write: Callable[[Path], object], step: Step) -> None:
            self.kept += 1
            if self.kept == 2:
                raise OSError(28, "No space left on device")
            super().keep(path, write, step)

    snapshots = Snapshots(tmp_path, NoRoom())
    with pytest.raises(DiskFullError):
        snapshots.write(Snapshot({"sites": {}}, (), 1))
    assert list(tmp_path.iterdir()) == []
    snapshots.write(Snapshot({"sites": {}}, (), 1))
    assert snapshots.numbers() == [1]


def test_a_snapshot_writes_first_what_has_a_newer_version_by_then(tmp_path: Path) -> None:
    """What nobody but the snapshot holds any more is let go of sooner."""
    seen: list[int] = []
    with telling(tmp_path / "run", 2) as story:
        desk, live = story.desk, list(story.desk.values)
        write = desk.store.snapshot_writer(desk.machine, live, check=lambda index, values: seen.append(index))
        before = live[1]
        live[1] = replace(before, version=before.version + 1)
        write()
        kept = desk.store.snapshots.load(desk.store.snapshots.numbers()[-1])
    assert seen == [1, 0]
    assert all(same_values(mine, theirs) for mine, theirs in zip(kept.fragments, [live[0], before], strict=True))


# --- What stays of the past ------------------------------------------------------------------------------------------


def point(number: int, steps: int, size: int = 10) -> Point:
    return Point(number, steps, number, size, 1)


@pytest.mark.parametrize("every", [1, 16, 300])
@pytest.mark.parametrize("steps", [1, 64, 256])
def test_few_snapshots_do_for_a_replay_of_any_step_within_retention(every: int, steps: int) -> None:
    held: list[Point] = []
    now, draw = 0, random.Random(every)
    for number in range(1, 200):
        now += every + draw.randrange(2)
        held, cut = choose([*held, point(number, now)], Retention(steps, 1 << 40), lambda segments: 0)
        assert not cut
        assert held[-1].number == number
        assert len(held) <= 7, held
        if held[0].number > 1:
            assert steps <= now - held[0].steps <= 2 * steps + 4 * (every + 1), "not much more than promised"


def test_values_of_a_lineage_are_found_by_their_record_and_else_named(tmp_path: Path) -> None:
    lineages, kept = Lineages(tmp_path / "lineages"), image()
    assert lineages.numbers() == []
    for _ in range(2):  # Another attempt replaces the first.
        lineages.keep(7, kept)
    found = lineages.values(event(7, kept))
    assert all(same_values(one, other) for one, other in zip(found, kept.fragments, strict=True))
    with pytest.raises(JournalError, match="lineage 8 began with are not here"):
        lineages.values(event(8, kept))
    with pytest.raises(JournalError, match="holds other values than those that lineage 7 began with"):
        lineages.values(LineageBegan(7, ("0" * 64, "1" * 64), "another"))
    path = tmp_path / "lineages" / "7" / "fragment-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(JournalError, match=r"fragment-0\.safetensors is damaged"):
        lineages.values(event(7, kept))
    for lineage in (9, 12):
        lineages.keep(lineage, kept)
    lineages.prune(9)
    assert lineages.numbers() == [12], "what no snapshot is older than goes"


def test_the_oldest_goes_first_where_the_bound_is_reached_and_that_is_said() -> None:
    points = [point(number, 100 * number) for number in range(1, 8)]
    behind = {1: 400, 2: 300, 3: 200, 4: 100, 5: 50}
    seen = []
    for bound in (10_000, 400, 200, 70, 0):
        kept, cut = choose(points, Retention(600, bound), lambda segments: behind[segments.start])
        assert kept[-2:] == points[-2:]
        past = kept[:-2]
        assert not past or sum(each.size for each in past) + behind[past[0].number] <= bound
        seen.append((len(kept), cut))
    assert seen[0] == (4, False), "every 300 steps one, from 600 steps back"
    assert seen[-1] == (2, True)
    assert [count for count, _ in seen] == sorted((count for count, _ in seen), reverse=True)


# --- The values that lineages began with: kept, found by their record, dropped when nothing needs them ---------------


def image() -> Image:
    return Image(asdict(CARD), tuple(FragmentValues(5, v, v.clone(), NOTHING, digest(v)) for v in version_zero()))


def event(lineage: int, kept: Image) -> LineageBegan:
    return LineageBegan(lineage, tuple(values.digest for values in kept.fragments), "a test")


# --- A bit that flips in the syncer's memory ends the process before it reaches a site or a snapshot -----------------


def held(version: int = 3) -> FragmentValues:
    published = dice("published", 0)
    memory = OuterState(3, {"momentum": dice("momentum", 0)})
    return FragmentValues(version, dice("theta", 0), published, memory, digest(published), dice("reference", 0))


def flip(values: Tensor | None) -> None:
    values.numpy().view("uint32")[5] ^= 1 << 20


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("published", "what is published"),
        ("theta", "the parameters"),
        ("momentum", "the optimizer's momentum"),
        ("reference", "what a region measures from"),
    ],
)
def test_one_flipped_bit_is_found_and_named(field: str, words: str) -> None:
    values, check = held(), MemoryCheck([], 1.0)
    for version in (replace(held(2), theta=dice("other", 0), optimizer=NOTHING), values, values):
        check.check(0, version)  # A new version is no damage.
    flip(values.optimizer.momentum if field == "momentum" else getattr(values, field))
    with pytest.raises(MemoryDamaged, match=f"{words} of version 3 of fragment 0 changed"):
        check.check(0, values)


@pytest.mark.parametrize(("every_s", "fragment"), [(0.01, 1), (0.0, 0)])
def test_a_syncer_ends_in_words_keeps_nothing_of_it_and_goes_on_from_its_disk(
    tmp_path: Path, every_s: float, fragment: int
) -> None:
    """A thread takes every fragment in turn; without it, whatever is written to a snapshot is looked at."""
    syncer = new_syncer(tmp_path, Events().emit, memory_check_s=every_s)
    syncer.start()
    snapshots = files(tmp_path / "snapshots").keys()
    flip(syncer.holdings.values[fragment].published)
    ends = syncer.api.snapshot if not every_s else lambda: eventually(lambda: syncer.wait(0.1), "an end")
    words = f"version 0 of fragment {fragment} changed in this process"
    with pytest.raises(MemoryDamaged if every_s else Refusal, match=words if every_s else f"not be kept: .*{words}"):
        ends()
    syncer.stop(0.1)
    assert files(tmp_path / "snapshots").keys() == snapshots
    with serving(tmp_path) as again:
        assert [digest(values.published) for values in again.holdings.values] == [digest(v) for v in version_zero()]
