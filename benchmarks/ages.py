"""How old is each row?  ``python -m benchmarks.ages`` prints each question's last record, and the number of commits
since then that changed the measured code."""

from __future__ import annotations

import json
import subprocess

from benchmarks.record import RESULTS, ROOT

EXCHANGE = ("codec", "learner", "syncer", "wire")
TRAINED = ("codec", "inner", "outer")
MEASURED: dict[str, tuple[str, ...]] = {
    "codec": ("codec",),
    "gpu_codec": ("codec",),
    "inner": ("inner",),
    "kernels": ("inner",),
    "trainer": ("inner",),
    "dashboard": ("observe",),
    "recovery": ("inner", "runs"),
    "sim": ("sim", "sync"),
    "machine": (),
    **dict.fromkeys(("agent", "peers", "restart", "round", "several", "utilisation", "wan"), EXCHANGE),
    **dict.fromkeys(("arrivals", "convergence", "demo", "examples", "lab", "law", "quality"), TRAINED),
}
"""The packages of ``diloco`` that a question measures; a hunt measures those of ``HUNTED``."""
HUNTED = ("sync", *EXCHANGE)


def changes_since(commit: str, at: str, packages: tuple[str, ...]) -> int:
    """Return how many commits changed ``packages`` since ``commit``, or since ``at`` where git does not know it."""
    known = _git("cat-file", "-e", f"{commit}^{{commit}}").returncode == 0
    since = [f"{commit}..HEAD"] if known else [f"--since={at}", "HEAD"]
    found = _git("rev-list", "--count", *since, "--", *(f"diloco/{name}" for name in packages))
    return int(found.stdout) if packages else 0


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def main() -> None:
    """Print a line for each question, the oldest first."""
    rows = []
    for path in RESULTS.glob("*.jsonl"):
        last = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        packages = MEASURED.get(path.stem, HUNTED)
        rows.append((last["at"], path.stem, changes_since(last["commit"].removesuffix("-dirty"), last["at"], packages)))
    for at, question, changes in sorted(rows):
        print(f"{at[:10]}  {question:12}  {f'{changes} commits since changed its code' if changes else 'up to date'}")


if __name__ == "__main__":
    main()
