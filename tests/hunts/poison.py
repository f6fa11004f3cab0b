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
import os
import re
import shlex
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diloco.cli.main import main as run_verb
from diloco.config import build
from diloco.config import compose as configs
from diloco.config.connecting import link_options
from diloco.config.errors import ExitCode
from diloco.config.model_files import load_values
from diloco.models.evaluate import Evaluator
from diloco.observe.eventlog import Event, read_events
from diloco.syncer.restoring import Kept
from diloco.wan.process import RelayProcess
from tests.forked import ForkedVerb
from tests.hunts.lives import check_ledgers, ledgers_of
from tests.hunts.pseudo_gradients import poisoning
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.loopback.cluster import free_port
from tests.runs.processes import Verb, place_in, wait_for

GAP_MAX = 0.02
STRENGTH = 8.0
"""The length of the poison over that of the true pseudo-gradient."""
POISONER = "site-c"
LATER = 3
"""Versions after the poison, before the hunt stops the run."""
SETTINGS = ("cluster.syncer.snapshot_every=1000",)
BOUND_S = 600.0


class Site(Verb):
    """A site whose updates with these sequences are poison."""

    def __init__(self, folder: Path, name: str, arguments: list[str], sequences: range) -> None:
        self.name, self.out = name, folder / f"{name}.out"
        prepare = partial(poisoning, sequences, STRENGTH)
        self.process = ForkedVerb(arguments, folder, self.out, os.environ, prepare=prepare)


class Poisoning:
    """The three runs below ``root``."""

    def __init__(self, root: Path, seed: int, tokens: int, at: int, updates: int, more: tuple[str, ...] = ()) -> None:
        self.root, self.tokens = root, tokens
        self.sequences = range(at, at + updates)
        self.settings = [*SETTINGS, *more, f"run.dir={root}", f"data.cache={root}/cache", f"seed={seed}"]
        self.settings.append(f"run.tokens={tokens}")
        self.left_out: list[dict[str, Any]] = []

    def happen(self) -> dict[str, float]:
        with place_in(self.root) as self.place:
            loss_clean, tokens_clean = self.finished("clean")
            loss_poisoned, _ = self.finished("poisoned", poisoned=True)
            when_stopped, alone, without = self.stopped_and_restored()
            loss_restored, tokens_restored = self.finished("restored")
        return {
            "loss_clean": loss_clean,
            "loss_poisoned": loss_poisoned,
            "loss_when_stopped": when_stopped,
            "loss_without_poison_alone": alone,
            "loss_without": without,
            "loss_restored": loss_restored,
            "tokens_clean": tokens_clean,
            "tokens_restored": tokens_restored,
            "left_out": len(self.left_out),
        }

    def finished(self, name: str, *, poisoned: bool = False) -> tuple[float, int]:
        """Let a run reach its tokens; return the loss of its final model, and the tokens merged."""
        with self.part(name, poisoned):
            pass
        syncer = self.root / name / "syncer"
        tokens = Kept(syncer).points()[-1].state.run_tokens()
        assert tokens >= self.tokens, f"{name} ended with {tokens} tokens merged"
        return self.loss_of(syncer / "final/model.safetensors"), tokens

    def stopped_and_restored(self) -> list[float]:
        """Stop a run right after the poison, remove that and restore the run.

        Return the loss when it was stopped, without the poison alone, and also without all that was trained on it.
        """
        with self.part("restored", poisoned=True) as (syncer, *sites):
            wait_for(self.is_poisoned, "the poison", syncer.text, BOUND_S)
            syncer.signal(signal.SIGINT)
        sent = [re.findall(r"^poison: (\d+)$", site.text(), re.MULTILINE) for site in sites]
        self.check_sent([sorted({int(number) for number in numbers}) for numbers in sent])
        run, chosen = str(self.root / "restored"), f"{self.sequences.start}..{self.sequences.stop - 1}"
        names, without = ("as-it-was", "alone", "without"), ["--without", f"site={POISONER}:sequences={chosen}"]
        said, alone, told = (
            verb("replay", run, *how, "--out", str(self.root / name), "--json")
            for name, how in zip(names, ([], without, [*without, "--and-later"]), strict=True)
        )
        assert said["left_out"] == []
        poison = len(said["versions"]) * len(self.sequences)
        assert len(alone["left_out"]) == poison, f"not all poison is left out: {alone['left_out']}"
        self.left_out = told["left_out"]
        verb("restore", run, "--from", str(self.root / "without"), "--json")
        return [self.loss_of(self.root / name / "model.safetensors") for name in names]

    @contextlib.contextmanager
    def part(self, name: str, poisoned: bool) -> Iterator[list[Verb]]:
        """Run the syncer and all sites until the run ends or is drained; then check that its tokens balance."""
        address = f"127.0.0.1:{free_port()}"
        shared = [*self.settings, f"run.name={name}", f"cluster.syncer.listen={address}"]
        config = configs.compose(shared)
        self.num_fragments = config.outer.num_fragments
        verbs = [self.place.start(f"{name}-syncer", "syncer", *shared)]
        with RelayProcess() as relay:
            for index, (site, settings) in enumerate(config.cluster.sites.items()):
                dial = relay.add(site, link_options(config, site), address) if config.network.emulate else address
                own = [f"site.id={site}", f"site.index={index}", f"site.num_sites={len(config.cluster.sites)}"]
                own += [f"site.slowdown={settings.slowdown}", f"site.syncer={dial}"]
                sequences = self.sequences if poisoned and site == POISONER else range(0)
                verbs.append(Site(self.root, f"{name}-{site}", ["site", *shared, *own], sequences))
                self.place.verbs.append(verbs[-1])
            yield verbs
            for each in verbs:
                code = each.end(BOUND_S)
                assert code in (ExitCode.OK, ExitCode.DRAINED), f"{each.name} ended with {code}: {each.text()[-400:]}"
        check_ledgers(ledgers_of(self.events(name)), self.root / name / "syncer")

    def events(self, name: str) -> list[Event]:
        return list(read_events(self.root / name / "events.jsonl"))

    def is_poisoned(self) -> bool:
        """Return whether all poison is merged, and each fragment has ``LATER`` more versions."""
        events = self.events("restored")
        poison = [each for each in events if each["who"] == POISONER and each.get("sequence") in self.sequences]
        refused = [event for event in poison if event["what"] == "fate"]
        assert not refused, f"not merged: {refused}"
        merged = [int(str(event["version"])) for event in poison if event["what"] == "merged"]
        versions: dict[object, int] = {}
        for event in events:
            if event["what"] == "published":
                versions[event["fragment"]] = int(str(event["version"]))
        if len(merged) < self.num_fragments * len(self.sequences):
            return False
        return len(versions) == self.num_fragments and min(versions.values()) >= max(merged) + LATER

    def loss_of(self, model: Path) -> float:
        """Return the loss of a file of parameters on the whole validation text, in nats per token."""
        config = configs.compose(self.settings)
        evaluator, built = Evaluator(config, build.corpus(config)), build.build_model(config)
        load_values(str(model), built)
        with torch.no_grad():
            return round(evaluator.score(built, whole=True).val_loss, 4)

    def check_sent(self, by_site: list[list[int]]) -> None:
        """Check that exactly one site sent the poison, all of it."""
        sent = [numbers for numbers in by_site if numbers]
        assert sent == [list(self.sequences)], f"one site was to send {list(self.sequences)} as poison: {by_site}"


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
