"""A run that never was: the events of three sites, a syncer and `up`, with the faults of the demo."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path

from diloco.observe.eventlog import Event
from diloco.observe.history import RunHistory

SITES = {"site-a": 0.30, "site-b": 0.38, "site-c": 0.48}
"""Seconds of an inner step."""
STEP_TOKENS = 2048
FRAGMENTS = [600_000, 450_000]
BEGIN = 1_780_000_000.0


class Recorder:
    """Makes the events of a run of so many seconds, second by second."""

    def __init__(self, seconds: float = 60.0) -> None:
        self.seconds = seconds
        self.random = random.Random(0)
        self.events: list[Event] = []
        self.versions = [0] * len(FRAGMENTS)
        self.steps = dict.fromkeys(SITES, 0)
        self.incarnation = dict.fromkeys(SITES, 1)
        self.own_steps = dict.fromkeys(SITES, 0)
        self.merged = dict.fromkeys(SITES, 0)
        self.lost = dict.fromkeys(SITES, 0)
        self.sequence = dict.fromkeys(SITES, 0)
        self.run_tokens = 0

    def say(self, at: float, who: str, what: str, **fields: object) -> None:
        self.events.append({"at": BEGIN + at, "who": who, "what": what, **fields})

    def record(self) -> list[Event]:
        self.say(0.0, "up", "run", state="started", sites=list(SITES), name="quiet-otter")
        self.say(0.1, "up", "layout", fragments=FRAGMENTS)
        self.say(0.1, "up", "reference", bits_per_byte={"zlib -9": 1.81, "xz": 1.32})
        self.say(0.2, "up", "process", name="syncer", pid=100, state="started")
        self.say(1.5, "syncer", "syncer_started", epoch=1, versions=list(self.versions), recovered=0)
        for number, site in enumerate(SITES):
            self.say(0.3, "up", "process", name=site, site=True, pid=101 + number, state="started")
            self.say(2.0, "syncer", "site_joined", site=site, why="it was never seen before")
            self.say(2.1, site, "joined", incarnation=1, epoch=1, versions=list(self.versions))
        self.say(2.5, "up", "eval", tokens=0, val_loss=6.95, val_bits_per_byte=4.57, versions=list(self.versions))
        tick = 0.0
        while tick < self.seconds:
            self.second(3.0 + tick, tick)
            tick += 1.0
        self.end(3.0 + tick)
        return sorted(self.events, key=lambda event: float(str(event["at"])))

    def second(self, at: float, tick: float) -> None:
        dead, cut = 12 <= tick < 18, 27 <= tick < 37
        syncer_dead = 39 <= tick < 42
        self.faults(at, tick)
        for site, step_s in SITES.items():
            if not (site == "site-b" and dead):
                self.train(at, site, step_s)
        merged, partly = 40 * int(tick), 3 * (tick >= 12)
        units = {"leased": merged + partly + 192, "merged": merged, "partly": partly, "in_hand": 192, "repeated": 1}
        self.say(at + 0.96, "up", "units", **units, processed=merged + 20, given_back=0, reissued=0, sequences=8)
        for site in SITES:
            self.say(at + 0.95, "up", "link", site=site, bytes_up=int(60_000 * tick), bytes_down=int(48_000 * tick))
        if not syncer_dead:
            self.merge(
                at, [site for site in SITES if not (site == "site-b" and dead) and not (site == "site-c" and cut)]
            )
        if tick % 5 == 4:
            loss = self.loss(at) + 0.05
            bits = round(loss / math.log(2) / 2.19, 4)
            fields = {"val_loss": round(loss, 4), "val_bits_per_byte": bits}
            self.say(at + 0.5, "up", "eval", tokens=self.run_tokens, versions=list(self.versions), **fields)

    def faults(self, at: float, tick: float) -> None:
        if tick == 12:
            self.say(at, "up", "fault", fault="kill", target="site-b", seconds=6.0)
            self.say(at + 0.01, "up", "process", name="site-b", site=True, pid=102, state="killed")
        if tick == 18:
            self.say(at, "up", "healed", fault="kill", target="site-b")
            self.say(at, "up", "process", name="site-b", site=True, pid=104, state="started")
            self.incarnation["site-b"], self.own_steps["site-b"] = 2, 0
            self.lost["site-b"] = 5 * STEP_TOKENS
            why = "a new process speaks for it: incarnation 2"
            self.say(at + 0.1, "syncer", "site_joined", site="site-b", why=why)
            self.say(at + 0.1, "site-b", "joined", incarnation=2, epoch=1, versions=list(self.versions))
            self.say(at + 0.1, "site-b", "resumed", step=self.steps["site-b"] - 5, tokens_lost=5 * STEP_TOKENS)
        if tick == 27:
            self.say(at, "up", "fault", fault="partition", target="link:site-c", seconds=10.0)
            self.say(at + 0.5, "site-c", "disconnected", why="Watch: nothing came for 5 s")
        if tick == 37:
            self.say(at, "up", "healed", fault="partition", target="link:site-c")
            self.say(at + 0.5, "site-c", "connected")
        if tick == 39:
            self.say(at, "up", "fault", fault="kill", target="syncer", seconds=3.0)
            self.say(at, "up", "process", name="syncer", pid=100, state="killed")
        if tick == 42:
            self.say(at, "up", "healed", fault="kill", target="syncer")
            self.say(at, "up", "process", name="syncer", pid=105, state="started")
            self.say(at + 0.1, "syncer", "syncer_started", epoch=2, versions=list(self.versions), recovered=812)

    def loss(self, at: float) -> float:
        return 2.5 + 4.4 * math.exp(-at / 15)

    def train(self, at: float, site: str, step_s: float) -> None:
        for number in range(int(1 / step_s)):
            self.steps[site] += 1
            self.own_steps[site] += 1
            loss = round(self.loss(at) + self.random.gauss(0, 0.05), 4)
            tokens = {"tokens": STEP_TOKENS, "tokens_total": self.steps[site] * STEP_TOKENS}
            fields = {"tokens_per_s": STEP_TOKENS / step_s, "lr": 0.02, "step_s": step_s}
            self.say(at + number * step_s, site, "step", step=self.steps[site], loss=loss, **tokens, **fields)
        self.meter(at + 0.9, site, step_s)

    def meter(self, at: float, site: str, step_s: float) -> None:
        steps = self.own_steps[site]
        times = {
            "train_s": steps * step_s,
            "stall_s": steps * 0.002,
            "adopt_s": steps * 0.001,
            "after_step_s_max": 0.02,
        }
        spread = {"step_s_p50": step_s, "step_s_p95": step_s * 1.1, "step_s_max": step_s * 1.5}
        counts = {"inner_steps": steps, "tokens": steps * STEP_TOKENS, "in_flight": 1, "staleness": 1}
        meter = {**counts, **times, **spread, "bytes_up": 10, "bytes_down": 10}
        self.say(at, site, "meter", incarnation=self.incarnation[site], **meter)

    def merge(self, at: float, sites: list[str]) -> None:
        fragment = int(at) % len(FRAGMENTS)
        for site in sites:
            self.sequence[site] += 1
            facts = {"fragment": fragment, "sequence": self.sequence[site]}
            self.say(at + 0.2, site, "sealed", base_version=self.versions[fragment], tokens=2048, steps=1, **facts)
            self.say(at + 0.3, site, "pushed", outcome="accepted", reason=None, bytes=240_000, seconds=0.1, **facts)
            self.merged[site] += STEP_TOKENS
        self.run_tokens += STEP_TOKENS * len(sites)
        version = self.versions[fragment] = self.versions[fragment] + 1
        weights = {site: 1 / len(sites) for site in sites}
        stale = {site: self.random.choice([0, 0, 1, 2]) for site in sites}
        self.say(at + 0.4, "syncer", "grace", why="quorum of 1", fragment=fragment)
        facts = {"fragment": fragment, "version": version}
        self.say(at + 0.6, "syncer", "outer_step", sites=weights, staleness=stale, norm=1.5, seconds=0.003, **facts)
        done = {"run_tokens": self.run_tokens, "progress_ppm": int(1e6 * min(1, (at - 3) / self.seconds))}
        self.say(at + 0.7, "syncer", "published", digest="ab", bytes=240_000, **facts, **done)
        for site in sites:
            self.say(at + 0.8, site, "fetched", bytes=240_000, seconds=0.1, whole=False, **facts)
            self.say(at + 0.85, site, "adopted", merged=[], stall_s=0.001, **facts)

    def end(self, at: float) -> None:
        self.say(at, "syncer", "refused", site="site-c", fragment=0, sequence=9, reason="stale")
        self.say(at + 0.2, "syncer", "last_round", why="the run's time is over")
        self.say(at + 1.0, "syncer", "final", ending="finished", versions=list(self.versions))
        for site in SITES:
            self.say(at + 1.5, site, "site_done", ledger=self.ledger(site), reason="finished")
        fields = {"val_loss": 2.61, "val_bits_per_byte": 1.72, "versions": list(self.versions)}
        self.say(at + 2.5, "up", "eval", tokens=self.run_tokens, **fields)
        for name in [*SITES, "syncer"]:
            self.say(at + 3.0, "up", "process", name=name, state="ended", code=0)

    def ledger(self, site: str) -> dict[str, int]:
        processed = self.steps[site] * STEP_TOKENS + self.lost[site]
        in_flight = STEP_TOKENS
        merged = self.merged[site] - in_flight
        parts = {"merged": merged, "refused": 0, "in_flight": in_flight, "overwritten": 0, "lost": self.lost[site]}
        return {"processed": processed, "unsent": processed - sum(parts.values()), **parts}

    def status(self) -> dict[str, object]:
        """What the syncer's Status says at the end."""
        sites = {
            site: {
                "status": "left",
                "tokens_merged": self.merged[site],
                "updates_merged": self.sequence[site],
                "updates_refused": {"stale": 1} if site == "site-c" else {},
                "undecided": 0,
            }
            for site in SITES
        }
        return {"phase": "ended", "ending": "finished", "run_tokens": self.run_tokens, "sites": sites}


def append(path: Path, events: Iterable[Event]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def told(events: list[Event]) -> RunHistory:
    """What is known after ``events``, in the order of their times."""
    return RunHistory(sorted(events, key=lambda event: float(str(event["at"]))))
