"""The published model of a run whose parts lie with two syncers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.config import build
from diloco.config.compose import compose
from diloco.config.placing import syncer_configs
from diloco.models import evaluate
from diloco.models.evaluate import Observed
from diloco.outer.fragments import gather, named_parameters_once
from diloco.wire.messages import Unreachable
from tests.models.test_evaluate import Shelf
from tests.runs.processes import TINY, Place


class Door:
    """An admin's end of one syncer."""

    def __init__(self, tokens: int) -> None:
        self.said: dict[str, Any] = {"run_tokens": tokens, "phase": "running", "ending": None}
        self.away = False

    def status(self) -> dict[str, Any]:
        if self.away:
            raise Unreachable("gone")
        return self.said

    def close(self) -> None: ...


def test_it_reads_both_and_is_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Place(tmp_path)
    config = compose([*TINY, "run.name=x", "outer.num_fragments=3", "outer.num_syncers=2"])
    layouts = [build.layout_of(part) for part in syncer_configs(config)]
    shelves: dict[str, Any] = {
        address: Shelf(build.version_zero(part, layout))
        for address, part, layout in zip(("a:1", "b:2"), syncer_configs(config), layouts, strict=True)
    }
    doors = {"a:1": Door(100), "b:2": Door(400)}
    for shelf in shelves.values():
        shelf.close = lambda: None
    monkeypatch.setattr(evaluate, "SyncClient", lambda address, *_: shelves[address])
    monkeypatch.setattr(evaluate, "AdminClient", lambda address, *_: doors[address])
    seen = Observed(config, "a:1/b:2", lambda close: None)
    doors["b:2"].away = True
    assert seen.refresh() is None, "half a model is none"
    doors["b:2"].away = False
    assert seen.refresh()
    assert seen.versions == [0, 0, 0]
    counts = [len(layout.fragments) for layout in layouts]
    assert seen.run_tokens == (100 * counts[0] + 400 * counts[1]) // 3

    shelves["b:2"].advance(0, torch.ones(layouts[1].fragments[0].numel))
    doors["a:1"].away = True
    assert seen.refresh(), "one that is away keeps nobody from seeing what the other publishes"
    held = build.held_of(syncer_configs(config)[1])[0]
    assert [version for place, version in enumerate(seen.versions) if place != held] == [0, 0]
    assert seen.versions[held] == 1
    model = build.build_model(config)
    seen.write_into(model)
    for fragment, values in zip(layouts[1].fragments, shelves["b:2"].published, strict=True):
        assert torch.equal(gather(fragment, named_parameters_once(model)), values)

    doors["a:1"].away = False
    doors["a:1"].said |= {"phase": "ended", "ending": "finished"}
    seen.refresh()
    assert not seen.ended, "the other goes on"
    doors["b:2"].said |= {"phase": "ended", "ending": "drained"}
    seen.refresh()
    assert seen.ended
    assert seen.drained
