"""What rank 0 does with the model's values all ranks do, each with its part, and one order is done before the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from diloco.inner.holding import Holding
from diloco.inner.parallel import SiteGroup
from diloco.learner.exchange import Follower
from diloco.learner.ranks import ADOPT, GO_ON, RETAKE, SEAL, STOP, Orders
from diloco.learner.tensors import SiteTensors
from diloco.outer.fragments import Layout, gather, named_parameters_once, plan_layout
from tests.layouts import LAYOUTS, SHAPES, Odd, dice, heard, part_of, ranks, same, whole
from tests.learner.held import held

LAYOUT = plan_layout(list(SHAPES.items()), 3)


class Said:
    """The process group of rank 0 of two, as far as it is told things."""

    world = 2

    def __init__(self) -> None:
        self.words: list[list[int]] = []

    def broadcast_small(self, words: Sequence[int]) -> None:
        self.words.append(list(words))


def test_an_order_names_the_agent_and_only_the_site_says_when_to_go_on() -> None:
    group: Any = Said()
    orders = Orders(group)
    with orders.all_do(SEAL, 2):
        assert group.words == [[SEAL, 0, 2, 0]], "it is said before a value is read"
    second = orders.of(1)
    with second.all_do(ADOPT, 0, 3):
        second.go_on()
    orders.go_on()
    orders.go_on(stop=True)
    assert group.words[1:] == [[ADOPT, 1, 0, 3], [GO_ON], [STOP]]


def test_of_what_several_threads_order_one_is_done_before_the_next_is_said() -> None:
    group: Any = Said()
    orders = Orders(group)
    parts, entered, leave = (orders.of(0), orders.of(1)), threading.Event(), threading.Event()

    def first() -> None:
        with parts[0].all_do(SEAL, 0):
            entered.set()
            assert leave.wait(10)
            group.words.append(["done"])

    def second() -> None:
        with parts[1].all_do(RETAKE, 1):
            pass

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert entered.wait(10)
    threads[1].start()
    leave.set()
    for thread in threads:
        thread.join(10)
    assert group.words == [[SEAL, 0, 0, 0], ["done"], [RETAKE, 1, 1, 0]]


def test_one_process_has_nobody_to_tell() -> None:
    orders = Orders(SiteGroup(device="cpu"))
    with orders.all_do(SEAL, 0):
        orders.go_on()


# --- four ranks, each rule, each layout -------------------------------------------------------------------------------


@torch.no_grad()
def trained(parameters: dict[str, Tensor], step: int) -> None:
    """The same step whoever holds what."""
    for name, values in dice("step", step).items():
        mine = parameters[name]
        (mine.to_local() if isinstance(mine, DTensor) else mine).add_(part_of(mine, values), alpha=0.01)


def rounds(found: SiteTensors, orders: Orders, layout: Layout, train: Callable[[int], None]) -> list[Tensor]:
    """Rank 0's boundaries: what it measured, in order."""
    measured: list[Tensor] = []
    for fragment in layout.fragments:
        found.arrived(fragment.index, 0, gather(fragment, dice("v0")), "")
        with orders.all_do(RETAKE, fragment.index):
            found.retake(fragment.index, 0, [])
    orders.go_on()
    for version in (1, 2, 3):
        train(version)
        for fragment in layout.fragments:
            with orders.all_do(SEAL, fragment.index):
                inputs = found.measure(fragment.index, [])
            measured.append(inputs.pseudo_gradient())
            found.sent[fragment.index, version] = measured[-1]
        orders.go_on()
        train(10 + version)
        for fragment in layout.fragments:
            found.arrived(fragment.index, version, gather(fragment, dice("v", version)), "")
            with orders.all_do(ADOPT, fragment.index):
                found.adopt(fragment.index, version, [version])
        orders.go_on()
    orders.go_on(stop=True)
    return measured


def lead(name: str, rule: str, group: SiteGroup) -> tuple[list[Tensor], dict[str, Tensor]]:
    parameters = named_parameters_once(LAYOUTS[name](Odd(), group.world))
    holding = Holding(parameters, group)
    measured: list[Tensor] = []
    if group.is_first:
        found = SiteTensors(LAYOUT, holding, rule, 0.25)
        measured = rounds(found, Orders(group), LAYOUT, lambda step: trained(parameters, step))
    else:
        boundaries = iter([1, 11, 2, 12, 3, 13])
        follower = Follower([LAYOUT], holding, rule)
        while not follower.start():
            step = next(boundaries, None)
            if step is not None:
                trained(parameters, step)
    return measured, whole(parameters)


PAIRS = [(name, "rebase") for name in ("ddp", "fsdp", "hsdp", "tp", "tp_fsdp")]
PAIRS += [("ddp", "overwrite"), ("tp_fsdp", "overwrite"), ("ddp", "blend"), ("fsdp", "blend")]
"""Each layout and each rule; what a rule does to a part it does to every part, whole or cut."""


def program(group: SiteGroup, tell: Callable[[Any], None]) -> None:
    for name, rule in PAIRS:
        measured, values = lead(name, rule, group)
        tell((name, rule, [value.numpy() for value in measured], {key: v.numpy() for key, v in values.items()}))


@pytest.fixture(scope="module")
def said() -> Iterator[dict[tuple[str, str], list[Any]]]:
    """What four ranks measured and held at the end, by layout and rule."""
    with ranks(program, 4) as ends:
        found: dict[tuple[str, str], list[Any]] = {}
        for end in ends:
            for _ in PAIRS:
                name, rule, *told = heard(end)
                found.setdefault((name, rule), []).append(told)
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule"), PAIRS)
def test_the_layout_changes_no_bit(said: dict[tuple[str, str], list[Any]], name: str, rule: str) -> None:
    parameters = {each: torch.zeros(shape) for each, shape in SHAPES.items()}
    found = SiteTensors(LAYOUT, held(parameters), rule, 0.25)
    alone = rounds(found, Orders(SiteGroup(device="cpu")), LAYOUT, lambda step: trained(parameters, step))
    told = said[name, rule]
    assert len(told[0][0]) == len(alone) == 9
    assert all(same(torch.from_numpy(here), there) for here, there in zip(told[0][0], alone, strict=True))
    for _, values in told:
        assert all(same(torch.from_numpy(values[each]), value) for each, value in parameters.items()), "on every rank"
