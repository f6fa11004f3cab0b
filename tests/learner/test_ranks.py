"""What is said within a site arrives in order, a loss is told, and nobody without the key is let in."""

from __future__ import annotations

import multiprocessing
import queue
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.inner import GroupError
from diloco.inner.holding import Holding
from diloco.inner.trainer import StepInfo
from diloco.learner import ranks as channel
from diloco.learner import ranks as meeting
from diloco.learner.exchange import Follower
from diloco.learner.ranks import ADOPT, GO_ON, NEAR, RETAKE, SEAL, STOP, Channel, Door, knock, meet
from diloco.outer.fragments import gather, part_of
from tests.syncer.building import LAYOUT, dice

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


# --- The other ranks of a site hold what rank 0 has adopted, and stop when it stops ----------------------------------

INFO = StepInfo(1, 1.0, 10, 0, 1000, 1, 1.0, 0.1, applied=True)


class Told:
    """The process group of two replicas as rank 1 sees it: what rank 0 has said, in order."""

    rank, world, device = 1, 2, torch.device("cpu")

    def __init__(self, *said: Any) -> None:
        self.said = list(said)

    def all_gather_bytes(self, mine: bytes) -> list[bytes]:
        return [mine, mine]

    def broadcast_small(self, values: Sequence[int], src: int = 0) -> list[int]:
        return list(self.said.pop(0))

    def broadcast_(self, tensor: Tensor, src: int = 0) -> None:
        tensor.copy_(self.said.pop(0))


def held_by(group: Told) -> tuple[dict[str, Tensor], Holding]:
    parameters = {name: torch.zeros(shape) for name, shape in LAYOUT.parameters}
    return parameters, Holding(parameters, group)  # type: ignore[arg-type]


def test_it_takes_what_it_is_told_and_nothing_else() -> None:
    first, second, third = dice("v0", 0), dice("v0", 1), dice("v1", 0)
    group = Told([RETAKE, 0, 0, 0], first, [RETAKE, 0, 1, 0], second, [GO_ON], [GO_ON], [ADOPT, 0, 0, 0], third, [STOP])
    parameters, holding = held_by(group)
    follower = Follower([LAYOUT], holding, "rebase")
    follower.start()
    assert torch.equal(gather(LAYOUT.fragments[0], parameters), first)
    assert torch.equal(gather(LAYOUT.fragments[1], parameters), second)
    assert not follower.after_step(INFO).stop
    verdict = follower.after_step(INFO)
    assert verdict.stop
    assert torch.equal(gather(LAYOUT.fragments[0], parameters), third)
    assert group.said == []


def test_it_knows_when_rank_0_could_not_begin() -> None:
    for said, stops in ((STOP, True), (GO_ON, False)):
        group = Told([said])
        assert Follower([LAYOUT], held_by(group)[1], "rebase").start() is stops


def test_each_of_several_agents_orders_of_its_own_fragments() -> None:
    first, second = dice("v0", 0), dice("v0", 1)
    group = Told([RETAKE, 0, 0, 0], first, [RETAKE, 1, 0, 0], second, [GO_ON], [STOP])
    parameters, holding = held_by(group)
    follower = Follower([part_of(LAYOUT, [0]), part_of(LAYOUT, [1])], holding, "rebase")
    follower.start()
    assert torch.equal(gather(LAYOUT.fragments[0], parameters), first)
    assert torch.equal(gather(LAYOUT.fragments[1], parameters), second)
    assert follower.after_step(INFO).stop
    assert group.said == []


class Owned:
    """What a rank owns of one agent's fragments."""

    def __init__(self, name: str) -> None:
        self.name, self.done, self.closed = name, 0, False

    def do(self) -> None:
        self.done += 1

    def state(self) -> dict[str, Tensor]:
        return {self.name: torch.ones(1)}

    def close(self) -> None:
        self.closed = True


def test_what_it_owns_is_its_own_to_do_and_to_keep() -> None:
    group = Told([SEAL, 1, 0, 1], [RETAKE, 0, 0, 1], [GO_ON], [STOP])
    _, holding = held_by(group)
    owned: Any = [Owned("base.0"), Owned("base.1")]
    layouts = [part_of(LAYOUT, [0]), part_of(LAYOUT, [1])]
    follower = Follower(layouts, holding, "rebase", owned)
    follower.start()
    assert [each.done for each in owned] == [1, 1]
    assert sorted(follower.state()[0]) == ["0.base.0", "1.base.1"], "by agent, as rank 0 names its own"
    assert sorted(Follower([LAYOUT], holding, "rebase", owned[:1]).state()[0]) == ["base.0"]
    follower.finish()
    assert all(each.closed for each in owned)


def test_of_an_agent_of_which_it_owns_nothing_it_does_and_keeps_nothing() -> None:
    group = Told([SEAL, 1, 0, 1], [GO_ON], [STOP])
    _, holding = held_by(group)
    mine: Any = Owned("base.0")
    follower = Follower([part_of(LAYOUT, [0]), part_of(LAYOUT, [1])], holding, "rebase", [None, mine])
    follower.start()
    assert mine.done == 1
    assert list(follower.state()[0]) == ["1.base.0"]
    follower.finish()
    assert mine.closed


def test_it_stays_until_rank_0_has_sent_everything() -> None:
    last = dice("v1", 1)
    group = Told([GO_ON], [ADOPT, 0, 1, 0], last, [GO_ON], [STOP])
    parameters, holding = held_by(group)
    follower = Follower([LAYOUT], holding, "overwrite")
    follower.start()
    follower.finish()
    assert torch.equal(gather(LAYOUT.fragments[1], parameters), last)
    assert group.said == []


# --- Who knows the key comes in; who does not, or says nothing, keeps nobody waiting ---------------------------------

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
    with Door(KEY, NEAR) as door, knock(NEAR, door.port, KEY, BOUND_S) as there:
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


def test_a_door_at_all_addresses_is_found_at_this_one() -> None:
    with Door(KEY) as door, knock("localhost", door.port, KEY, BOUND_S), door.come.get(timeout=BOUND_S):
        pass


def test_the_oldest_of_those_who_say_nothing_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "KNOCKING_MAX", 2)
    with Door(KEY, NEAR) as door:
        silent = [socket.create_connection((NEAR, door.port), timeout=BOUND_S) for _ in range(3)]
        with knock(NEAR, door.port, KEY, BOUND_S), door.come.get(timeout=BOUND_S):
            assert ends(silent[0])
            assert ends(silent[1])
    assert ends(silent[2]), "at the end nobody is left before the door"
    for each in silent:
        each.close()


def test_who_came_in_and_was_not_heard_is_told_that_the_door_is_closed() -> None:
    with Door(KEY, NEAR) as door:
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
