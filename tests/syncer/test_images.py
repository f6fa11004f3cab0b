"""Images: what is written comes back to the bit, and every damage is named."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from diloco.durable import DiskFullError
from diloco.outer.fragments import scatter
from diloco.outer.optimizer import NOTHING
from diloco.sync.journal import canonical
from diloco.syncer.journal_files import JournalFiles, Position
from diloco.syncer.snapshots import (
    Choice,
    Image,
    ImageError,
    Point,
    Retention,
    Snapshot,
    Snapshots,
    choose,
    read_image,
    same_values,
    write_image,
)
from diloco.wire.messages import Refusal, Status
from tests.syncer.building import LAYOUT, Events, eventually, join, push, serving, update, version_zero
from tests.syncer.desk import CARD, Desk
from tests.syncer.test_server import merged
from tests.syncer.test_store import Story


def image(folder: Path) -> Image:
    desk = Desk(folder)
    desk.begin()
    story = Story(desk, 2)
    for _ in range(40):
        story.tell()
    desk.close()
    assert all(values.optimizer.tensors for values in desk.values)
    return Image(asdict(CARD), tuple(desk.values), {("a", 1): (300, 3)}, {"from": "a test", "left_out": [1, 2]})


def test_it_comes_back_to_the_bit(tmp_path: Path) -> None:
    written = image(tmp_path / "run")
    write_image(tmp_path / "image", written)
    found = read_image(tmp_path / "image")
    assert (found.card, found.held, found.facts) == (written.card, written.held, written.facts)
    assert all(same_values(one, other) for one, other in zip(found.fragments, written.fragments, strict=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["image", "run"]
    with pytest.raises(ImageError, match="exists already"):
        write_image(tmp_path / "image", written)


def test_without_momentum_it_says_so(tmp_path: Path) -> None:
    written = image(tmp_path / "run")
    bare = replace(written, fragments=tuple(replace(values, optimizer=NOTHING) for values in written.fragments))
    write_image(tmp_path / "image", bare)
    assert json.loads((tmp_path / "image" / "image.json").read_bytes())["momentum"] is False
    assert read_image(tmp_path / "image").fragments[0].optimizer == NOTHING


def test_the_parameters_lie_beside_it_for_people(tmp_path: Path) -> None:
    parameters = {name: version_zero()[0].new_zeros(shape) for name, shape in LAYOUT.parameters}
    for fragment, values in zip(LAYOUT.fragments, version_zero(), strict=True):
        scatter(fragment, values, parameters)
    write_image(tmp_path / "image", image(tmp_path / "run"), parameters)
    found = load_file(tmp_path / "image" / "model.safetensors")
    assert all(bool((found[name] == values).all()) for name, values in parameters.items())


def test_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"is no image: .*image\.json is missing"):
        read_image(tmp_path)
    write_image(tmp_path / "image", image(tmp_path / "run"))
    manifest, path = tmp_path / "image" / "image.json", tmp_path / "image" / "fragment-1.safetensors"
    whole, told = path.read_bytes(), json.loads(manifest.read_bytes())
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ImageError, match=r"fragment-1\.safetensors is damaged"):
        read_image(tmp_path / "image")
    path.write_bytes(whole)
    for changed, said in (
        ({"held": [["a", 1, 301, 3]]}, r"image\.json is damaged: its own digest does not match"),
        ({"facts": {}}, "its own digest does not match"),
        ({"digests": [told["digests"][0], "0" * 64]}, "is not the version"),
        ({"versions": [told["versions"][0], 99]}, "is not the version 99"),
        ({"format": 7}, "has format 7"),
        ({"card": 1}, "is damaged: TypeError"),
        ({"files": []}, "is damaged: TypeError"),
    ):
        lying = {**told, **changed}
        if not said.endswith("does not match"):  # Somebody has written it so, and it is whole.
            del lying["sha256"]
            lying["sha256"] = hashlib.sha256(canonical(lying)).hexdigest()
        manifest.write_text(json.dumps(lying, sort_keys=True, indent=1))
        with pytest.raises(ImageError, match=said):
            read_image(tmp_path / "image")
    path.unlink()
    manifest.write_text(json.dumps(told, sort_keys=True, indent=1))
    with pytest.raises(ImageError, match=r"fragment-1\.safetensors is missing"):
        read_image(tmp_path / "image")


def test_an_image_of_another_format_is_no_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "image.json").write_text('{"format": 1, "versions": []}')
    with pytest.raises(ImageError, match=r"image\.json has format 1: 2 wanted"):
        read_image(tmp_path)


def test_every_flipped_byte_and_every_cut_is_found(tmp_path: Path) -> None:
    write_image(tmp_path / "image", image(tmp_path / "run"))
    dice = random.Random(7)
    for path in sorted((tmp_path / "image").iterdir()):
        whole = path.read_bytes()
        for turn in range(80):
            at = dice.randrange(len(whole))
            flipped = whole[:at] + bytes([whole[at] ^ 1 << dice.randrange(8)]) + whole[at + 1 :]
            path.write_bytes(flipped if turn % 4 else whole[:at])
            with pytest.raises(ImageError, match=str(tmp_path / "image")):
                read_image(tmp_path / "image")
        path.write_bytes(whole)
    assert read_image(tmp_path / "image").held == {("a", 1): (300, 3)}


# --- Snapshots that find no room are put off and come later; the run goes on, and any other failure ends it ----------


def full(*_: object) -> None:
    raise DiskFullError(28, "No space left on device")


@pytest.mark.parametrize("where", [(Snapshots, "write"), (JournalFiles, "rotate")])
def test_a_snapshot_without_room_is_said_once_and_comes_with_a_later_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str]
) -> None:
    events = Events()
    with serving(tmp_path, events, snapshot_every=1) as syncer:
        join(syncer)
        before = syncer.store.snapshots.numbers()
        with monkeypatch.context() as patch:
            patch.setattr(*where, full)
            merged(syncer, 3)
            with pytest.raises(Refusal, match="disk full: No space left on device") as raised:
                syncer.api.snapshot()
            assert raised.value.status is Status.UNAVAILABLE
        (note,) = [each for each in events.of("note") if each["note"] == "snapshot_put_off"]
        assert note["why"] == "disk full: No space left on device"
        assert syncer.store.snapshots.numbers() == before
        push(syncer, *update(sequence=4, base_version=3))
        eventually(lambda: syncer.store.snapshots.numbers() != before, "the next version is kept")
        syncer.api.snapshot()
        assert syncer.failed is None
    with serving(tmp_path) as again:
        assert again.holdings.values[0].version == 4


def test_a_stop_on_a_full_disk_is_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, snapshot_every=1000) as syncer:
        join(syncer)
        merged(syncer, 2)
        monkeypatch.setattr(Snapshots, "write", full)
    monkeypatch.undo()
    events = Events()
    with serving(tmp_path, events) as again:
        assert again.holdings.values[0].version == 2
        assert events.of("syncer_started")[0]["recovered"] > 0, "from the journal"


def test_a_snapshot_that_finds_no_room_half_way_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = Snapshots(tmp_path)
    place = Position(1, "")
    keep, calls = snapshots._disk.keep, [0]

    def fails(path: Path, write: object, step: object) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(28, "No space left on device")
        keep(path, write, step)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(snapshots._disk, "keep", fails)
        with pytest.raises(DiskFullError):
            snapshots.write(Snapshot({"sites": {}}, (), place.segment))
    assert list(tmp_path.iterdir()) == []
    snapshots.write(Snapshot({"sites": {}}, (), place.segment))
    assert snapshots.numbers() == [1]


def test_a_snapshot_writes_first_what_has_a_newer_version_by_then(tmp_path: Path) -> None:
    """What nobody but the snapshot holds any more is let go of sooner."""
    desk = Desk(tmp_path / "run")
    desk.begin()
    live = list(desk.values)
    seen: list[tuple[int, int]] = []
    write = desk.store.snapshot_writer(
        desk.machine, live, check=lambda index, values: seen.append((index, values.version))
    )
    before = live[1]
    live[1] = replace(before, version=before.version + 1)
    write()
    assert seen == [(1, 0), (0, 0)]
    kept = desk.store.snapshots.load(desk.store.snapshots.numbers()[-1])
    assert all(same_values(mine, theirs) for mine, theirs in zip(kept.fragments, [live[0], before], strict=True))
    desk.close()


# --- What stays of the past ------------------------------------------------------------------------------------------


def point(number: int, steps: int, size: int = 10) -> Point:
    return Point(number, steps, number, size)


def nothing(segments: range) -> int:
    return 0


def numbers(choice: Choice) -> list[int]:
    return [each.number for each in choice.kept]


def test_without_retention_the_newest_two_stay() -> None:
    points = [point(number, 16 * number) for number in range(1, 8)]
    for count in range(1, 8):
        choice = choose(points[:count], Retention(), nothing)
        assert numbers(choice) == [each.number for each in points[:count][-2:]]
        assert not choice.cut


@pytest.mark.parametrize("every", [1, 3, 16, 100, 300])
@pytest.mark.parametrize("steps", [1, 64, 256])
def test_any_step_within_retention_can_be_replayed_at_any_time_and_few_snapshots_do_for_that(
    every: int, steps: int
) -> None:
    kept: tuple[Point, ...] = ()
    now = 0
    dice = random.Random(every)
    for number in range(1, 200):
        now += every + dice.randrange(2)
        choice = choose([*kept, point(number, now)], Retention(steps, 1 << 40), nothing)
        kept = choice.kept
        assert not choice.cut
        assert kept[-1].number == number
        assert kept[0].number == 1 or now - kept[0].steps >= steps
        assert len(kept) <= 7, kept
        assert kept[0].number == 1 or now - kept[0].steps <= 2 * steps + 4 * (every + 1), "not much more than promised"


def test_the_oldest_goes_first_where_the_bound_is_reached_and_that_is_said() -> None:
    points = [point(number, 100 * number) for number in range(1, 8)]
    behind = {1: 400, 2: 300, 3: 200, 4: 100, 5: 50}
    seen = []
    for bound in (10_000, 400, 200, 70, 0):
        choice = choose(points, Retention(600, bound), lambda segments: behind[segments.start])
        assert choice.kept[-2:] == tuple(points[-2:])
        past = choice.kept[:-2]
        assert not past or sum(each.size for each in past) + behind[past[0].number] <= bound
        seen.append((len(choice.kept), choice.cut))
    assert seen[0] == (4, False), "every 300 steps one, from 600 steps back"
    assert seen[-1] == (2, True)
    assert [count for count, _ in seen] == sorted((count for count, _ in seen), reverse=True)


def test_the_newest_two_stay_whatever_they_take() -> None:
    points = [point(1, 10, 1 << 40), point(2, 20, 1 << 40)]
    assert numbers(choose(points, Retention(5, 1), nothing)) == [1, 2]
