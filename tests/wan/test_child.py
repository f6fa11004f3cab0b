"""How a program of ours is spoken to, tried on the smallest one; ``test_process`` tries it on the relay."""

from __future__ import annotations

import json
import sys

import pytest

from diloco.wan.process import Child, ChildDiedError


class Echo(Child):
    """Answers each command with what it was, and dies of one called "die"."""

    module = "tests.wan.test_child"
    noun = "echo"

    def say(self, what: str, **arguments: object) -> object:
        return self._do(what, **arguments)


def main() -> None:
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "die":
            sys.exit("farewell")
        answer = {"number": command["number"]}
        answer |= {"refused": "no thanks"} if command["do"] == "refuse" else {"value": command["do"]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def test_a_command_is_answered_refused_or_the_last_thing_the_child_heard() -> None:
    with Echo() as echo:
        assert echo.say("hello") == "hello"
        with pytest.raises(ValueError, match="no thanks"):
            echo.say("refuse")
        assert echo.is_alive()
        with pytest.raises(ChildDiedError, match=rf"the echo {echo.pid} has ended \(exit code 1\); it said: farewell"):
            echo.say("die")
        assert not echo.is_alive()
    with pytest.raises(ChildDiedError, match="the echo was closed"):
        echo.say("hello")


if __name__ == "__main__":
    main()
