from __future__ import annotations

from diloco.launch.config import is_name
from diloco.launch.names import HOW, WHO, new_name


def test_a_name_is_two_words_fit_for_a_folder() -> None:
    name = new_name(lambda name: False)
    how, _, who = name.partition("-")
    assert how in HOW.split()
    assert who in WHO.split()
    assert is_name(name)


def test_a_taken_name_is_not_given_again() -> None:
    taken: set[str] = set()
    for _ in range(200):
        name = new_name(taken.__contains__)
        assert name not in taken
        taken.add(name)


def test_there_is_always_a_name() -> None:
    assert is_name(new_name(lambda name: True))


def test_what_a_name_may_be() -> None:
    assert is_name("site-a")
    assert not any(is_name(name) for name in ("", "-a", "a/b", "a b", "é", "x" * 65, ".."))
