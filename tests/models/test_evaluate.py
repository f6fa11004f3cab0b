from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from diloco.config import build
from diloco.config.compose import compose
from diloco.config.errors import VerbError
from diloco.config.schema import RunConfig
from diloco.models import evaluate
from diloco.models.evaluate import Evaluator, Observed
from diloco.outer.fragments import gather, named_parameters_once
from diloco.wire.client import SyncClient
from diloco.wire.messages import PullAsk
from diloco.wire.pulling import PulledVersion, PullSink
from tests.loopback.cluster import closed_port
from tests.models.pasts import Hand, configured
from tests.runs.processes import TINY, Place


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def begun(ends: ExitStack, root: Path, *settings: str) -> Hand:
    """A syncer and its site ``a``."""
    hand = Hand(configured(root, "codec.down=int4:32", *settings))
    ends.callback(hand.stop)
    hand.join("a")
    return hand


def check_holds_what_was_published(seen: Observed, config: RunConfig, *hands: Hand) -> None:
    model = build.build_model(config)
    seen.write_into(model)
    for hand in hands:
        for fragment, held in zip(hand.layout.fragments, hand.syncer.holdings.values, strict=True):
            assert torch.equal(gather(fragment, named_parameters_once(model)), held.published)


def test_an_observer_holds_what_was_published_bit_for_bit_fetches_the_rest_whole_and_refuses_another_model(
    tmp_path: Path, ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, pull = list[int](), SyncClient.pull

    def pulled(client: SyncClient, ask: PullAsk, sink: PullSink) -> PulledVersion:
        asked.append(ask.have_version)
        return pull(client, ask, sink)

    monkeypatch.setattr(SyncClient, "pull", pulled)
    hand = begun(ends, tmp_path)
    seen = Observed(hand.config, hand.address, ends.callback)
    assert seen.versions == [-1, -1]
    assert [seen.refresh() for _ in range(2)] == [True, False]
    for _ in range(3):
        hand.push("a", 0)
        hand.push("a", 1)
        assert seen.refresh()
    assert (seen.versions, asked) == ([3, 3], [-1, -1, 0, 0, 0, 0, 1, 1, 2, 2])
    check_holds_what_was_published(seen, hand.config, hand)
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "digest", lambda *told: "of other values")
        assert seen.refresh() is None, "these are not the published values"
    asked.clear()
    assert seen.refresh()
    assert (seen.versions, asked) == ([3, 3], [-1, -1])
    other = configured(tmp_path / "other", "model.dim=64")
    there, here = (build.layout_of(config).fragments[0].numel for config in (hand.config, other))
    with pytest.raises(VerbError, match=f"fragment 0 has {there} values at the syncer and {here} by the settings"):
        Observed(other, hand.address, ends.callback).refresh()


def test_an_untrained_model_scores_like_chance_on_the_part_and_on_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Place(tmp_path)
    config = compose([*TINY, "run.name=x", "data.validation_sequences=1"])
    evaluator, model = Evaluator(config, build.corpus(config)), build.build_model(config)
    part, whole = evaluator.score(model), evaluator.score(model, whole=True)
    for score in (part, whole):
        assert score.val_loss == pytest.approx(math.log(257), rel=0.05)
        assert score.val_bits_per_byte == pytest.approx(score.val_loss / math.log(2), rel=0.1)
    assert evaluator.score(model) == part != whole


def test_the_published_model_of_two_syncers_is_read_from_both_and_is_the_whole_model(
    tmp_path: Path, ends: ExitStack
) -> None:
    two = ("outer.num_fragments=3", "outer.num_syncers=2")
    first, second = (begun(ends, tmp_path / str(at), *two, f"cluster.syncer.index={at}") for at in range(2))
    config = configured(tmp_path / "seen", *two)
    half = Observed(config, f"{first.address}/127.0.0.1:{closed_port()}", ends.callback)
    assert half.refresh() is None, "half a model is none"
    seen = Observed(config, f"{first.address}/{second.address}", ends.callback)
    assert seen.refresh()
    assert seen.versions == [0, 0, 0]
    first.push("a", 0)
    second.push("a", 0)
    assert seen.refresh()
    tokens = [int(str(hand.syncer.api.status()["run_tokens"])) for hand in (first, second)]
    second.push("a", 0)
    first.syncer.stop(0.1)
    assert seen.refresh(), "one that is away keeps nobody from seeing what the other publishes"
    counts = [len(hand.layout.fragments) for hand in (first, second)]
    tokens[1] = int(str(second.syncer.api.status()["run_tokens"]))
    assert min(tokens) > 0
    assert seen.run_tokens == (tokens[0] * counts[0] + tokens[1] * counts[1]) // 3
    held = [build.held_of(hand.config)[0] for hand in (first, second)]
    assert seen.versions == [held.index(place) + 1 if place in held else 0 for place in range(3)]
    check_holds_what_was_published(seen, config, first, second)
    for ending, drained in (("finished", False), ("drained", True)):
        seen._statuses = [{"phase": "ended", "ending": "finished"}, {"phase": "running", "ending": None}]
        assert not seen.ended, "the other goes on"
        seen._statuses[1] = {"phase": "ended", "ending": ending}
        assert (seen.ended, seen.drained) == (True, drained)
