"""The layouts of a site's ranks change no bit, in a short run of two of them and in a long one of all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.hunts.layouts import Found, main, run_of

pytestmark = pytest.mark.slow  # What a hunt is worth is tried where the hunts run, in .ci/run.


def test_two_sites_of_two_layouts_exchange_what_two_processes_do(tmp_path: Path) -> None:
    mixed = run_of(tmp_path / "mixed", {"a": ("fsdp", 2), "b": ("tp", 2)}, 2, "rebase")
    plain = run_of(tmp_path / "plain", {"a": ("plain", 1), "b": ("plain", 1)}, 2, "rebase")
    assert mixed.differs(plain) == []
    assert len(plain.payloads) == 2 * 3 * 2, "two sites, three fragments, two rounds"
    assert len(plain.versions) == 3 * 2
    assert len(plain.held) == 2 * 2 * 3, "two sites, two rounds of three steps"


@pytest.mark.hunt
@pytest.mark.parametrize("adopt", ["rebase", "overwrite"])
def test_sites_of_every_layout_and_of_four_together(adopt: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--rounds", "3", "--adopt", adopt, *(["--mixed"] if adopt == "overwrite" else [])])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, found["violations"], found["mismatches"]) == (0, 0, 0), found
    assert found["compared"] >= 80


def test_one_bit_in_one_place_is_a_difference() -> None:
    found = Found({("a", 0, 1): "p"}, {(0, 1): "v"}, {("a", 1): "h"})
    assert found.differs(found) == []
    assert found.differs(replace(found, payloads={("a", 0, 1): "q"})) == ["payloads ('a', 0, 1)"]
    assert found.differs(replace(found, versions={})) == ["versions (0, 1)"]
    assert found.differs(replace(found, held={("a", 1): "h", ("a", 2): "h"})) == ["held ('a', 2)"]
