from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from diloco.cli import recover
from diloco.cli.main import main
from diloco.config import syncer_settings
from diloco.config.compose import compose
from diloco.config.errors import ExitCode
from tests.cli.conftest import Cli
from tests.loopback.cluster import closed_port
from tests.runs.processes import TINY

HELPED = """
import io, sys
from contextlib import redirect_stdout
from diloco.cli.main import VERBS, main
from diloco.config.arguments import OWN
with_grpc = ("up", "dashboard")
last = [verb.name for verb in VERBS if verb.name not in with_grpc]
for asked in ([], ["--help"], ["--version"], *([verb, "--help"] for verb in (*last, *with_grpc))):
    out = io.StringIO()
    try:
        with redirect_stdout(out):
            code = main(asked)
    except SystemExit as ended:
        code = ended.code
    assert not code, asked
    heavy = {"torch", "hydra"} | ({"grpc"} if asked[:1] not in [[verb] for verb in with_grpc] else set())
    assert not heavy & set(sys.modules), asked
    assert (asked in ([], ["--help"])) is all(f"  {verb.name} " in out.getvalue() for verb in VERBS), asked
    assert out.getvalue().startswith(("usage: diloco", "diloco 0.")) or asked in ([], ["--help"]), asked
    if asked[:1] in [[verb] for verb in OWN]:
        assert "diloco config lists all" in out.getvalue(), asked
    if asked[:1] in [[verb] for verb in ("admit", "refuse", "evict", "readmit", "drain")]:
        assert f"diloco {asked[0]} runs/nimble-otter" in out.getvalue(), "the words that follow"
"""


def test_help_and_a_question_to_a_syncer_load_no_torch() -> None:
    subprocess.run([sys.executable, "-c", HELPED], check=True, timeout=60)
    asked = "import sys, diloco.wire.client; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", asked], check=True, timeout=60)


def test_a_closed_stream_changes_no_exit_code() -> None:
    program = [sys.executable, "-m", "diloco", "syncer", "outer.quorum=9", "outer.sites_max=4"]
    for closed in (">&-", "2>&-"):
        ended = subprocess.run(f"{shlex.join(program)} {closed}", shell=True, capture_output=True, timeout=60)
        assert ended.returncode == ExitCode.USAGE, closed


def test_the_tab_key_finds_verbs_and_settings(cli: Cli) -> None:
    script = cli.out("completion")
    for typed, found in (
        ("st", {"status", "standby"}),
        ("status site.tok", {"site.token_file="}),
        ("up cluster=", set()),
        ("up netw", {"network="}),
    ):
        words = ["diloco", *typed.split()]
        here = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}"
        asked = f"{script}\n{here}; _diloco; printf '%s\n' \"${{COMPREPLY[@]}}\""
        done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True, timeout=60)
        assert found <= set(done.stdout.split())
        assert all(word.startswith(words[-1]) for word in done.stdout.split())


def test_a_terminal_without_unicode_gets_question_marks() -> None:
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "diloco", "config", "adamw"], capture_output=True, env=plain, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert b"adamw: ?2" in done.stdout, "β2 with a question mark"


@pytest.mark.parametrize("verb", ["syncer", "train", "site"])
def test_what_the_machine_refuses_is_one_line_and_exit_1(
    verb: str, here: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setattr(syncer_settings, "of_site", lambda settings, *, wait: compose(settings))  # No syncer is here.
    (here / "runs").write_text("a file where the folder of runs should be")
    told = cli.refuses(1, f"diloco {verb}: runs/x", verb, *TINY, "run.name=x")
    assert told.endswith(("Not a directory", "File exists")), told


def test_a_full_disk_is_said_in_words(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    for where in ("/data/x", None):
        full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", where))
        monkeypatch.setattr(recover, "journal", full)
        cli.refuses(1, f"{where or 'diloco journal'}: the disk is full: free space there", "journal", "show", "x")


def test_only_its_address_is_blamed_on_where_a_syncer_listens(here: Path, cli: Cli) -> None:
    (here / "tokens").write_text("{}")
    (here / "tokens").chmod(0o644)
    asked = ["syncer", *TINY, "cluster.syncer.listen=127.0.0.1:0", "cluster.syncer.tokens_file=tokens"]
    assert "listen" not in cli.refuses(2, "cluster.syncer.tokens_file tokens can be read by others", *asked)


def test_the_configuration_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["site", "--print-config", "experiment=streaming", f"site.syncer=127.0.0.1:{closed_port()}"])
    assert ended.value.code == 0
    printed = capsys.readouterr()
    assert "adopt: blend" in printed.out
    assert "note: without the settings that the run shares, since site site-a cannot reach the syncer" in printed.err


def test_under_torchrun_a_rank_reads_a_resolved_file(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for verb in ("site", "train"):
        cli.refuses(2, "ranks read a resolved file", verb, "run.name=x")


REFUSING = """
import contextlib
from diloco.cli.main import main
with contextlib.suppress(SystemExit):
    main(["status", "--help"])
import grpc
from diloco.wire.options import ServerOptions
from tests.wire.fake_syncer import FakeSyncer, RUN, serve
server = serve(FakeSyncer(), ServerOptions(run_id=RUN))
with grpc.insecure_channel(server.address) as channel:
    for _ in range(3):
        with contextlib.suppress(grpc.RpcError):
            channel.unary_unary("/a.B/C")(b"x" * 1000, compression=grpc.Compression.Gzip, timeout=20)
server.stop(0)
"""


def test_a_refusal_by_grpc_itself_writes_no_line() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", REFUSING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
