from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest

from diloco.config.compose import compose, write
from diloco.config.errors import ConfigError, ExitCode, RankLost, VerbError
from diloco.config.run_dir import SiteDir, held, run_dir_of
from diloco.inner import GroupError, checkpoint
from diloco.inner.checkpoint import CheckpointError
from diloco.inner.data import DataError
from diloco.learner.agent import Finished
from diloco.observe.eventlog import Event
from diloco.runs import site_rank
from diloco.runs.site_rank import (
    Place,
    among_machines,
    check_one_folder,
    check_resume,
    ending,
    in_words,
    join_group,
    open_log,
    place_from_environment,
)
from tests.observe.test_eventlog import full

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_a_rank_has_the_place_that_torchrun_and_among_several_machines_diloco_site_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(name, value)
    local = place_from_environment()
    assert local == Place(3, 1, 4, "10.0.0.1", 29500, start=2)
    told = {"first": 8, "world": 16, "master_addr": "node-a", "master_port": 4711, "start": 3}
    assert among_machines(local, json.dumps(told)) == Place(11, 1, 16, "node-a", 4711, start=3)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(VerbError, match="are invalid"):
        place_from_environment()


def test_resume_is_what_the_user_said(tmp_path: Path) -> None:
    never, must, auto = (compose([f"run.resume={word}"]) for word in ("never", "must", "auto"))
    check_resume(never, tmp_path)
    check_resume(auto, tmp_path)
    with pytest.raises(ConfigError, match="there is no checkpoint in"):
        check_resume(must, tmp_path)
    checkpoint.save(tmp_path, "step-1", {}, {})
    check_resume(must, tmp_path)
    check_resume(auto, tmp_path)
    with pytest.raises(ConfigError, match="take another run"):
        check_resume(never, tmp_path)


def test_a_sites_log_heals_with_the_disk_and_its_terminal_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both were silent for ever behind the first line for which there was no room."""
    config, file, said = compose(["run.log_every=1"]), tmp_path / "site.log", queue.SimpleQueue[Event]()
    with ExitStack() as stack:
        log = open_log(tmp_path / "events.jsonl", file, "site-a", config, stack)
        log.follow(said.put)

        def steps(*numbers: int) -> None:
            for step in numbers:
                log.emit("step", {"step": step})
                said.get(timeout=30)

        steps(1)
        with full(file, room=20):
            steps(2, 3)
        steps(4)
    lines = file.read_text().splitlines()
    assert [line[:25] for line in lines if " v: " in line] == [f"[site-a] step: {step:6d}  lo" for step in (1, 4)]
    assert "[site-a] lines missing here: 2 (File too large)" in lines
    assert capsys.readouterr().out.count("step:") == 4


def test_an_ending_has_a_code_and_says_where_the_tokens_are() -> None:
    ledger = {"processed": 1000, "merged": 900, "refused": 0, "lost": 100}
    for how, resumed_step, code, words in (
        ("finished", None, ExitCode.OK, "site-a finished: 1,000 tokens processed (900 merged, 100 lost)"),
        ("drained", None, ExitCode.DRAINED, "the same command resumes"),
        ("left", 40, ExitCode.DRAINED, "it had resumed from step 40"),
    ):
        got, text = ending("site-a", Finished(how, "why", ledger), resumed_step)
        assert got is code
        assert words in text
    with pytest.raises(VerbError, match="site-a stopped: five discards in a row") as ended:
        ending("site-a", Finished("failed", "five discards in a row", {}), None)
    assert ended.value.code is ExitCode.FAILED


def test_what_training_says_becomes_one_line() -> None:
    for error, kind in (
        (DataError("no text"), ConfigError),
        (CheckpointError("damaged"), VerbError),
        (TimeoutError("in vain"), VerbError),
        (GroupError("rank 1 of 2 failed"), RankLost),
    ):
        with pytest.raises(kind, match=str(error)), in_words():
            raise error


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The exit code of one rank of the site ``a`` at one start, which ends as it is told."""
    config = compose([f"run.dir={tmp_path}", "run.name=again", "site.id=a", "site.nproc=2"])
    folder = run_dir_of(config).site("a")
    folder.agent.mkdir(parents=True)
    write(config, folder.config)
    monkeypatch.setattr(site_rank, "die_with_parent", lambda parent: None)

    def run(number: int, how: object, start: int = 0) -> int:
        environment = {**TORCHRUN, "RANK": str(number), "TORCHELASTIC_RESTART_COUNT": str(start)}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(site_rank, "run_rank", how if callable(how) else Mock(side_effect=[how]))
        return site_rank.main([str(folder.config)])

    return run


LOST = RankLost(ExitCode.FAILED, "another rank is gone")
MISTAKE = ConfigError("data: no text")


@pytest.mark.parametrize(
    ("error", "code", "of"),
    [
        (RankLost(ExitCode.FAILED, "rank 1 of 2 failed"), 1, ExitCode.FAILED),
        (VerbError(ExitCode.MISMATCH, "another model"), 0, ExitCode.MISMATCH),
        (MISTAKE, 0, ExitCode.USAGE),
    ],
)
def test_only_a_lost_rank_has_all_ranks_started_again(
    error: Exception, code: int, of: ExitCode, rank: Callable[..., int], tmp_path: Path
) -> None:
    ending = tmp_path / "again/sites/a/ending.json"
    ended = {"code": int(of), "text": str(error), "start": 0, "again": bool(code)}
    assert rank(0, error) == code
    assert json.loads(ending.read_text()) == ended
    # Another rank is lost with it; that is worth a new start where it is to rank 0, and of this start only.
    assert rank(1, LOST) == code
    assert rank(1, LOST, start=1) == 1
    assert json.loads(ending.read_text()) == ended
    # A new rank 0 takes back how the one before it ended.
    assert rank(0, lambda config, place: (ExitCode.OK, str(ending.exists())), start=1) == 0
    assert told(tmp_path) == (0, "False")


def told(tmp_path: Path) -> tuple[int, str]:
    words = json.loads((tmp_path / "again/sites/a/ending.json").read_text())
    return words["code"], words["text"]


def test_what_no_start_would_mend_on_any_rank_ends_the_site(rank: Callable[..., int], tmp_path: Path) -> None:
    mistake = (2, f"rank 1, on {socket.gethostname()}: data: no text")
    # Said before rank 0 has begun, which then loses it.
    assert rank(1, MISTAKE) == 0
    assert rank(0, LOST) == 0
    assert told(tmp_path) == mistake
    # Whatever other ranks say of it after that.
    assert rank(2, VerbError(ExitCode.FAILED, "the checkpoint is damaged")) == rank(2, LOST) == 0
    assert told(tmp_path) == mistake
    # All were started nevertheless, because somebody had been lost as well: what was said is taken back.
    assert rank(0, LOST, start=1) == rank(2, LOST, start=1) == 1
    assert told(tmp_path) == (1, "another rank is gone")
    # Rank 0 lost it before it had said why.
    assert rank(1, MISTAKE, start=1) == 0
    assert told(tmp_path) == mistake


def test_how_rank_0_has_left_is_how_the_site_has(rank: Callable[..., int], tmp_path: Path) -> None:
    assert rank(0, (ExitCode.DRAINED, "site a left")) == 0
    assert rank(1, MISTAKE) == 0
    assert rank(1, (ExitCode.OK, "")) == 0
    assert told(tmp_path) == (75, "site a left")


def test_two_ranks_that_end_at_once_say_one_after_the_other(rank: Callable[..., int], tmp_path: Path) -> None:
    folder = SiteDir(tmp_path / "again/sites/a")
    with ThreadPoolExecutor(1) as other, held(folder.saying):
        lost = other.submit(site_rank.end_word, folder, Place(0, world=2), ExitCode.FAILED, str(LOST), lost=True)
        with pytest.raises(TimeoutError):
            lost.result(0.3)
        words = {"code": 2, "text": str(MISTAKE), "start": 0, "again": False}
        folder.ending.write_text(json.dumps(words))
    assert lost.result() is False
    assert told(tmp_path) == (2, str(MISTAKE))


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"site\.device is 'tpu'"):
        join_group(compose(["site.device=tpu"]), Place())


BOUND_S = 20.0


class Rank:
    """One of several threads as a rank."""

    def __init__(self, rank: int, barrier: threading.Barrier, said: dict[int, bytes]) -> None:
        self.rank, self.world, self.is_first = rank, barrier.parties, rank == 0
        self._barrier, self._said = barrier, said

    def all_gather_bytes(self, mine: bytes) -> list[bytes]:
        self._said[self.rank] = mine
        self._barrier.wait(BOUND_S)
        found = [self._said[rank] for rank in range(self.world)]
        self._barrier.wait(BOUND_S)
        return found

    def broadcast_small(self, values: list[int]) -> list[int]:
        return [int(self.all_gather_bytes(str(values[0]).encode())[0])]


def checked(*folders: Path, within_s: float) -> list[str]:
    """What each rank is told that has this folder for the site's."""
    barrier, said = threading.Barrier(len(folders)), dict[int, bytes]()
    config = compose(["run.dir=here"])

    def check(rank: int) -> str:
        group = Rank(rank, barrier, said)
        try:
            check_one_folder(config, SiteDir(folders[rank]), group, within_s)  # type: ignore[arg-type]
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(folders)) as ranks:
        return list(ranks.map(check, range(len(folders))))


def test_one_folder_is_enough_also_where_it_shows_late_and_nothing_is_left_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checked(tmp_path, within_s=0) == [""]
    exists, asked = Path.exists, list[str]()

    def later(path: Path) -> bool:
        asked.append(path.name)
        return len(asked) > 4 and exists(path)

    monkeypatch.setattr(Path, "exists", later)
    assert checked(tmp_path, tmp_path, within_s=BOUND_S) == ["", ""]
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_sees_another_folder_is_named_to_all(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    told = checked(tmp_path, tmp_path, tmp_path / "other", within_s=0.2)
    assert len(set(told)) == 1
    assert told[0].startswith("run.dir is 'here': rank 2, on ")
    assert "does not see there what rank 0 writes" in told[0]
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
