from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from diloco.cli.site import check_identity
from diloco.config.compose import read
from diloco.deploy.rendering import processes
from diloco.deploy.slurm import call, files
from tests.deploy.rendered import LABEL, commands, configured, put, understood
from tests.runs.processes import wait_for

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
    texts = put(tmp_path, [file for each in found for file in files(each)])
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
        assert int(told["cpus-per-task"]) == process.needs.cpus


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
    put(tmp_path, [file for each in processes(configured()) for file in files(each)])
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
