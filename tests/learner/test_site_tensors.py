"""A site's tensors under the three ways to adopt, and through a checkpoint."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from diloco.inner.holding import Holding
from diloco.learner.tensors import Place, SiteTensors
from diloco.outer.fragments import gather, scatter
from diloco.outer.optimizer import OuterOptimizerOptions
from diloco.outer.pseudo_gradient import pseudo_gradient, rebase
from tests.learner.participant import Elsewhere, held
from tests.syncer.building import LAYOUT, dice

SHAPES = dict(LAYOUT.parameters)
FRAGMENT = LAYOUT.fragments[0]


def site_tensors(rule: str, alpha: float = 0.25, place: Place | None = None) -> SiteTensors:
    """One that has taken version 3 and trained since, with updates 5 and 6 on their way."""
    parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    found = SiteTensors(LAYOUT, held(parameters), rule, alpha, place)
    found.latest[0] = (3, dice("base", 0))
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


def measured(found: SiteTensors, subtract: list[int]) -> Tensor:
    inputs = found.measure(0, subtract)
    return pseudo_gradient(inputs.reference, inputs.local, inputs.in_flight)


def test_rebase_keeps_what_is_not_merged() -> None:
    found = site_tensors("rebase")
    found.latest[0] = (4, dice("new", 0))
    found.adopt(0, 4, [5])
    wanted = dice("new", 0) - (dice("base", 0) - dice("local", 0) - dice("d5", 0))
    assert torch.equal(local(found), wanted)
    assert found.base[0] is found.reference[0] is found.latest[0][1]
    assert sorted(found.sent) == [(0, 6), (1, 5)]


def test_rebase_of_nothing_is_the_version_bit_for_bit() -> None:
    found = site_tensors("rebase")
    base = found.base[0]
    assert base is not None
    found.sent[0, 5] = base - local(found)
    found.latest[0] = (4, dice("new", 0))
    found.adopt(0, 4, [5])
    assert torch.equal(local(found), dice("new", 0))


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


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_a_blend_may_be_measured_from_the_version_less_what_was_sent_since(alpha: float) -> None:
    found = site_tensors("blend", alpha)
    found.measure_from = "published"
    found.latest[0] = (4, dice("new", 0))
    found.adopt(0, 4, [5])
    assert found.reference[0] is found.base[0], "a checkpoint has it once"
    left = dice("new", 0) - local(found)
    assert left.abs().max() > 0.1
    assert torch.equal(measured(found, []), left), "what is left of the site's own way goes out again"
    found.sent[0, 7] = left
    found.write(0, local(found) - 2)
    assert torch.allclose(measured(found, [7]), torch.full_like(left, 2.0), atol=1e-6)


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


def test_eager_may_have_ahead_what_the_outer_step_will_make_of_its_own_updates_and_keeps_it_in_a_checkpoint() -> None:
    """Nesterov of .5 and .5 among three sites: version 4 merged update 5, and 6 is under way."""
    options = OuterOptimizerOptions(kind="nesterov", lr=0.5, momentum=0.5)
    parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    found = SiteTensors(LAYOUT, held(parameters), "eager", 0.0, ahead=options)
    found.arrived(0, 3, dice("base", 0), "")
    found.retake(0, 3, [])
    found.write(0, dice("local", 0))
    found.sent[0, 5], found.sent[0, 6] = dice("d5", 0), dice("d6", 0)
    found.arrived(0, 4, dice("new", 0), "", 3)
    found.adopt(0, 4, [5], fresh=[5, 6], under_way=[6])
    unsent = dice("base", 0) - dice("local", 0) - dice("d5", 0) - dice("d6", 0)
    momentum = 0.5 * dice("d5", 0) / 3 + dice("d6", 0) / 3
    reference = dice("new", 0) - 0.5 * (dice("d6", 0) / 3 + 0.5 * momentum)
    assert torch.allclose(local(found), reference - unsent, atol=1e-6)
    assert torch.allclose(measured(found, []), unsent, atol=1e-6), "what was not sent goes out with the next update"
    tensors = {name: values.clone() for name, values in found.tensors().items()}
    again = SiteTensors(LAYOUT, copied(found), "eager", 0.0, ahead=options)
    again.restore(tensors, [4, -1])
    for each in (found, again):
        each.arrived(0, 6, dice("newest", 0), "", 3)
        each.adopt(0, 6, [6])
        assert each.own is not None
        assert each.own[0].momentum is not None
        # Of versions 5 and 6 the last held update 6.
        assert torch.allclose(each.own[0].momentum, 0.25 * dice("d5", 0) / 3 + dice("d6", 0) / 3, atol=1e-6)
    assert torch.equal(local(again), local(found))
    again.retake(0, 6, [])
    assert "own.0" in found.tensors()
    assert "own.0" not in again.tensors()


def test_eager_has_nothing_ahead_while_nobody_has_told_of_how_many_sites_a_version_is() -> None:
    options = OuterOptimizerOptions(kind="nesterov", lr=0.5, momentum=0.5)
    parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    found = SiteTensors(LAYOUT, held(parameters), "eager", 0.0, ahead=options)
    found.arrived(0, 3, dice("base", 0), "")
    found.retake(0, 3, [])
    found.write(0, dice("local", 0))
    found.sent[0, 5], found.sent[0, 6] = dice("d5", 0), dice("d6", 0)
    found.arrived(0, 4, dice("new", 0), "")
    found.adopt(0, 4, [5], fresh=[5, 6], under_way=[6])
    assert found.reference[0] is not None
    assert torch.equal(found.reference[0], dice("new", 0))
    assert found.own is not None
    assert found.own[0].momentum is None


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


def test_retake_of_the_version_that_is_held_needs_no_newer_one() -> None:
    found = site_tensors("rebase")
    found.latest[0] = (9, dice("newer", 0))  # It is here, and not what was ordered.
    found.retake(0, 3, [])
    assert torch.equal(local(found), dice("base", 0))


def test_measuring_copies_the_model_at_that_instant() -> None:
    found = site_tensors("rebase")
    inputs = found.measure(0, [5, 6])
    found.write(0, torch.zeros(FRAGMENT.numel))
    wanted = dice("base", 0) - dice("local", 0) - dice("d5", 0) - dice("d6", 0)
    assert torch.equal(pseudo_gradient(inputs.reference, inputs.local, inputs.in_flight), wanted)


@pytest.mark.parametrize("rule", ["rebase", "overwrite", "blend"])
def test_a_checkpoint_holds_everything_that_the_next_update_is_made_of(rule: str) -> None:
    found = site_tensors(rule)
    found.latest[0] = (4, dice("new", 0))
    found.adopt(0, 4, [5])
    tensors = {name: values.clone() for name, values in found.tensors().items()}
    again = SiteTensors(LAYOUT, copied(found), rule, 0.25)
    again.restore(tensors, [4, -1])
    subtract = [6] if rule == "rebase" else []
    mine, theirs = measured(again, subtract), measured(found, subtract)
    assert torch.equal(mine, theirs)
    assert (again.base[1], again.reference[1], again.latest[1]) == (None, None, None)
    assert again.latest[0] is not None
    assert again.latest[0][0] == 4
    assert sorted(again.sent) == [(0, 6), (1, 5)]
    again.latest[0] = found.latest[0] = (5, dice("newest", 0))
    again.adopt(0, 5, [6])
    found.adopt(0, 5, [6])
    assert torch.equal(local(again), local(found))


def test_a_released_update_is_forgotten_once_and_for_all() -> None:
    found = site_tensors("rebase")
    found.release(0, 5)
    found.release(0, 5)
    assert sorted(found.sent) == [(0, 6), (1, 5)]


@pytest.mark.parametrize("kind", ["fp32", "bfloat16", "transposed"])
def test_rebase_in_place_and_by_a_copy_give_the_same_bits(kind: str) -> None:
    """What is not flat fp32 on the CPU is copied out and back; both are the definition."""
    found = site_tensors("rebase")
    if kind == "bfloat16":
        found.holding = held({name: values.bfloat16() for name, values in parameters_of(found).items()})
    elif kind == "transposed":
        parameters = parameters_of(found).items()
        turned = {name: values.t().contiguous().t() if values.dim() == 2 else values for name, values in parameters}
        found.holding = held(turned)
    before = {name: values.data_ptr() for name, values in parameters_of(found).items()}
    wanted = rebase(local(found), dice("base", 0), dice("new", 0), [dice("d5", 0), dice("d6", 0)])
    found.latest[0] = (4, dice("new", 0))
    found.adopt(0, 4, [5, 6])
    assert {name: values.data_ptr() for name, values in parameters_of(found).items()} == before
    assert torch.equal(local(found), wanted.bfloat16().float() if kind == "bfloat16" else wanted)


def test_memory_of_what_is_held_is_never_given_to_anybody_else() -> None:
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
    assert buffers.spare_bytes > 0, "the rest was used again"


def test_parameters_of_other_kinds_are_written_in_place() -> None:
    parameters = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    before = {name: values.data_ptr() for name, values in parameters.items()}
    found = SiteTensors(LAYOUT, held(parameters), "rebase", 0.5)
    found.write(0, dice("base", 0))
    assert {name: values.data_ptr() for name, values in parameters.items()} == before
    wanted = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    scatter(FRAGMENT, dice("base", 0), wanted)
    assert torch.equal(found.local(0), gather(FRAGMENT, {n: v.bfloat16() for n, v in wanted.items()}))


def test_the_digest_that_was_told_goes_with_its_version_into_the_base_and_through_a_checkpoint() -> None:
    found = site_tensors("rebase")
    found.arrived(0, 4, dice("new", 0), "four")
    assert found.told_base == ["", ""], "it is here and not adopted"
    found.arrived(0, 3, dice("old", 0), "three")
    found.adopt(0, 4, [5])
    assert found.told_base == ["four", ""]
    found.arrived(0, 5, dice("newer", 0), "five")
    again = SiteTensors(LAYOUT, copied(found), "rebase", 0.25)
    again.restore(found.tensors(), [4, -1], found.told_base)
    assert again.told_base == ["four", ""]
    again.retake(0, 4, [])
    assert again.told_base == ["four", ""], "the same version once more"
    again.arrived(0, 5, dice("newer", 0), "five")
    again.retake(0, 5, [])
    assert again.told_base == ["five", ""]


def test_of_a_checkpoint_only_what_is_owned_is_read() -> None:
    found = site_tensors("rebase")

    class Read(dict[str, Tensor]):
        """Names the tensors that are asked for."""

        asked: ClassVar[list[str]] = []

        def __getitem__(self, name: str) -> Tensor:
            self.asked.append(name)
            return super().__getitem__(name)

    tensors = Read(found.tensors() | {"base.1": dice("base", 1), "residual.1": dice("r", 1)})
    again = SiteTensors(LAYOUT, copied(found), "rebase", 0.25, owned=[1])
    again.restore(tensors, [3, 2], ["three", "two"])
    assert sorted(Read.asked) == ["base.1", "residual.1", "sent.1.5"]
    assert again.base[0] is None
    assert again.base[1] is not None
    assert list(again.sent) == [(1, 5)]
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
    copies = {name: values.clone() for name, values in there.tensors().items()}
    again = SiteTensors(LAYOUT, there.holding, rule, 0.25, Elsewhere())
    again.restore(copies, [4, -1])
    subtract = [6] if rule == "rebase" else []
    wanted = here.measure(0, subtract).pseudo_gradient()
    assert torch.equal(there.measure(0, subtract).pseudo_gradient(), wanted)
    assert torch.equal(again.measure(0, subtract).pseudo_gradient(), wanted)
    assert again.sent[0, 6] is not copies["sent.0.6"]
    for found in (here, there):
        found.retake(0, 4, [6])
    assert torch.equal(local(there), local(here))
