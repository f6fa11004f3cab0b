"""An operator's words, said with the verbs to a real syncer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from diloco.cli.main import main
from diloco.config.errors import ExitCode
from tests.syncer.building import dice, eventually, join, push, serving, update

if TYPE_CHECKING:
    from pathlib import Path

    from diloco.syncer.server import Syncer


@pytest.mark.parametrize("verb", ["admit", "refuse", "evict", "readmit", "drain"])
def test_help_names_the_words_that_follow(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    assert f"diloco {verb} runs/nimble-otter" in capsys.readouterr().out


def hold_one(syncer: Syncer) -> None:
    """Fragment 0 of site a has sequence 5 held."""
    join(syncer)
    for sequence in range(1, 6):
        base = sequence - 1
        values = dice(sequence, 0) * (1e6 if sequence == 5 else 1)
        push(syncer, *update(sequence=sequence, values=values, base_version=base))
        if sequence < 5:
            eventually(lambda: version(syncer) == sequence, "merged")  # noqa: B023


def version(syncer: Syncer) -> int:
    return syncer.core.ask(lambda machine: machine.state.fragments[0].version)


def fate(syncer: Syncer) -> str | None:
    fates = syncer.core.ask(lambda machine: machine.state.sites["a"].lines[0].fates)
    return next((str(each.reason or "merged") for each in fates if each.sequence == 5), None)


@pytest.mark.parametrize(("verb", "end"), [("admit", "merged"), ("refuse", "withdrawn")])
def test_a_held_update_gets_the_fate_that_was_said(
    tmp_path: Path, verb: str, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path, health={"policy": "hold"}) as syncer:
        hold_one(syncer)
        where = address(syncer)
        assert main([verb, where, "a", "0", "5"]) == ExitCode.OK
        eventually(lambda: fate(syncer) == end, "decided")
        assert main([verb, where, "a", "0", "5", "--json"]) == ExitCode.OK
        told = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (told["verb"], told["site"], told["fragment"], told["sequence"]) == (verb, "a", "0", "5")
        other = "refuse" if verb == "admit" else "admit"
        assert main([other, where, "a", "0", "5"]) == ExitCode.FAILED
        words = "is in version 5 already" if verb == "admit" else "was refused: withdrawn"
        assert words in capsys.readouterr().err


def test_what_is_said_to_a_run_is_said_to_all_its_syncers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path / "one") as one, serving(tmp_path / "other") as other:
        join(one)
        join(other)
        where = f"{address(one)}/{address(other)}"
        assert main(["evict", where, "a"]) == ExitCode.OK
        told = capsys.readouterr().out.splitlines()
        assert [line.split(": ")[0] for line in told] == [address(one), address(other)]
        assert main(["admit", where, "a", "0", "5"]) == ExitCode.USAGE
        assert "each counts its own fragments from 0" in capsys.readouterr().err
    with serving(tmp_path / "third") as third:
        join(third)
        assert main(["evict", f"{address(one)}/{address(third)}", "a"]) == ExitCode.UNREACHABLE
        assert capsys.readouterr().out.startswith(address(third)), "one that is away keeps no other from hearing it"


def address(syncer: Syncer) -> str:
    assert syncer._server is not None
    return syncer._server.address


def test_a_site_is_put_out_and_let_in_again_and_a_run_is_drained(
    tmp_path: Path, refused: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path) as syncer:
        join(syncer)
        where = address(syncer)
        for verb, status in (("evict", "evicted"), ("evict", "evicted"), ("readmit", "left"), ("readmit", "left")):
            assert main([verb, where, "a"]) == ExitCode.OK
            assert syncer.api.status()["sites"]["a"]["status"] == status  # type: ignore[index]
        assert "a may join" in capsys.readouterr().out
        join(syncer, process="feedbeef01")
        for said, verb, *words in (
            ("site_id is 'nobody': the run has no such site", "admit", "nobody", "0", "5"),
            ("fragment is 9: the run has no such fragment", "refuse", "a", "9", "5"),
            ("sequence is 77: a has sent no such update of fragment 0", "admit", "a", "0", "77"),
            ("site_id is 'nobody': the run has no such site", "evict", "nobody"),
            ("site_id is 'nobody': the run has no such site", "readmit", "nobody"),
        ):
            refused(ExitCode.FAILED, said, verb, where, *words)
    with serving(tmp_path / "drained") as syncer:
        assert main(["drain", address(syncer)]) == ExitCode.OK
        assert syncer.wait(10.0) is not None
        assert "can be taken up again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        ("HOST:PORT or run folder, SITE, FRAGMENT, SEQUENCE", ExitCode.USAGE, ["admit", "127.0.0.1:1", "a", "0"]),
        ("FRAGMENT is 'zero': a number", ExitCode.USAGE, ["refuse", "127.0.0.1:1", "a", "zero", "1"]),
        ("site_id", ExitCode.USAGE, ["evict", "127.0.0.1:1", "../x"]),
        ("HOST:PORT or run folder", ExitCode.USAGE, ["drain"]),
        ("does not answer", ExitCode.UNREACHABLE, ["drain", "127.0.0.1:1"]),
    ],
)
def test_a_mistake_is_one_line(said: str, code: ExitCode, words: list[str], refused: Callable[..., None]) -> None:
    refused(code, said, *words)
