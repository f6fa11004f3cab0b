"""Inject bad updates among the real pseudo-gradients of four sites: each must be refused, or bounded as documented.

A small model is trained (``pseudo_gradients``); the syncer's own code measures every update, and its machine judges it.
At ``--places`` rounds, each fault is injected into a copy of that machine.  An update that is not refused must be
finite and have at most ``norm_ratio_max`` times the usual norm: its site's weight then bounds its effect.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import Counter
from random import Random

import torch
from torch import Tensor

from diloco.codec.base import DecodeError
from diloco.codec.merging import sums_of
from diloco.codec.registry import make_codec
from diloco.sync import effects as fx
from diloco.sync import events as ev
from diloco.sync.options import HealthOptions, OuterOptions
from diloco.sync.syncer import OuterSync
from diloco.syncer.api import vitals_of
from tests.hunts.pseudo_gradients import FRAGMENTS, INNER_STEPS, SITES, Sent, Training
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting

FAULTS = ("nan", "scale", "sign", "exponent_bit", "stale_replay", "wrong_layout")
ALWAYS_REFUSED = frozenset({"nan", "scale", "stale_replay", "wrong_layout"})
BEGINS = 20
"""Rounds before the first fault, from which the machine learns the usual norm."""


class Run:
    """A training, and the machine that receives every update of it."""

    def __init__(self, rounds: int, seed: int) -> None:
        self.training = Training(rounds, seed)
        options = OuterOptions(num_fragments=FRAGMENTS, quorum=len(SITES), staleness_max=2)
        self.machine = OuterSync(options)
        self.machine.handle(ev.SyncerStarted(1, HealthOptions()), 0)
        for name in SITES:
            self.machine.handle(ev.JoinRequested(1, name, name), 0)

    def answer(self, machine: OuterSync, sent: Sent, sequence: int, base: int, values: Tensor) -> fx.AnswerPush:
        """Return the syncer's answer to ``values`` as an update of ``sent``'s site."""
        vitals = vitals_of(sums_of(values, sent.momentum))
        event = ev.UpdateArrived(
            *(1, sent.site, 1, sent.fragment, sequence, base, INNER_STEPS, INNER_STEPS, 1, 1),
            *(f"{sent.site}-{sent.fragment}-{sequence}", "payload", "fp32", vitals.finite, False),
            *(vitals.norm, vitals.cosine),
        )
        effects = machine.handle(event, 0)
        self.started = [effect for effect in effects if isinstance(effect, fx.StartOuterStep)]
        return next(effect for effect in effects if isinstance(effect, fx.AnswerPush))

    def take(self, sent: Sent) -> fx.AnswerPush:
        """Pass on an unchanged update; the last one of a round closes it."""
        answer = self.answer(self.machine, sent, sent.version + 1, sent.version, sent.gradient)
        for step in self.started:
            self.machine.handle(ev.OuterStepDone(step.fragment, step.version, "", ""), 0)
        return answer

    def inject(self, kind: str, sent: Sent, random: Random) -> tuple[str, float]:
        """Inject ``kind`` into an update of ``sent``'s site; return the outcome and the norm over the usual one."""
        machine = OuterSync(self.machine.options, copy.deepcopy(self.machine.state))
        values, sequence, base = sent.gradient.clone(), sent.version + 1, sent.version
        place = random.randrange(values.numel())
        if kind == "nan":
            values[place] = math.nan
        elif kind == "scale":
            values *= 1e6
        elif kind == "sign":
            values = -values
        elif kind == "exponent_bit":
            values.view(torch.int32)[place] ^= 1 << random.randrange(23, 31)
        elif kind == "stale_replay":  # With a new sequence number: with its own it would be a duplicate.
            base = sent.version - 3
        elif kind == "wrong_layout":
            codec = make_codec("fp32")
            try:
                codec.decode(codec.encode(values[:-1]), values.numel())
            except DecodeError:
                return "refused", 0.0
            return "taken", math.inf
        answer = self.answer(machine, sent, sequence, base, values)
        lines = [site.lines[sent.fragment] for site in self.machine.state.sites.values()]
        usual = statistics.median(vital.norm for line in lines for vital in line.vitals)
        return answer.outcome.value, float(torch.linalg.vector_norm(values.double())) / usual


@hunting(places=(20, "rounds at which each fault is injected"), rounds=(1000, "clean rounds"))
def main(hunt: Hunt, asked: Namespace) -> Counts:
    random = Random(asked.seed)
    run = Run(asked.rounds, asked.seed)
    at = set(random.sample(range(BEGINS, asked.rounds), asked.places))
    counts: Counter[str] = Counter()
    updates = false_refusals = 0
    for number, arrived in enumerate(run.training.updates()):
        if number in at:
            victim = random.choice(arrived)
            for kind in FAULTS:
                outcome, ratio = run.inject(kind, victim, random)
                counts[f"{kind}_{outcome}"] += 1
                bounded = kind not in ALWAYS_REFUSED and ratio <= HealthOptions().norm_ratio_max
                if outcome != "refused" and not bounded:
                    hunt.violated(f"round {number}: {kind} of {ratio:.3g} times the usual norm is {outcome}")
        for sent in arrived:
            updates += 1
            answer = run.take(sent)
            if answer.outcome is not ev.Outcome.ACCEPTED:
                false_refusals += 1
                hunt.violated(f"round {number}: a clean update of {sent.site} is {answer}")
    return {"updates": updates, "false_refusals": false_refusals, **dict(sorted(counts.items()))}
