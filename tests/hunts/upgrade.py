"""``make upgrade FROM=e4cbd8b``: upgrade a run from an old release to this one, with real processes.

The old release's syncer and sites start the run.  Its syncer is killed, and this release's resumes from its folder,
with sites of the old protocol; then each site is replaced, and the syncer once more.  Versions must rise by one, every
acknowledged update must have one fate, and no token may be lost.  The old code comes from this repository's history.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.loopback.upgrading import Upgrade
from tests.runs.processes import ROOT, place_in

PREVIOUS = "e4cbd8b"
"""The last commit that speaks protocol 2, whose digests are SHA-256."""


def unpacked(commit: str, folder: Path) -> Path:
    """Unpack the tree of ``commit`` into ``folder``, ready for import."""
    made = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, timeout=60, check=False)
    if made.returncode:
        sys.exit(f"upgrade: {commit} is not in this history: {made.stderr.decode().strip()}")
    with tarfile.open(fileobj=BytesIO(made.stdout)) as tree:
        tree.extractall(folder, filter="data")
    (folder / "diloco" / "configs").symlink_to(folder / "configs")  # As an installed package has it.
    ask = [sys.executable, "-c", "import diloco; print(diloco.__file__)"]
    said = subprocess.run(
        ask, env={**os.environ, "PYTHONPATH": str(folder)}, cwd=folder, capture_output=True, text=True
    )
    assert said.stdout.strip() == str(folder / "diloco" / "__init__.py"), (said.stdout, said.stderr)
    return folder


@hunting(from_commit=(PREVIOUS, "the old release's commit"))
def main(hunt: Hunt, asked: Namespace) -> Counts:
    old, folder = unpacked(asked.from_commit, hunt.folder / "old"), hunt.folder / "run"
    folder.mkdir()
    told: dict[str, object] = {}
    with place_in(folder) as place:
        upgrade = Upgrade(place, old, ROOT)
        try:
            told = upgrade.run()
        except AssertionError as error:
            print(error)
            after = upgrade.said[-1] if upgrade.said else "the start"
            hunt.violated(f"after {after}: {str(error).splitlines()[-1][:200]}")
    print("; ".join(upgrade.said), flush=True)
    return told
