"""Processes that play a syncer, sites and an observer for the tests of ``up``: they start at once and only emit events.

``python actors.py ROLE RUN_DIR WHO [options as json]``
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from pathlib import Path

from diloco.durable import write_file
from diloco.observe.eventlog import EventLog, read_events

asked: list[int] = []


def play_syncer(log: EventLog, folder: Path, options: dict[str, float]) -> int:
    """Ends after ``seconds`` of all its lives, or when asked to (then it may linger), or when its data are lost."""
    (folder / "syncer" / "snapshots" / "00000001").mkdir(parents=True, exist_ok=True)
    lived = folder / "lived"
    before = float(lived.read_text()) if lived.exists() else 0.0
    epoch = folder / "epoch"
    epoch.write_text(str(int(epoch.read_text()) + 1 if epoch.exists() else 1))
    log.emit("syncer_started", {"epoch": int(epoch.read_text()), "versions": [0], "recovered": int(before * 10)})
    began = time.monotonic()
    version = 0
    while before + time.monotonic() - began < options["seconds"] and not asked:
        time.sleep(0.05)
        version += 1
        write_file(lived, str(before + time.monotonic() - began).encode())
        share = (before + time.monotonic() - began) / options["seconds"]
        done = {"run_tokens": version * 10, "progress_ppm": int(min(share, 1) * 1e6)}
        log.emit(
            "outer_step", {"fragment": 0, "version": version, "sites": {"site-a": 1.0}, "staleness": {"site-a": 0}}
        )
        log.emit("published", {"fragment": 0, "version": version, "bytes": 1, **done})
        if "loses_after" in options and time.monotonic() - began > options["loses_after"]:
            shutil.rmtree(folder / "syncer")
            print("diloco syncer: runs/x/syncer is gone", flush=True)
            return 1
    log.emit("last_round", {"why": "asked to" if asked else "the time is over"})
    ending = "drained" if asked else "finished"
    log.emit("final", {"ending": ending, "versions": [version]})
    (folder / "ending").write_text(ending)
    time.sleep(options.get("lingers", 0.0))
    return 75 if asked else 0


def play_site(log: EventLog, folder: Path, options: dict[str, float], who: str) -> int:
    """Trains until the run has ended; with ``dies_after`` it fails once."""
    failed = folder / f"{who}.failed"
    log.emit("joined", {"incarnation": 1 + failed.exists(), "epoch": 1, "versions": [0]})
    log.emit("connected")
    began = time.monotonic()
    step = 0
    while not (folder / "ending").exists() and not asked:
        time.sleep(0.05)
        step += 1
        log.emit("step", {"step": step, "loss": 3.0, "tokens": 10, "tokens_total": 10 * step, "tokens_per_s": 200.0})
        if "dies_after" in options and not failed.exists() and time.monotonic() - began > options["dies_after"]:
            failed.write_text("")
            print("ValueError: the disk is full", flush=True)
            return 1
    fields = {"inner_steps": step, "tokens": 10 * step, "train_s": 1.0, "stall_s": 0.0}
    log.emit("meter", {"incarnation": 1 + failed.exists(), **fields})
    rest = dict.fromkeys(["refused", "in_flight", "unsent", "overwritten", "lost"], 0)
    ledger = {"processed": 10 * step, "merged": 10 * step, **rest}
    log.emit("site_done", {"ledger": {f"tokens_{name}": value for name, value in ledger.items()}, "reason": "the end"})
    return 75 if asked or (folder / "ending").read_text() == "drained" else 0


def play_observer(log: EventLog, folder: Path, options: dict[str, float]) -> int:
    """Evaluates once at the end, which takes it ``takes`` seconds, and stays for ``stays`` more."""
    while not (finals := [event for event in read_events(log.path) if event["what"] == "final"]) and not asked:
        time.sleep(0.05)
    if finals:
        time.sleep(options.get("takes", 0.0))
        facts = {"val_loss": 2.0, "val_bits_per_byte": 1.5, "tokens": 1, "whole": True}
        log.emit("eval", {**facts, "versions": finals[-1]["versions"]})
        time.sleep(options.get("stays", 0.0))
    return 0


def main() -> int:
    role, folder, who = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    options = json.loads(sys.argv[4])
    if role == "fails":
        print("one line\ndiloco site: site.id is 'x y': no name", flush=True)
        return 2
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in options else lambda number, frame: asked.append(number))
    log = EventLog(folder / "events.jsonl", who)
    try:
        if role == "syncer":
            return play_syncer(log, folder, options)
        return play_site(log, folder, options, who) if role == "site" else play_observer(log, folder, options)
    finally:
        log.close()


if __name__ == "__main__":
    sys.exit(main())
