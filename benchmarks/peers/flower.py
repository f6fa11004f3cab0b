"""The task done by Flower's FedAvg: a SuperLink, a SuperNode for each site, and an app of the message API.

Flower starts a process for each message to a site, so a site keeps its measurements in files.  A round lasts from a
site's answer until its code has the next message.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.task import Task, report

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
START_S = 120.0
BOUND_S = 1800.0
APP = """[project]
name = "bench"
version = "1.0.0"
description = "One outer round"
license = "Apache-2.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "bench"
[tool.flwr.app.components]
serverapp = "bench_app:server"
clientapp = "bench_app:client"
[tool.flwr.app.config]
folder = ""
"""
CODE = """from benchmarks.peers.flower import make_client, make_server
server = make_server()
client = make_client()
"""


def make_server() -> Any:
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        task = Task.read((Path(context.run_config["folder"]) / "task.json").read_text())
        sites = task.sites
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=sites, min_available_nodes=sites)
        strategy.start(grid, ArrayRecord(task.zeros()), num_rounds=task.rounds_in_all + 1, timeout=BOUND_S)

    return app


def make_client() -> Any:
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Any, context: Any) -> Any:
        folder = Path(context.run_config["folder"])
        task = Task.read((folder / "task.json").read_text())
        site = int(context.node_config["site"])
        values = [np.array(array) for array in message.content["arrays"].to_numpy_ndarrays()]
        got_at = time.monotonic()
        noted = folder / f"{site}.jsonl"
        step = len(noted.read_text().splitlines()) if noted.exists() else 0
        error = task.error(values, "mean") if step == task.rounds_in_all else None
        task.disturb(values, site, step)
        content = {"arrays": ArrayRecord(values), "metrics": MetricRecord({"num-examples": 1})}
        answer = Message(content=RecordDict(content), reply_to=message)
        with noted.open("a") as file:
            file.write(json.dumps([got_at, time.monotonic(), error]) + "\n")
        return answer

    return app


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in held]
    for each in held:
        each.close()
    return ports


def await_port(port: int) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def run_all(task: Task) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.json").write_text(task.written)
        app, home = folder / "app", folder / "home"
        app.mkdir()
        home.mkdir()
        (app / "pyproject.toml").write_text(APP)
        (app / "bench_app.py").write_text(CODE)
        api, *mine = free_ports(1 + task.sites)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{api}"\ninsecure = true\n'
        )
        environment = {**os.environ, "FLWR_HOME": str(home), "PYTHONPATH": str(ROOT), "FLWR_TELEMETRY_ENABLED": "0"}
        environment["PATH"] = f"{BIN}:{environment['PATH']}"
        running: list[subprocess.Popen[bytes]] = []

        def start(program: str, *arguments: str) -> None:
            command = [str(BIN / program), "--insecure", *arguments]
            running.append(subprocess.Popen(command, env=environment, stdout=sys.stderr))

        try:
            start("flower-superlink", "--disable-runtime-dependency-installation", "--port", str(api))
            await_port(api)
            for site in range(task.sites):
                where = ["--superlink", f"127.0.0.1:{api}", "--port", str(mine[site])]
                start("flower-supernode", *where, "--node-config", f"site={site}")
            run = [str(BIN / "flwr"), "run", str(app), "here", "--stream", "--run-config", f'folder="{folder}"']
            subprocess.run(run, env=environment, timeout=BOUND_S, check=True, stdout=sys.stderr)
        finally:
            for process in reversed(running):
                process.terminate()
            for process in running:
                process.wait(START_S)
        for site in range(task.sites):
            notes = [json.loads(line) for line in (folder / f"{site}.jsonl").read_text().splitlines()]
            spans = [(sent, got) for (_, sent, _), (got, _, _) in itertools.pairwise(notes)]
            report(site, spans=spans[task.warm_up :], error=notes[-1][2])


if __name__ == "__main__":
    run_all(Task.read(sys.argv[1]))
