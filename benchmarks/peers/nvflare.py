"""The task done by NVFlare's FedAvg: its simulator with a process for each site, numpy arrays on the wire.

NVFlare runs this same file (with ``--told``) inside its own process for each site.  The tensors are the rows of one
array, because its persistor keeps only one.  A round lasts from a site's result until it receives the next model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

# NVFlare's process runs a copy of this file in another folder, so the task's module is imported from the original's.
if "--root" in sys.argv:
    sys.path.insert(0, sys.argv[sys.argv.index("--root") + 1])

from benchmarks.peers.task import NUM_TENSORS, Task, report

ROOT = Path(__file__).resolve().parents[2]
KEY = "numpy_key"
"""The key of the array in NVFlare's numpy persistor."""


def run_site(task: Task, told: Path) -> None:
    import nvflare.client as flare

    flare.init()
    site = int(flare.get_site_name().removeprefix("site-")) - 1
    spans = []
    sent_at = 0.0
    for step in range(task.rounds_in_all + 1):
        model = flare.receive()
        if model is None:
            return
        if step:
            spans.append((sent_at, time.monotonic()))
        values = np.array(model.params[KEY], dtype=np.float32)
        if step == task.rounds_in_all:
            error = task.error(list(values), "mean")
            (told / f"{site}.json").write_text(
                json.dumps({"site": site, "spans": spans[task.warm_up :], "error": error})
            )
        task.disturb(list(values), site, step)
        sent_at = time.monotonic()
        flare.send(flare.FLModel(params={KEY: values}))


def run_all(task: Task) -> None:
    from nvflare.app_common.np.recipes import NumpyFedAvgRecipe
    from nvflare.recipe import SimEnv

    with tempfile.TemporaryDirectory() as folder:
        start, told = Path(folder) / "zeros.npy", Path(folder) / "told"
        told.mkdir()
        np.save(start, np.zeros((NUM_TENSORS, task.numel // NUM_TENSORS), np.float32))
        written = Path(folder) / "task.json"
        written.write_text(task.written)
        recipe = NumpyFedAvgRecipe(
            name="bench",
            initial_ckpt=str(start),
            min_clients=task.sites,
            num_rounds=task.rounds_in_all + 1,
            train_script=__file__,
            train_args=f"{written} --told {told} --root {ROOT}",
        )
        environment = SimEnv(num_clients=task.sites, num_threads=task.sites, workspace_root=str(Path(folder) / "work"))
        recipe.execute(environment)
        for file in sorted(told.iterdir()):
            report(**json.loads(file.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", help="the task, or a file with it")
    parser.add_argument("--told", type=Path)
    parser.add_argument("--root")
    options = parser.parse_args()
    if options.told is None:
        run_all(Task.read(options.task))
    else:
        run_site(Task.read(Path(options.task).read_text()), options.told)


if __name__ == "__main__":
    main()
