"""docs/claims.md has every field that a site sends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from diloco.wire.v1 import sync_pb2

PAGE = (Path(__file__).parent.parent / "docs/claims.md").read_text()


@pytest.mark.parametrize("name", ["JoinRequest", "PushHeader", "ReportRequest", "UnitAsk", "PullRequest"])
def test_each_field_that_a_site_sends_is_on_the_page_once(name: str) -> None:
    _, _, section = PAGE.partition(f"## {name}\n")
    rows = [line.split("|")[1] for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    told = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(told) == sorted(sync_pb2.DESCRIPTOR.message_types_by_name[name].fields_by_name)
