"""Who knows the key comes in; who does not, or says nothing, keeps nobody waiting."""

from __future__ import annotations

import socket
import struct
import threading
from multiprocessing import AuthenticationError

import pytest

from diloco.learner import ranks as meeting
from diloco.learner.ranks import NEAR, Door, knock

BOUND_S = 20.0
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
