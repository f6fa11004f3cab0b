"""Explicit error feedback: what was rounded off goes out with the next update, once, whatever happens in between."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from diloco.codec.registry import make_codec, values_of
from diloco.learner.seal import Encoder, SealedUpdate, SealJob, seal
from diloco.learner.tensors import HOST, Place, SealInputs, SiteTensors
from diloco.outer.fragments import plan_layout
from diloco.sync.effects import Seal
from tests.learner.participant import held
from tests.learner.test_agent import ALONE

LAYOUT = plan_layout([("w", (600,))], 1)
SYNCER = {**ALONE, "up_codecs": ["int2:8"], "optimizer": {"kind": "sgd", "lr": 1.0, "momentum": 0.0}}
SITE = {"up_codec": "int2:8", "feedback": 1.0, "learner": {"adopt": "overwrite"}}


def draw(seed: int) -> Tensor:
    return torch.randn(600, generator=torch.Generator().manual_seed(seed))


class Model:
    """A site's tensors with an update's way written out: train, measure, seal, and its fate."""

    def __init__(self, codec: str, rule: str = "overwrite", beta: float = 1.0, alpha: float = 0.25) -> None:
        self.codec = make_codec(codec)
        self.encoder = Encoder(self.codec, Place(HOST))
        self.parameters = {"w": torch.zeros(600)}
        self.tensors = SiteTensors(LAYOUT, held(self.parameters), rule, alpha, feedback=beta)
        self.version = 0
        self.tensors.arrived(0, 0, torch.zeros(600), "")
        self.tensors.retake(0, 0, [])
        self.next = 1
        self.since_adopt: list[int] = []

    def train(self, seed: int) -> None:
        self.parameters["w"] -= 0.01 * draw(seed)

    def measured(self) -> SealInputs:
        return self.tensors.measure(0, self.since_adopt)

    def seal(self, inputs: SealInputs) -> SealedUpdate:
        effect = Seal(0, self.next, self.version, (), 1, 1, 1, 1, final=False)
        self.next += 1
        return seal(SealJob(effect, inputs, self.codec.name), self.encoder, "run", "a", 1)

    def keep(self, sealed: SealedUpdate) -> None:
        self.tensors.sealed(0, sealed.header.sequence, sealed.encoded.sent, sealed.encoded.fed)
        self.since_adopt.append(sealed.header.sequence)

    def update(self) -> SealedUpdate:
        sealed = self.seal(self.measured())
        self.keep(sealed)
        return sealed

    def adopt(self, values: Tensor, merged: list[int]) -> None:
        self.version += 1
        self.tensors.arrived(0, self.version, values, "")
        self.tensors.adopt(0, self.version, merged)
        self.since_adopt = []

    def refuse(self, sequence: int) -> None:
        self.tensors.release(0, sequence)
        if sequence in self.since_adopt:
            self.since_adopt.remove(sequence)

    def residual(self) -> Tensor:
        return self.tensors.tensors().get("residual.0", torch.zeros(600))


def fresh(sealed: SealedUpdate) -> Tensor:
    assert sealed.encoded.fed is not None
    return sealed.encoded.fed.fresh.double()


@pytest.mark.parametrize("codec", ["int4", "e3m0", "int2:8", "sign", "topk:256x4", "topk:256x16+zstd1"])
@pytest.mark.parametrize("rule", ["overwrite", "blend"])
def test_invariant_12_what_was_merged_and_the_residual_are_what_was_to_be_sent(codec: str, rule: str) -> None:
    """With refusals, some while another update is being encoded, and adopts at any time; to rounding, in fp64."""
    for seed in range(3):
        dice, model = random.Random(seed), Model(codec, rule)
        theta = torch.zeros(600)
        merged, to_send = torch.zeros(600, dtype=torch.float64), torch.zeros(600, dtype=torch.float64)
        in_flight: list[SealedUpdate] = []
        for step in range(80):
            model.train(1000 * seed + step)
            inputs = model.measured()
            if in_flight and dice.random() < 0.25:
                model.refuse(in_flight.pop(dice.randrange(len(in_flight))).header.sequence)
                # The machine would have measured this one after the fate; here the refusal comes while it is encoded.
                inputs = model.measured() if dice.random() < 0.5 else inputs
            elif in_flight and dice.random() < 0.5:
                decided = in_flight.pop(0)
                theta, merged = (
                    theta - values_of(decided.encoded.sent),
                    merged + values_of(decided.encoded.sent).double(),
                )
                to_send += fresh(decided)
                model.adopt(theta, [decided.header.sequence])
                model.train(1000 * seed + step + 500)
                inputs = model.measured()
            if len(in_flight) < 2:
                sealed = model.seal(inputs)
                model.keep(sealed)
                in_flight.append(sealed)
        for sealed in in_flight:
            model.refuse(sealed.header.sequence)
        lost = (merged + model.residual().double() - to_send).abs().max()
        assert lost < 1e-6, f"{codec}, {rule}, seed {seed}: {lost}"
        assert len(model.tensors.sent) <= 2


def test_one_update_is_carried_bit_for_bit_as_it_is_defined() -> None:
    model = Model("sign", beta=0.5)
    model.train(1)
    first = model.update()
    assert torch.equal(model.residual(), fresh(first).float() - values_of(first.encoded.sent))
    before = model.residual()
    model.adopt(-values_of(first.encoded.sent), [1])
    model.train(2)
    second = model.update()
    to_send = fresh(second).float() + before * 0.5
    assert second.encoded.payload == model.codec.encode(to_send)
    assert torch.equal(model.residual(), to_send - values_of(second.encoded.sent))
    assert second.encoded.norm == pytest.approx(float(values_of(second.encoded.sent).norm()))


def test_two_updates_between_adopts_send_what_the_first_rounded_off_once() -> None:
    """Seen: measured less what the first decodes to, the second had the remainder in its d and in its residual."""
    model = Model("sign")
    model.train(1)
    first = model.update()
    second = model.update()  # Nothing was trained in between.
    assert bool((fresh(second) == 0).all())
    total = (values_of(first.encoded.sent) + values_of(second.encoded.sent) + model.residual()).double()
    assert (total - fresh(first)).abs().max() < 1e-7


def test_a_refused_update_is_as_if_it_had_never_been() -> None:
    for beta in (1.0, 0.9):
        model, never = Model("int2:8", beta=beta), Model("int2:8", beta=beta)
        for each in (model, never):
            each.train(1)
            each.adopt(torch.zeros(600), [each.update().header.sequence])
            each.train(2)
        refused = model.update()
        model.refuse(refused.header.sequence)
        assert torch.allclose(model.residual(), never.residual() * beta, atol=1e-8)
        again = model.update()
        assert torch.equal(fresh(again), fresh(refused)), "its progress goes out again, all of it"


def test_what_an_update_would_leave_behind_if_it_were_refused_is_kept_until_it_is_decided() -> None:
    model = Model("sign")
    for number, decide in enumerate((model.refuse, lambda one: model.adopt(torch.zeros(600), [one])), 1):
        model.train(number)
        model.update()
        assert f"term.0.{number}" in model.tensors.tensors()
        decide(number)
        assert f"term.0.{number}" not in model.tensors.tensors()


def test_a_small_value_is_sent_at_last_and_without_feedback_never() -> None:
    steady = torch.full((600,), 1e-3)
    steady[:4] = 1.0
    for beta, reached in ((1.0, True), (0.0, False)):
        model, sent = Model("topk:256x8", beta=beta), torch.zeros(600)
        for _ in range(200):
            model.parameters["w"] -= steady
            update = model.update()
            sent += values_of(update.encoded.sent)
            model.adopt(torch.zeros(600), [update.header.sequence])
        assert bool((sent[:256] > 0).all()) == reached, beta
        assert torch.allclose(sent + model.residual(), 200 * steady, rtol=1e-3) == reached, beta


@pytest.mark.parametrize("rule", ["overwrite", "blend"])
def test_a_checkpoint_holds_it_and_the_next_update_has_the_same_bytes(rule: str) -> None:
    model = Model("int2:8", rule, beta=0.9)
    model.train(1)
    first = model.update()
    model.train(2)
    second = model.update()
    model.adopt(-values_of(first.encoded.sent), [first.header.sequence])
    model.train(3)
    again = Model("int2:8", rule, beta=0.9)
    again.tensors.restore(model.tensors.tensors(), [model.version])
    again.parameters["w"].copy_(model.parameters["w"])
    again.next = model.next
    assert sorted(again.tensors.tensors()) == sorted(model.tensors.tensors())
    for each in (model, again):
        each.refuse(second.header.sequence)
        each.update()
    assert torch.equal(model.residual(), again.residual())
    assert model.seal(model.measured()).encoded.payload == again.seal(again.measured()).encoded.payload


def test_a_retake_drops_it() -> None:
    model = Model("sign")
    model.train(1)
    update = model.update()
    assert model.tensors.residuals.to_drop(0) == {"residual_dropped": pytest.approx(float(model.residual().norm()))}
    model.tensors.retake(0, 0, [update.header.sequence])
    assert model.tensors.residuals.to_drop(0) == {}
    model.refuse(update.header.sequence)
    assert sorted(model.tensors.tensors()) == ["base.0"]


def test_where_feedback_was_turned_off_it_is_dropped_and_said() -> None:
    model = Model("sign")
    model.train(1)
    model.update()
    without = Model("sign", beta=0.0)
    without.tensors.restore(model.tensors.tensors(), [0])
    assert without.tensors.residuals.dropped() == {"residual_dropped": pytest.approx(float(model.residual().norm()))}
    assert model.tensors.residuals.dropped() == {}
    assert not any(name.startswith(("residual", "term")) for name in without.tensors.tensors())


def test_rebase_has_none() -> None:
    with pytest.raises(AssertionError, match="what is not sent is the residual"):
        Model("sign", "rebase")
