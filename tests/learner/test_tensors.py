"""A site's tensors under every way to adopt, with their residuals, through a checkpoint and on a device."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.codec.base import digest
from diloco.codec.registry import make_codec, values_of
from diloco.inner.checkpoint import Prefixed
from diloco.inner.holding import Holding
from diloco.learner.seal import Encoder, SealJob, seal
from diloco.learner.tensors import HOST, IDLE_SHARE, AdoptOptions, Echo, Place, SealInputs, SiteTensors, place_of
from diloco.outer.fragments import gather, plan_layout
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, outer_step
from diloco.outer.pseudo_gradient import pseudo_gradient, rebase
from diloco.sync.effects import Adopt, Seal
from diloco.wire.messages import short_digest
from tests.codec.values import bf16_by_default
from tests.learner.participant import Elsewhere, SealedUpdate, held
from tests.syncer.building import LAYOUT, dice

SHAPES = dict(LAYOUT.parameters)

FRAGMENT = LAYOUT.fragments[0]


def site_tensors(rule: str, alpha: float = 0.25, place: Place | None = None, **more: Any) -> SiteTensors:
    """One that has taken version 3 and trained since, with updates 5 and 6 on their way."""
    parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    found = SiteTensors(LAYOUT, held(parameters), rule, AdoptOptions(adopt_alpha=alpha, **more), place)
    found.arrived(0, 3, dice("base", 0), "")
    found.retake(0, 3, [])
    found.write(0, dice("local", 0), dice("local", 0))
    found.sent[0, 5], found.sent[0, 6] = dice("d5", 0), dice("d6", 0)
    found.sent[1, 5] = dice("d5", 1)
    return found


def local(found: SiteTensors) -> Tensor:
    return gather(FRAGMENT, parameters_of(found))


def parameters_of(found: SiteTensors) -> dict[str, Tensor]:
    return {name: found.holding.part(name) for name in SHAPES}


def copied(found: SiteTensors) -> Holding:
    return held({name: values.clone() for name, values in parameters_of(found).items()})


def restored(found: SiteTensors, rule: str, place: Place | None = None, **more: Any) -> SiteTensors:
    """What a new process has of its checkpoint."""
    tensors = {name: values.clone() for name, values in found.tensors().items()}
    again = SiteTensors(LAYOUT, copied(found), rule, AdoptOptions(adopt_alpha=0.25, **more), place)
    again.restore(tensors, [4, -1], found.told_base, found.sent)
    return again


def measured(found: SiteTensors, subtract: Sequence[int] = ()) -> Tensor:
    inputs = found.measure(0, subtract)
    return pseudo_gradient(inputs.reference, inputs.local, inputs.in_flight)


def reference(found: SiteTensors) -> Tensor:
    assert found.reference[0] is not None
    return found.reference[0]


def ahead(found: SiteTensors) -> Any:
    """The momentum of the site's own part of the outer step."""
    return found.own[0].momentum


@pytest.mark.parametrize("kind", ["fp32", "bfloat16", "transposed"])
def test_rebase_keeps_what_is_not_merged_in_place_and_by_a_copy(kind: str) -> None:
    """What is not flat fp32 on the CPU is copied out and back; both are the definition."""
    found = site_tensors("rebase")
    if kind == "bfloat16":
        found.holding = held({name: values.bfloat16() for name, values in parameters_of(found).items()})
    elif kind == "transposed":
        parameters = parameters_of(found).items()
        turned = {name: values.t().contiguous().t() if values.dim() == 2 else values for name, values in parameters}
        found.holding = held(turned)
    before = {name: values.data_ptr() for name, values in parameters_of(found).items()}
    for version, merged in ((4, 5), (5, 6)):
        theta = dice(("new", version), 0)
        wanted = rebase(local(found), reference(found), theta, [dice(f"d{merged}", 0)])
        found.latest[0] = (version, theta)
        found.adopt(Adopt(0, version, (merged,)))
        assert {name: values.data_ptr() for name, values in parameters_of(found).items()} == before
        assert torch.equal(local(found), wanted.bfloat16().float() if kind == "bfloat16" else wanted)
        assert (0, merged) not in found.sent
    assert found.base[0] is found.latest[0][1]
    assert (found.reference[0] is found.base[0]) == (kind != "bfloat16")


def test_a_blend_is_measured_from_the_value_right_after_the_adopt() -> None:
    found = site_tensors("blend", 0.25)
    found.latest[0] = (4, dice("new", 0))
    found.adopt(Adopt(0, 4, (5, 6)))
    new, old = dice("new", 0), dice("local", 0)
    wanted = new - (new - old) * 0.25
    assert torch.equal(local(found), wanted)
    assert torch.equal(reference(found), wanted)
    assert sorted(found.sent) == [(1, 5)]
    assert torch.equal(measured(found, []), torch.zeros_like(new))


@pytest.mark.parametrize("rule", ["rebase", "blend", "eager"])
def test_buffers_are_measured_whole_and_taken_as_they_are(rule: str) -> None:
    parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    layout = replace(LAYOUT, buffers=tuple(piece.name for piece in FRAGMENT.pieces))
    options = AdoptOptions(adopt_alpha=0.25, feedback=0.5 * (rule == "blend"))
    found = SiteTensors(layout, held(parameters), rule, options)
    found.arrived(0, 3, dice("base", 0), "")
    found.retake(0, 3, [])
    found.write(0, dice("local", 0), dice("local", 0))
    found.sent[0, 5] = found.sent[0, 6] = dice("d", 0)
    assert torch.equal(measured(found, [5, 6]), -dice("local", 0))
    found.latest[0] = (4, dice("new", 0))
    found.adopt(Adopt(0, 4, (5,)))
    assert torch.equal(local(found), dice("new", 0))
    found.retake(0, 4, [6])
    assert torch.equal(local(found), dice("new", 0))
    assert torch.equal(measured(found, [6]), -dice("new", 0))
    assert found.measure(0, [6]).beta == 0


def test_eager_keeps_what_is_unsent_and_a_share_of_what_the_version_lacks() -> None:
    """Update 5 was measured before the last adopt, so only 6 is in what was trained since; the version has 5."""
    found = site_tensors("eager")
    found.latest[0] = (4, dice("new", 0))
    found.adopt(Adopt(0, 4, (5,), fresh=(6,), under_way=(6,)))
    unsent = dice("base", 0) - dice("local", 0) - dice("d6", 0)
    wanted = dice("new", 0).sub(dice("d6", 0), alpha=0.25)
    assert torch.equal(local(found), wanted - unsent)
    assert torch.equal(reference(found), wanted)
    assert sorted(found.sent) == [(0, 6), (1, 5)]
    assert torch.allclose(measured(found, []), unsent, atol=1e-6), "what was not sent goes out with the next update"


def test_eager_may_have_ahead_what_the_outer_step_will_make_of_its_own_updates_and_keeps_it_in_a_checkpoint() -> None:
    """Nesterov of .5 and .5 among three sites: version 4 merged update 5, and 6 is under way."""
    options = OuterOptimizerOptions(kind="nesterov", lr=0.5, momentum=0.5)
    found = site_tensors("eager", 0.0, ahead=options)
    found.arrived(0, 4, dice("new", 0), "", 3)
    found.adopt(Adopt(0, 4, (5,), fresh=(5, 6), under_way=(6,)))
    unsent = dice("base", 0) - dice("local", 0) - dice("d5", 0) - dice("d6", 0)
    momentum = 0.5 * dice("d5", 0) / 3 + dice("d6", 0) / 3
    wanted = dice("new", 0) - 0.5 * (dice("d6", 0) / 3 + 0.5 * momentum)
    assert torch.allclose(local(found), wanted - unsent, atol=1e-6)
    assert torch.allclose(measured(found), unsent, atol=1e-6), "what was not sent goes out with the next update"
    again = restored(found, "eager", ahead=options)
    for each in (found, again):
        each.arrived(0, 6, dice("newest", 0), "", 3)
        each.adopt(Adopt(0, 6, (6,)))
        # Of versions 5 and 6 the last held update 6.
        assert torch.allclose(ahead(each), 0.25 * dice("d5", 0) / 3 + dice("d6", 0) / 3, atol=1e-6)
    assert torch.equal(local(again), local(found))
    again.arrived(0, 7, dice("newest", 0), "")
    assert again.sites_in[0] == 3, "it stays where the next one does not say"
    again.retake(0, 6, [])
    assert "own.0" in found.tensors()
    assert "own.0" not in again.tensors()


@pytest.mark.parametrize("rule", ["rebase", "overwrite", "blend", "eager"])
def test_retake_throws_unsent_progress_away(rule: str) -> None:
    found = site_tensors(rule)
    found.latest[0] = (4, dice("new", 0))
    found.retake(0, 4, [6])
    new = dice("new", 0)
    assert torch.equal(local(found), new - dice("d6", 0) if rule == "rebase" else new)
    assert sorted(found.sent) == [(0, 6), (1, 5)], "another fragment's are not touched"
    subtract = [6] if rule == "rebase" else []
    assert torch.allclose(measured(found, subtract), torch.zeros_like(new), atol=1e-6), "nothing is left to send"
    found.latest[0] = (9, dice("newer", 0))  # It is here, and not what is ordered.
    found.retake(0, 4, [])
    assert torch.equal(local(found), new)


@pytest.mark.parametrize("rule", ["rebase", "overwrite", "blend"])
def test_elsewhere_and_after_a_checkpoint_all_is_as_on_the_host_without_one(rule: str) -> None:
    """Versions are fetched and hashed on the host; what is computed is computed where the model lies."""
    here, there = site_tensors(rule), site_tensors(rule, place=Elsewhere())
    for found in (here, there):
        found.arrived(0, 4, dice("new", 0), "told")
        found.adopt(Adopt(0, 4, (5,)))
    assert there.latest[0] is not None
    assert there.base[0] is there.latest[0][1], "what is hashed is what was fetched"
    assert there.reference[0] is not there.base[0]
    subtract = [6] if rule == "rebase" else []
    everywhere = [here, there, restored(here, rule), restored(there, rule, place=Elsewhere())]
    for found in everywhere:
        assert found.latest[0] is not None
        assert found.latest[0][0] == 4
        assert (found.base[1], found.reference[1], found.latest[1]) == (None, None, None)
        assert sorted(found.sent) == [(0, 6), (1, 5)]
        assert found.tensors().keys() == here.tensors().keys()
        with bf16_by_default():
            assert torch.equal(measured(found, subtract), measured(here, subtract))
        assert torch.equal(local(found), local(here))
    for change in (lambda found: found.retake(0, 5, [6]), lambda found: found.adopt(Adopt(0, 5, (6,)))):
        for found in everywhere:
            found.latest[0] = (5, dice("newest", 0))
            with bf16_by_default():
                change(found)
            assert torch.equal(local(found), local(here))


def test_the_digest_that_was_told_goes_with_its_version_into_the_base_and_through_a_checkpoint() -> None:
    found = site_tensors("rebase")
    found.arrived(0, 4, dice("new", 0), "four")
    assert found.told_base == ["", ""], "it is here and not adopted"
    found.arrived(0, 3, dice("old", 0), "three")
    found.adopt(Adopt(0, 4, (5,)))
    assert found.told_base == ["four", ""]
    found.arrived(0, 5, dice("newer", 0), "five")
    again = restored(found, "rebase")
    assert again.told_base == ["four", ""]
    again.retake(0, 4, [])
    assert again.told_base == ["four", ""], "the same version once more"
    again.arrived(0, 5, dice("newer", 0), "five")
    again.retake(0, 5, [])
    assert again.told_base == ["five", ""]


def test_of_a_checkpoint_only_what_is_owned_is_read() -> None:
    found, asked = site_tensors("rebase"), list[str]()
    tensors = found.tensors() | {"base.1": dice("base", 1), "residual.1": dice("r", 1)}
    read = Prefixed({name: name for name in tensors}, "", lambda name: asked.append(name) or tensors[name])
    again = SiteTensors(LAYOUT, copied(found), "rebase", AdoptOptions(), owned=[1])
    again.restore(read, [3, 2], ["three", "two"], found.sent)
    assert sorted(asked) == ["base.1", "residual.1", "sent.1.5"]
    assert again.told_base == ["three", "two"], "of all it is known what was told"
    assert sorted(again.tensors()) == ["base.1", "sent.1.5"]


# --- Streaming DiLoCo by torchft's numbers: two of its recorded runs of mocked updates --------------------------------

PERIOD, STEPS = 6, 15


RUNS = {
    0: (
        [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25],
        [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
        [-11, -23, -29, -35],
    ),
    1: (
        [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
        [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
        [-7, -19, -25, -31, -38],
    ),
}
"""By delay, with an alpha of .5: the values of either parameter after each step, and of the fragments' versions as they
came.  The recording of a delay of 0 ends before the last version."""


@pytest.mark.parametrize("delay", RUNS)
def test_the_recorded_runs_come_out_exactly(delay: int) -> None:
    layout = plan_layout([("first", (1,)), ("second", (1,))], 2)
    parameters = {name: torch.ones(1) for name, _ in layout.parameters}
    site = SiteTensors(layout, held(parameters), "blend", AdoptOptions(measure_from="published"))
    theta = [torch.ones(1), torch.ones(1)]
    for index in (0, 1):
        site.arrived(index, 0, theta[index], "")
        site.retake(index, 0, [])
    options = OuterOptimizerOptions(kind="sgd", lr=2.0, momentum=0.0)
    walked, published = [[1.0], [1.0]], []
    for step in range(1, STEPS + 1):
        for values in parameters.values():
            values -= 2
        for index in (0, 1):
            place = 3 * (index + 1)
            if (step + delay - place) % PERIOD == 0:
                gradient = site.measure(index, []).pseudo_gradient()
                theta[index], _ = outer_step(theta[index], gradient, NOTHING, options)
            if step >= place and (step - place) % PERIOD == 0:
                version = 1 + step // PERIOD
                site.arrived(index, version, theta[index], "")
                site.adopt(Adopt(index, version, ()))
                published.append(theta[index].item())
            walked[index].append(site.local(index).item())
    first, second, versions = RUNS[delay]
    assert walked == [first, second]
    assert published[: len(versions)] == versions


# --- Sites whose parameters are narrower than fp32: what a write rounds off is no progress, under every rule ----------

NUMEL, ULP = 300, 2.0**-7
"""Of bf16 between 1 and 2."""

NARROW = plan_layout([("a", (100,)), ("b", (NUMEL - 100,))], 1)

EAGER = OuterOptimizerOptions(kind="sgd", lr=0.5, momentum=0.0)

RULES = {
    "rebase": ("rebase", AdoptOptions()),
    "overwrite": ("overwrite", AdoptOptions()),
    "blend": ("blend", AdoptOptions()),
    "blend, published": ("blend", AdoptOptions(measure_from="published")),
    "eager": ("eager", AdoptOptions(adopt_alpha=0.25)),
    "eager, by the outer step": ("eager", AdoptOptions(adopt_alpha=0.0, ahead=EAGER)),
}


class Sites:
    """Two, in lock-step; outer SGD of rate .5.  The first moves each of its values by an ulp in every round."""

    def __init__(self, rule: str, dtype: torch.dtype) -> None:
        self.theta = 1 + torch.rand(NUMEL, generator=torch.Generator().manual_seed(0))
        models = [{name: torch.zeros(shape, dtype=dtype) for name, shape in NARROW.parameters} for _ in range(2)]
        self.trained = models[0]
        self.sites = [SiteTensors(NARROW, held(each), *RULES[rule]) for each in models]
        for site in self.sites:
            site.arrived(0, 0, self.theta, "")
            site.retake(0, 0, [])

    def run(self, rounds: int) -> Tensor:
        state = NOTHING
        for number in range(1, rounds + 1):
            for values in self.trained.values():
                values += ULP
            updates = [site.measure(0, []).pseudo_gradient() for site in self.sites]
            mean = (updates[0] + updates[1]) / 2
            self.theta, state = outer_step(self.theta, mean, state, EAGER)
            for site, update in zip(self.sites, updates, strict=True):
                site.sealed(0, number, update, None)
                site.arrived(0, number, self.theta, "", 2)
                site.adopt(Adopt(0, number, (number,), fresh=(number,)))
        return self.theta


@pytest.mark.parametrize("rule", RULES)
def test_an_ulp_a_round_at_one_site_moves_the_version_as_it_would_in_fp32(rule: str) -> None:
    """Twenty rounds of an ulp at one of two sites and a rate of .5 are five ulp, wherever a value lies on the grid.

    What a blend left of the site's own way is sent again where it is measured from the version.
    """
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        sites = Sites(rule, dtype)
        sites.theta.mul_(0.4).add_(0.6)  # From 1 to 1.4, so that none leaves the range of this ulp.
        for site in sites.sites:
            site.retake(0, 0, [])
        began = sites.theta.clone()
        found.append((sites.run(20) - began) / ULP)
    assert torch.allclose(found[0], found[1], rtol=0, atol=1e-3)
    assert (found[1].mean().item() == pytest.approx(5.0, abs=1e-3)) == (rule != "blend, published")


def test_a_checkpoint_holds_what_was_written_and_an_fp32_model_has_nothing_more_in_it() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        sites = Sites("rebase", dtype)
        site = sites.sites[0]
        assert ("reference.0" in site.tensors()) == (dtype == torch.bfloat16)
        again = SiteTensors(NARROW, held(sites.trained), "rebase", AdoptOptions())
        again.restore(site.tensors(), [0], None, ())
        assert not again.measure(0, []).pseudo_gradient().any()


# --- Explicit error feedback: what was rounded off goes out with the next update, once, whatever happens in between ---

ONE = plan_layout([("w", (600,))], 1)


def draw(seed: int) -> Tensor:
    return torch.randn(600, generator=torch.Generator().manual_seed(seed))


class Model:
    """A site's tensors with an update's way written out: train, measure, seal, and its fate."""

    def __init__(self, codec: str, rule: str = "overwrite", beta: float = 1.0, alpha: float = 0.25) -> None:
        self.codec = make_codec(codec)
        self.encoder = Encoder(self.codec, Place(HOST))
        self.parameters = {"w": torch.zeros(600)}
        self.tensors = SiteTensors(ONE, held(self.parameters), rule, AdoptOptions(adopt_alpha=alpha, feedback=beta))
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
        return SealedUpdate(*seal(SealJob(effect, inputs, self.codec.name), self.encoder, "run", "a", 1))

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
        self.tensors.adopt(Adopt(0, self.version, tuple(merged)))
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


def test_two_updates_between_adopts_send_what_the_first_rounded_off_once() -> None:
    """Seen: measured less what the first decodes to, the second had the remainder in its d and in its residual."""
    model = Model("sign")
    model.train(1)
    first = model.update()
    second = model.update()  # Nothing was trained in between.
    assert bool((fresh(second) == 0).all())
    total = (values_of(first.encoded.sent) + values_of(second.encoded.sent) + model.residual()).double()
    assert (total - fresh(first)).abs().max() < 1e-7


@pytest.mark.parametrize("beta", [1.0, 0.9])
def test_a_refused_update_is_as_if_it_had_never_been(beta: float) -> None:
    model = Model("int2:8", beta=beta)
    model.train(1)
    model.adopt(torch.zeros(600), [model.update().header.sequence])
    model.train(2)
    before = model.residual()
    refused = model.update()
    model.refuse(refused.header.sequence)
    assert torch.allclose(model.residual(), before * beta, atol=1e-8)
    again = model.update()
    assert torch.equal(fresh(again), fresh(refused)), "its progress goes out again, all of it"


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
    again.tensors.restore(model.tensors.tensors(), [model.version], None, model.tensors.sent)
    again.parameters["w"].copy_(model.parameters["w"])
    again.next = model.next
    assert sorted(again.tensors.tensors()) == sorted(model.tensors.tensors())
    for each in (model, again):
        each.refuse(second.header.sequence)
        each.update()
    assert torch.equal(model.residual(), again.residual())
    assert model.seal(model.measured()).encoded.payload == again.seal(again.measured()).encoded.payload


# --- A site says what it holds, and not what it was told --------------------------------------------------------------


def echo_of(told: str, *bases: Tensor | None) -> tuple[Echo, SiteTensors, list[float]]:
    """What hashes these bases, and a clock that shows the first of its times, then the next, until one is left."""
    layout = plan_layout([(f"p{index}", (4,)) for index in range(len(bases))], len(bases))
    model = held({name: torch.zeros(shape) for name, shape in layout.parameters})
    tensors = SiteTensors(layout, model, "rebase", AdoptOptions())
    tensors.base, tensors.told_base = list(bases), [told] * len(bases)
    tensors.base_versions = [10 + index for index in range(len(bases))]
    times = [100.0]
    return Echo(tensors, threading.Condition(), lambda: times.pop(0) if times[1:] else times[0]), tensors, times


def test_fragments_take_turns_and_a_digest_stands_for_the_very_tensor_it_was_made_of() -> None:
    echo, tensors, _ = echo_of(digest(dice("x", 0)), dice("x", 0), dice("y", 1))
    first, second = short_digest(digest(dice("x", 0))), short_digest(digest(dice("y", 1)))
    assert echo.digests() == [0, 0]
    assert echo.compute() == (0, 10, first)
    assert echo.digests() == [first, 0]
    assert echo.compute() == (1, 11, second)
    assert echo.digests() == [first, second]
    tensors.base[0] = dice("x", 0)
    assert echo.digests() == [0, second], "another tensor lies there now"
    assert echo.compute() == (0, 10, first)


def test_a_digest_is_in_the_form_of_what_was_told_and_nothing_is_said_where_nothing_was() -> None:
    values = dice("x", 0)
    for told, short in (("0" * 64, short_digest(digest(values, like="0" * 64))), ("", 0)):
        echo, *_ = echo_of(told, values)
        assert echo.compute() == (0, 10, short)
        assert echo.digests() == [short]
    echo, *_ = echo_of("", None)
    assert (echo.compute(), echo.digests()) == (None, [0]), "a site that has no base yet"


def test_hashing_takes_a_bounded_share_of_the_time() -> None:
    echo, _, times = echo_of(digest(dice("x", 0)), dice("x", 0))
    times[:] = [100.0, 102.0]
    assert echo.compute() is not None
    times[:] = [102.0 + IDLE_SHARE * 2.0 - 0.1]
    assert echo.compute() is None
    times[:] = [102.0 + IDLE_SHARE * 2.0 + 0.1]
    assert echo.compute() is not None


# --- What is elsewhere is copied there once, and goes when it goes here ----------------------------------------------


def test_elsewhere_there_is_one_copy_for_as_long_as_the_original_is_held() -> None:
    place, here = Elsewhere(), torch.arange(5.0)
    assert Place(HOST).of(here) is here
    there = place.of(here)
    assert there is not here
    assert torch.equal(there, here)
    assert place.of(here) is there
    assert place.of(torch.arange(5.0)) is not there, "equal is not the same"
    gone = weakref.ref(there)
    del there, here
    gc.collect()
    assert gone() is None


def test_a_model_on_one_accelerator_is_there_and_any_other_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_of([torch.ones(1), torch.ones(2)]).is_host
    assert place_of([torch.ones(1), torch.ones(1, device="meta")]).is_host
    assert place_of([]).is_host
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    for place in (Place(HOST), Place(torch.device("cuda", 3))):
        place.begin_thread()
    assert used == [torch.device("cuda", 3)], "a thread of a rank works on the device of its rank"


def test_what_is_measured_precedes_all_that_is_done_beside_it_later(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[object] = []
    usual = SimpleNamespace(wait_stream=waits.append)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: usual)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: (device, "the loop's"))
    place, there = Place(HOST), torch.device("cuda", 3)
    place.precede()
    assert not waits
    found = site_tensors("rebase")
    monkeypatch.setattr(found.holding, "gather", lambda *given: setattr(place, "device", there))
    monkeypatch.setattr(found, "place", place)
    found.local(0)
    assert waits == [(there, "the loop's")], "after the copy was queued"


@pytest.mark.gpu
@pytest.mark.parametrize("apart", [False, True], ids=["the default stream", "a stream of its own"])
def test_training_does_not_wait_for_what_is_beside_it(apart: bool) -> None:
    """Training's stream has long work; a thread beside it sees what was given before, and ends by itself."""
    device = torch.device("cuda", torch.cuda.current_device())
    place = Place(device)
    assert place_of([torch.ones(1, device=device)]).device == device
    here = torch.arange(2.0**22)
    training = torch.cuda.Stream(device) if apart else torch.cuda.default_stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(training):
        values = torch.zeros(2**22, device=device)
        for _ in range(50):
            values += 1
        place.precede()
    found = []

    def beside() -> None:
        there = place.of(here)
        told = torch.empty(2**22, pin_memory=True)
        with place.beside():
            told.copy_(values + there, non_blocking=True)
        found.append(told)

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert torch.equal(found[0], here + 50)
    assert found[0].is_pinned()
