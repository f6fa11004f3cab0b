"""The partition is exact, even, and the same everywhere; what comes from a remote is checked."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from diloco.outer.fragments import (
    Fragment,
    Layout,
    Piece,
    gather,
    named_parameters_once,
    part_of,
    place,
    plan_layout,
    scatter,
)


def test_other_frozen_parameters_are_another_layout_and_none_the_one_of_earlier_releases() -> None:
    shapes = [("a.lora", (4, 8)), ("b.lora", (3,))]
    plain, here, there = (plan_layout(shapes, 2, frozen) for frozen in ("", "12ab" * 16, "34cd" * 16))
    assert "frozen" not in plain.to_json()
    assert len({layout.fingerprint for layout in (plain, here, there)}) == 3
    assert Layout.from_json(here.to_json()) == here
    assert part_of(here, [1]).frozen == here.frozen
    words = (
        "the frozen parameters are of digest 12ab12ab12ab here and of digest 34cd34cd34cd there: they are not exchanged"
    )
    assert (here.first_difference(there) or "").startswith(words)
    all_of_them = plan_layout([("a.weight", (8, 8)), *shapes], 2)
    assert (here.first_difference(all_of_them) or "").startswith(words.replace("of digest 34cd34cd34cd", "none"))
    other_rank = plan_layout([("a.lora", (2, 8)), ("b.lora", (3,))], 2, here.frozen)
    assert here.first_difference(other_rank) == "parameter a.lora has shape (4, 8) here and (2, 8) there"


def test_buffers_are_one_fragment_more_and_without_any_the_layout_is_that_of_earlier_releases() -> None:
    shapes, buffers = [("0.weight", (4, 8)), ("2.bias", (3,))], [("1.mean", (8,)), ("1.var", (8,))]
    plain, apart = plan_layout(shapes, 2), plan_layout([*buffers, *shapes], 2, "", ["1.var", "1.mean"])
    assert "buffers" not in plain.to_json()
    assert apart.fragments[:2] == plain.fragments
    assert [piece.name for piece in apart.fragments[2].pieces] == ["1.mean", "1.var"]
    assert (apart.averaged, plain.averaged) == ({2}, set())
    assert Layout.from_json(apart.to_json()) == apart
    assert (part_of(apart, [1, 2]).averaged, part_of(apart, [0, 1]).averaged) == ({1}, set())
    assert apart.first_difference(plain) == "parameter 1.mean is here and not there"
    with pytest.raises(ValueError, match="num_fragments is 3: must be from 1 to the 2 parameters"):
        plan_layout([*buffers, *shapes], 3, "", ["1.var", "1.mean"])


def test_fragments_may_cut_a_parameter() -> None:
    layout = Layout(
        (("a", (10,)),),
        (Fragment(0, (Piece("a", 0, 2), Piece("a", 7, 10)), 5), Fragment(1, (Piece("a", 2, 7),), 5)),
    )
    values = {"a": torch.arange(10.0)}
    assert gather(layout.fragments[0], values).tolist() == [0, 1, 7, 8, 9]
    assert Layout.from_json(layout.to_json()) == layout


ONE = [["a", [1]]]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fragments": [[["a", 0, 11], ["b", 0, 3]]]}, "end at 11, it has 10"),
        ({"fragments": [[["a", 0, 10]]]}, "parameter b end at 0, it has 3"),
        ({"fragments": [[["a", 0, 6], ["a", 5, 10], ["b", 0, 3]]]}, "overlaps"),
        ({"fragments": [[["a", 0, 10], ["b", 0, 3]], [["a", 0, 10]]]}, "overlaps"),
        ({"fragments": [[["a", 0, 4], ["a", 5, 10], ["b", 0, 3]]]}, "gap"),
        ({"fragments": [[["a", -1, 10], ["b", 0, 3]]]}, "overlaps"),
        ({"fragments": [[["a", 0, 10], ["a", 10, 10], ["b", 0, 3]]]}, "empty"),
        ({"fragments": [[["a", 0, 10], ["b", 0, 3], ["x", 0, 1]]]}, "no parameter"),
        ({"fragments": [[["b", 0, 3], ["a", 0, 10]]]}, "canonical order"),
        ({"fragments": [[["a", 0, 10], ["b", 0, 3]], []]}, "no pieces"),
        ({"fragments": [[["a", 0, 10], ["b", 0, 3.0]]]}, "int wanted"),
        ({"fragments": [[["a", 0], ["b", 0, 3]]]}, "3 wanted"),
        ({"fragments": [{"a": 1}]}, "a list wanted"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"parameters": []}, "no parameters"),
        ({"parameters": [["a", [0]]]}, "at least 1"),
        ({"parameters": [["a", [-1, -1]]]}, "at least 1"),
        ({"parameters": [*ONE, *ONE]}, "twice"),
        ({"parameters": [["b", [1]], *ONE]}, "order"),
        ("", "not JSON"),
        ("[]", "a mapping wanted"),
    ],
)
def test_invariant_15_what_is_no_partition_is_no_layout(given: dict[str, object] | str, words: str) -> None:
    right = {"dtype": "float32", "parameters": [["a", [10]], ["b", [3]]], "fragments": [[["a", 0, 10], ["b", 0, 3]]]}
    Layout.from_json(json.dumps(right))
    with pytest.raises(ValueError, match=words):
        Layout.from_json(given if isinstance(given, str) else json.dumps(right | given))


def test_a_layout_has_as_many_fragments_as_parameters_at_most() -> None:
    for num_fragments in (0, 3, -1):
        with pytest.raises(ValueError, match=f"num_fragments is {num_fragments}"):
            plan_layout([("a", (1,)), ("b", (1,))], num_fragments)


def test_layouts_that_differ_have_other_fingerprints_and_the_difference_is_said() -> None:
    here = plan_layout([("blocks.0.w", (4, 8)), ("head", (2,))], 1)
    assert here.first_difference(here) is None
    wider, alone = plan_layout([("blocks.0.w", (4, 9)), ("head", (2,))], 1), plan_layout([("head", (2,))], 1)
    turned, more = (plan_layout([("blocks.0.w", shape), ("head", (2,))], n) for shape, n in (((8, 4), 1), ((4, 8), 2)))
    swapped = Layout(
        here.parameters, (Fragment(0, (Piece("head", 0, 2),), 2), Fragment(1, more.fragments[0].pieces, 32))
    )
    for one, other, words in (
        (here, wider, "parameter blocks.0.w has shape (4, 8) here and (4, 9) there"),
        (here, turned, "parameter blocks.0.w has shape (4, 8) here and (8, 4) there"),
        (here, alone, "parameter blocks.0.w is here and not there"),
        (alone, here, "parameter blocks.0.w is there and not here"),
        (here, more, "there are 1 fragments here and 2 there"),
        (more, swapped, "fragment 0 has 32 values"),
    ):
        assert words in (one.first_difference(other) or "")
        assert one.fingerprint != other.fingerprint


def test_gather_and_scatter_are_inverse_also_of_transposed_and_half_precision_parameters() -> None:
    parameters = {"a": torch.zeros(3, 2).t(), "b": torch.zeros(4, dtype=torch.bfloat16), "c": torch.zeros(())}
    fragment = plan_layout([(name, tuple(p.shape)) for name, p in parameters.items()], 1).fragments[0]
    before = gather(fragment, parameters)
    values = torch.tensor([1.0, 2, 3, 4, 5, 6, 1.001, 8, 9, 10, 11])
    scatter(fragment, values, parameters)
    assert parameters["a"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert parameters["b"].tolist() == [1, 8, 9, 10]
    assert parameters["c"].item() == 11
    expected = values.clone()
    expected[6] = 1
    assert torch.equal(gather(fragment, parameters), expected)
    assert not before.any(), "what was gathered is a copy"
    module = nn.Linear(2, 2)
    scatter(plan_layout([("weight", (2, 2))], 1).fragments[0], torch.ones(4), named_parameters_once(module))
    assert module.weight.requires_grad
    assert module.weight.tolist() == [[1, 1], [1, 1]]


class Tied(nn.Module):
    """An embedding and a head that share their weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.zeros(2))


class Outer(nn.Module):
    """A model with a submodule that happens to be called ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(1, 1, bias=False)


def test_names_are_those_of_the_bare_model_with_tied_parameters_once_and_no_buffers() -> None:
    assert list(named_parameters_once(Tied())) == ["embedding.weight"]
    assert list(named_parameters_once(Outer())) == ["module.weight"]
    assert list(named_parameters_once(torch.compile(Tied(), backend="eager"))) == ["embedding.weight"]
    for wrapped in (lambda module: torch.compile(module, backend="eager"), checkpoint_wrapper):
        inside = nn.Sequential(wrapped(nn.BatchNorm1d(2)))
        assert list(named_parameters_once(inside)) == ["0.weight", "0.bias"]
        inside.register_buffer("derived", torch.zeros(2), persistent=False)
        assert list(named_parameters_once(inside, buffers=True)) == ["0.running_mean", "0.running_var"]


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_names_under_ddp() -> None:
    with one_rank():
        wrapped = nn.parallel.DistributedDataParallel(Tied())
        assert list(named_parameters_once(wrapped)) == ["embedding.weight"]
        assert list(named_parameters_once(torch.compile(wrapped, backend="eager"))) == ["embedding.weight"]
        inside = nn.Sequential(nn.parallel.DistributedDataParallel(Outer()))
        assert list(named_parameters_once(inside)) == ["0.module.weight"]
        # A wrapped model that outlives its group frees the group's threads with the GIL held, which they may wait for:
        # the test then hangs where it returns, now and then.
        del wrapped, inside
        gc.collect()


def test_names_and_shapes_under_fsdp() -> None:
    bare = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    told = [(name, tuple(value.shape)) for name, value in named_parameters_once(bare).items()]
    with one_rank():
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(bare[0], mesh=mesh)
        fully_shard(bare, mesh=mesh)
        found = named_parameters_once(bare)
        assert [(name, tuple(value.shape)) for name, value in found.items()] == told
        assert all(isinstance(value, DTensor) for value in found.values())


# --- Which syncer holds which fragments ------------------------------------------------------------------------------


def test_a_faster_link_takes_more_and_one_syncer_all() -> None:
    assert place([3, 1, 2], [7.0]) == ((0, 1, 2),)
    assert place([10] * 8, [300.0, 100.0]) == ((0, 1, 2, 4, 5, 6), (3, 7))
    assert place([10] * 4, [1.0, 1.0]) == ((0, 2), (1, 3))
    assert place([5, 9, 5], [1.0, 1.0]) == ((1,), (0, 2))


@pytest.mark.parametrize(
    ("numels", "rates", "words"),
    [
        ([10], [1.0, 1.0], "syncer 1 of 2 would hold none of 1 fragments"),
        ([10, 10], [1.0, 0.01], "syncer 1 of 2 would hold none of 2 fragments, with a rate of 0.01 among 1, 0.01"),
        ([10], [0.0], "rates has 0.0: positive and finite"),
        ([10], [float("nan")], "rates has nan: positive and finite"),
    ],
)
def test_what_cannot_be_placed_is_said(numels: list[int], rates: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        place(numels, rates)


def test_a_part_is_a_layout_of_its_own_and_the_parts_are_the_whole() -> None:
    whole = plan_layout([(f"w{number}", (number + 1, 3)) for number in range(9)], 4)
    placed = place([fragment.numel for fragment in whole.fragments], [1.0, 2.0])
    parts = [part_of(whole, mine) for mine in placed]
    assert sum(part.numel for part in parts) == whole.numel
    assert sorted(name for part in parts for name, _ in part.parameters) == [name for name, _ in whole.parameters]
    assert len({part.fingerprint for part in parts} | {whole.fingerprint}) == 3
    for part, mine in zip(parts, placed, strict=True):
        assert [each.pieces for each in part.fragments] == [whole.fragments[index].pieces for index in mine]
        assert [each.index for each in part.fragments] == list(range(len(mine)))
    assert part_of(whole, range(4)) == whole


def test_a_parameter_cannot_lie_with_two_syncers() -> None:
    pieces = (Fragment(0, (Piece("w", 0, 5),), 5), Fragment(1, (Piece("w", 5, 9),), 4))
    with pytest.raises(ValueError, match="the pieces of parameter w end at 5, it has 9 values"):
        part_of(Layout((("w", (9,)),), pieces), [0])
