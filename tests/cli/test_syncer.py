from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from diloco.cli.main import main
from diloco.cli.syncer import again, join_line, old_copy
from diloco.config.arguments import load_config, settings_parser
from diloco.config.compose import compose, read, shared_digest, write
from diloco.config.errors import ExitCode
from diloco.config.run_dir import RunDir
from diloco.durable import locked, write_file
from diloco.observe.eventlog import read_events
from diloco.runs.process import Child, child_environment, verb
from tests.cli.conftest import Cli
from tests.loopback.cluster import free_port
from tests.runs.processes import TINY, place_in, wait_for

LISTEN = "cluster.syncer.listen=127.0.0.1:0"


pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize("by_file", [False, True])
def test_each_of_several_syncers_gets_the_same_settings_and_its_own_place(
    here: Path, monkeypatch: pytest.MonkeyPatch, by_file: bool
) -> None:
    commands: list[list[str]] = []

    def kept(children: dict[Path, Child], begun: object) -> ExitCode:
        commands.extend([list(child.command) for child in children.values()])
        return ExitCode.OK

    monkeypatch.setattr("diloco.cli.syncer.keep_running", kept)
    own = ["cluster.syncer.processes=2", "cluster.syncer.listen='[::1]:7077'", "run.name='007'"]
    several = ["outer.num_fragments=4", "outer.num_syncers=2", "run.tokens=5", "data=text", "data.path=.", *own]
    write(compose([*several, "outer.lr=0.3"]), here / "all.yaml")
    given = ["--config", "all.yaml", "outer.lr=0.5"] if by_file else [*several, "outer.lr=0.5"]
    assert main(["syncer", *given]) == ExitCode.OK
    assert (here / "runs/007/config.yaml").is_file()
    assert len(commands) == 2
    for index, command in enumerate(commands):
        config = load_config(settings_parser("syncer", "").parse_args(command[command.index("syncer") + 1 :]))
        syncer = config.cluster.syncer
        assert (syncer.index, syncer.processes, syncer.listen) == (index, 1, f"[::1]:{7077 + index}")
        assert (config.run.name, syncer.metrics, config.outer.lr, config.run.tokens) == ("007", "", 0.5, 5)


def test_the_line_that_a_site_needs_means_the_same_run() -> None:
    settings = ["outer=diloco", "run.tokens=5", "cluster=local4", LISTEN, "run.dir=elsewhere", "data.path=a b"]
    settings.append("data=text")
    config = compose([*settings, "run.name=otter"])
    line = join_line(config, ["10.0.0.1:7077"], settings, None)
    assert line.startswith("diloco site outer=diloco run.tokens=5 ")
    assert line.endswith(" site.syncer=10.0.0.1:7077 site.id=site-a")
    assert "'data.path=a b'" in line
    assert LISTEN not in line
    joined = compose(shlex.split(line)[2:])
    assert shared_digest(joined) == shared_digest(config)
    assert list(joined.cluster.sites) == list(config.cluster.sites), "into how many shares the text is dealt"
    assert join_line(config, ["10.0.0.1:7077"], ["run.tokens=5", "outer.lr=0.5", LISTEN, "run.track=jsonl"], None) == (
        "diloco site site.syncer=10.0.0.1:7077 site.id=site-a"
    )
    assert "--config run.yaml" in join_line(config, ["x:1"], [], Path("run.yaml"))
    secured = ("tls_cert=c", "tls_key=k", "tls_ca=a", "require_client_cert=true", "tokens_file=t")
    config = compose(["run.name=otter", *(f"cluster.syncer.{each}" for each in secured)])
    own = "site.tls_ca=ca.pem site.tls_cert=site-a.pem site.tls_key=site-a.key site.token_file=site-a.token"
    assert join_line(config, ["h:1"], [], None).endswith(f" site.id=site-a {own}")


def test_a_run_without_a_name_says_how_it_goes_on_and_its_syncer_ends_in_words_once_its_folder_is_gone(
    tmp_path: Path,
) -> None:
    with place_in(tmp_path) as place:
        syncer = place.start("syncer", "syncer", *TINY, LISTEN, "cluster.syncer.linger_s=0")
        wait_for(lambda: "a site joins with" in syncer.text(), "the syncer's greeting", syncer.text)
        name = next((tmp_path / "runs").glob("*/syncer.address")).parent.name
        first = syncer.text().splitlines()[0]
        assert first.startswith(f"run {name} in runs/{name}, listening on 127.0.0.1:")
        assert first.endswith(f"; the same command with run.name={name} resumes it")
        shutil.rmtree(tmp_path / f"runs/{name}/syncer")
        assert syncer.end() == 1
        last = f"diloco syncer: runs/{name}/syncer was removed or emptied while this process served from it"
        assert syncer.text().splitlines()[-1] == last
        assert "Traceback" not in syncer.text()


def test_it_drains_although_its_reader_died_of_the_same_interrupt_and_stays_after_nohup(here: Path) -> None:
    (here / "secrets.py").write_text("raise SystemExit('a file of the user was taken for a module')")
    command = [*verb("syncer"), *TINY, LISTEN, "run.name=otter"]
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        syncer = subprocess.Popen(
            command, env=child_environment(os.environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    finally:
        signal.signal(signal.SIGHUP, ignored)
    try:
        with syncer.stdout as lines:  # type: ignore[union-attr]
            assert next(line for line in lines if "a site joins with" in line)
        syncer.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            syncer.wait(0.3)
        syncer.send_signal(signal.SIGINT)
        assert syncer.wait(60) == ExitCode.DRAINED
        (final,) = [event for event in read_events(here / "runs/otter/events.jsonl") if event["what"] == "final"]
        assert final["ending"] == "drained", "it was not handed over"
    finally:
        syncer.kill()


def test_more_sites_may_join_when_the_syncer_starts_again_with_room_for_them(tmp_path: Path) -> None:
    """The sites know nothing of it: theirs is the room of before."""
    with place_in(tmp_path) as place:
        listen = f"cluster.syncer.listen=127.0.0.1:{free_port()}"
        syncer, address = place.syncer("otter", "outer.sites_max=1", listen)
        written = tmp_path / "runs/otter/config.yaml"
        assert read(written).outer.sites_max == 1
        two = ["outer.sites_max=1", "site.num_sites=2", "site.slowdown=4"]
        fra = place.site("otter", address, "fra", "site.index=0", *two)
        wait_for(lambda: place.seen("otter", "fra", "joined"), "fra", fra.text)
        iad = place.site("otter", address, "iad", "site.index=1", *two)
        assert iad.end() == 1
        assert "the run has no room for site iad: outer.sites_max is reached" in iad.text()
        syncer.signal(signal.SIGHUP)
        assert syncer.end() == 75
        begin = len(place.events("otter"))
        syncer, _ = place.syncer("otter", "outer.sites_max=2", listen)
        (changed,) = place.seen("otter", "syncer", "settings_changed")
        assert changed["why"] == "outer.sites_max is 2 and was 1"
        assert read(written).outer.sites_max == 2
        iad = place.site("otter", address, "iad", "site.index=1", *two)

        def merged() -> set[str]:
            steps = [event["sites"] for event in place.events("otter")[begin:] if event["what"] == "outer_step"]
            return {name for sites in steps if isinstance(sites, dict) for name in sites}

        wait_for(lambda: merged() == {"fra", "iad"}, "updates of both", lambda: f"{iad.text()}{syncer.text()}")


def test_what_the_folder_holds_is_left_alone(tmp_path: Path, cli: Cli) -> None:
    given = ["syncer", *TINY, LISTEN, "run.name=otter"]
    cli.refuses(
        2, "run.init_from is 'nowhere': neither a .safetensors file nor a folder", *given, "run.init_from=nowhere"
    )
    assert not Path("runs").exists()
    cli.refuses(2, "there is no run otter in runs", *given, "run.resume=must")
    with locked(Path("runs/otter/syncer")):
        cli.refuses(1, "is this run's syncer running already?", *given)
        cli.refuses(1, "running already?", *given, "run.init_from=nowhere")  # A run that goes on has long had it.
    cli.refuses(2, "take another run.name", *given, "run.resume=never")
    config = compose([*TINY, "run.name=otter"])
    write(config, Path("runs/otter/config.yaml"))
    cli.refuses(4, "outer.lr is 0.1 now and 0.7 in runs/otter/config.yaml", *given, "outer.lr=0.1")
    assert read(Path("runs/otter/config.yaml")) == config


def test_a_standby_that_was_promoted_goes_on_as_a_syncer() -> None:
    settings = ["run.name=otter", "data.path=a b", "cluster.standby.primary=x:1", "cluster.syncer.listen=y:1"]
    config = compose(settings)
    given = argparse.Namespace(config=None, settings=settings)
    assert again(config, given) == "the same command with run.name=otter"
    whole = "`diloco syncer run.name=otter 'data.path=a b' cluster.syncer.listen=y:1`"
    assert again(config, given, promoted=True) == whole
    given.config = Path("run.yaml")
    assert again(config, given, promoted=True).startswith("`diloco syncer --config run.yaml run.name=otter ")


def test_a_folder_that_the_run_has_left_is_not_gone_on_in(cli: Cli) -> None:
    given = ["syncer", *TINY, LISTEN, "run.name=otter"]
    write(compose(given[1:]), Path("runs/otter/config.yaml"))
    RunDir(Path("runs/otter")).move_to(Path("runs/otter/standby"))
    words = "the run was moved to runs/otter/standby"
    cli.refuses(2, words, *given, "cluster.syncer.folder=runs/otter/syncer")
    with locked(Path("runs/otter/standby")):
        for named in ([], ["cluster.syncer.folder=runs/otter/standby"]):
            cli.refuses(1, "runs/otter/standby is in use by process", *given, *named)


def test_a_run_whose_data_is_lost_does_not_begin_anew_in_silence(cli: Cli) -> None:
    Path("runs/otter").mkdir(parents=True)
    Path("runs/otter/events.jsonl").write_text('{"at": 1, "who": "syncer", "what": "published", "version": 1}\n')
    words = "has published versions and runs/otter/syncer is gone: diloco restore restores it"
    cli.refuses(1, words, "syncer", *TINY, LISTEN, "run.name=otter")
    Path("runs/otter/syncer").mkdir()  # An empty volume in its place.
    cli.refuses(1, words, "syncer", *TINY, LISTEN, "run.name=otter")


def test_a_file_of_identities_that_breaks_is_on_the_terminal_once_and_in_the_status(tmp_path: Path, cli: Cli) -> None:
    tokens, token = tmp_path / "tokens.json", tmp_path / "token"
    for file, text in ((tokens, '{"observer": "token-of-observer"}'), (token, "token-of-observer")):
        file.write_text(text)
        file.chmod(0o600)
    with place_in(tmp_path) as place:
        syncer, address = place.syncer("broken", f"cluster.syncer.tokens_file={tokens}")
        write_file(tokens, b"{", 0o600)  # By a rename: a file that is being written would break once more.
        said = f"tokens_file cannot be used, its last good content stays in force: tokens_file {tokens} is not JSON"
        wait_for(lambda: said in syncer.text(), "its terminal", syncer.text)
        assert said in cli.out("status", address, f"site.token_file={token}")
        write_file(tokens, b'{"observer": "token-of-observer"}', 0o600)
        wait_for(lambda: "tokens_file was read again" in syncer.text(), "its terminal", syncer.text)
        assert syncer.text().count(said) == 1
        assert "cannot be used" not in cli.out("status", address, f"site.token_file={token}")


def test_a_start_on_an_old_copy_says_so_and_what_to_type() -> None:
    events: list[dict[str, Any]] = [
        {"at": 1.0, "who": "syncer", "what": "published", "fragment": 1, "version": version} for version in (6, 7)
    ]
    status = {"lineage": 1, "fragments": [{"version": 9}, {"version": 7}]}
    assert old_copy(events, status) == ""
    status["fragments"] = [{"version": 3}, {"version": 3}]
    said = old_copy(events, status)
    assert "version 7 of fragment 1 was published, and here it is at 3" in said
    assert said.endswith("diloco restore RUN_DIR --from-site SITE_DIR --above 1, or --from BACKUP")
    events[-1]["lineage"] = 50
    assert "--above 50" in old_copy(events, {"lineage": 1, "fragments": [{"version": 9}, {"version": 9}]})
    assert old_copy(events, {"lineage": 60, "fragments": [{"version": 1}, {"version": 1}]}) == ""
    events.append({"at": 2.0, "who": "syncer", "what": "syncer_started", "versions": [0, 0]})
    assert old_copy(events, {"lineage": 1, "fragments": [{"version": 0}, {"version": 0}]}) == "", "it was begun again"
