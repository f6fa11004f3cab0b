"""What is said within a site arrives in order, a loss is told, and nobody without the key is let in."""

from __future__ import annotations

import multiprocessing
import queue
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from diloco.inner.checks import GroupError
from diloco.learner import ranks as channel
from diloco.learner.ranks import Channel, meet

BOUND_S = 20.0


def pair() -> tuple[Channel, Connection]:
    here, there = multiprocessing.Pipe()
    return Channel(here), there


def test_words_are_heard_in_order_and_the_end_of_the_other_one_is_told() -> None:
    mine, theirs = pair()
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    mine.hear(heard.put, heard.put)
    for number in range(100):
        theirs.send(("word", number))
    assert [heard.get(timeout=BOUND_S) for _ in range(100)] == [("word", number) for number in range(100)]
    mine.send("back", 7)
    assert theirs.recv() == ("back", 7)
    theirs.close()
    assert "has ended" in heard.get(timeout=BOUND_S)
    mine.send("to", "nobody")
    mine.close()


def test_what_cannot_be_done_is_told_as_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    mine, theirs = pair()
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()

    def fail(words: object) -> None:
        raise AssertionError(f"no {words}")

    mine.hear(fail, lost.put)
    theirs.send(("order",))
    assert "could not be done" in lost.get(timeout=BOUND_S)
    assert theirs.poll(BOUND_S), "who spoke to it is told as well: nothing is heard there any more"
    with pytest.raises(EOFError):
        theirs.recv()
    mine.close()


def test_who_closes_is_not_told_of_a_loss_and_what_was_sent_arrives() -> None:
    mine, theirs = pair()
    lost: list[str] = []
    mine.hear(lambda words: None, lost.append)
    mine.send("last")
    mine.close()
    mine.close()
    assert theirs.recv() == ("last",)
    with pytest.raises(EOFError):
        theirs.recv()
    assert lost == []


class Rank:
    """One of several threads as a rank: the collective that ``meet`` needs."""

    def __init__(self, rank: int, world: int, shared: dict[int, bytes], barrier: threading.Barrier) -> None:
        self.rank, self.world, self.timeout_s, self.master_addr = rank, world, BOUND_S, "127.0.0.1"
        self._shared, self._barrier = shared, barrier

    def all_gather_bytes(self, mine: bytes) -> list[bytes]:
        self._shared[self.rank] = mine
        self._barrier.wait(BOUND_S)
        found = [self._shared[rank] for rank in range(self.world)]
        self._barrier.wait(BOUND_S)
        return found


def ranks(world: int, do: Callable[[Rank], None]) -> None:
    shared: dict[int, bytes] = {}
    barrier = threading.Barrier(world)
    threads = [threading.Thread(target=do, args=(Rank(rank, world, shared, barrier),)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * BOUND_S)
        assert not thread.is_alive()


def test_every_rank_meets_rank_0() -> None:
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def do(group: Rank) -> None:
        found = meet(group)  # type: ignore[arg-type]
        if group.rank:
            assert list(found) == [0]
            found[0].send("from", group.rank)
            said: queue.SimpleQueue[Any] = queue.SimpleQueue()
            found[0].hear(said.put, said.put)
            assert said.get(timeout=BOUND_S) == ("to", group.rank)
        else:
            assert sorted(found) == [1, 2, 3]
            for rank, each in found.items():
                each.hear(lambda words, rank=rank: heard.put((rank, words)), lambda why: None)  # type: ignore[misc]
                each.send("to", rank)
            assert sorted(heard.get(timeout=BOUND_S) for _ in range(3)) == [
                (rank, ("from", rank)) for rank in (1, 2, 3)
            ]
        group.all_gather_bytes(b"")
        for each in found.values():
            each.close()

    ranks(4, do)
    assert heard.empty()


def test_who_says_nothing_does_not_keep_the_ranks_from_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    silent: list[socket.socket] = []
    real = channel.knock

    def later(host: str, port: int, key: bytes, bound_s: float) -> Connection:
        silent.extend(socket.create_connection((host, port), timeout=BOUND_S) for _ in range(3))
        return real(host, port, key, bound_s)

    monkeypatch.setattr(channel, "knock", later)
    met: list[int] = []

    def do(group: Rank) -> None:
        for each in meet(group).values():  # type: ignore[arg-type]
            met.append(group.rank)
            each.close()

    ranks(2, do)
    assert sorted(met) == [0, 1]
    for each in silent:
        with each:
            while each.recv(1024):
                pass  # What they were asked; and then that nobody waits for an answer any more.


def test_ranks_of_several_machines_go_where_their_rendezvous_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_loopback", lambda: str(threading.get_ident()).encode())
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")  # As Debian has it for its own name.
    real, went = channel.knock, list[str]()

    def noted(host: str, port: int, key: bytes, bound_s: float) -> Connection:
        went.append(host)
        return real(host, port, key, bound_s)

    monkeypatch.setattr(channel, "knock", noted)

    def do(group: Rank) -> None:
        group.master_addr = "localhost"
        for each in meet(group).values():  # type: ignore[arg-type]
            each.close()

    ranks(3, do)
    assert went == ["localhost"] * 2, "rank 0 is at the rendezvous, and by its own name nobody else would find it"


def test_a_rank_0_elsewhere_says_its_address_on_the_way_to_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    class Way:
        def __init__(self, *kind: int) -> None:
            self.towards: list[object] = []

        def __enter__(self) -> Way:
            return self

        def __exit__(self, *told: object) -> None:
            pass

        def connect(self, towards: object) -> None:
            self.towards.append(towards)

        def getsockname(self) -> tuple[str, int]:
            assert self.towards == [("10.0.0.1", 1)]
            return "10.0.0.7", 5

    assert channel._own_address("127.0.0.1") == ""
    monkeypatch.setattr(socket, "socket", Way)
    assert channel._own_address("10.0.0.1") == "10.0.0.7"


def test_a_rank_that_does_not_come_is_said_and_a_stranger_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    real = channel.knock

    def stranger(host: str, port: int, key: bytes, bound_s: float) -> Connection:
        return real(host, port, b"another" + key, bound_s)

    monkeypatch.setattr(channel, "knock", stranger)

    def do(group: Rank) -> None:
        group.timeout_s = 1.0
        try:
            meet(group)  # type: ignore[arg-type]
        except GroupError as error:
            told.append(str(error))

    ranks(2, do)
    assert sorted(each.partition(":")[0] for each in told) == [
        "only 0 of 1 ranks of this site came to rank 0",
        "rank 1 of this site could not meet rank 0",
    ]


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_goes_while_they_meet_is_said_in_words(gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    real = channel.knock

    def goes(host: str, port: int, key: bytes, bound_s: float) -> Connection:
        if gone == 0:
            raise ConnectionRefusedError("nobody listens there any more")
        real(host, port, key, bound_s).close()
        raise EOFError

    monkeypatch.setattr(channel, "knock", goes)

    def do(group: Rank) -> None:
        group.timeout_s = 1.0
        with pytest.raises(GroupError) as error:
            meet(group)  # type: ignore[arg-type]
        told.append(str(error.value))

    ranks(2, do)
    assert len(told) == 2, "each of them ends in words"
