from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.codec.registry import digest, make_codec
from diloco.codec.site_pass import publish
from diloco.config import build
from diloco.config.compose import compose
from diloco.config.errors import VerbError
from diloco.config.schema import RunConfig
from diloco.models.evaluate import Evaluator, Observer
from diloco.outer.fragments import gather, named_parameters_once
from diloco.wire.messages import PullAsk, PullHeader
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
        encoding, parts = (
            ("fp32", [make_codec("fp32").encode(self.published[fragment])])
            if whole
            else (CODEC, [self.downlinks[fragment]] if ask.have_version < version else [])
        )
        told = "0" * 64 if self.damaged else digest(self.published[fragment])
        numel, lengths = self.published[fragment].numel(), tuple(map(len, parts))
        header = PullHeader(
            fragment, ask.have_version, version, whole, encoding, numel, sum(lengths), lengths, told, 0, ()
        )
        return PulledVersion(header, tuple(memoryview(part) for part in parts))


def test_an_observer_holds_what_was_published_bit_for_bit(config: RunConfig) -> None:
    layout = build.layout_of(config)
    shelf: Any = Shelf(build.version_zero(config, layout))
    observer = Observer(shelf, "x", layout)
    assert observer.versions == [-1, -1]
    assert observer.refresh()
    assert not observer.refresh()
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        for fragment in (0, 1):
            shelf.advance(fragment, torch.randn(layout.fragments[fragment].numel, generator=generator))
        assert observer.refresh()
    assert observer.versions == [3, 3]
    assert shelf.asked == [-1, -1, 0, 0, 0, 0, 1, 1, 2, 2]
    model = build.build_model(config)
    observer.write_into(model)
    for fragment, values in zip(layout.fragments, shelf.published, strict=True):
        assert torch.equal(gather(fragment, named_parameters_once(model)), values)


def test_values_that_are_not_the_published_ones_are_fetched_whole(config: RunConfig) -> None:
    layout = build.layout_of(config)
    shelf: Any = Shelf(build.version_zero(config, layout))
    observer = Observer(shelf, "x", layout)
    observer.refresh()
    shelf.advance(0, torch.ones(layout.fragments[0].numel))
    shelf.damaged = True
    observer.refresh()
    assert observer.versions == [-1, -1]
    shelf.damaged = False
    shelf.asked.clear()
    observer.refresh()
    assert observer.versions == [1, 0]
    assert shelf.asked == [-1, -1]


def test_values_of_another_model_are_refused_in_words(config: RunConfig) -> None:
    there = build.layout_of(compose([*TINY, "run.name=x", "outer.num_fragments=2", "model.dim=64"]))
    shelf: Any = Shelf([torch.zeros(fragment.numel) for fragment in there.fragments])
    observer = Observer(shelf, "x", build.layout_of(config))
    with pytest.raises(VerbError, match=f"fragment 0 has {there.fragments[0].numel} values at the syncer and"):
        observer.refresh()


def test_an_untrained_model_scores_like_chance_on_the_part_and_on_the_whole(config: RunConfig) -> None:
    evaluator = Evaluator(config, build.corpus(config))
    model = build.build_model(config)
    part, whole = evaluator.score(model), evaluator.score(model, whole=True)
    for score in (part, whole):
        assert score.val_loss == pytest.approx(math.log(257), rel=0.05)
        assert score.val_bits_per_byte == pytest.approx(score.val_loss / math.log(2), rel=0.1)
    assert evaluator.score(model) == part


def test_the_part_is_smaller_than_the_whole(config: RunConfig) -> None:
    config.data.validation_sequences = 1
    evaluator = Evaluator(config, build.corpus(config))
    model = build.build_model(config)
    assert evaluator.score(model) != evaluator.score(model, whole=True)
