"""docs/architecture.md is true: each name in it exists, and a round makes the calls that it lists."""

from __future__ import annotations

import ast
import re
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from diloco.wire.v1 import sync_pb2
from tests.loopback.cluster import SiteThread, serving
from tests.loopback.test_exchange import lock_step

if TYPE_CHECKING:
    from types import FrameType


ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "diloco"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
BOUND_S = 40.0


def calls() -> list[tuple[int, str, str]]:
    """Return the number, file and function of each call in the page's numbered list."""
    found = []
    way = PAGE[PAGE.index("## The way") : PAGE.index("## Threads")]
    for number, text in re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\n\n|\Z)", way, re.MULTILINE | re.DOTALL):
        file = ""
        for name in re.findall(r"`([^`]+)`", text):
            if name.endswith(".py"):
                file = name
            elif file:
                found.append((int(number), file, name))
    return found


def functions(file: str) -> set[str]:
    """Return the functions of a file, and its methods as Class.name."""
    tree = ast.parse((PACKAGE / file).read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def test_each_room_and_each_file_that_it_names_is_there() -> None:
    rooms = re.findall(r"^\| \d+ \| `(\w+)` \|", PAGE[: PAGE.index("## Two machines")], re.MULTILINE)
    assert rooms
    assert sorted(rooms) == sorted(each.parent.name for each in PACKAGE.glob("*/__init__.py"))
    for name in re.findall(r"`([\w/]+\.py|[\w/]+\.json)`", PAGE):
        assert (ROOT / name).is_file() or (PACKAGE / name).is_file(), name


def test_each_call_that_it_names_is_a_function_of_that_file() -> None:
    assert len(calls()) > 50
    for number, file, name in calls():
        assert name in functions(file), f"{number}: {file} has no {name}"


def test_a_round_makes_these_calls(tmp_path: Path) -> None:
    """The syncer and the site run in this process, so that one trace sees both."""
    made: set[tuple[str, str]] = set()

    def trace(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            made.add((str(Path(frame.f_code.co_filename).relative_to(PACKAGE)), frame.f_code.co_qualname))

    threading.setprofile(trace)
    try:
        toy = lock_step(tmp_path, 1, 4, codec="int4:32")
        with serving(toy) as (syncer, address, _), SiteThread(toy, "a", address):
            until_s = time.monotonic() + BOUND_S
            while syncer.wait(0.1) is None:
                assert time.monotonic() < until_s, "the run did not end"
    finally:
        threading.setprofile(None)
    assert sys.getprofile() is None
    assert [call for call in calls() if call[1:] not in made] == []


# --- docs/claims.md has every field that a site sends ----------------------------------------------------------------

CLAIMS = (Path(__file__).parent.parent / "docs/claims.md").read_text()


@pytest.mark.parametrize("name", ["JoinRequest", "PushHeader", "ReportRequest", "UnitAsk", "PullRequest"])
def test_each_field_that_a_site_sends_is_on_the_page_once(name: str) -> None:
    _, _, section = CLAIMS.partition(f"## {name}\n")
    rows = [line.split("|")[1] for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    told = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(told) == sorted(sync_pb2.DESCRIPTOR.message_types_by_name[name].fields_by_name)
