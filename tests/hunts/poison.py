"""``make poison``: a site poisons the demo's model, and a replay removes the poison.

Three runs of the demo's configuration (model, text, three sites of different speed, emulated WAN links), with one seed
and up to the same merged tokens: a clean one; one in which a site sends poison without any countermeasure; and one that
is stopped soon after the same poison, replayed without those updates and all that was trained on them, restored, and
continued.  Its loss on the whole validation text must then be within 2 % of the clean one's.  The result also has the
loss of leaving out the poison alone.

The poison is a negated pseudo-gradient of eight times the length: below the factor of ten from which admission would
refuse it.  The runs differ in which update falls into which round, as any two runs of the demo do.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from pathlib import Path
from typing import Any

import torch

from diloco.cli.main import main as run_verb
from diloco.config import compose as configs
from diloco.config.run_dir import run_dir_of
from diloco.config.schema import RunConfig
from tests.hunts.lives import check_balance
from tests.hunts.pseudo_gradients import Part, loss_of
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting

GAP_MAX = 0.02
STRENGTH = 8.0
"""The length of the poison over that of the true pseudo-gradient."""
POISONER = "site-c"
LATER = 3
"""Versions after the poison, before the hunt stops the run."""
SETTINGS = ("cluster.syncer.listen=127.0.0.1:0", "cluster.syncer.snapshot_every=1000")


class Poisoning:
    """The three runs below ``root``."""

    def __init__(self, root: Path, seed: int, tokens: int, at: int, updates: int, more: tuple[str, ...] = ()) -> None:
        self.root, self.seed, self.tokens = root, seed, tokens
        self.sequences = range(at, at + updates)
        self.more = more
        self.left_out: list[dict[str, Any]] = []

    def config(self, name: str) -> RunConfig:
        settings = [f"run.name={name}", f"run.dir={self.root}", f"seed={self.seed}", f"run.tokens={self.tokens}"]
        config = configs.compose([*SETTINGS, *self.more, *settings])
        configs.write(config, run_dir_of(config).config)
        return config

    def happen(self) -> dict[str, float]:
        clean = self.config("clean")
        loss_clean, tokens_clean = self.finished(clean, Part(clean))
        poisoned = self.config("poisoned")
        loss_poisoned, _ = self.finished(poisoned, Part(poisoned, POISONER, self.sequences, STRENGTH))
        restored = self.config("restored")
        when_stopped, alone, without = self.stopped_and_restored(restored)
        loss_restored, tokens_restored = self.finished(restored, Part(restored))
        return {
            "loss_clean": round(loss_clean, 4),
            "loss_poisoned": round(loss_poisoned, 4),
            "loss_when_stopped": round(when_stopped, 4),
            "loss_without_poison_alone": round(alone, 4),
            "loss_without": round(without, 4),
            "loss_restored": round(loss_restored, 4),
            "tokens_clean": tokens_clean,
            "tokens_restored": tokens_restored,
            "left_out": len(self.left_out),
        }

    def finished(self, config: RunConfig, part: Part) -> tuple[float, int]:
        """Let the run reach its tokens; return the loss of its final model, and the tokens merged."""
        part.end()
        run_dir = run_dir_of(config)
        assert run_dir.final_model.is_file(), f"{config.run.name} has no final version"
        assert part.merged_tokens >= self.tokens, f"{config.run.name} ended with {part.merged_tokens} tokens merged"
        self.balanced(part)
        return loss_of(config, run_dir.final_model), part.merged_tokens

    def stopped_and_restored(self, config: RunConfig) -> list[float]:
        """Stop a run right after the poison, remove that and restore the run.

        Return the loss when it was stopped, without the poison alone, and also without all that was trained on it.
        """
        part = Part(config, POISONER, self.sequences, STRENGTH)
        part.wait_for_poison(POISONER, self.sequences, LATER)
        part.syncer.drain()
        part.end()
        self.check_sent([sorted(site.sent) for site in part.sites])
        self.balanced(part)
        run, folder = run_dir_of(config).root, self.root
        said = verb("replay", str(run), "--out", str(folder / "as-it-was"), "--json")
        chosen = f"site={POISONER}:sequences={self.sequences.start}..{self.sequences.stop - 1}"
        alone = verb("replay", str(run), "--without", chosen, "--out", str(folder / "alone"), "--json")
        told = verb("replay", str(run), "--without", chosen, "--and-later", "--out", str(folder / "without"), "--json")
        assert said["left_out"] == []
        poison = len(said["versions"]) * len(self.sequences)
        assert len(alone["left_out"]) == poison, f"not all poison is left out: {alone['left_out']}"
        self.left_out = told["left_out"]
        verb("restore", str(run), "--from", str(folder / "without"), "--json")
        return [loss_of(config, folder / name / "model.safetensors") for name in ("as-it-was", "alone", "without")]

    def check_sent(self, by_site: list[list[int]]) -> None:
        """Check that exactly one site sent the poison, all of it."""
        sent = [numbers for numbers in by_site if numbers]
        assert sent == [list(self.sequences)], f"one site was to send {list(self.sequences)} as poison: {by_site}"

    def balanced(self, part: Part) -> None:
        for site in part.sites:
            assert site.finished is not None, f"{site.site} never ended"
            check_balance(site.site, site.finished.ledger, part.merged_of)


def verb(*arguments: str) -> dict[str, Any]:
    """Run a verb and return the JSON object that it prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = run_verb(list(arguments))
    assert code == 0, f"diloco {' '.join(arguments)} ended with {code}"
    found: dict[str, Any] = json.loads(said.getvalue())
    return found


@hunting(
    tokens=(1_200_000, "tokens merged in each run"),
    at=(4, "the site's first poisoned update"),
    updates=(2, "poisoned updates in a row"),
    settings=("", "more of diloco up, for another run than the demo"),
)
def main(hunt: Hunt, asked: Namespace) -> Counts:
    torch.set_num_threads(1)
    given = {name: getattr(asked, name) for name in ("seed", "tokens", "at", "updates")}
    poisoning = Poisoning(hunt.folder, **given, more=tuple(shlex.split(asked.settings)))
    counts: dict[str, float] = {}
    with hunt.judging("the three runs"):
        counts = poisoning.happen()
        gap = counts["loss_restored"] / counts["loss_clean"] - 1
        counts["gap_percent"] = round(100 * gap, 3)
        if counts["loss_when_stopped"] < 1.05 * counts["loss_without"]:
            hunt.violated("the poison did no harm, so the hunt shows nothing")
        assert abs(gap) <= GAP_MAX, f"the restored run's loss is {gap:+.1%} from the clean one's"
    return counts
