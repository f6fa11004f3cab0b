"""``diloco replay``: compute the outer steps of a run again, as they were or without some of their updates."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.launch.arguments import OneLineParser, limit_threads
from diloco.launch.errors import ConfigError, ExitCode, VerbError
from diloco.launch.past import past_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.launch.past import Past
    from diloco.sync.rounds import Selection
    from diloco.syncer.replaying import ReplayerWithout, Rules

DOES = """Computes a run's outer steps again from its syncer's own data, which is only read, also while the syncer runs.

  diloco replay runs/nimble-otter                             every kept version against its digest in the journal
  diloco replay runs/nimble-otter --without site=site-b:versions=17..19 --out without-b
                                                              the state that the same journal gives without those
                                                              updates; `diloco restore` takes a run up from there

The journal's rounds stand: what else was merged with an update that is left out is merged without it, with the weights
that the others have among themselves.  A step left empty is skipped and keeps its number."""
LISTED_MAX = 20


def main(arguments: Sequence[str]) -> ExitCode:
    """Run the verb."""
    parser = OneLineParser(prog="diloco replay", description=DOES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN_DIR", help="a run's folder, its name below runs/, or its data folder")
    told = "site=NAME:versions=FIRST..LAST (into which they were merged) or :sequences=..., and :fragment=N for one"
    parser.add_argument("--without", action="append", default=[], metavar="UPDATES", help=f"leave out {told}")
    parser.add_argument("--and-later", action="store_true", help="and every update trained on a base with those inside")
    parser.add_argument("--to", type=int, metavar="VERSION", help="end every fragment at this version")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the result there: image and model.safetensors")
    parser.add_argument("--verify", action="store_true", help="from the oldest snapshot, and compare every other one")
    parser.add_argument("--json", action="store_true", help="say it as one JSON object")
    given = parser.parse_args(arguments)
    selections = _selections(given.without)
    if given.to is not None and given.to < 0:
        raise ConfigError(f"--to is {given.to}: a version, from 0 on")
    if given.out is not None and given.out.exists():
        raise ConfigError(f"--out is {str(given.out)!r}: it exists already, and an image gets a folder of its own")
    past = past_of(given.run)
    limit_threads(1)
    facts = _replay(past, past.rules(), selections, given)
    if given.json:
        print(json.dumps(facts))
    return ExitCode.OK


def _selections(texts: Sequence[str]) -> list[Selection]:
    from diloco.sync.rounds import parse_selection

    try:
        return [parse_selection(text) for text in texts]
    except ValueError as error:
        raise ConfigError(f"--without {error}") from error


def _replay(past: Past, rules: Rules, selections: Sequence[Selection], given: argparse.Namespace) -> dict[str, object]:
    """Replay; print the result as text unless JSON is wanted, and return the values for JSON."""
    from diloco.launch import build
    from diloco.syncer.restoring import Kept, KeptError
    from diloco.syncer.snapshots import Image, ImageError, full_parameters, write_image

    notes: list[str] = []
    try:
        kept = Kept(past.data, notes.append)
        rebuilt = kept.replay(rules, selections, given.to, and_later=given.and_later, verify=given.verify)
    except KeptError as error:
        raise VerbError(ExitCode.FAILED, str(error)) from error
    facts = _facts(past, rebuilt, [str(chosen) for chosen in selections], notes)
    if given.out is not None:
        parameters = full_parameters(build.layout_of(past.config), [values.evaluated for values in rebuilt.values])
        try:
            write_image(given.out, Image(kept.card.facts(), tuple(rebuilt.values), rebuilt.held, facts), parameters)
        except ImageError as error:
            raise VerbError(ExitCode.FAILED, str(error)) from error
        facts["out"] = str(given.out)
    if not given.json:
        print("\n".join([*(f"note: {note}" for note in notes), *_lines(rebuilt)]))
        if given.out is not None:
            print(f"kept in {given.out}: diloco restore {given.run} --from {given.out} takes the run up from there")
    return facts


def _facts(past: Past, rebuilt: ReplayerWithout, selections: list[str], notes: list[str]) -> dict[str, object]:
    return {
        "run": past.config.run.name,
        "lineage": rebuilt.machine.state.lineage,
        "without": selections,
        "from_versions": rebuilt.began_at,
        "versions": [values.version for values in rebuilt.values],
        "digests": [values.digest for values in rebuilt.values],
        "records": rebuilt.records,
        "versions_compared": rebuilt.compared,
        "snapshots_compared": rebuilt.snapshots,
        "left_out": [asdict(out) for out in rebuilt.left_out],
        "skipped": [{"fragment": fragment, "version": version} for fragment, version in rebuilt.skipped],
        "trained_on_old_base": dict(sorted(rebuilt.on_old_base.items())),
        "waiting_on_old_base": rebuilt.old_base_waiting,
        "notes": notes,
    }


def _lines(rebuilt: ReplayerWithout) -> list[str]:
    """Return the result as lines of text."""
    began, ended = (" ".join(map(str, v)) for v in (rebuilt.began_at, [values.version for values in rebuilt.values]))
    lines = [f"lineage {rebuilt.machine.state.lineage}: {rebuilt.records:,} records, versions {began} to {ended}"]
    lines.append(f"{rebuilt.compared:,} versions have the digest that the journal says, bit for bit")
    if rebuilt.snapshots:
        lines.append(f"{rebuilt.snapshots} snapshots hold what the journal gives, bit for bit")
    for out in rebuilt.left_out[:LISTED_MAX]:
        where = f"{out.site}, fragment {out.fragment}, sequence {out.sequence}"
        why = "" if out.chosen else " (trained on what is left out)"
        lines.append(f"left out: {where}, merged into version {out.version}, {out.tokens:,} tokens{why}")
    if len(rebuilt.left_out) > LISTED_MAX:
        lines.append(f"left out: {len(rebuilt.left_out) - LISTED_MAX} more (--json has them all)")
    for fragment, version in rebuilt.skipped:
        lines.append(f"skipped: version {version} of fragment {fragment}: nothing of it remained; it keeps its number")
    if rebuilt.left_out:
        by_site = ", ".join(f"{site} {count}" for site, count in sorted(rebuilt.on_old_base.items())) or "none"
        count = sum(rebuilt.on_old_base.values())
        kept = "and are merged as they are (--and-later leaves them out too)" if count else "and are kept"
        lines.append(
            f"{count} later updates were trained on a base with those inside ({by_site}) {kept}; "
            f"{rebuilt.old_base_waiting} more wait"
        )
    return lines
