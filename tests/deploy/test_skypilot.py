from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from diloco.cli.site import check_identity
from diloco.config.compose import read
from diloco.deploy.rendering import processes
from diloco.deploy.skypilot import call, files
from tests.deploy.rendered import INDEX, LABEL, SOURCE, commands, configured, put, read_by, understood

TLS = [
    "site.tls_ca=certs/ca.pem",
    "site.tls_cert=certs/sites/fra.pem",
    "site.tls_key=/etc/own/fra.key",
    "cluster.syncer.tls_cert=certs/syncer.pem",
    "cluster.syncer.tls_key=certs/syncer.key",
]


def test_each_process_has_a_task_that_starts_it(tmp_path: Path) -> None:
    more = [INDEX, "launch.spot=true", "launch.setup=[module load cuda]", "cluster.sites.fra.accelerator=MI300X"]
    config = configured("site.device=cuda", "launch.accelerator=A100-80GB", *more, *TLS)
    found = processes(config)
    texts = put(tmp_path, *map(files, found))
    words = call(found[1])
    assert (words[:3], words[-2:]) == (["sky", "jobs", "launch"], [str(SOURCE), "site-a.sky.yaml"])
    assert call(found[0])[:3] == ["sky", "launch", "--cluster"], "it keeps its disk and its address"
    for process in found:
        told = yaml.safe_load(texts[f"{process.name}.sky.yaml"])
        assert told["name"] == process.label
        assert LABEL.fullmatch(told["name"])
        assert told["num_nodes"] == 1
        (command,) = commands(told["run"])
        assert understood(command, tmp_path) == process.config
        needs = told["resources"]
        assert needs.get("accelerators") == {"syncer": None, "site-a": "A100-80GB:1", "fra": "MI300X:8"}[process.name]
        assert needs["use_spot"] is (process.verb == "site"), "a syncer is not given away"
        assert needs.get("ports") == (7077 if process.verb == "syncer" else None)
        own = ["certs/ca.pem", "certs/sites/fra.pem"]
        own = own if process.verb == "site" else ["certs/syncer.pem", "certs/syncer.key"]
        wanted = [process.settings, *own]
        assert told["file_mounts"] == {f"~/diloco/{name}": name for name in wanted}, "what lies there stays there"
        torch = {
            "syncer": "--extra-index-url https://wheels.example.org/whl/cpu --constraint constraints.txt .\n",
            "site-a": "pip install --constraint constraints.txt '.[gpu]'\n",
            "fra": "--extra-index-url https://wheels.example.org/whl/rocm7.2 --constraint constraints.txt .\n",
        }
        assert told["setup"].endswith(torch[process.name])
        assert told["run"].splitlines()[-2] == "module load cuda"


def test_the_machines_of_a_site_are_the_nodes_of_a_task(tmp_path: Path) -> None:
    fra = processes(configured("cluster.sites.fra.nodes=2"))[2]
    texts = put(tmp_path, files(fra))
    told = yaml.safe_load(texts["fra.sky.yaml"])
    assert told["num_nodes"] == 2
    assert "put run.dir into it" in texts["fra.sky.yaml"]
    script = told["run"].replace("cd ~/diloco\n", "").replace("diloco site", "echo site")
    for node_rank in range(2):
        place = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": str(node_rank), "HOME": str(tmp_path)}
        done = subprocess.run(
            ["bash", "-c", script], env={**os.environ, **place}, check=True, capture_output=True, text=True
        )
        words = done.stdout.split()
        assert words[:3] == ["site", "--config", "fra.config.yaml"]
        config = read(tmp_path / words[2], words[3:])
        check_identity(config)
        assert (config.site.node_rank, config.site.rendezvous) == (node_rank, "10.0.0.1:29500")


LOAD = """import json, sys, sky
for name in sys.argv[1:]:
    try:
        task = sky.Task.from_yaml(name)
    except ValueError as error:
        print(json.dumps(str(error)))
        continue
    (resources,) = task.resources
    told = [task.name, task.num_nodes, resources.accelerators, resources.ports, resources.use_spot, task.file_mounts]
    print(json.dumps(told))
"""


@pytest.mark.slow
def test_the_loader_of_skypilot_understands_the_tasks(tmp_path: Path) -> None:
    more = [INDEX, "launch.spot=true", "cluster.sites.fra.accelerator=MI300X", "cluster.sites.fra.nodes=2"]
    found = processes(configured("site.device=cuda", *more))
    texts = put(tmp_path, *map(files, found))
    (tmp_path / "wrong.yaml").write_text(texts["fra.sky.yaml"].replace("num_nodes", "nodes"))
    told = read_by(LOAD, tmp_path, [*(f"{each.name}.sky.yaml" for each in found), "wrong.yaml"]).splitlines()
    *tasks, refused = [json.loads(line) for line in told]
    mounts = [{f"~/diloco/{each.settings}": each.settings} for each in found]
    assert tasks == [
        ["first-run-syncer", 1, None, ["7077"], False, mounts[0]],
        ["first-run-site-a", 1, {"H100": 1}, None, True, mounts[1]],
        ["first-run-fra", 2, {"MI300X": 8}, None, True, mounts[2]],
    ]
    assert "nodes" in refused
