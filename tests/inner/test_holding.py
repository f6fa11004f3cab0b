"""How ranks hold a model: where each part lies, that all bits are gathered and scattered, that they train as one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from diloco.inner.data import CorpusManifest, validation_batches
from diloco.inner.evaluate import evaluate
from diloco.inner.holding import Holding, ParallelOptions, cut_by_shard, cut_by_tensor
from diloco.inner.model import ModelOptions, Transformer
from diloco.inner.parallel import (
    HoldingError,
    SiteGroup,
    box_of,
    is_cut,
    local,
)
from diloco.outer.fragments import Piece, named_parameters_once
from tests.codec.values import bf16_by_default
from tests.inner import spread_program
from tests.inner.conftest import run_ranks
from tests.inner.spread_program import CASES, RESUMED, SAVED, build, trained
from tests.layouts import LAYOUTS, SHAPES, Odd, dice, fill, heard, ranks, same, whole

WORLD = 4
FIRST_STAGE = ("embed.weight", "up.bias", "up.weight")
WHOLE = [Piece(name, 0, prod(shape)) for name, shape in sorted(SHAPES.items())]


def cuts(seed: int) -> list[list[Piece]]:
    """Every value in one of three lists, each parameter cut at two places drawn by lot."""
    lot, found = random.Random(seed), [list[Piece](), list[Piece](), list[Piece]()]
    for name, shape in sorted(SHAPES.items()):
        numel = prod(shape)
        at = [0, *sorted(lot.randint(0, numel) for _ in range(2)), numel]
        for pieces, start, stop in zip(found, at, at[1:], strict=False):
            if start < stop:
                pieces.append(Piece(name, start, stop))
    return found


def flat(pieces: Sequence[Piece], values: dict[str, Tensor]) -> Tensor:
    return torch.cat([values[piece.name].reshape(-1)[piece.start : piece.stop] for piece in pieces])


class Counting(SiteGroup):
    """Counts the values that this rank sends to others, and its broadcasts."""

    sent = broadcasts = 0

    def all_to_all(self, message: Tensor, to: Sequence[int], of: Sequence[int]) -> Tensor:
        assert to[self.rank] == 0, "nothing is sent to oneself"
        self.sent += sum(to)
        return super().all_to_all(message, to, of)

    def broadcast_(self, tensor: Tensor, src: int = 0) -> None:
        self.broadcasts += 1
        super().broadcast_(tensor, src)


def check_layout(name: str, group: Counting) -> dict[str, object]:
    """Gather at every rank and scatter from every rank, whole parameters and pieces of them."""
    parameters = named_parameters_once(LAYOUTS[name](Odd(), group.world))
    assert {each: tuple(value.shape) for each, value in parameters.items()} == SHAPES
    holding, told = Holding(parameters, group), dict[str, object]()
    for at in range(group.world):
        values = dice("theta", at)
        values["cube"][0, 0, :2] = torch.tensor([float("nan"), -0.0])
        fill(parameters, values)
        for pieces in [WHOLE, *cuts(at)]:
            into = torch.full((sum(p.stop - p.start for p in pieces),), 7.0) if group.rank == at else None
            with bf16_by_default():
                holding.gather(pieces, into, at)
            assert into is None or same(into, flat(pieces, values)), (at, pieces)
            assert holding.is_whole(pieces) or not holding.is_copied(pieces)
        new = dice("new", at)
        for pieces in cuts(at):
            with bf16_by_default():
                holding.scatter(pieces, flat(pieces, new) if group.rank == at else None, of=at)
        assert all(same(found, new[each]) for each, found in whole(parameters).items()), at
    group.sent = group.broadcasts = 0
    holding.gather(WHOLE, torch.empty(sum(map(prod, SHAPES.values()))) if group.is_first else None)
    held = {each: tuple(holding.part(each).shape) for each in SHAPES}
    told |= {"sent": group.sent, "held": held, "is_whole": holding.is_whole(WHOLE)}
    placed = [each for value in parameters.values() if isinstance(value, DTensor) for each in value.placements]
    told["strided"] = any(hasattr(placement, "split_factor") for placement in placed)
    assert group.broadcasts == 0
    assert not any(each.differs for each in holding.compared())
    with torch.no_grad():
        part = holding.part("norm.weight")
        part.add_(float(group.rank == 1))
    told["differ"] = [(sorted(each.names), each.ranks, each.digests) for each in holding.compared() if each.differs]
    told["compared"] = {name: each.ranks for each in holding.compared() for name in each.names}
    return told


def check_errors(group: SiteGroup) -> dict[str, object]:
    found: dict[str, object] = {}
    mesh = init_device_mesh("cpu", (group.world,))
    nowhere = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    gaps = DTensor.from_local(torch.ones(2), mesh, [_StridedShard(0, split_factor=2)], shape=(8,), stride=(1,))
    other = {"a": torch.ones(3), ("c" if group.rank == 2 else "b"): torch.ones(2)}
    missing = {"a": torch.ones(3)} | ({} if group.rank == 1 else {"z": torch.ones(1)})
    typed = {"a": torch.ones(3, dtype=torch.bfloat16 if group.rank == 3 else torch.float32)}
    given = {"partial": {"a": nowhere}, "gaps": {"a": gaps}, "other": other, "missing": missing, "typed": typed}
    for what, parameters in given.items():
        try:
            Holding(parameters, group)
        except HoldingError as error:
            found[what] = str(error)
    return found


def check_stages(group: SiteGroup) -> dict[str, object]:
    """Two stages of two ranks: the first copies its part of the model, the second cuts it."""
    stages = [FIRST_STAGE, [each for each in SHAPES if each not in FIRST_STAGE]]
    meshes = [DeviceMesh("cpu", [2 * stage, 2 * stage + 1], mesh_dim_names=("shard",)) for stage in range(2)]
    stage = group.rank // 2
    zeros = {name: torch.zeros(SHAPES[name]) for name in stages[stage]}
    cut = {name: distribute_tensor(each, meshes[1], [Shard(0)]) for name, each in zeros.items()} if stage else zeros
    holding, found = Holding(cut, group, in_stages=True), dict[str, object]()
    for at in range(group.world):
        new = dice("new", at)
        for pieces in [WHOLE, *cuts(at)]:
            holding.scatter(pieces, flat(pieces, new) if group.rank == at else None, of=at)
            into = torch.empty(sum(p.stop - p.start for p in pieces)) if group.rank == at else None
            holding.gather(pieces, into, at)
            assert into is None or same(into, flat(pieces, new)), (at, pieces)
    found["shapes"] = list(holding.shapes.items())
    found["parts"] = sum(part.numel() for part in holding.parts())
    found["compared"] = {name: (each.ranks, each.differs) for each in holding.compared() for name in each.names}
    other = {"a": torch.ones(3 if stage else 2), f"of rank {group.rank}": torch.ones(1)}
    try:
        Holding(other, group, in_stages=True)
    except HoldingError as error:
        found["error"] = str(error)
    narrow = {"ab"[stage]: torch.zeros(2, dtype=(torch.float64, torch.bfloat16)[stage])}
    pieces, values = [Piece("a", 0, 2), Piece("b", 0, 1)], torch.full((3,), 1.0009765625)
    found["rounded"] = Holding(narrow, group, in_stages=True).rounded(pieces, values).tolist()
    return found


def program(group: SiteGroup, tell: Callable[[Any], None]) -> None:
    group.__class__ = Counting
    assert isinstance(group, Counting)
    found = {name: check_layout(name, group) for name in LAYOUTS}
    tell(found | {"errors": check_errors(group), "stages": check_stages(group)})


def uneven(group: SiteGroup, tell: Callable[[Any], None]) -> None:
    """Rows that tensor parallel cuts in 4 and 3, and ``fully_shard`` each of these in three."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("shard", "tensor"))
    model, values = nn.Sequential(nn.Linear(2, 7)), torch.arange(14.0).view(7, 2)
    with torch.no_grad():
        model[0].weight.copy_(values)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    weight, into = model[0].weight, torch.empty(14) if group.is_first else None
    held = torch.equal(local(weight), values[box_of(weight).slices])
    holding = Holding({"weight": weight}, group)
    holding.gather([Piece("weight", 0, 14)], into)
    tell((held, into is None or torch.equal(into, values.flatten()), len(local(weight))))


def test_rows_that_two_kinds_of_cut_do_not_divide_are_where_torch_has_put_them() -> None:
    with ranks(uneven, 6) as ends:
        assert [heard(end) for end in ends] == [(True, True, rows) for rows in (2, 1, 2, 1, 0, 1)]


@pytest.fixture(scope="module")
def said() -> Iterator[list[Any]]:
    """What four ranks found, each by layout."""
    with ranks(program, WORLD) as ends:
        yield [heard(end) for end in ends]


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_value_is_sent_once_by_who_holds_what_rank_0_does_not_and_only_what_is_copied_is_compared(
    said: list[Any], name: str
) -> None:
    """That all bits are the parameters' own, in both directions, the ranks have seen themselves."""
    told = [each[name] for each in said]
    numel = sum(map(prod, SHAPES.values()))
    mine = sum(prod(shape) for shape in told[0]["held"].values())
    assert told[0]["sent"] == 0
    assert sum(each["sent"] for each in told) == numel - mine
    assert told[0]["is_whole"] == (name in ("plain", "ddp"))
    if name == "fsdp":
        assert [each["held"]["scale"] for each in told] == [(1,), (0,), (0,), (0,)]
        assert [each["held"]["wide"] for each in told] == [(6, 2)] * 4, "cut by columns"
        assert max(sum(map(prod, each["held"].values())) for each in told) < 0.4 * numel
    assert told[0]["strided"] == (name == "tp_fsdp"), "torch cuts again what is cut"
    if name == "hsdp":
        assert [each["sent"] for each in told[2:]] == [0, 0], "the copies have nothing to add"
    assert [each["differ"] for each in told] == [told[0]["differ"]] * WORLD, "all ranks know"
    assert len(told[0]["differ"]) == (0 if name == "fsdp" else 1), "under fsdp rank 1 alone has that part"
    for names, _, digests in told[0]["differ"]:
        assert "norm.weight" in names
        assert digests[1] not in (digests[0], digests[3])
    compared = {
        "ddp": dict.fromkeys(SHAPES, ((0, 1, 2, 3),)),
        "fsdp": {},
        "hsdp": {each: ((0, 2), (1, 3)) if each != "scale" else ((0, 2),) for each in SHAPES},
    }
    assert told[0]["compared"] == compared.get(name, told[0]["compared"])


def test_what_does_not_fit_is_said_by_every_rank(said: list[Any]) -> None:
    for each in said:
        found = each["errors"]
        assert "parameter a is" in found["partial"]
        assert found["gaps"].endswith(" on (4,) ranks: a rank's part is not one box")
        assert found["other"] == "rank 2 has the parameter ['c', [2]] where rank 0 has ['b', [2]]"
        assert found["typed"] == "parameter a is bfloat16 on rank 3 and float32 on another"
        assert found["missing"] == "rank 1 has the parameter None where rank 0 has ['z', [1]]"


def test_stages_have_each_a_part_of_the_model(said: list[Any]) -> None:
    """That any rank gathers and scatters all of it, to the bit, the ranks have seen themselves."""
    told = [each["stages"] for each in said]
    assert all(each["shapes"] == sorted(SHAPES.items()) for each in told)
    first = sum(prod(SHAPES[name]) for name in FIRST_STAGE)
    assert [each["parts"] for each in told[:2]] == [first, first]
    assert told[2]["parts"] + told[3]["parts"] == sum(map(prod, SHAPES.values())) - first
    assert [each["compared"] for each in told] == [dict.fromkeys(FIRST_STAGE, (((0, 1),), False))] * WORLD
    assert [each["rounded"] for each in told] == [[1.0009765625, 1.0009765625, 1.0]] * WORLD, "of both stages' types"
    assert {each["error"] for each in told} == {"parameter a is of shape [3] on rank 2 and [2] on another"}


def test_one_process_has_everything_also_a_number_and_half_precision_and_a_transposed_parameter() -> None:
    parameters = {"a": torch.zeros(3, 2).t(), "b": torch.zeros(4, dtype=torch.bfloat16), "c": torch.zeros(())}
    holding = Holding(parameters, SiteGroup(device="cpu"))
    pieces = [Piece("a", 0, 6), Piece("b", 0, 4), Piece("c", 0, 1)]
    holding.scatter(pieces, torch.tensor([1.0, 2, 3, 4, 5, 6, 1.001, 8, 9, 10, 11]))
    assert parameters["a"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert parameters["b"].tolist() == [1, 8, 9, 10]
    assert parameters["c"].item() == 11
    into = torch.empty(11)
    holding.gather(pieces, into)
    assert into.tolist() == [1, 2, 3, 4, 5, 6, 1, 8, 9, 10, 11]
    given = torch.tensor([1.001, 2, 3, 4, 5, 6, 1.001, 8, 9, 10, 11])
    assert holding.rounded(pieces, given).tolist() == [given[0].item(), *into.tolist()[1:]]
    assert holding.is_whole(pieces)
    assert holding.is_copied(pieces)
    assert holding.compared() == []
    assert given[6].item() != 1, "it stays as it is"
    assert holding.rounded(pieces[:1], given[:6]).data_ptr() == given.data_ptr(), "nothing is made for fp32"


def test_the_rank_that_gathers_or_scatters_passes_values_and_no_other() -> None:
    holding, pieces = Holding({"a": torch.zeros(2)}, SiteGroup(device="cpu")), [Piece("a", 0, 2)]
    for use in (holding.gather, holding.scatter):
        for values, other in ((None, 0), (torch.ones(2), 1)):
            with pytest.raises(AssertionError, match="only the hub"):
                use(pieces, values, other)
        with pytest.raises(AssertionError, match=r"shape \(3,\), the pieces 2"):
            use(pieces, torch.ones(3))


# --- What of a model each of two ranks holds --------------------------------------------------------------------------


TIED = ModelOptions(vocab_size=258, layers=1, dim=16, heads=2, context=16, tied=True)


def cutting(group: SiteGroup, tell: Callable[[Any], None]) -> None:
    """The boxes that a rank holds: by tensor parallel, and by ``fully_shard``."""
    mesh = init_device_mesh("cpu", (group.world,), mesh_dim_names=("side",))
    told = {}
    for how in (cut_by_tensor, cut_by_shard):
        model = Transformer(TIED, seed=1)
        how(model, mesh)
        assert model.head.weight is model.embedding.weight, "a tied pair stays one matrix"
        told[how.__name__] = {name: box_of(each).sizes for name, each in model.named_parameters() if is_cut(each)}
    tell(told)


def test_columns_of_what_reads_and_rows_of_what_writes_or_every_parameter_by_its_rows() -> None:
    with ranks(cutting, 2) as ends:
        held, other = (heard(end) for end in ends)
    assert held == other, "halves of even matrices"
    hidden = TIED.ffn_dim_used
    attention = {f"blocks.0.attention.{name}.weight": (8, 16) for name in ("query", "key", "value")}
    feed_forward = {f"blocks.0.feed_forward.{name}.weight": (hidden // 2, 16) for name in ("gate", "up")}
    writing = {"blocks.0.attention.output.weight": (16, 8), "blocks.0.feed_forward.down.weight": (16, hidden // 2)}
    assert held["cut_by_tensor"] == {"embedding.weight": (129, 16)} | attention | feed_forward | writing, "and no norm"
    whole = dict(Transformer(TIED, seed=1).named_parameters())
    assert held["cut_by_shard"] == {name: (len(each) // 2, *each.shape[1:]) for name, each in whole.items()}


# --- Training in every layout -----------------------------------------------------------------------------------------


BY_ONE = ("fsdp", "hsdp", "tp+fsdp")


@pytest.fixture(scope="module")
def results(manifest: CorpusManifest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where four ranks, and after them two and one, have left what they did."""
    out, alone = tmp_path_factory.mktemp("ranks"), SiteGroup(device="cpu")
    trained(build(CASES["fsdp"], manifest.directory, alone, out / "plain-checkpoints"), SAVED)
    for world in (WORLD, 2):
        run_ranks(spread_program, world, manifest.directory, out)
    for name in BY_ONE:
        spread_program.resume(name, name, manifest.directory, alone, out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_four_ranks_in_any_layout_are_one_process_on_the_same_text(
    name: str, manifest: CorpusManifest, results: Path
) -> None:
    ranks = [json.loads((results / f"{name}-{rank}.json").read_text()) for rank in range(WORLD)]
    assert all(rank["steps"] == ranks[0]["steps"] for rank in ranks)
    alone = build(CASES[name], manifest.directory, SiteGroup(device="cpu"))
    wanted = trained(alone)
    for (loss, norm), (here, our_norm) in zip(wanted, ranks[0]["steps"], strict=True):
        assert here == pytest.approx(loss, rel=2e-5)
        assert our_norm == pytest.approx(norm, rel=2e-4)
    found = load_file(results / f"{name}.safetensors")
    assert found.keys() == dict(alone.model.named_parameters()).keys()
    like = Transformer(ModelOptions(**CASES[name].model))
    with torch.no_grad():
        for key, parameter in like.named_parameters():
            parameter.copy_(found[key])
    loss = evaluate(like, validation_batches(manifest, 16, 3, 5), precision="fp32")
    assert {rank["loss"] for rank in ranks} == {ranks[0]["loss"]}
    assert ranks[0]["loss"] == pytest.approx(loss, rel=1e-6)
    # Muon, which may work in bf16, raises the smallest directions of a gradient several hundredfold: noise of 1e-7 in
    # one process's own gradients moves a matrix by 3 % of its way.  What it does with equal gradients is checked there.
    bound = 0.15 if CASES[name].inner["optimizer"] == "muon" else 1e-3
    begun = dict(Transformer(ModelOptions(**CASES[name].model), seed=5).named_parameters())
    for key, parameter in alone.model.named_parameters():
        assert (found[key] - parameter).norm() <= bound * (parameter - begun[key]).norm(), key
    # No rank holds more than its part, but for norms under tp and a row more where rows do not come out even.
    numel = sum(parameter.numel() for parameter in alone.model.parameters())
    shares = {"ddp": 1.0, "hsdp": 0.5}
    assert all(rank["held"] <= numel * shares.get(name, 0.25) * 1.1 for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world"), [*((name, WORLD) for name in RESUMED), ("fsdp", 2), *((name, 1) for name in BY_ONE)]
)
def test_a_checkpoint_is_gone_on_from_in_any_layout_and_by_fewer_ranks(name: str, world: int, results: Path) -> None:
    """To the bit in the same layout."""
    source = "fsdp" if RESUMED[name] == "plain" else RESUMED[name]
    straight = json.loads((results / f"{source}-0.json").read_text())["steps"]
    resumed = json.loads((results / f"resumed {name} by {world}.json").read_text())
    if (name, world) == (RESUMED[name], WORLD):
        assert resumed == straight[SAVED:]
    bound = 1e-3 if world == 1 and CASES[source].inner["optimizer"] == "muon" else 2e-5
    for (loss, norm), (wanted, wanted_norm) in zip(resumed, straight[SAVED:], strict=True):
        assert loss == pytest.approx(wanted, rel=bound)
        assert norm == pytest.approx(wanted_norm, rel=10 * bound)


@pytest.mark.parametrize(
    ("options", "world", "sizes"),
    [
        ({}, 4, (4, 1, 1)),
        ({"parallel": "tp+fsdp", "tensor_ranks": 2}, 8, (1, 4, 2)),
        ({"parallel": "tp+fsdp", "tensor_ranks": 2, "shard_ranks": 2}, 8, (2, 2, 2)),
    ],
)
def test_sizes_come_from_the_number_of_ranks(options: dict[str, object], world: int, sizes: tuple[int, ...]) -> None:
    assert ParallelOptions(**options).sizes(world) == sizes  # type: ignore[arg-type]


def test_a_parameter_of_complex_numbers_or_without_values_is_refused() -> None:
    with pytest.raises(HoldingError, match=r"parameter a is of shape \(0, 3\): it has no values to exchange"):
        Holding({"a": torch.ones(0, 3)}, SiteGroup(device="cpu"))
    with pytest.raises(HoldingError, match=r"parameter a is torch\.complex64: its values must be real numbers"):
        Holding({"a": torch.ones(2, dtype=torch.complex64)}, SiteGroup(device="cpu"))
