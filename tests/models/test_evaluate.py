from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.codec.base import digest
from diloco.codec.registry import make_codec
from diloco.codec.site_pass import publish
from diloco.config import build
from diloco.config.compose import compose
from diloco.config.errors import VerbError
from diloco.config.placing import syncer_configs
from diloco.config.schema import RunConfig
from diloco.models import evaluate
from diloco.models.evaluate import Evaluator, Observed, Observer
from diloco.outer.fragments import gather, named_parameters_once
from diloco.wire.messages import PullAsk, PullHeader, Unreachable
from diloco.wire.pulling import PulledVersion, PullSink
from tests.runs.processes import TINY, Place

CODEC = "int4:32"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(tmp_path)
    Place(tmp_path)
    return compose([*TINY, "run.name=x", "outer.num_fragments=2"])


class Shelf:
    """Plays the syncer's end of Pull, by the rules of the down-link."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        self.published = values
        self.versions = [0] * len(values)
        self.downlinks: list[bytes] = [b""] * len(values)
        self.asked: list[int] = []
        self.damaged = False

    def advance(self, fragment: int, theta: torch.Tensor) -> None:
        self.downlinks[fragment], self.published[fragment] = publish(theta, self.published[fragment], make_codec(CODEC))
        self.versions[fragment] += 1

    def pull(self, ask: PullAsk, sink: PullSink) -> PulledVersion:
        del sink
        fragment, version = ask.fragment, self.versions[ask.fragment]
        self.asked.append(ask.have_version)
        whole = ask.have_version < max(0, version - 1)
        encoding, parts = CODEC, [self.downlinks[fragment]] if ask.have_version < version else []
        if whole:
            encoding, parts = "fp32", [make_codec("fp32").encode(self.published[fragment])]
        told = "0" * 64 if self.damaged else digest(self.published[fragment])
        numel, lengths = self.published[fragment].numel(), tuple(map(len, parts))
        header = PullHeader(
            fragment, ask.have_version, version, whole, encoding, numel, sum(lengths), lengths, told, 0, ()
        )
        return PulledVersion(header, tuple(memoryview(part) for part in parts))


def test_an_observer_holds_what_was_published_bit_for_bit_fetches_the_rest_whole_and_refuses_another_model(
    config: RunConfig,
) -> None:
    layout = build.layout_of(config)
    shelf: Any = Shelf(build.version_zero(config, layout))
    observer = Observer(shelf, "x", layout)
    assert observer.versions == [-1, -1]
    for _ in range(2):
        observer.refresh()
        assert observer.versions == [0, 0]
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        for fragment in (0, 1):
            shelf.advance(fragment, torch.randn(layout.fragments[fragment].numel, generator=generator))
        observer.refresh()
    assert observer.versions == [3, 3]
    assert shelf.asked == [-1, -1, 0, 0, 0, 0, 1, 1, 2, 2]
    model = build.build_model(config)
    observer.write_into(model)
    for fragment, values in zip(layout.fragments, shelf.published, strict=True):
        assert torch.equal(gather(fragment, named_parameters_once(model)), values)
    shelf.advance(0, torch.ones(layout.fragments[0].numel))
    shelf.damaged = True
    observer.refresh()
    assert observer.versions == [-1, -1], "these are not the published values"
    shelf.damaged = False
    shelf.asked.clear()
    observer.refresh()
    assert observer.versions == [4, 3]
    assert shelf.asked == [-1, -1]
    there = build.layout_of(compose([*TINY, "run.name=x", "outer.num_fragments=2", "model.dim=64"]))
    other: Any = Shelf([torch.zeros(fragment.numel) for fragment in there.fragments])
    with pytest.raises(VerbError, match=f"fragment 0 has {there.fragments[0].numel} values at the syncer and"):
        Observer(other, "x", layout).refresh()


def test_an_untrained_model_scores_like_chance_on_the_part_and_on_the_whole(config: RunConfig) -> None:
    config.data.validation_sequences = 1
    evaluator, model = Evaluator(config, build.corpus(config)), build.build_model(config)
    part, whole = evaluator.score(model), evaluator.score(model, whole=True)
    for score in (part, whole):
        assert score.val_loss == pytest.approx(math.log(257), rel=0.05)
        assert score.val_bits_per_byte == pytest.approx(score.val_loss / math.log(2), rel=0.1)
    assert evaluator.score(model) == part != whole


# --- A run whose parts lie with two syncers ---------------------------------------------------------------------------


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


@pytest.mark.usefixtures("config")
def test_the_published_model_of_two_syncers_is_read_from_both_and_is_the_whole_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
