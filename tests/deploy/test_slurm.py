from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.cli.site import check_identity
from diloco.config.compose import read
from diloco.deploy.rendering import processes
from diloco.deploy.slurm import call, files
from tests.deploy.rendered import LABEL, commands, configured, put, understood
from tests.runs.processes import ROOT, TINY, Place, wait_for

OPTION = re.compile(r"#SBATCH --([a-z-]+)(?:=(\S+))?")


def options(text: str) -> dict[str, str]:
    """The script's own; sbatch reads them up to the first command."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            match = OPTION.fullmatch(line)
            assert match is not None, line
            assert match[1] not in found, line
            found[match[1]] = match[2] or ""
        elif line and not line.startswith("#"):
            break
    assert text.count("#SBATCH") == len(found)
    return found


def test_each_process_has_a_script_that_starts_it(tmp_path: Path) -> None:
    config = configured("site.device=cuda", "launch.hours=1.5", "launch.partition='gpu,big'", "launch.account=me")
    found = processes(config)
    texts = put(tmp_path, *map(files, found))
    assert sorted(texts) == sorted(
        f"{name}.{end}" for name in ("syncer", "site-a", "fra") for end in ("sbatch", "config.yaml")
    )
    assert call(found[1]) == ["sbatch", "site-a.sbatch"]
    for process in found:
        text = texts[f"{process.name}.sbatch"]
        subprocess.run(["bash", "-n", str(tmp_path / f"{process.name}.sbatch")], check=True, capture_output=True)
        (command,) = commands(text)
        meant = understood(command, tmp_path)
        assert meant == process.config
        told = options(text)
        assert LABEL.fullmatch(told["job-name"])
        assert (told["nodes"], told["ntasks"], told["time"]) == ("1", "1", "90")
        assert (told["signal"], told["partition"], told["account"]) == ("B:TERM@120", "gpu,big", "me")
        assert "requeue" in told
        assert told.get("gpus-per-node") == {"syncer": None, "site-a": "1", "fra": "8"}[process.name]
        assert int(told["cpus-per-task"]) == process.cpus


def with_programs(folder: Path, **texts: str) -> None:
    """Programs by the names of ours and of Slurm's that write down how they are called, and a pipe to wait at."""
    (folder / "bin").mkdir()
    for name, text in texts.items():
        (folder / "bin" / name).write_text("#!/usr/bin/env bash\n" + text)
        (folder / "bin" / name).chmod(0o755)
    os.mkfifo(folder / "hold")


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """A site's script, and what it calls."""
    put(tmp_path, *map(files, processes(configured())))
    waits = (
        "trap 'echo asked > asked; exit 75' TERM\n"
        'echo "$@" > began\n[ -n "${ENDS:-}" ] && exit $ENDS\nwhile true; do read -t 0.1 < hold; done\n'
    )
    with_programs(tmp_path, diloco=waits, scontrol='echo "$@" > queued\n')
    return tmp_path


def started(stage: Path, **more: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PATH": f"{stage / 'bin'}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(stage)}
    environment |= {"SLURM_JOB_ID": "17", **more}
    return subprocess.Popen(["bash", str(stage / "fra.sbatch")], env=environment, cwd="/", start_new_session=True)


def test_a_job_sets_up_what_the_program_needs_first(tmp_path: Path) -> None:
    setup = [f"PATH={tmp_path}/own:$PATH", "module load cuda, 12", 'export LOADED="$unset$loaded"']
    fra = processes(configured("cluster.sites.fra.nproc=1", f"launch.setup={setup}"))[2]
    put(tmp_path, files(fra))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "diloco").write_text('#!/bin/sh\necho "$LOADED: $@" > began\n')
    (tmp_path / "own" / "diloco").chmod(0o755)
    (tmp_path / "modules").write_text('module() { loaded="$*"; }\n')
    assert started(tmp_path, BASH_ENV=str(tmp_path / "modules")).wait(60) == 0
    assert (tmp_path / "began").read_text() == "load cuda, 12: site --config fra.config.yaml\n"
    (tmp_path / "own" / "diloco").unlink()
    command, bare = ["bash", "fra.sbatch"], {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("diloco is not on this job's PATH: load it by launch.setup\n")


@pytest.mark.parametrize(("code", "again"), [(0, False), (75, True), (2, False)])
def test_only_what_left_in_order_is_queued_again(stage: Path, code: int, again: bool) -> None:
    assert started(stage, ENDS=str(code)).wait(60) == code
    assert (stage / "began").read_text() == "site --config fra.config.yaml\n"
    assert (stage / "queued").exists() is again
    if again:
        assert (stage / "queued").read_text() == "requeue 17\n"


def test_before_its_end_a_job_leaves_in_order(stage: Path) -> None:
    """Also where the site has ended by the time that the script looks for it."""
    late = 'kill() { [ "$1" = -TERM ] && told=1; [ "$1" = -0 ] && [ "${told:-}" ] && sleep 0.2; builtin kill "$@"; }'
    (stage / "late").write_text(late)
    job = started(stage, BASH_ENV=str(stage / "late"))
    hold = os.open(stage / "hold", os.O_RDWR)
    try:
        wait_for(lambda: (stage / "began").exists(), "the site")
        for _ in range(600):  # Slurm says it once; here the script may not know its child yet.
            job.send_signal(signal.SIGTERM)
            try:
                assert job.wait(0.1) == 75
                break
            except subprocess.TimeoutExpired:
                continue
        else:
            raise AssertionError("the job did not leave")
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        os.close(hold)
    assert (stage / "asked").exists()
    assert (stage / "queued").read_text() == "requeue 17\n"


@pytest.mark.parametrize("killed", [False, True])
def test_a_site_of_several_machines_is_one_job(tmp_path: Path, killed: bool) -> None:
    fra = processes(configured("cluster.sites.fra.nodes=3", "site.device=cuda"))[2]
    texts = put(tmp_path, files(fra))
    told = options(texts["fra.sbatch"])
    assert (told["nodes"], told["ntasks"], told["ntasks-per-node"], told["gpus-per-node"]) == ("3", "3", "1", "8")
    # As Slurm has it: each task gets its own number, and none of them is started again.
    srun = (
        'echo "$@" | head -n 1 > srun.new\nwhile [[ "$1" == --* ]]; do shift; done\n'
        'SLURM_PROCID=0 "$@"; SLURM_PROCID=1 "$@"; mv srun.new srun\n'
    )
    site = (
        'echo "$@" >> began\ncase "$*" in\n'
        "*node_rank=0*) until [ -e srun ]; do read -t 0.05 < hold; done;;\n"
        '*node_rank=2*) [ -n "${KILLED:-}" ] && [ ! -e once ] && { : > once; kill -9 $$; };;\nesac\nexit 0\n'
    )
    with_programs(tmp_path, srun=srun, diloco=site)
    hold = os.open(tmp_path / "hold", os.O_RDWR)
    try:
        job = started(tmp_path, SLURMD_NODENAME="node-7", **({"KILLED": "1"} if killed else {}))
        assert job.wait(60) == 0
    finally:
        os.close(hold)
    began = (tmp_path / "began").read_text().splitlines()
    wanted = [f"site --config fra.config.yaml site.node_rank={rank} site.rendezvous=node-7:0" for rank in range(3)]
    assert sorted(began) == sorted([*wanted, *([wanted[2]] if killed else [])])
    assert (
        (tmp_path / "srun").read_text().startswith("--nodes=2 --ntasks=2 --ntasks-per-node=1 --relative=1 --cpus-per-")
    )
    for node_rank in range(3):
        config = read(tmp_path / "fra.config.yaml", wanted[node_rank].split()[3:])
        check_identity(config)
        assert (config.site.nodes, config.site.node_rank) == (3, node_rank)


# --- Slurm itself ----------------------------------------------------------------------------------------------------

HEAD = "10.77.0.1"
BOUND_S = 180.0
NAMESPACE = """set -e
ip link set lo up
ip address add {head}/32 dev lo
hostname head
mount --bind {folder}/hosts /etc/hosts
touch {folder}/ready
exec sleep 3600
"""
SLURM_CONF = """ClusterName=test
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerParameters=batch_sched_delay=1,sched_interval=2
MailProg=/bin/true
NodeName=n[1-4] NodeHostname=head NodeAddr={head} Port=[17001-17004] CPUs=4 RealMemory=64000
PartitionName=main Nodes=ALL Default=YES State=UP
"""
DAEMONS = {
    "munged": "munged --foreground --force --key-file=munge.key --socket=munge.socket --pid-file=munged.pid"
    " --log-file=munged.log --seed-file=munge.seed",
    "slurmctld": "slurmctld -D",
    **{f"n{number}": f"slurmd -D -N n{number}" for number in (1, 2, 3, 4)},
}
"""Each stays in the foreground.  cred_expire above is also how long a job that is queued again must wait."""
ABSENT = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", "nsenter", "ip") if shutil.which(name) is None]


class Slurm:
    """A cluster of four nodes, all on this machine in namespaces of its own, which end with process ``inside``."""

    def __init__(self, folder: Path, inside: int) -> None:
        self.folder = folder
        self.enter = ["nsenter", f"--target={inside}", "--net", "--uts", "--mount", "--pid", f"--wd={folder}"]
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        done = subprocess.run(
            [*self.enter, *command], env=self.environment, capture_output=True, text=True, timeout=BOUND_S, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in self.folder.rglob("*.log"))

    def wait(self, wanted: str, *command: str) -> None:
        """Until ``command`` prints the pattern ``wanted``."""
        wait_for(lambda: re.fullmatch(wanted, self.run(*command)), f"{wanted} of {command}", self.logs, BOUND_S)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "state").mkdir()
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{HEAD} head n1 n2 n3 n4\n")
    (folder / "slurm.conf").write_text(SLURM_CONF.format(head=HEAD, folder=folder))
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    unshare = ["unshare", "--net", "--uts", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
    if subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.skip("this container may not make namespaces")
    with contextlib.ExitStack() as ending:
        outside = subprocess.Popen([*unshare, "sh", "-c", NAMESPACE.format(head=HEAD, folder=folder)])
        ending.callback(outside.wait, 20)
        ending.callback(outside.kill)  # And with it every process of the namespaces.
        wait_for(lambda: (folder / "ready").exists() or outside.poll() is not None, "the namespaces")
        assert outside.poll() is None
        inside = Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text()
        cluster = Slurm(folder, int(inside))
        for name, command in DAEMONS.items():
            with (folder / f"{name}.out.log").open("wb") as log:
                daemon = subprocess.Popen(
                    [*cluster.enter, *command.split()], env=cluster.environment, stdout=log, stderr=subprocess.STDOUT
                )
            ending.callback(daemon.wait, 20)
            ending.callback(daemon.kill)
            if name == "munged":
                wait_for((folder / "munge.socket").exists, "munged", cluster.logs)
        yield cluster


@pytest.mark.slow
@pytest.mark.skipif(ABSENT != [], reason=f"not installed here: {ABSENT} (Debian: slurm-wlm, munge, iproute2)")
@pytest.mark.skipif(os.geteuid() != 0, reason="a cluster in namespaces of its own needs root")
def test_a_run_on_slurm_goes_to_its_end_while_nodes_are_drained_and_resumed(slurm: Slurm, tmp_path: Path) -> None:
    """The syncer and site-a have a node each, fra has two.

    A round needs both sites, so that the run cannot end while one of them is away.
    """
    place, run = Place(tmp_path), "first"
    slurm.wait("idle", "sh", "-c", "sinfo --noheader --format=%T || true")
    settings = [*TINY, f"run.name={run}", "run.seconds=null", "run.tokens=600000", "outer.quorum=2"]
    settings += ["cluster=one", "cluster.sites.fra.nodes=2", f"site.syncer={HEAD}:7077", "launch.memory_gib=2"]
    settings += ["cluster.syncer.listen=0.0.0.0:7077", "cluster.syncer.insecure_non_loopback=true", "launch.hours=1"]
    settings += [f"launch.setup=['PATH={Path(sys.executable).parent}:$PATH','export PYTHONPATH={ROOT}']"]
    ours = ["env", f"--chdir={tmp_path}", f"PYTHONPATH={ROOT}", sys.executable, "-m", "diloco"]
    slurm.run(*ours, "launch", "slurm", "--yes", "--to", ".", *settings)
    fra = ["squeue", "--noheader", "--name=first-fra"]
    slurm.wait("RUNNING", *fra, "--format=%T")
    nodes = slurm.run(*fra, "--format=%N")
    wait_for(lambda: place.seen(run, "fra", "checkpoint"), "a checkpoint of fra", slurm.logs, BOUND_S)
    slurm.run("scontrol", "update", f"nodename={nodes}", "state=drain", "reason=test")
    slurm.run("scancel", "--batch", "--signal=TERM", "--name=first-fra")
    slurm.wait("PENDING", *fra, "--format=%T")
    slurm.wait("drained", "sinfo", "--noheader", f"--nodes={nodes}", "--format=%T")
    assert len(place.seen(run, "fra", "joined")) == 1
    slurm.run("scontrol", "update", f"nodename={nodes}", "state=resume")
    slurm.wait("", "squeue", "--noheader")
    for job in (1, 2, 3):
        assert "JobState=COMPLETED " in slurm.run("scontrol", "show", "job", str(job))
    (resumed,) = place.seen(run, "fra", "resumed")
    assert resumed["tokens_lost"] == 0, "it left in order"
    versions = [event for event in place.seen(run, "syncer", "published") if event["at"] > resumed["at"]]
    assert versions[-1]["run_tokens"] >= 600000
