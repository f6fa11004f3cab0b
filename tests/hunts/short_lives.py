"""Kill processes that do one thing and end (restores, backups) at a passage of each of their durable steps.

The restores are the real verb in its own process, from all three sources, on a run whose syncer had a real
configuration.  After each kill, the syncer itself opens the folder: it starts with the earlier run or with the restored
one, or says that the folder must be restored again.  Then the verb runs once more, and its result starts, accepts
updates and makes versions.  An interrupted backup leaves no backup, or a complete one.

``make crash`` draws the step and the passage of each kill; this program alone kills at every one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from diloco.cli import recover
from diloco.cli.main import main as verb
from diloco.codec.base import digest
from diloco.config import build, build_syncer
from diloco.config import compose as configs
from diloco.durable import Disk, KillingDisk, Step, locked
from diloco.models.sources import past_of
from diloco.runs.process import KILL_VARIABLE
from diloco.sync.progress import FragmentProgress, LearnerState
from diloco.syncer.backups import BackupError, Vault, back_up
from diloco.syncer.restoring import Kept
from diloco.syncer.spool import Spool
from diloco.syncer.store import STAGING, RunCard, Store, StoreError
from diloco.wire.messages import PushHeader
from tests.forked import forkserver
from tests.hunts.cutting import copied
from tests.hunts.lives import least
from tests.hunts.reporting import Counts, Hunt, Namespace, hunting
from tests.models.pasts import Hand, with_a_past
from tests.models.test_read_warm_site import checkpointed
from tests.syncer.building import stored

BOUND_S = 120.0
IMAGE, BACKUP, SITE = "image", "vault", "site"
WAYS = (IMAGE, BACKUP, SITE)
MAKING, DROPPING, GIVING_BACK = "backup", "backup dropped", "update given back"
"""What a process does to backups; the last one turns a complete update in the spool back into a partial one."""
_BEGINS = (Step.LINEAGE_FOLDER, Step.LINEAGE_IMAGE, Step.LINEAGE_CARD, Step.LINEAGE_PRUNE)
_JOURNAL = (Step.JOURNAL_BEGIN, Step.JOURNAL_WRITE, Step.JOURNAL_SYNC, Step.JOURNAL_MARK, Step.JOURNAL_END)
_SNAPSHOT = (Step.SNAPSHOT_BEGIN, Step.SNAPSHOT_FILE, Step.SNAPSHOT_RENAME, Step.SNAPSHOT_FOLDER)
_PRUNES = (Step.SNAPSHOT_PRUNE, Step.JOURNAL_PRUNE)
_STAGED = (Step.RESTORE_BEGIN, Step.RESTORE_MOVE, Step.RESTORE_END)
SHORT: Mapping[str, frozenset[Step]] = {
    IMAGE: frozenset({Step.FOLDER, *_BEGINS, *_JOURNAL, *_SNAPSHOT, *_PRUNES}),
    BACKUP: frozenset({Step.FOLDER, Step.RESTORE_FETCH, *_BEGINS, *_JOURNAL, *_SNAPSHOT, *_PRUNES, *_STAGED}),
    SITE: frozenset({Step.FOLDER, Step.CARD, *_BEGINS, *_JOURNAL, *_SNAPSHOT, *_PRUNES, *_STAGED}),
    MAKING: frozenset({Step.BACKUP_FILE, Step.BACKUP_WHOLE}),
    DROPPING: frozenset({Step.BACKUP_DROP}),
    GIVING_BACK: frozenset({Step.SPOOL_BACK}),
}
"""Every durable step of each process."""
PAYLOAD = b"payload" * 100
HEADER = PushHeader(
    "run", "a", 1, 0, 1, 0, 10, 1, 1, 1, False, "fp32", len(PAYLOAD), 175, hashlib.sha256(PAYLOAD).hexdigest()
)


class CountingDisk(Disk):
    """Counts how often each step is passed."""

    def __init__(self) -> None:
        self.passages: Counter[str] = Counter()

    def reached(self, step: Step) -> None:
        self.passages[str(step)] += 1


def _restores(arguments: list[str], death: str, counts: Path | None, said: Path) -> None:
    """Run the verb in this process, and end with its exit code."""
    torch.set_num_threads(1)
    if death:
        os.environ[KILL_VARIABLE] = death
    disk = CountingDisk()
    if counts is not None:
        recover.disk_from_environment = lambda: disk  # type: ignore[attr-defined]
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        code = verb(["restore", *arguments])
    said.write_text(text.getvalue())
    if counts is not None:
        counts.write_text(json.dumps(disk.passages))
    os._exit(code)


def _backs_up(what: str, data: Path, vault: str, step: str, passage: int, counts: Path | None) -> None:
    disk = CountingDisk() if counts is not None else KillingDisk(Step(step), passage)
    place = Vault(vault, disk)
    if what == MAKING:
        # The existing backup is as recent: rename it as an earlier release would, so that another one is made.
        made = Path(vault) / "past" / next(iter(place.backups("past")))
        made.rename(made.with_name("20261121T040317.000000Z"))
        back_up(data, place)
    else:
        place.drop("past", next(iter(place.backups("past"))))
    if counts is not None and isinstance(disk, CountingDisk):
        counts.write_text(json.dumps(disk.passages))


def _gives_back(folder: Path, step: str, passage: int) -> None:
    """Do as when a site sends an update again that is complete here and not decided yet."""
    spool = Spool(folder, KillingDisk(Step(step), passage))
    partial = spool.open_partial(HEADER)
    partial.write(memoryview(PAYLOAD))
    spool.settle(spool.keep(partial), keep=False, back=partial)


@dataclass(frozen=True)
class Stood:
    """The state of the run in a data folder: its lineage, and each fragment's version and digest."""

    lineage: int
    versions: tuple[int, ...]
    digests: tuple[str, ...]


class ShortLives:
    """A stopped run with all its sources for a restore, and the kills."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run = with_a_past(self.folder, 3)
        self.data = self.run / "syncer"
        self.config = configs.read(self.run / "config.yaml")
        self.pristine = self.folder / "pristine"
        shutil.copytree(self.data, self.pristine)
        self.image, self.vault, self.site = (self.folder / name for name in WAYS)
        with contextlib.redirect_stdout(io.StringIO()):
            left_out = ["--without", "site=b:versions=3..4", "--out", str(self.image)]
            assert verb(["replay", str(self.run), *left_out]) == 0
        self._warm()
        back_up(self.data, Vault(str(self.vault)))
        self.before = self.stood(self.data)
        told = json.loads((self.image / "image.json").read_text())
        self.wanted = {IMAGE: tuple(told["digests"]), BACKUP: self.before.digests, SITE: self.before.digests}

    def _warm(self) -> None:
        """Make a site with the newest published values as its base."""
        hand = Hand(self.config)
        values = hand.syncer.holdings.values
        parts = [FragmentProgress(v.version, next_sequence=5, tokens_merged=400, updates_merged=4) for v in values]
        bases = tuple(each.published.clone() for each in values)
        known = {"run_id": "past", "layout_fingerprint": hand.layout.fingerprint, "digests": [digest(b) for b in bases]}
        hand.stop()
        checkpointed(self.site, LearnerState(parts, epoch=30, step=9), bases=bases, **known)
        copied(self.pristine, self.data)

    # --- kills ---------------------------------------------------------------------------------------------------

    @cache  # noqa: B019  # It lives as long as the run's folder.
    def passages(self, what: str) -> dict[str, int]:
        """Return how often each step occurs in ``what`` without a kill."""
        if what == GIVING_BACK:
            return {str(Step.SPOOL_BACK): 2}
        self._lay_out(what)
        counts = self.folder / "counts.json"
        if what in WAYS:
            assert self._restore(what, "", counts) == 0, self.said
        else:
            self._process(_backs_up, what, self.data, str(self._copied_vault()), "", 0, counts)
        found: dict[str, int] = json.loads(counts.read_text())
        return found

    def kill(self, what: str, step: str, passage: int) -> None:
        """Kill once, and check everything that must be true after it."""
        self._lay_out(what)
        if what not in WAYS:
            (self._kill_giving_back if what == GIVING_BACK else self._kill_backup)(what, step, passage)
            return
        code = self._restore(what, f"{step}:{passage}")
        assert code == -9, f"it ended with {code}, not by a death: {self.said}"
        left = self._left(what)
        code = self._restore(what, "")
        if left is None or what == IMAGE:
            assert code == 0, f"the verb run again ended with {code}: {self.said}"
        elif left != self.before:
            assert code == 1, f"a restored run is restored once more with {code}: {self.said}"
            assert self.stood(self.data) == left, "what was restored is another run after a refusal"
        self._goes_on(what)

    def _left(self, what: str) -> Stood | None:
        """Return the run's state as a syncer would recover it; None when it asks for another restore, as it may."""
        if not self._is_there(self.data):
            return None
        try:
            found = self.stood(copied(self.data, self.folder / "looked-at"))
        except StoreError as error:
            if what == IMAGE or "restore it again" not in str(error):
                raise AssertionError(f"it does not start: {error}") from error
            return None
        restored = found.lineage > 1
        versions = tuple(version + restored for version in self.before.versions)
        assert found.versions == versions, f"{found} is neither the run before nor the restored one"
        assert found.digests == (self.wanted[what] if restored else self.before.digests), found
        assert restored or what == IMAGE, "a lost run is back in its old lineage"
        return found

    def _is_there(self, data: Path) -> bool:
        return any(path.name not in ("lock", STAGING) for path in data.iterdir()) or (data / STAGING).exists()

    def _goes_on(self, what: str) -> None:
        """Check that the syncer starts with the wanted values, and that a site's updates make versions."""
        found = self.stood(self.data)
        assert found.lineage > 1, "nothing was restored in the end"
        assert found.digests == self.wanted[what], "the restored values are not the wanted ones"
        assert json.loads((self.data / "run.json").read_text())["lineage"] == found.lineage
        assert not (self.data / STAGING).exists(), "something is left of a restore"
        leftovers = list(self.data.rglob(".*.tmp"))
        assert not leftovers, f"a kill left files that no code removes: {leftovers}"
        hand = Hand(self.config)
        try:
            hand.push("a", 0, hand.join("a"))
            assert hand.versions() == [found.versions[0] + 1, *found.versions[1:]]
        finally:
            hand.stop()
        rebuilt = Kept(self.data).replay(past_of(str(self.run)).rules(), verify=True)
        assert rebuilt.machine.state.lineage == found.lineage

    def _kill_backup(self, what: str, step: str, passage: int) -> None:
        vault = self._copied_vault()
        code = self._process(_backs_up, what, self.data, str(vault), step, passage, None)
        assert code == -9, f"it ended with {code}, not by a death"
        place = Vault(str(vault))
        names = list(place.backups("past"))
        assert len(names) in ((1, 2) if what == MAKING else (0, 1)), names
        for name in names:
            back = self.folder / "back"
            shutil.rmtree(back, ignore_errors=True)
            try:
                place.fetch("past", name, back)
            except BackupError as error:
                raise AssertionError(f"a listed backup is incomplete: {error}") from error
            assert self.stood(back) == self.before
        for name in place.leftovers("past"):
            place.drop("past", name)
        assert place.leftovers("past") == []

    def _kill_giving_back(self, what: str, step: str, passage: int) -> None:
        folder = self.folder / what
        shutil.rmtree(folder, ignore_errors=True)
        code = self._process(_gives_back, folder, step, passage)
        assert code == -9, f"it ended with {code}, not by a death"
        spool = Spool(folder)
        if passage == 1:
            assert stored(spool, spool.reference("a", 0, 1, HEADER.digest), HEADER.digest) == PAYLOAD
            spool.sweep(set())
            assert not list(folder.glob("*/*.update"))
        else:
            partial = spool.open_partial(HEADER)
            assert (partial.offset, partial.hash.text()) == (len(PAYLOAD), HEADER.digest)
            partial.close()

    # --- parts ---------------------------------------------------------------------------------------------------

    def stood(self, data: Path) -> Stood:
        """Return the state of the run in ``data``, as its syncer recovers it."""
        plan = build_syncer.plan(self.config, build.layout_of(self.config))
        card = RunCard(plan.agreement.run_id, plan.agreement.layout_fingerprint, plan.shared_digest)
        rules = past_of(str(self.run)).rules()
        with locked(data):
            store = Store(data, card)
            try:
                state = store.recover(rules).machine.state
            finally:
                store.journal.close()
        fragments = state.fragments
        return Stood(state.lineage, tuple(each.version for each in fragments), tuple(each.digest for each in fragments))

    def _lay_out(self, what: str) -> None:
        (self.run / "events.jsonl").unlink(missing_ok=True)  # It contains the previous restore.
        if what in (BACKUP, SITE):
            shutil.rmtree(self.data, ignore_errors=True)
            self.data.mkdir()
        else:
            copied(self.pristine, self.data)

    def _copied_vault(self) -> Path:
        return copied(self.vault, self.folder / "copied-vault")

    def _restore(self, way: str, death: str, counts: Path | None = None) -> int | None:
        source = ["--from-site", str(self.site)] if way == SITE else ["--from", str(self.folder / way)]
        said = self.folder / "said"
        said.unlink(missing_ok=True)
        return self._process(_restores, [str(self.run), *source], death, counts, said)

    @property
    def said(self) -> str:
        path = self.folder / "said"
        return path.read_text() if path.exists() else "it said nothing"

    def _process(self, work: Callable[..., None], *arguments: object) -> int | None:
        process = forkserver().Process(target=work, args=arguments, name="short-lived")
        process.start()
        process.join(BOUND_S)
        if process.exitcode is None:
            process.kill()
            process.join(BOUND_S)
            raise AssertionError(f"it still ran after {BOUND_S} s: {arguments}")
        return process.exitcode


def draw(lives: ShortLives, dice: random.Random, killed: Counter[str], deaths: int) -> None:
    """Kill ``deaths`` times, each time at a step with the fewest kills."""
    places = [(what, step) for what, steps in SHORT.items() for step in sorted(steps)]
    for _ in range(deaths):
        what, step = least(places, dice, lambda place: killed[named(*place)])
        lives.kill(what, step, dice.randint(1, lives.passages(what)[step]))
        killed[named(what, step)] += 1


def named(what: str, step: str) -> str:
    """Return the name of a kill's place in a hunt's counts."""
    return f"{f'restore from {what}' if what in WAYS else what}: {step}"


@hunting(stride=(1, "kill at every STRIDE-th passage"))
def main(hunt: Hunt, asked: Namespace) -> Counts:
    lives, killed, number = ShortLives(hunt.folder), Counter[str](), 0
    for what in SHORT:
        for step, passages in sorted(lives.passages(what).items()):
            for passage in range(1, passages + 1):
                number += 1
                if number % asked.stride == 0:
                    with hunt.judging(f"{what} at {step}:{passage}"):
                        lives.kill(what, step, passage)
                    killed[named(what, step)] += 1
    return {"kills": killed.total(), "killed_at": dict(sorted(killed.items()))}
