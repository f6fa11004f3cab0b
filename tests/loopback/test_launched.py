"""What `diloco launch slurm` writes, run: a whole run by its scripts, without Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.cli.main import main
from diloco.observe.eventlog import read_events
from tests.loopback.cluster import free_port
from tests.runs.processes import ROOT, TINY, place_in, wait_for

SETTINGS = [
    "run.name=jobs",
    "run.tokens=12000",
    "run.seconds=null",
    "outer.quorum=2",  # However long one of them takes to start.
    "outer.quorum_min=2",
    "outer.final_wait_s=5",
    "cluster=one",
    "cluster.sites.fra.nproc=2",
    "site.syncer=syncer.example.org:7077",
    "cluster.syncer.listen=0.0.0.0:7077",
    "cluster.syncer.insecure_non_loopback=true",
]


@pytest.mark.slow
def test_the_scripts_of_a_run_make_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    assert main(["launch", "slurm", "--dry-run", "--to", str(tmp_path / "jobs"), *TINY, *SETTINGS]) == 0
    port = free_port()
    for file in (tmp_path / "jobs").glob("*.config.yaml"):  # This machine alone is all of theirs.
        text = file.read_text().replace("syncer.example.org:7077", f"127.0.0.1:{port}")
        file.write_text(text.replace("0.0.0.0:7077", f"127.0.0.1:{port}"))
    program = tmp_path / "bin" / "diloco"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m diloco "$@"\n')
    program.chmod(0o755)
    with place_in(tmp_path / "jobs"):  # The text that they train on.
        environment = {
            **os.environ,
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "SLURM_SUBMIT_DIR": str(tmp_path / "jobs"),
        }

        def job(name: str) -> subprocess.Popen[bytes]:
            with (tmp_path / f"{name}.log").open("wb") as log:
                script = str(tmp_path / "jobs" / f"{name}.sbatch")
                return subprocess.Popen(
                    ["bash", script], env=environment, cwd="/", stdout=log, stderr=log, start_new_session=True
                )

        jobs = {"syncer": job("syncer")}
        try:
            address = tmp_path / "jobs" / "runs" / "jobs" / "syncer.address"
            wait_for(address.is_file, "the syncer", (tmp_path / "syncer.log").read_text)
            jobs |= {name: job(name) for name in ("site-a", "fra")}
            for name, process in jobs.items():
                assert process.wait(240) == 0, (tmp_path / f"{name}.log").read_text()
        finally:
            for process in jobs.values():
                if process.poll() is None:
                    os.killpg(process.pid, 9)
                    process.wait(10)
    events = read_events(tmp_path / "jobs" / "runs" / "jobs" / "events.jsonl")[0]
    assert {event["who"] for event in events} >= {"syncer", "site-a", "fra"}
    assert (tmp_path / "jobs" / "runs" / "jobs" / "syncer" / "final" / "model.safetensors").is_file()
