"""Short runs of hunts (admission, swarm, layouts, fuzz, fuzz_inputs), and proof that each can find a violation."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.sim.site_process import Trainer
from diloco.sync import fates
from diloco.sync.options import HealthOptions
from tests.hunts import admission, fuzz, fuzz_inputs, layouts, statuses, swarm
from tests.hunts.asking import World, good, methods
from tests.hunts.attacks import strict
from tests.hunts.fuzz import Findings, Siege, growth_of
from tests.hunts.fuzz_inputs import readers, run_piece
from tests.hunts.layouts import Found, differing, run_of
from tests.hunts.reporting import Hunt
from tests.hunts.swarm import pieces
from tests.hunts.target import View, guarded
from tests.hunts.test_statuses import ELSEWHERE

Hunted = Callable[..., Any]
Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.slow  # The hunts are tested where they run, in .ci/run.


def test_bad_updates_are_refused_or_bounded_and_clean_ones_enter(hunted: Hunted) -> None:
    found, _ = hunted(admission, "--places", "4", "--rounds", "24")
    assert (found["violations"], found["false_refusals"], found["updates"]) == (0, 0, 24 * 8)
    for kind in admission.ALWAYS_REFUSED:
        assert found[f"{kind}_refused"] == 4


def test_the_hunt_sees_a_syncer_that_admits_everything(hunted: Hunted, monkeypatch: Patch) -> None:
    monkeypatch.setattr(admission, "HealthOptions", lambda: HealthOptions(policy="admit"))
    _, said = hunted(admission, "--places", "1", "--rounds", "30")
    assert ": scale of " in said


# --- The swarm, and how every hunt tells what it finds ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name", "broken", "more"),
    [
        (fates, "all_final", lambda turn, index: False, []),
        (Trainer, "complete", lambda self, ready: False, ["--syncers", "several"]),
    ],
)
def test_a_violation_is_one_line_with_the_command_that_replays_it(
    owner: object, name: str, broken: object, more: list[str], hunted: Hunted, monkeypatch: Patch
) -> None:
    """The hunt's processes are forked, so that they inherit the patched function."""
    options = ["--seed", "3", "--seeds", "1", *more]
    found, _ = hunted(swarm, *options, "--jobs", "1")
    assert (found["hunt"], found["seed"], found["ran"]["seeds"], found["violations"]) == ("swarm", 3, 1, 0)
    monkeypatch.setattr(owner, name, broken)
    found, said = hunted(swarm, *options, "--jobs", "1")
    assert said.startswith(f"python -m tests.hunts.swarm {' '.join(options)}  # liveness: ")
    assert (found["violations"], len(said.splitlines())) == (1, 2)


def test_a_replay_has_the_options_that_were_given_as_they_are_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"at_step": ("any", "where"), "settings": ("", "more of them"), "n": (10, "how many")}
    hunt = Hunt("example", "An example.", **options)
    hunt.asked(["--settings", "a=1 b=2", "--n", "3"])
    hunt.violated("it broke", at_step="journal.sync", n=10)
    (tmp_path / "evidence").touch()
    with hunt.judging("a run", tmp_path):
        raise AssertionError("two\nlines")
    first, second = hunt.violations
    assert first == "python -m tests.hunts.example --seed 0 --at-step journal.sync --settings 'a=1 b=2'  # it broke"
    kept = Path(second.partition("kept in ")[2].partition(":")[0])
    assert second.startswith("python -m tests.hunts.example --seed 0 --settings 'a=1 b=2' --n 3  # a run, kept in ")
    assert ": two lines (test_admission.py:" in second
    assert (kept / "evidence").exists()
    assert hunt.finish({}) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["violations"] == 2
    shutil.rmtree(kept)


def test_pieces_are_all_the_seeds_once() -> None:
    assert [seed for piece in pieces(7, 120) for seed in piece] == list(range(7, 127))


# --- The layout of a site's ranks changes no bit: a short run of two layouts, and a long one of all ------------------


TWO = {"a": ("fsdp", 2), "b": ("tp", 2)}
FOUR = {"a": ("hsdp", 4), "b": ("tp_fsdp", 4)}


@pytest.mark.parametrize(
    ("layouts_of", "adopt"), [(TWO, "rebase"), (TWO, "blend"), (TWO, "overwrite"), (FOUR, "rebase")]
)
def test_two_sites_of_two_layouts_exchange_what_two_processes_do(
    tmp_path: Path, layouts_of: dict[str, tuple[str, int]], adopt: str
) -> None:
    mixed = run_of(tmp_path / "mixed", layouts_of, 2, adopt)
    plain = run_of(tmp_path / "plain", {"a": ("plain", 1), "b": ("plain", 1)}, 2, adopt)
    assert differing(mixed, plain) == []
    assert len(plain["payloads"]) == 2 * 3 * 2, "two sites, three fragments, two rounds"
    assert len(plain["versions"]) == 3 * 2
    assert len(plain["held"]) == 2 * 2 * 3, "two sites, two rounds of three steps"


@pytest.mark.hunt
@pytest.mark.parametrize("adopt", ["rebase", "overwrite"])
def test_sites_of_every_layout_and_of_four_together(adopt: str, hunted: Hunted) -> None:
    found, _ = hunted(layouts, "--rounds", "3", "--adopt", adopt, *(["--mixed"] if adopt == "overwrite" else []))
    assert (found["violations"], found["mismatches"]) == (0, 0), found
    assert found["compared"] >= 80


def test_one_bit_in_one_place_is_a_difference() -> None:
    found: Found = {"payloads": {("a", 0, 1): "p"}, "versions": {(0, 1): "v"}, "held": {("a", 1): "h"}}
    assert differing(found, found) == []
    assert differing(found, found | {"payloads": {("a", 0, 1): "q"}}) == ["payloads ('a', 0, 1)"]
    assert differing(found, found | {"versions": {}}) == ["versions (0, 1)"]
    assert differing(found, found | {"held": {("a", 1): "h", ("a", 2): "h"}}) == ["held ('a', 2)"]


# --- Fuzzed calls ----------------------------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path) -> World:
    fortress, _ = guarded("tokens", tmp_path, ["site-a"])
    return World("site-a", "site-b", fortress.layout(), fortress.agreement(), "f00dfeed", 2, [3, 3], [3, 3])


def test_a_share_of_the_hunt(hunted: Hunted) -> None:
    found, _ = hunted(fuzz, "--n", "400", "--seed", "9000", "--variant", "tokens")
    assert (found["hunt"], found["unknown_or_internal"], found["violations"]) == ("fuzz", 0, 0)
    assert found["calls"] >= 400
    for answer in ("OK", "INVALID_ARGUMENT", "PERMISSION_DENIED", "DATA_LOSS", "refused/non_finite", "UNIMPLEMENTED"):
        assert found["answers"][answer] > 0, found


def test_every_method_has_a_good_request_and_every_class_an_attack_drawn_from_the_seed(world: World) -> None:
    assert set(good(world, random.Random(1))) == set(methods())
    calls = strict(world, random.Random(2))
    rows = {next(calls).row for _ in range(3000)}
    elsewhere = {*ELSEWHERE, statuses.DUPLICATE, statuses.CONFLICT}  # Without a known update there are none of these.
    assert rows == set(statuses.ROWS) - elsewhere
    first, again = (strict(world, random.Random(7)) for _ in range(2))
    assert all(next(first) == next(again) for _ in range(200)), "the same seed draws the same calls"


@pytest.mark.parametrize(
    ("answer", "details", "words"),
    [
        ("INTERNAL", "", "INTERNAL"),
        ("UNKNOWN", "", "UNKNOWN"),
        ("OK", "", "where INVALID_ARGUMENT is due"),
        ("INVALID_ARGUMENT", "x" * 2000, "2000 characters"),
        ("INVALID_ARGUMENT", "cannot open /home/x/run.json", "tell too much"),
        ("INVALID_ARGUMENT", 'Traceback: File "a.py"', "tell too much"),
        ("INVALID_ARGUMENT", "a\nb", "break a line"),
    ],
)
def test_a_wrong_answer_is_a_complaint(answer: str, details: str, words: str) -> None:
    due = frozenset({"INVALID_ARGUMENT"})
    assert words in str(statuses.complaint("row", due, answer, details))
    assert statuses.complaint("row", due, "INVALID_ARGUMENT", "steps is 0: at least 1") is None


def test_growth_is_judged_by_many_looks() -> None:
    assert growth_of([]) == 0
    assert growth_of([100, 100, 130, 100, 100, 100, 90, 100]) == pytest.approx(-0.05)
    assert growth_of(list(range(100, 140))) > 0.2


def view(**changes: object) -> View:
    fields = {"state": "s", "watermarks": 5, "phase": "running", "rss_bytes": 1, "threads": 1, "files": 1, "partial": 0}
    return View(**(fields | {"decoded": 7, "counters": {}, "said": 0, "forged": []} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "after", "accepted", "words"),
    [
        ("strict", view(state="t"), 0, "the run changed"),
        ("spoiled", view(state="t", watermarks=6), 2, "2 updates were accepted, but 1 are there"),
        ("spoiled", view(), 1, "the run has not changed"),
        ("strangers", view(decoded=8), 0, "1 payloads decoded"),
        ("impostors", view(counters={"payload_bytes_in": 9}), 0, "9 bytes were received"),
        ("strict", view(counters={"internal": 1}), 0, "an internal error"),
        ("strict", view(said=900), 0, "900 lines"),
        ("strict", view(forged=["a\nb"]), 0, "a forged line was logged"),
        ("strict", view(partial=50), 0, "half received"),
    ],
)
def test_what_a_look_inside_shows_is_judged(world: World, kind: str, after: View, accepted: int, words: str) -> None:
    siege = Siege.__new__(Siege)
    siege.findings = Findings()
    siege.workers = [type("Worker", (), {"world": world})()]
    siege._judge(kind, view(), after, accepted)
    assert any(words in complaint for complaint in siege.findings.complaints), siege.findings.complaints
    siege.findings = Findings()
    siege._judge(kind, view(), view(), 0)
    assert not siege.findings.complaints


# --- Fuzzed inputs ---------------------------------------------------------------------------------------------------


def test_a_share_of_the_inputs(hunted: Hunted) -> None:
    """A part of the thirty thousand inputs that .ci/run takes."""
    found, _ = hunted(fuzz_inputs, "--n", "1000", "--seed", "9000", "--jobs", "1")
    assert (found["hunt"], found["inputs"], found["violations"]) == ("fuzz_inputs", 1000, 0)
    assert found["taken"] > 50, "nothing was accepted"
    assert found["refused"] > 500, "nothing was refused"


def test_every_reader_takes_what_is_good(tmp_path: Path) -> None:
    for name, reader in readers(tmp_path).items():
        for raw in reader.samples:
            try:
                reader.read(raw)
            except reader.words as error:
                raise AssertionError(f"{name} refuses what it wrote: {error}") from error


@pytest.mark.parametrize(
    ("changes", "seed", "words"),
    [
        ({"diloco.sync.journal.chain_after": lambda before, body: bytes(32)}, 5, ("never written",)),
        ({"diloco.codec.entropy.EntropyCodec._check_header": lambda *_: None}, 3, ("zstd", "memoryerror")),
        (  # The kernels check it themselves.
            {"diloco.codec.base.kernels": lambda *_: None, "diloco.codec.blocks.is_finite": lambda values: True},
            3,
            ("not finite",),
        ),
    ],
    ids=["a chain that is not followed", "a frame that lies about its size", "a value that is not finite"],
)
def test_a_reader_that_does_not_look_is_found(
    changes: dict[str, object], seed: int, words: tuple[str, ...], monkeypatch: Patch
) -> None:
    for name, careless in changes.items():
        monkeypatch.setattr(name, careless)
    failures = run_piece(seed, 1500).failures
    assert any(word in failure.lower() for failure in failures for word in words), failures
