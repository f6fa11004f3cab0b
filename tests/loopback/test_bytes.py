"""What crosses a link, counted on the link."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.codec.registry import make_codec
from diloco.wan.link import LinkOptions
from diloco.wan.process import RelayProcess
from tests.loopback.cluster import SiteThread, serving
from tests.loopback.toy import EVERYBODY, TOKENS_PER_STEP, Toy

BOUND_S = 60.0
SHAPES = (("blocks.0.w", (400, 300)), ("blocks.1.w", (300, 401)), ("head", (300, 500)), ("norm", (77,)))
ROUNDS = 5
FIRST = 2
"""Rounds that are not counted: joins and the first whole fragments are in them."""
INNER_STEPS = 3


def count(folder: Path, codec: str) -> tuple[int, list[int]]:
    """The bytes of ``ROUNDS - FIRST`` equal rounds of two sites in lock-step, on the links and of each payload.

    ``codec`` is that of both ways.  They are counted between two rounds, when nothing moves.
    """
    outer = {**EVERYBODY, "token_budget": (ROUNDS + 1) * 2 * INNER_STEPS * TOKENS_PER_STEP}
    toy = Toy(folder=str(folder), codec=codec, inner_steps=INNER_STEPS, lock_step=True, shapes=SHAPES, outer=outer)
    counts: list[int] = []
    marks: list[dict[str, int]] = []
    with serving(toy) as (syncer, address, _), RelayProcess() as relay, ExitStack() as alive:

        def between_rounds() -> None:
            counts.append(sum(int(link["bytes_up"] + link["bytes_down"]) for link in relay.stats().values()))
            marks.append({site.site: len(site.log) for site in sites})

        meeting = threading.Barrier(2, between_rounds, BOUND_S)

        def boundary(steps: int) -> None:
            if steps in (FIRST * INNER_STEPS, ROUNDS * INNER_STEPS):
                meeting.wait()

        links = {site: relay.add(site, LinkOptions(), address) for site in "ab"}
        sites = [alive.enter_context(SiteThread(toy, site, links[site], after=boundary)) for site in "ab"]
        assert syncer.wait(BOUND_S) is not None
        for site in sites:
            site.join(BOUND_S)
    up, down = [], []
    for site in sites:
        events = site.log.events[marks[0][site.site] : marks[1][site.site]]
        up += [int(str(event["bytes"])) for event in events if event["what"] == "pushed"]
        fetched = [event for event in events if event["what"] == "fetched"]
        assert codec == "fp32" or not any(event["whole"] for event in fetched), fetched
        down += [int(str(event["bytes"])) for event in fetched]
    assert len(up) == len(down) == 2 * (ROUNDS - FIRST), "the rounds are equal"
    return counts[1] - counts[0], up + down


@pytest.mark.parametrize(
    "codec", ["fp32", "int4:32", "topk:4096x64", pytest.param("int4:32+zstd1", marks=pytest.mark.slow)]
)
def test_invariant_13_the_formula_predicts_the_bytes(tmp_path: Path, codec: str) -> None:
    """Payloads to the byte where there is no entropy stage, never more where there is; the link adds headers only."""
    link_bytes, payloads = count(tmp_path, codec)
    numel = Toy(folder="", shapes=SHAPES).layout().fragments[0].numel
    formula = make_codec(codec).payload_bytes(numel)
    for payload in payloads:
        assert payload == formula or ("zstd" in codec and payload <= formula + 1)
    if codec == "int4:32":
        assert link_bytes <= len(payloads) * 4 * numel / 6, "a sixth of what fp32 takes"
    carried = sum(payloads)
    added = link_bytes - carried
    assert added > 0, "the relay counted no less than what was carried"
    # Framing is some 0.1 % of the payload; beats, fates and headers are small messages that do not grow with it.
    assert added <= 0.005 * carried + 40_000, (added, link_bytes, payloads)
