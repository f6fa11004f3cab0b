"""Images: what is written comes back to the bit, and every damage is named."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from diloco.outer.fragments import scatter
from diloco.outer.optimizer import NOTHING
from diloco.sync.plain import canonical
from diloco.syncer.snapshots import Image, ImageError, read_image, same_values, write_image
from tests.syncer.building import LAYOUT, version_zero
from tests.syncer.desk import CARD, Desk
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
