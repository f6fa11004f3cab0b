"""What a user types wrong, or asks of what is not there: one line that names it, an exit code, and nothing is done."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from diloco.cli import model
from diloco.cli.main import main
from tests.cli.conftest import Cli
from tests.lab.laboratories import rows, written
from tests.models.pasts import with_a_past
from tests.runs.processes import TINY, Place

FOLLOW = "TINY run.name=otter cluster.syncer.listen=127.0.0.1:0 cluster.standby.primary"
STUCK = "TINY cluster=local3 outer.quorum=4 run.seconds=null run.tokens=1000 --step-s 30"
ABOVE = "upstream.endpoint=a:1 upstream.site_id=b"
LIGER = "inner.kernels=liger site.device=cpu"
KEPT = "inner.memory_checkpoint_every_steps=5"
NOBODY = "site.syncer=127.0.0.1:1 site.join_timeout_s=0.1"

BEGIN = ("train", "lab", "eval RUN")
"""These verbs have made a folder for the run, or have read its text, before they can know."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_a_past(tmp_path_factory.mktemp("mistaken"))


@pytest.mark.parametrize(
    ("code", "words", "line"),
    [
        (2, "unknown verb sight: did you mean site?", "sight"),
        (2, "unknown verb ps: diloco runs lists the runs here", "ps"),
        (2, "unknown verb resume: the command that began a run resumes it", "resume"),
        (2, "unknown verb nonsense: one of up, syncer, site, status, doctor", "nonsense"),
        (2, "--seconds; settings are key=value: run.seconds=...", "up --seconds 60"),
        (2, "--lr=0.1; settings are key=value: inner.lr=0.1 or outer.lr=0.1", "up --lr=0.1"),
        (2, "--nope", "site --nope"),
        (2, "unrecognized arguments: --print-config", "eval x --print-config"),
        (2, "unrecognized arguments: --config", "status x --config f"),
        (2, "invalid choice: 'hide'", "journal hide x"),
        # Settings, by verb.
        (2, "inner.lr is -1.0: positive and finite", "site TINY run.name=none inner.lr=-1"),
        (2, "site.id is 'a/b'", "site TINY run.name=none site.id=a/b"),
        (2, "site.memory_folder is 'none'", f"site TINY run.name=x {KEPT} site.memory_folder=none"),
        (2, "inner.kernels is 'liger': its kernels are for accelerators", f"site TINY run.name=x site.nproc=2 {LIGER}"),
        (2, "site.nproc is 0: at least 1", "site TINY run.name=x site.nproc=0"),
        (2, "site.node_rank is 1: from 0 to 0", "site TINY run.name=x site.node_rank=1"),
        (3, "tried for 0.1 s (site.join_timeout_s)", f"site site.id=a {NOBODY}"),
        (2, "there is no such file or folder", "train TINY data.path=nowhere"),
        (2, "site.nproc is 2: start the ranks", "train TINY site.nproc=2"),
        (2, "inner.kernels is 'liger': its kernels are for accelerators", f"train TINY run.name=base {LIGER}"),
        (2, "codec.down is 'int5'", "syncer TINY codec.down=int5"),
        (2, "nohost.invalid does not resolve here", "syncer TINY cluster.syncer.listen=nohost.invalid:1"),
        (2, "listen is '0.0.0.0:0': not a loopback address", "syncer TINY cluster.syncer.listen=0.0.0.0:0"),
        (2, "backup is 'runs': another folder, since", "syncer TINY run.name=otter cluster.syncer.backup=runs"),
        (2, "backup is 'd': another", "syncer TINY run.name=o cluster.syncer.backup=d cluster.syncer.folder=d/o/x"),
        (2, "backup is 'd/o': another", "syncer TINY run.name=o cluster.syncer.backup=d/o cluster.syncer.folder=d"),
        (2, "backup is 'runs': another folder", f"standby follow {FOLLOW}=a:1 cluster.syncer.backup=runs"),
        # Who is asked.
        (2, "'127.0.0.1:99999': a port of 1 to 65535", "status 127.0.0.1:99999"),
        (2, "site.token_file is 'nowhere'", "status 127.0.0.1:1 site.token_file=nowhere"),
        (2, "HOST:PORT or run folder, SITE, FRAGMENT, SEQUENCE", "admit 127.0.0.1:1 a 0"),
        (2, "FRAGMENT is 'zero': a number", "refuse 127.0.0.1:1 a zero 1"),
        (2, "site_id", "evict 127.0.0.1:1 ../x"),
        (2, "HOST:PORT or run folder", "drain"),
        (2, "give one of follow, promote, detach, status", "standby prommote a:1"),
        (2, "promote takes one HOST:PORT", "standby promote"),
        (2, "follow takes no HOST:PORT, but settings", "standby follow a:1"),
        (2, "--json is not an option of promote", "standby promote a:1 --json"),
        (2, "--lossy is not an option of detach", "standby detach a:1 --lossy"),
        (2, "run.name is null", "standby follow TINY"),
        (2, "cluster.standby.primary is '': host:port", f"standby follow {FOLLOW}="),
        (2, "cluster.standby.primary is 'a:1,b:1': host:port", f"standby follow {FOLLOW}=\"'a:1,b:1'\""),
        (2, "name is 'syncer': ", f"standby follow {FOLLOW}=a:1 cluster.standby.name=syncer"),
        (2, "cluster.standby.name is 'a/b'", f"standby follow {FOLLOW}=a:1 cluster.standby.name=a/b"),
        (2, "listen is 'nowhere'", f"standby follow {FOLLOW}=a:1 cluster.syncer.listen=nowhere"),
        (2, "--steps is 0: at least 1", "canary . --steps 0"),
        (2, "--expect is 'xyz': 64 hexadecimal digits", "canary . --expect xyz"),
        (2, "--nice is 20: from 0 to 19", "canary . --nice 20"),
        (2, "server is 'here'", "doctor TINY server=here"),
        (2, "unknown key sever", "doctor TINY sever=127.0.0.1:7077"),
        (2, "--webhook and --command belong to --watch", "doctor --webhook http://127.0.0.1:1/"),
        (2, "--webhook is 'ftp://x'", "doctor --watch a:1 --webhook ftp://x"),
        (2, "--every is 0.5: from 1 to 3600", "doctor --watch a:1 --every 0.5"),
        (2, "give the syncer's HOST:PORT", "doctor --watch a:1 b:2"),
        # Certificates.
        (2, "say for whom", "certs issue pki"),
        (2, "say for whom", "certs issue pki --site a --admin"),
        (2, "--site is 'a/b'", "certs issue pki --site a/b"),
        (2, "--syncer needs --host", "certs issue pki --syncer"),
        (2, "only a syncer or a standby", "certs issue pki --site a --host x"),
        (2, "--days is 9999", "certs issue pki --site a --days 9999"),
        (1, "host is 'x:1'", "certs issue pki --syncer --host x:1"),
        (2, "--site is not an option of diloco certs init", "certs init pki --site a"),
        (2, "--days is not an option of diloco certs revoke", "certs revoke pki --site a --days 3"),
        (1, "names no certificate of site/b", "certs revoke pki --site b"),
        (1, "ca.pem does not exist: diloco certs init", "certs issue nothing --site a"),
        (1, "does not exist", "certs show nothing"),
        # Launchers.
        (2, "give one of docker, slurm, kubernetes, skypilot, not nomad", "launch nomad"),
        (2, "not docker slurm", "launch docker slurm"),
        (2, "site.syncer is 'a:1,[::1]:2': the address", "launch slurm --dry-run site.syncer='a:1,[::1]:2'"),
        # What is predicted, and the laboratory.
        (2, "parameters is not set: parameters=70e9, or +experiment=NAME", "plan"),
        (2, "+experiment is '100t_20d': did you mean 100t_20dc?", "plan +experiment=100t_20d"),
        (2, "+experiment is 'zzz': one of 100t_20dc, gpt3_4dc, 10b_8dc", "plan +experiment=zzz"),
        (2, "unknown key outer.inner_steps: did you mean inner_steps?", "plan PLAN outer.inner_steps=3"),
        (2, "sites is '2.5': a whole number", "plan PLAN sites=2.5"),
        (2, "up_gbps is '1,x': numbers with commas between", "plan PLAN up_gbps=1,x"),
        (2, "'sites' is no setting: key=value", "plan PLAN sites"),
        (2, "codec is 'int5'", "plan PLAN codec_up=int5"),
        (2, "outer_kind is 'newton': one of sgd", "plan PLAN outer_kind=newton"),
        (2, "utilisation is 1.0: between 0 and 1", "plan PLAN utilisation=1"),
        (2, "+lab is not given", "lab"),
        (2, "did you mean smoke?", "lab +lab=smok"),
        (2, "--rows is 'b': one of a", "lab MINE --rows b"),
        (2, "--seeds is 'x'", "lab MINE --seeds x"),
        (2, "--jobs is 0", "lab MINE --jobs 0"),
        (2, "row a: unknown key outer.lrr", "lab MINE outer.lrr=1"),
        (2, "row a: run.tokens is None", "lab MINE run.tokens=null"),
        (2, "row a: outer.momentum is 0.0: kind", "lab MINE outer.kind=nesterov outer.momentum=0"),
        (2, "+scenario is 'goodput_decouple': did you mean", "sim +scenario=goodput_decouple"),
        (2, "outer.lr=1: +scenario=bandwidth_streaming is a", "sim +scenario=bandwidth_streaming outer.lr=1"),
        (2, "--hours and +scenario=bandwidth_streaming: ", "sim +scenario=bandwidth_streaming --hours 3"),
        (2, "one at a time", "sim +scenario=bandwidth_streaming +scenario=goodput_decoupled"),
        (2, "--step-s is 1e-12: must be from 1e-06 to 1e+09", "sim --step-s 1e-12"),
        (2, "--hours is inf: must be from", "sim --hours inf"),
        (2, "--merge-s is inf: must be from 0 to 86400", "sim --merge-s inf"),
        (2, "--region-interruptions-per-day is nan", "sim --region-interruptions-per-day nan"),
        (2, "per-day is 2: name the sites with --region", "sim --region-interruptions-per-day 2"),
        (2, "--region is site-a,site-b: --region-interruptions-per-day is 0", "sim --region site-a,site-b"),
        (2, "has a site twice", "sim --region site-a,site-a --region-interruptions-per-day 2"),
        (2, "--chips is 8: --interruptions-per-chip-year is 0, so they never fail", "sim --chips 8"),
        (2, "is 87611.2 interruptions of a site in a day", "sim --chips 400 --interruptions-per-chip-year 80000"),
        (2, "--chips is -1: must be from 0", "sim --chips -1"),
        (2, "--interruptions-per-chip-year is nan: must be from 0", "sim --interruptions-per-chip-year nan"),
        (2, "--interruptions-per-chip-year is 1: give a site's chips", "sim --interruptions-per-chip-year 1"),
        (2, "--maintenance-every-h is 0: must be from 0.001", "sim --maintenance-s 60"),
        (2, "--maintenance-s is 3600: must", "sim --maintenance-every-h 1 --maintenance-s 3600 --hours 9"),
        (2, "is 1: give the simulated time with --hours", "sim --maintenance-every-h 1 --maintenance-s 60"),
        (2, "--step-jitter is 1: must be from 0 to below 1", "sim --step-jitter 1"),
        (2, "--seeds is 0: must be from 1 to 1000", "sim --seeds 0"),
        (2, "--seeds and --like: the seed is that of the run", "sim --seeds 2 --like runs/none"),
        (2, "cluster.sites.site-a.slowdown is nan: from 1 (full speed)", "sim cluster.sites.site-a.slowdown=nan"),
        (2, "cluster.sites.site-a.nproc is 0: at least 1", "sim cluster.sites.site-a.nproc=0"),
        (2, "--above: unknown key outer.lrr", "sim --above outer.lrr=1"),
        (2, "--above: outer.lock_step is True: not built for regions", "sim --above outer=diloco"),
        (2, "--above: codec.up is 'topk:4096x64': not built for regions", "sim --above codec=topk"),
        (2, "outer.num_fragments=4: the region decides this; --above", "sim --above outer.num_fragments=4"),
        (2, "model=small: the region decides this", "sim --above model=small"),
        (2, "outer.lock_step is True: not built for a region", "sim outer.lock_step=true --regions 2"),
        (2, "--above: --regions is 0: at least 1", "sim --regions 0"),
        (2, "--maintenance-s is 0: must be above 0 and below", "sim --maintenance-every-h 1"),
        (2, "upstream.endpoint is 'a:1': leave it out (null)", f"sim {ABOVE}"),
        (2, "--above simulates no scenario", "sim scenario=demo --regions 2"),
        (2, "--above, --regions and --like: only a run without regions", "sim --like runs/none --regions 2"),
        (2, "0 of 1000 tokens are merged", f"sim {STUCK}"),
        # A run's past.
        (2, "holds no journal", "journal show EMPTY"),
        (2, "is no run folder", "replay NOTHING"),
        (2, "has no config.yaml", "replay EMPTY"),
        (2, "--without 'b' has 'b': site=NAME", "replay RUN --without b"),
        (1, "the run has no site x; it has a, b", "replay RUN --without site=x:versions=1"),
        (2, "--to is -1", "replay RUN --to -1"),
        (2, "--out is '.': it exists already", "replay RUN --out ."),
        (2, "give --from IMAGE|BACKUP or --from-site FOLDER", "restore RUN"),
        (2, "one of them", "restore RUN --from x --from-site y"),
        (2, "cluster.syncer.backup is ''", "restore RUN --list"),
        (1, "holds neither an image nor a backup of run past", "restore RUN --from nowhere"),
        (1, "nowhere is not there", "restore RUN --from-site nowhere"),
        # Models.
        (2, "give one run folder", "export --to x"),
        (2, "give one run folder", "export RUN RUN --to x"),
        (2, "--to is missing", "export RUN"),
        (2, "it exists already", "export RUN --to RUN"),
        (2, "Protocol not known: nothing", "export RUN --to nothing://model"),
        (2, "--version is '²': a number from 0 on, or newest", "export RUN --to x --version ²"),
        (1, "holds no more than version 8", "export RUN --to x --version 9"),
        (2, "--shard-size is '5': a size", "export RUN --to x --shard-size 5"),
        (2, "--shard-size is '0GB'", "export RUN --to x --shard-size 0GB"),
        (2, "--shard-size is 5MB: only", "export RUN --to x --format dcp --shard-size 5MB"),
        (2, "has another model, or other fragments, than", "export RUN --to x model.tied=true"),
        (3, "does not answer", "export --syncer 127.0.0.1:1 --to x run.name=past"),
        (2, "give a run, a checkpoint or a model's folder, a prompt", "generate RUN"),
        (2, "give a syncer's HOST:PORT and a prompt", "generate --syncer 127.0.0.1:1"),
        (2, "can't encode", "generate RUN a\udcff"),  # The shell gave a byte that is no text.
        (2, "--tokens is 0: at least 1", "generate RUN a --tokens 0"),
        (2, "--top-k is -1", "generate RUN a --top-k -1"),
        (2, "give one run folder, or the syncer's HOST:PORT", "eval"),
        (3, "the syncer of run past does not answer", "eval RUN"),
        (3, "the syncer at 127.0.0.1:1 does not answer", "eval --syncer 127.0.0.1:1 --follow"),
        (2, "--fewshot is 2: only --tasks uses it", "eval nowhere --fewshot 2"),
        (2, "--tasks are scored once: no --follow", "eval nowhere --tasks pets --follow"),
        (2, "--tasks is 'a,,b': names of different tasks", "eval nowhere --tasks a,,b"),
        (2, "--tasks is 'a,a': names of different tasks", "eval nowhere --tasks a,a"),
        (2, "--include-path is 'there': an existing folder", "eval nowhere --tasks pets --include-path there"),
        (2, "--fewshot is -1: at least 0", "eval nowhere --tasks pets --fewshot -1"),
        (2, "--limit is 0: at least 1", "eval nowhere --tasks pets --limit 0"),
        (2, "one model: give nowhere or --syncer", "eval nowhere --tasks pets --syncer 127.0.0.1:1"),
        (1, "): pip install 'diloco[harness]'", "eval nowhere --tasks pets"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_done(
    code: int,
    words: str,
    line: str,
    here: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # As where the harness is not installed.
    monkeypatch.delitem(sys.modules, "diloco.integrations.lm_eval", raising=False)
    monkeypatch.setattr(model, "GIVE_UP_S", 0.5)
    Place(here)
    for name in ("EMPTY", "NOTHING"):
        (here / name).mkdir()
    (here / "EMPTY" / "events.jsonl").touch()
    meant = {"TINY": TINY, "PLAN": ["parameters=1e9", "step_s=2", "fragments=4"]}
    if " RUN" in line:
        meant["RUN"] = [str(request.getfixturevalue("run"))]
    if " MINE" in line:
        meant["MINE"] = [f"+lab={written(here, rows('a'))}"]
    if " pki" in line:
        assert main(["certs", "init", "pki"]) == 0
    there = sorted(here.rglob("*"))
    arguments = [each for word in shlex.split(line) for each in meant.get(word, [word])]
    cli.refuses(code, words, *arguments)
    assert sorted(here.rglob("*")) == there or line.startswith(BEGIN)
    assert not [*here.rglob("cells")]
