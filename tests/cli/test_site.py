from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from diloco.cli import site as site_main
from diloco.cli.main import main
from diloco.cli.site import check
from diloco.config import run_dir
from diloco.config.compose import compose, read, write
from diloco.config.errors import ConfigError, ExitCode
from diloco.config.run_dir import SiteDir
from diloco.config.schema import RunConfig
from diloco.durable import locked
from diloco.runs.site_machines import Ranks
from tests.cli.conftest import Cli
from tests.loopback.cluster import closed_port
from tests.runs.processes import TINY


def test_a_site_says_which_run_it_is_of() -> None:
    with pytest.raises(ConfigError, match=r"run\.name is null"):
        check(compose(["site.id=fra"]))


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_second_start_touches_nothing_of_the_first(
    nproc: int, here: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setattr(run_dir, "HELD_WAIT_S", 0.1)
    folder = SiteDir(Path("runs/x/sites/site-a"))
    with locked(folder.root):
        write(compose([*TINY, "run.name=x", "site.id=site-a", "run.log_every=7"]), folder.config)
        config = folder.config.read_text()
        for path in (folder.ending, folder.speaker):
            path.write_text("of the first")
        nobody = f"site.syncer=127.0.0.1:{closed_port()}"
        asked = ["site", *TINY, "run.name=x", "site.id=site-a", f"site.nproc={nproc}", nobody]
        cli.refuses(1, "is it started twice?", *asked)
        assert [path.read_text() for path in (folder.ending, folder.speaker)] == ["of the first"] * 2
        assert folder.config.read_text() == config


def test_19_a_site_goes_on_as_its_run_began_and_a_wrong_preset_leaves_no_trace(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []
    monkeypatch.setattr(site_main, "run_rank", lambda config, place: ran.append(config) or (ExitCode.DRAINED, ""))
    site = ["site", *TINY, "run.name=x", "site.id=site-a", f"site.syncer=127.0.0.1:{closed_port()}"]
    folder = SiteDir(Path("runs/x/sites/site-a"))
    write(compose([*site[1:], "outer=streaming", "outer.measure_from=adopted"]), folder.config)
    assert [main([*site, preset]) for preset in ("outer=streaming", "outer=halos", "outer=streaming")] == [75, 4, 75]
    assert [config.outer.measure_from for config in ran] == ["adopted", "adopted"]
    assert "in run x and" in capsys.readouterr().err


def test_under_torchrun_values_are_checked_and_a_drained_site_has_not_failed(
    here: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    write(compose([*TINY, "run.name=x", "site.id=site-a"]), here / "site.yaml")
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    ends = iter((ExitCode.OK, ExitCode.DRAINED, ExitCode.FAILED))
    monkeypatch.setattr(site_main, "run_rank", lambda config, place: (next(ends), "so it was"))
    cli.refuses(2, "inner.lr is -1.0: positive", "site", "--config", "site.yaml", "inner.lr=-1")
    cli.refuses(2, "site.nodes is 2: not under torchrun", "site", "--config", "site.yaml", "site.nodes=2")
    assert [main(["site", "--config", "site.yaml"]) for _ in range(3)] == [0, 0, 1]


@pytest.mark.parametrize(("node_rank", "who", "own"), [(0, "First", ""), (1, "Another", "machines/1")])
def test_each_machine_has_its_part_and_keeps_its_own_settings(
    node_rank: int, who: str, own: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SiteDir(Path("runs/x/sites/site-a"))

    class Machine:
        def __init__(self, config: RunConfig, site: SiteDir, ranks: Ranks, stopping: object) -> None:
            assert site == folder
            assert ranks.log == folder.root / own / "torchrun.log"
            assert read(folder.root / own / "config.yaml").site.node_rank == config.site.node_rank == node_rank

        def run(self) -> tuple[ExitCode, str]:
            return ExitCode.DRAINED, "as machine 0 said"

    monkeypatch.setattr(site_main, who, Machine)
    write(compose([*TINY, "run.name=x", "site.id=site-a"]), folder.config)  # It was here before.
    several = ["site.nodes=2", f"site.node_rank={node_rank}", "site.rendezvous=127.0.0.1:0"]
    several += [f"site.syncer=127.0.0.1:{closed_port()}"]
    assert main(["site", *TINY, "run.name=x", "site.id=site-a", *several]) == 75
    assert read(folder.config).site.nodes == (1 if node_rank else 2), "machine 1 leaves the file of machine 0 alone"


def test_ranks_that_are_started_again_are_not_held_to_the_word_of_those_before(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is lost just when rank 0 has left: torchrun starts all again, and the new rank 0 takes that word back."""
    folder = SiteDir(Path("runs/x/sites/site-a"))
    ended = {"code": int(ExitCode.DRAINED), "text": "drained", "start": 0, "again": False}

    class Scripted:
        killed = False

        def __init__(self, nproc: int, config: Path, log: Path) -> None:
            self.log, self._began = log, time.monotonic()

        def start(self, restarts: int) -> None:
            folder.ending.write_text(json.dumps(ended))

        def code(self) -> int | None:
            since = time.monotonic() - self._began
            if 0.3 < since < 1.5:
                folder.ending.unlink(missing_ok=True)
            if since < 2.0 and not self.killed:
                return None
            folder.ending.write_text(json.dumps({**ended, "code": int(ExitCode.OK), "text": "finished"}))
            return 0

        def kill(self) -> None:
            Scripted.killed = True

    monkeypatch.setattr(site_main, "Ranks", Scripted)
    monkeypatch.setattr(site_main, "RANKS_END_S", 1.0)
    folder.root.mkdir(parents=True)
    config = compose(["run.name=x", "site.id=site-a", "site.nproc=2"])
    assert site_main.run_ranks(config, folder) == (ExitCode.OK, "finished")
    assert not Scripted.killed
