"""A site's tensors under every way to adopt, with their residuals, through a checkpoint and on a device."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.codec.base import digest
from diloco.codec.registry import make_codec, values_of
from diloco.inner.holding import Holding
from diloco.learner.seal import Encoder, SealedUpdate, SealJob, seal
from diloco.learner.tensors import HOST, IDLE_SHARE, Echo, Place, SealInputs, SiteTensors, place_of
from diloco.outer.fragments import gather, plan_layout
from diloco.outer.optimizer import NOTHING, OuterOptimizerOptions, outer_step
from diloco.outer.pseudo_gradient import pseudo_gradient, rebase
from diloco.sync.effects import Seal
from diloco.wire.messages import short_digest
from tests.learner.participant import Elsewhere, held
from tests.syncer.building import LAYOUT, dice

SHAPES = dict(LAYOUT.parameters)

FRAGMENT = LAYOUT.fragments[0]


def site_tensors(rule: str, alpha: float = 0.25, place: Place | None = None, **more: Any) -> SiteTensors:
    """One that has taken version 3 and trained since, with updates 5 and 6 on their way."""
    parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    found = SiteTensors(LAYOUT, held(parameters), rule, alpha, place, **more)
    found.arrived(0, 3, dice("base", 0), "")
    found.retake(0, 3, [])
    found.write(0, dice("local", 0))
    found.sent[0, 5], found.sent[0, 6] = dice("d5", 0), dice("d6", 0)
    found.sent[1, 5] = dice("d5", 1)
    return found


def local(found: SiteTensors) -> Tensor:
    return gather(FRAGMENT, parameters_of(found))


def parameters_of(found: SiteTensors) -> dict[str, Tensor]:
    return {name: found.holding.part(name) for name in SHAPES}


def copied(found: SiteTensors) -> Holding:
    return held({name: values.clone() for name, values in parameters_of(found).items()})


def restored(found: SiteTensors, rule: str, **more: Any) -> SiteTensors:
    """What a new process has of its checkpoint."""
    tensors = {name: values.clone() for name, values in found.tensors().items()}
    again = SiteTensors(LAYOUT, copied(found), rule, 0.25, **more)
    again.restore(tensors, [4, -1], found.told_base)
    return again


def measured(found: SiteTensors, subtract: Sequence[int] = ()) -> Tensor:
    inputs = found.measure(0, subtract)
    return pseudo_gradient(inputs.reference, inputs.local, inputs.in_flight)


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
        theta, base = dice(("new", version), 0), found.reference[0]
        assert base is not None
        wanted = rebase(local(found), base, theta, [dice(f"d{merged}", 0)])
        found.latest[0] = (version, theta)
        found.adopt(0, version, [merged])
        assert {name: values.data_ptr() for name, values in parameters_of(found).items()} == before
        assert torch.equal(local(found), wanted.bfloat16().float() if kind == "bfloat16" else wanted)
        assert (0, merged) not in found.sent
    assert found.base[0] is found.latest[0][1]
    assert (found.reference[0] is found.base[0]) == (kind != "bfloat16")


@pytest.mark.parametrize(("rule", "alpha"), [("overwrite", 0.25), ("blend", 0.25), ("blend", 1.0)])
def test_the_others_measure_from_the_value_right_after_the_adopt(rule: str, alpha: float) -> None:
    found = site_tensors(rule, alpha)
    found.latest[0] = (4, dice("new", 0))
    found.adopt(0, 4, [5, 6])
    new, old = dice("new", 0), dice("local", 0)
    wanted = new if rule == "overwrite" else old if alpha == 1 else new - (new - old) * alpha
    assert torch.equal(local(found), wanted)
    assert found.reference[0] is not None
    assert torch.equal(found.reference[0], wanted)
    assert sorted(found.sent) == [(1, 5)]
    assert torch.equal(measured(found, []), torch.zeros_like(new))


@pytest.mark.parametrize("rule", ["rebase", "blend", "eager"])
def test_buffers_are_measured_whole_and_taken_as_they_are(rule: str) -> None:
    parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    layout = replace(LAYOUT, buffers=tuple(piece.name for piece in FRAGMENT.pieces))
    found = SiteTensors(layout, held(parameters), rule, 0.25, feedback=0.5 * (rule == "blend"))
    found.arrived(0, 3, dice("base", 0), "")
    found.retake(0, 3, [])
    found.write(0, dice("local", 0))
    found.sent[0, 5] = found.sent[0, 6] = dice("d", 0)
    assert torch.equal(measured(found, [5, 6]), -dice("local", 0))
    found.latest[0] = (4, dice("new", 0))
    found.adopt(0, 4, [5])
    assert torch.equal(local(found), dice("new", 0))
    found.retake(0, 4, [6])
    assert torch.equal(local(found), dice("new", 0))
    assert torch.equal(measured(found, [6]), -dice("new", 0))
    assert found.measure(0, [6]).carried is None


def test_eager_keeps_what_is_unsent_and_a_share_of_what_the_version_lacks() -> None:
    """Update 5 was measured before the last adopt, so only 6 is in what was trained since; the version has 5."""
    found = site_tensors("eager")
    found.latest[0] = (4, dice("new", 0))
    found.adopt(0, 4, [5], fresh=[6], under_way=[6])
    unsent = dice("base", 0) - dice("local", 0) - dice("d6", 0)
    reference = dice("new", 0).sub(dice("d6", 0), alpha=0.25)
    assert torch.equal(local(found), reference - unsent)
    assert found.reference[0] is not None
    assert torch.equal(found.reference[0], reference)
    assert sorted(found.sent) == [(0, 6), (1, 5)]
    assert torch.allclose(measured(found, []), unsent, atol=1e-6), "what was not sent goes out with the next update"


@pytest.mark.parametrize("sites", [0, 3])
def test_eager_may_have_ahead_what_the_outer_step_will_make_of_its_own_updates_and_keeps_it_in_a_checkpoint(
    sites: int,
) -> None:
    """Nesterov of .5 and .5 among three sites: version 4 merged update 5, and 6 is under way.

    While it is not known of how many sites a version is, nothing is ahead.
    """
    options = OuterOptimizerOptions(kind="nesterov", lr=0.5, momentum=0.5)
    found = site_tensors("eager", 0.0, ahead=options)
    found.arrived(0, 4, dice("new", 0), "", sites)
    found.adopt(0, 4, [5], fresh=[5, 6], under_way=[6])
    assert found.reference[0] is not None
    assert found.own is not None
    if not sites:
        assert torch.equal(found.reference[0], dice("new", 0))
        assert found.own[0].momentum is None
        return
    unsent = dice("base", 0) - dice("local", 0) - dice("d5", 0) - dice("d6", 0)
    momentum = 0.5 * dice("d5", 0) / 3 + dice("d6", 0) / 3
    reference = dice("new", 0) - 0.5 * (dice("d6", 0) / 3 + 0.5 * momentum)
    assert torch.allclose(local(found), reference - unsent, atol=1e-6)
    assert torch.allclose(measured(found), unsent, atol=1e-6), "what was not sent goes out with the next update"
    again = restored(found, "eager", ahead=options)
    for each in (found, again):
        each.arrived(0, 6, dice("newest", 0), "", 3)
        each.adopt(0, 6, [6])
        assert each.own is not None
        assert each.own[0].momentum is not None
        # Of versions 5 and 6 the last held update 6.
        assert torch.allclose(each.own[0].momentum, 0.25 * dice("d5", 0) / 3 + dice("d6", 0) / 3, atol=1e-6)
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
def test_a_checkpoint_holds_everything_that_the_next_update_is_made_of(rule: str) -> None:
    found = site_tensors(rule)
    found.latest[0] = (4, dice("new", 0))
    found.adopt(0, 4, [5])
    again = restored(found, rule)
    subtract = [6] if rule == "rebase" else []
    assert torch.equal(measured(again, subtract), measured(found, subtract))
    assert (again.base[1], again.reference[1], again.latest[1]) == (None, None, None)
    assert again.latest[0] is not None
    assert again.latest[0][0] == 4
    assert sorted(again.sent) == [(0, 6), (1, 5)]
    again.latest[0] = found.latest[0] = (5, dice("newest", 0))
    again.adopt(0, 5, [6])
    found.adopt(0, 5, [6])
    assert torch.equal(local(again), local(found))


def test_memory_of_what_is_held_is_never_used_again() -> None:
    """Rounds with everything that may still read a tensor: a checkpoint, a slow sender, an older version."""
    parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    found = SiteTensors(LAYOUT, held(parameters), "rebase", 0.5)
    buffers = found.buffers
    found.latest[0] = (0, dice("base", 0))
    found.retake(0, 0, [])
    kept: list[tuple[Tensor, Tensor]] = []
    for version in range(1, 20):
        found.write(0, dice(("trained", version), 0))
        inputs = found.measure(0, [])
        found.sent[0, version] = inputs.local
        values = buffers.values(FRAGMENT.numel).copy_(dice(("version", version), 0))
        found.arrived(0, version, values, "")
        found.adopt(0, version, [version])
        if version % 3 == 0:
            kept += [(values[5:], values[5:].clone()), (inputs.local, inputs.local.clone())]
        del values, inputs
        assert all(torch.equal(view, then) for view, then in kept)
        if version % 4 == 0:
            del kept[:1]
    assert buffers._spare, "the rest was used again"


def test_the_digest_that_was_told_goes_with_its_version_into_the_base_and_through_a_checkpoint() -> None:
    found = site_tensors("rebase")
    found.arrived(0, 4, dice("new", 0), "four")
    assert found.told_base == ["", ""], "it is here and not adopted"
    found.arrived(0, 3, dice("old", 0), "three")
    found.adopt(0, 4, [5])
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

    class Read(dict[str, Tensor]):
        """Names the tensors that are asked for."""

        def __getitem__(self, name: str) -> Tensor:
            asked.append(name)
            return super().__getitem__(name)

    tensors = Read(found.tensors() | {"base.1": dice("base", 1), "residual.1": dice("r", 1)})
    again = SiteTensors(LAYOUT, copied(found), "rebase", 0.25, owned=[1])
    again.restore(tensors, [3, 2], ["three", "two"])
    assert sorted(asked) == ["base.1", "residual.1", "sent.1.5"]
    assert again.told_base == ["three", "two"], "of all it is known what was told"
    assert sorted(again.tensors()) == ["base.1", "sent.1.5"]


@pytest.mark.parametrize("rule", ["rebase", "overwrite", "blend"])
def test_elsewhere_all_is_as_on_the_host(rule: str) -> None:
    """Versions are fetched and hashed here; what is computed is computed there, also after a checkpoint."""
    here, there = site_tensors(rule), site_tensors(rule, place=Elsewhere())
    for found in (here, there):
        found.arrived(0, 4, dice("new", 0), "told")
        found.adopt(0, 4, [5])
    assert torch.equal(local(there), local(here))
    assert there.latest[0] is not None
    assert there.base[0] is there.latest[0][1], "what is hashed is what was fetched"
    assert there.reference[0] is not there.base[0]
    assert there.tensors().keys() == here.tensors().keys()
    subtract = [6] if rule == "rebase" else []
    wanted = measured(here, subtract)
    for found in (there, restored(there, rule, place=Elsewhere())):
        assert torch.equal(found.measure(0, subtract).pseudo_gradient(), wanted)
    for found in (here, there):
        found.retake(0, 4, [6])
    assert torch.equal(local(there), local(here))


# --- Streaming DiLoCo by torchft's numbers: its six recorded runs of mocked updates -----------------------------------

PERIOD, STEPS = 6, 15

UNDISTURBED = [1.0 - 2 * step for step in range(STEPS + 1)]

RUNS = {
    (0, 0.0): (
        [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
        [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
        [-11, -23, -35, -47],
    ),
    (0, 0.5): (
        [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25],
        [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
        [-11, -23, -29, -35],
    ),
    (0, 1.0): (UNDISTURBED, UNDISTURBED, [-11, -23, -23, -23]),
    (1, 0.0): (
        [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
        [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45],
        [-7, -19, -27, -39, -47],
    ),
    (1, 0.5): (
        [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
        [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
        [-7, -19, -25, -31, -38],
    ),
    (1, 1.0): (UNDISTURBED, UNDISTURBED, [-7, -19, -23, -23]),
}
"""By delay and alpha: the values of either parameter after each step, and of the fragments' versions as they came.  The
recordings of a few runs end before the last version."""


@pytest.mark.parametrize(("delay", "alpha"), RUNS)
def test_the_recorded_runs_come_out_exactly(delay: int, alpha: float) -> None:
    layout = plan_layout([("first", (1,)), ("second", (1,))], 2)
    parameters = {name: torch.ones(1) for name, _ in layout.parameters}
    site = SiteTensors(layout, held(parameters), "blend", alpha, measure_from="published")
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
                site.adopt(index, version, [])
                published.append(theta[index].item())
            walked[index].append(site.local(index).item())
    first, second, versions = RUNS[delay, alpha]
    assert walked == [first, second]
    assert published[: len(versions)] == versions


# --- Sites whose parameters are narrower than fp32: what a write rounds off is no progress, under every rule ----------

NUMEL, ULP = 300, 2.0**-7
"""Of bf16 between 1 and 2."""

NARROW = plan_layout([("a", (100,)), ("b", (NUMEL - 100,))], 1)

EAGER = OuterOptimizerOptions(kind="sgd", lr=0.5, momentum=0.0)

RULES: dict[str, dict[str, object]] = {
    "rebase": {"adopt": "rebase", "adopt_alpha": 0.5},
    "overwrite": {"adopt": "overwrite", "adopt_alpha": 0.5},
    "blend": {"adopt": "blend", "adopt_alpha": 0.5},
    "blend, published": {"adopt": "blend", "adopt_alpha": 0.5, "measure_from": "published"},
    "eager": {"adopt": "eager", "adopt_alpha": 0.25},
    "eager, by the outer step": {"adopt": "eager", "adopt_alpha": 0.0, "ahead": EAGER},
}


class Sites:
    """Two, in lock-step; outer SGD of rate .5.  ``train`` is given the site, its parameters and the round."""

    def __init__(self, rule: str, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.theta = 1 + torch.rand(NUMEL, generator=generator)
        self.parameters = [
            {name: torch.zeros(shape, dtype=dtype) for name, shape in NARROW.parameters} for _ in range(2)
        ]
        self.sites = [SiteTensors(NARROW, held(each), **RULES[rule]) for each in self.parameters]  # type: ignore[arg-type]
        self.state = NOTHING
        for site in self.sites:
            site.arrived(0, 0, self.theta, "")
            site.retake(0, 0, [])

    def run(self, rounds: int, train: Callable[[int, dict[str, Tensor]], None]) -> Tensor:
        for number in range(1, rounds + 1):
            updates = []
            for index, site in enumerate(self.sites):
                train(index, self.parameters[index])
                updates.append(site.measure(0, []).pseudo_gradient())
                site.sealed(0, number, updates[-1], None)
            mean = (updates[0] + updates[1]) / 2
            self.theta, self.state = outer_step(self.theta, mean, self.state, EAGER)
            for site in self.sites:
                site.arrived(0, number, self.theta, "", 2)
                site.adopt(0, number, [number], fresh=[number])
        return self.theta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
def test_where_nothing_is_trained_nothing_moves(rule: str, dtype: torch.dtype) -> None:
    sites = Sites(rule, dtype)
    began = sites.theta
    assert not torch.equal(began, began.to(dtype).float())
    moved = sites.run(4, lambda site, parameters: None) - began
    # What is left is the rounding of fp32 itself.
    assert moved.abs().max().item() <= 2.0**-22
    assert torch.equal(sites.sites[0].local(0), sites.theta.to(dtype).float())


@pytest.mark.parametrize("rule", RULES)
def test_an_ulp_a_round_at_one_site_moves_the_version_as_it_would_in_fp32(rule: str) -> None:
    """Twenty rounds of an ulp at one of two sites and a rate of .5 are five ulp, wherever a value lies on the grid.

    What a blend left of the site's own way is sent again where it is measured from the version.
    """

    def train(site: int, parameters: dict[str, Tensor]) -> None:
        if site == 0:
            for values in parameters.values():
                values += ULP

    found = []
    for dtype in (torch.float32, torch.bfloat16):
        sites = Sites(rule, dtype)
        sites.theta.mul_(0.4).add_(0.6)  # From 1 to 1.4, so that none leaves the range of this ulp.
        for site in sites.sites:
            site.retake(0, 0, [])
        began = sites.theta.clone()
        found.append((sites.run(20, train) - began) / ULP)
    assert torch.allclose(found[0], found[1], rtol=0, atol=1e-3)
    assert (found[1].mean().item() == pytest.approx(5.0, abs=1e-3)) == (rule != "blend, published")


def test_a_checkpoint_holds_what_was_written_and_an_fp32_model_has_nothing_more_in_it() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        sites = Sites("rebase", dtype)
        site = sites.sites[0]
        assert ("reference.0" in site.tensors()) == (dtype == torch.bfloat16)
        again = SiteTensors(NARROW, held(sites.parameters[0]), "rebase", 0.5)
        again.restore(site.tensors(), [0])
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
        self.tensors = SiteTensors(ONE, held(self.parameters), rule, alpha, feedback=beta)
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


@pytest.mark.parametrize("drops", ["a retake", "feedback that was turned off"])
def test_a_residual_is_dropped_and_said(drops: str) -> None:
    model = Model("sign")
    model.train(1)
    update = model.update()
    said = {"residual_dropped": pytest.approx(float(model.residual().norm()))}
    if drops == "a retake":
        assert model.tensors.retake(0, 0, [update.header.sequence]) == said
        assert model.tensors.retake(0, 0, [update.header.sequence]) == {}
        model.refuse(update.header.sequence)
        assert sorted(model.tensors.tensors()) == ["base.0"]
    else:
        without = Model("sign", beta=0.0)
        without.tensors.restore(model.tensors.tensors(), [0])
        assert without.tensors.residuals.dropped == said
        assert model.tensors.residuals.dropped == {}
        assert not any(name.startswith(("residual", "term")) for name in without.tensors.tensors())


# --- A site says what it holds, and not what it was told --------------------------------------------------------------

TOLD = digest(dice("x", 0))


class Clock:
    def __init__(self) -> None:
        self.now_s, self.passes_s = 100.0, 0.0

    def __call__(self) -> float:
        self.now_s += self.passes_s
        return self.now_s


def echo_of(bases: Sequence[Tensor | None], told: str = TOLD, clock: Clock | None = None) -> tuple[Echo, SiteTensors]:
    layout = plan_layout([(f"p{index}", (4,)) for index in range(len(bases))], len(bases))
    tensors = SiteTensors(layout, held({name: torch.zeros(shape) for name, shape in layout.parameters}), "rebase", 0.5)
    tensors.base, tensors.told_base = list(bases), [told] * len(bases)
    tensors.base_versions = [10 + index for index in range(len(bases))]
    return Echo(tensors, threading.Condition(), clock or Clock()), tensors


def test_fragments_take_turns_and_a_digest_stands_for_the_very_tensor_it_was_made_of() -> None:
    echo, tensors = echo_of([dice("x", 0), dice("y", 1)])
    first, second = short_digest(digest(dice("x", 0))), short_digest(digest(dice("y", 1)))
    assert echo.digests() == (0, 0)
    assert echo.compute() == (0, 10, first)
    assert echo.digests() == (first, 0)
    assert echo.compute() == (1, 11, second)
    assert echo.digests() == (first, second)
    tensors.base[0] = dice("x", 0)
    assert echo.digests() == (0, second), "another tensor lies there now"
    assert echo.compute() == (0, 10, first)


def test_a_digest_is_in_the_form_of_what_was_told_and_nothing_is_said_where_nothing_was() -> None:
    values = dice("x", 0)
    echo, _ = echo_of([values], "0" * 64)
    echo.compute()
    assert echo.digests() == (short_digest(digest(values, like="0" * 64)),)
    echo, _ = echo_of([values], "")
    assert echo.compute() == (0, 10, 0)
    echo, _ = echo_of([None])
    assert (echo.compute(), echo.digests()) == (None, (0,)), "a site that has no base yet"


def test_hashing_takes_a_bounded_share_of_the_time() -> None:
    clock = Clock()
    echo, _ = echo_of([dice("x", 0)], clock=clock)
    clock.passes_s = 2.0
    assert echo.compute() is not None
    clock.passes_s = 0.0
    clock.now_s += IDLE_SHARE * 2.0 - 0.1
    assert echo.compute() is None
    clock.now_s += 0.2
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


@pytest.mark.gpu
def test_training_does_not_wait_for_what_is_beside_it() -> None:
    """Training's stream has long work; a thread beside it sees what was given before, and ends by itself."""
    device = torch.device("cuda", torch.cuda.current_device())
    place = Place(device)
    assert place_of([torch.ones(1, device=device)]).device == device
    here = torch.arange(2.0**22)
    values = torch.zeros(2**22, device=device)
    for _ in range(50):
        values += 1
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
