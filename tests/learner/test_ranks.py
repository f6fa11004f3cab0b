"""What is said within a site arrives in order, a loss is told, and only a process with the key is let in."""

from __future__ import annotations

import multiprocessing
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diloco.inner import GroupError
from diloco.learner import ranks as ranks_module
from diloco.learner.ranks import (
    ADOPT,
    GO_ON,
    NEAR,
    RETAKE,
    SEAL,
    STOP,
    WAIT,
    Channel,
    Dealt,
    Door,
    Orders,
    all_mine,
    deal,
    knock,
    meet,
    owners_of,
)
from diloco.outer.fragments import plan_layout
from tests.learner.participant import held

BOUND_S = 20.0


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Connection]]:
    here, there = multiprocessing.Pipe()
    mine = Channel(here)
    yield mine, there
    mine.close()


def test_words_are_heard_in_order_and_the_end_of_the_other_one_is_told(pair: tuple[Channel, Connection]) -> None:
    mine, theirs = pair
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    mine.hear(heard.put, heard.put)
    for number in range(100):
        theirs.send(("word", number))
    assert [heard.get(timeout=BOUND_S) for _ in range(100)] == [("word", number) for number in range(100)]
    mine.send("back", 7)
    assert theirs.recv() == ("back", 7)
    theirs.close()
    assert "has ended" in heard.get(timeout=BOUND_S)
    mine.send("to", "no end")


def test_who_closes_is_not_told_of_a_loss_and_what_was_sent_arrives(pair: tuple[Channel, Connection]) -> None:
    mine, theirs = pair
    lost: list[str] = []
    mine.hear(lambda words: None, lost.append)
    mine.send("last")
    mine.close()
    assert theirs.recv() == ("last",)
    with pytest.raises(EOFError):
        theirs.recv()
    assert lost == []


def test_what_cannot_be_done_is_told_as_a_loss(
    pair: tuple[Channel, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    mine, theirs = pair
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    mine.hear(lambda words: 1 / 0, lost.put)
    theirs.send(("order",))
    assert "could not be handled" in lost.get(timeout=BOUND_S)
    assert theirs.poll(BOUND_S), "who spoke to it is told as well: nothing is heard there any more"
    with pytest.raises(EOFError):
        theirs.recv()


class Rank:
    """One of several threads as a rank: the collective that ``meet`` needs."""

    def __init__(self, rank: int, world: int, shared: dict[int, Any], barrier: threading.Barrier) -> None:
        self.rank, self.world, self.timeout_s, self.master_addr = rank, world, BOUND_S, "127.0.0.1"
        self._shared, self._barrier = shared, barrier

    def all_gather_json(self, mine: Any) -> list[Any]:
        self._shared[self.rank] = mine
        self._barrier.wait(BOUND_S)
        found = [self._shared[rank] for rank in range(self.world)]
        self._barrier.wait(BOUND_S)
        return found


def side_by_side(world: int, do: Callable[[Rank], None]) -> None:
    shared: dict[int, Any] = {}
    barrier = threading.Barrier(world)
    threads = [threading.Thread(target=do, args=(Rank(rank, world, shared, barrier),)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * BOUND_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("apart", [False, True])
def test_every_rank_meets_rank_0_where_the_rendezvous_is_if_they_are_on_several_machines(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is at the rendezvous, and by its own name no other would find it."""
    if apart:
        monkeypatch.setattr(ranks_module, "_loopback", threading.get_ident)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")  # As Debian has it for its own name.
    real, went, met = ranks_module.knock, list[str](), list[tuple[int, list[int]]]()

    def noted(host: str, port: int, key: bytes, bound_s: float) -> Connection:
        went.append(host)
        return real(host, port, key, bound_s)

    monkeypatch.setattr(ranks_module, "knock", noted)

    def do(group: Rank) -> None:
        group.master_addr = "localhost"
        found, heard = meet(group), queue.SimpleQueue[Any]()
        for other, channel in found.items():
            channel.hear(heard.put, lambda why: None)
            channel.send(group.rank, other)
        words = sorted(heard.get(timeout=BOUND_S) for _ in found)
        assert words == sorted((other, group.rank) for other in found)
        met.append((group.rank, sorted(found)))
        group.all_gather_json("")
        for each in found.values():
            each.close()

    side_by_side(4, do)
    assert sorted(met) == [(0, [1, 2, 3]), (1, [0]), (2, [0]), (3, [0])]
    assert went == ["localhost" if apart else NEAR] * 3


def test_a_rank_0_elsewhere_says_its_address_on_the_way_to_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    towards: list[object] = []
    way = SimpleNamespace(connect=towards.append, getsockname=lambda: ("10.0.0.7", 5))
    assert ranks_module._own_address("127.0.0.1") == ""
    monkeypatch.setattr(socket, "socket", lambda *kind: nullcontext(way))
    assert ranks_module._own_address("10.0.0.1") == "10.0.0.7"
    assert towards == [("10.0.0.1", 1)]


def stranger(host: str, port: int, key: bytes, bound_s: float) -> Connection:
    return knock(host, port, b"another" + key, bound_s)


def goes_away(host: str, port: int, key: bytes, bound_s: float) -> Connection:
    knock(host, port, key, bound_s).close()
    raise EOFError


@pytest.mark.parametrize(
    ("knocks", "words"),
    [
        (stranger, "only 0 of 1 ranks of this site connected to rank 0"),
        (goes_away, "rank 0 of this site could not connect to the others"),
    ],
)
def test_a_rank_that_does_not_come_is_said_and_a_stranger_is_none(
    knocks: Callable[..., Connection], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(ranks_module, "knock", knocks)

    def do(group: Rank) -> None:
        group.timeout_s = 1.0
        with pytest.raises(GroupError) as error:
            meet(group)
        told.append(str(error.value).partition(":")[0])

    side_by_side(2, do)
    assert sorted(told) == [words, "rank 1 of this site could not connect to the others"]


# --- Who knows the key comes in; who does not, or says nothing, keeps none waiting ------------------------------------

KEY = b"k" * 32


def ends(stranger: socket.socket) -> bool:
    stranger.settimeout(BOUND_S)
    try:
        while stranger.recv(1024):
            pass
    except ConnectionError:
        pass
    return True


def test_who_knows_the_key_comes_in_and_both_hear_each_other() -> None:
    with closing(Door(KEY, NEAR)) as door, knock(NEAR, door.port, KEY, BOUND_S) as there:
        with door.come.get(timeout=BOUND_S) as here:
            there.send(("word", 1))
            assert here.recv() == ("word", 1)
            here.send("back")
            assert there.recv() == "back"
        with pytest.raises(AuthenticationError):
            knock(NEAR, door.port, b"another", BOUND_S)
        assert door.come.empty()
    with pytest.raises(ConnectionError):
        knock(NEAR, door.port, KEY, BOUND_S)
    with closing(Door(KEY)) as door, knock("localhost", door.port, KEY, BOUND_S), door.come.get(timeout=BOUND_S):
        pass  # A door at all addresses is found at this one.


def test_the_oldest_of_those_who_say_nothing_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "KNOCKING_MAX", 2)
    with closing(Door(KEY, NEAR)) as door:
        silent = [socket.create_connection((NEAR, door.port), timeout=BOUND_S) for _ in range(3)]
        with knock(NEAR, door.port, KEY, BOUND_S), door.come.get(timeout=BOUND_S):
            assert ends(silent[0])
            assert ends(silent[1])
    assert ends(silent[2]), "at the end none is left before the door"
    for each in silent:
        each.close()


def test_who_came_in_and_was_not_heard_is_told_that_the_door_is_closed() -> None:
    with closing(Door(KEY, NEAR)) as door:
        there = knock(NEAR, door.port, KEY, BOUND_S)
        while door.come.empty():
            threading.Event().wait(0.01)
    assert there.poll(BOUND_S)
    with pytest.raises(EOFError):
        there.recv()
    there.close()


@pytest.mark.parametrize(
    ("says", "kind"), [(b"", ConnectionError), (struct.pack("!i", 5) + b"hello", AuthenticationError)]
)
def test_what_is_no_door_of_ours_is_not_waited_for(says: bytes, kind: type[Exception]) -> None:
    with socket.create_server((NEAR, 0)) as other:
        came: list[socket.socket] = []

        def answer() -> None:
            came.append(other.accept()[0])
            came[0].sendall(says)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(kind):
            knock(NEAR, other.getsockname()[1], KEY, 1.0 if not says else BOUND_S)
        thread.join(BOUND_S)
        came[0].close()


# --- Fragments are dealt evenly where ranks hold parts, and not at all where each has everything ----------------------

FIVE = plan_layout([("a", (90,)), ("b", (50,)), ("c", (40,)), ("d", (30,)), ("e", (9,))], 5)


def cut(world: int, copied: bool = False) -> Any:
    """A model that is held in parts by ``world`` ranks."""
    return SimpleNamespace(group=SimpleNamespace(world=world), is_copied=lambda pieces: copied)


def test_fragments_are_dealt_the_largest_first_and_not_at_all_where_each_rank_has_everything() -> None:
    found = owners_of(FIVE, cut(2))
    loads = [sum(FIVE.fragments[each].numel for each in Dealt(found, {}).of(rank)) for rank in (0, 1)]
    assert sorted(loads) == [99, 120]
    assert len(set(owners_of(FIVE, cut(4)))) == 4
    assert set(owners_of(FIVE, cut(9))) == set(range(5)), "some own nothing"
    assert owners_of(FIVE, cut(4, copied=True)) == (0,) * 5
    parameters = {name: torch.zeros(shape) for name, shape in FIVE.parameters}
    assert deal(FIVE, held(parameters)) == all_mine(FIVE) == Dealt((0,) * 5, {}), "no rank is met"


# --- What rank 0 does with the model's values all ranks do, each with its part, and one order is done before the next -


class Said:
    """The process group of rank 0 of two, as far as it is told things."""

    world = 2

    def __init__(self) -> None:
        self.words: list[list[Any]] = []

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
    second.wait()
    orders.go_on(stop=True)
    assert group.words[1:] == [[ADOPT, 1, 0, 3], [GO_ON], [WAIT, 1, 0, 0], [STOP]]


def test_of_what_several_threads_order_one_is_done_before_the_next_is_said() -> None:
    group: Any = Said()
    orders = Orders(group)

    def other() -> None:
        with orders.of(1).all_do(RETAKE, 1):
            pass

    pool = ThreadPoolExecutor(1)
    with orders.of(0).all_do(SEAL, 0):
        second = pool.submit(other)
        time.sleep(0.05)
        group.words.append(["done"])
    pool.shutdown(wait=False)
    second.result(BOUND_S)
    assert group.words == [[SEAL, 0, 0, 0], ["done"], [RETAKE, 1, 1, 0]]
