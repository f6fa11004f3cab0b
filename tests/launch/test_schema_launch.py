from __future__ import annotations

from dataclasses import fields

from diloco.launch.keys import leaves, meanings
from diloco.launch.schema_launch import LaunchSection


def test_what_can_be_set_of_launch_is_listed_and_explained_with_all_the_rest() -> None:
    names = {f"launch.{item.name}" for item in fields(LaunchSection)}
    assert names == {name for name, _, _ in leaves() if name.startswith("launch.")}
    assert meanings()["LaunchSection", "image"].startswith("The container image")
