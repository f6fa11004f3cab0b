"""``make poison``: a site poisons a run of real training, and the poison is taken out again.

Three runs of the same seed and length, with four sites in lock-step: a clean one; one in which a site sends poison, and
nothing is done about it; and one that is stopped soon after the same poison, replayed without those updates and what
was trained on them, restored, and trained on to the same merged tokens.  Its validation loss is then within 2 % of the
clean one's.  What leaving out the poison alone would have given is told as well.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from diloco.launch import config as configs
from diloco.launch.cli import main as run_verb
from diloco.launch.run_dir import run_dir_of
from diloco.launch.schema import RunConfig
from tests.hunts.reporting import Hunt
from tests.hunts.training import Part, loss_of

GAP_MAX = 0.02
POISONER = "site-c"
SETTINGS = (
    "outer=diloco",
    "outer.num_fragments=2",
    "outer.inner_steps=10",
    "cluster=local4",
    "data=stdlib_bytes",
    "data.validation_sequences=64",
    "model.layers=2",
    "model.dim=64",
    "model.heads=2",
    "model.context=64",
    "inner.batch_sequences=8",
    "inner.lr=0.003",
    "inner.precision=fp32",
    "inner.checkpoint_every_steps=50",
    "codec=int8",
    "cluster.syncer.listen=127.0.0.1:0",
    "cluster.syncer.snapshot_every=1000",
)


def main(arguments: list[str] | None = None) -> int:
    hunt = Hunt("poison", __doc__)
    hunt.parser.add_argument("--rounds", type=int, default=16, help="outer steps of each fragment (default: 16)")
    hunt.parser.add_argument("--at", type=int, default=5, help="the version that the poison begins with (default: 5)")
    hunt.parser.add_argument("--updates", type=int, default=2, help="poisoned ones in a row (default: 2)")
    hunt.parser.add_argument("--strength", type=float, default=8.0, help="how many times too long (default: 8)")
    asked = hunt.asked(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="poison-") as folder:
        replay = {name: getattr(asked, name) for name in ("seed", "rounds", "at", "updates", "strength")}
        try:
            counts = Poisoning(Path(folder), asked.seed, asked.rounds, asked.at, asked.updates, asked.strength).happen()
        except AssertionError as error:
            hunt.violated(str(error), **replay)
            return hunt.finish({})
        gap = abs(counts["loss_restored"] / counts["loss_clean"] - 1)
        if gap > GAP_MAX:
            hunt.violated(f"the restored run's loss is {gap:.1%} from the clean one's", **replay)
        if counts["loss_when_stopped"] < 1.05 * counts["loss_without"]:
            hunt.violated("the poison did no harm: nothing is shown", **replay)
        return hunt.finish({**counts, "gap_percent": round(100 * gap, 3)})


class Poisoning:
    """The three runs below ``root``."""

    def __init__(self, root: Path, seed: int, rounds: int, at: int, updates: int, strength: float) -> None:
        self.root, self.seed = root, seed
        self.versions = range(at, at + updates)
        self.strength = strength
        steps = 10 * rounds
        self.tokens = 4 * 8 * 64 * steps
        self.left_out: list[dict[str, Any]] = []

    def config(self, name: str) -> RunConfig:
        settings = [f"run.name={name}", f"run.dir={self.root}", f"seed={self.seed}", f"run.tokens={self.tokens}"]
        config = configs.compose([*SETTINGS, *settings])
        configs.write(config, run_dir_of(config).config)
        return config

    def happen(self) -> dict[str, float]:
        clean = self.config("clean")
        loss_clean, _ = self.finished(clean, Part(clean))
        poisoned = self.config("poisoned")
        loss_poisoned, _ = self.finished(poisoned, Part(poisoned, POISONER, self.versions, self.strength))
        restored = self.config("restored")
        when_stopped, alone, without = self.stopped_and_restored(restored)
        loss_restored, tokens = self.finished(restored, Part(restored))
        assert tokens >= self.tokens, f"{tokens} tokens are merged in the restored run, and {self.tokens} are its bound"
        return {
            "loss_clean": round(loss_clean, 4),
            "loss_poisoned": round(loss_poisoned, 4),
            "loss_when_stopped": round(when_stopped, 4),
            "loss_without_poison_alone": round(alone, 4),
            "loss_without": round(without, 4),
            "loss_restored": round(loss_restored, 4),
            "tokens": tokens,
            "left_out": len(self.left_out),
        }

    def finished(self, config: RunConfig, part: Part) -> tuple[float, int]:
        """Let the run reach its tokens: the loss of its final model, and the tokens merged."""
        part.end()
        run_dir = run_dir_of(config)
        assert run_dir.final_model.is_file(), f"{config.run.name} has no final version"
        self.balanced(part)
        return loss_of(config, run_dir.final_model), part.merged_tokens

    def stopped_and_restored(self, config: RunConfig) -> list[float]:
        """Stop a run right after the poison, take that out and restore it.

        The loss that it was stopped with, without the poison alone, and without what was trained on it as well.
        """
        part = Part(config, POISONER, self.versions, self.strength)
        part.wait_until(self.versions.stop)
        part.syncer.drain()
        part.end()
        self.balanced(part)
        run, folder = run_dir_of(config).root, self.root
        said = verb("replay", str(run), "--out", str(folder / "as-it-was"), "--json")
        chosen = f"site={POISONER}:versions={self.versions.start}..{self.versions.stop - 1}"
        alone = verb("replay", str(run), "--without", chosen, "--out", str(folder / "alone"), "--json")
        told = verb("replay", str(run), "--without", chosen, "--and-later", "--out", str(folder / "without"), "--json")
        assert said["left_out"] == []
        assert len(alone["left_out"]) == 2 * len(self.versions), f"not all poison is left out: {alone['left_out']}"
        self.left_out = told["left_out"]
        verb("restore", str(run), "--from", str(folder / "without"), "--json")
        return [loss_of(config, folder / name / "model.safetensors") for name in ("as-it-was", "alone", "without")]

    def balanced(self, part: Part) -> None:
        for site in part.sites:
            assert site.finished is not None, f"{site.site} never ended"
            ledger = site.finished.ledger
            parts = sum(count for name, count in ledger.items() if name != "processed")
            assert ledger["processed"] == parts, f"{site.site}: tokens do not balance: {ledger}"
            assert ledger["merged"] == part.merged_of[site.site], f"{site.site}: {ledger}, {part.merged_of}"


def verb(*arguments: str) -> dict[str, Any]:
    """What a verb says as its one JSON object."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = run_verb(list(arguments))
    assert code == 0, f"diloco {' '.join(arguments)} ended with {code}"
    found: dict[str, Any] = json.loads(said.getvalue())
    return found


if __name__ == "__main__":
    sys.exit(main())
