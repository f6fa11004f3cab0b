"""A loop that is a site: how it counts, leaves, fails, and goes on."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diloco
from diloco.config import run_dir
from tests.integrations.serving import (
    TOKENS,
    Served,
    backward,
    cold_model,
    mean_loss,
    serving,
    small_model,
    supplied,
    until_stop,
    values,
)
from tests.runs.processes import wait_for


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Loop:
    """Somebody's own loop."""

    def __init__(self, served: Served, model: nn.Module | None = None, **arguments: Any) -> None:
        self.model = model or cold_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        usual = {"syncer": served.address, "site": "fra", "tokens_per_step": TOKENS}
        self.outer = diloco.join(self.model, self.optimizer, **{**usual, **arguments})

    def step(self, number: int = 0) -> bool:
        backward(self.model, number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.outer.should_stop

    def settle(self) -> None:
        """Nothing is on its way any more, so that no later word of the syncer's makes a checkpoint an old one."""
        wait_for(lambda: self.outer.ledger["in_flight"] == 0, "the fates of what was sent")

    def save(self, file: io.BytesIO) -> None:
        self.settle()
        torch.save({"model": self.model.state_dict(), "outer": self.outer.state_dict()}, file)

    def broken_off(self, steps: int, then: Callable[[], object]) -> None:
        """So many steps, ``then``, and an exception of the loop's own."""
        with self.outer:
            for number in range(steps):
                self.step(number)
            then()
            _ = 1 / 0


def balanced(ledger: dict[str, int]) -> bool:
    return ledger["processed"] == sum(count for name, count in ledger.items() if name != "processed")


def test_a_loop_trains_a_run_to_its_end(place: Path) -> None:
    with serving(place, "run.tokens=1500") as served:
        loop = Loop(served)
        with loop.outer:
            assert loop.outer.progress == 0.0
            first_loss = mean_loss(loop.model)
            steps = until_stop(loop.step)
            assert loop.outer.progress == 1.0
        assert loop.outer.ledger == {
            **dict.fromkeys(loop.outer.ledger, 0),
            "processed": 10 * steps,
            "merged": 10 * steps,
        }
        assert steps >= 150
        assert mean_loss(loop.model) < first_loss
        before = values(loop.model)
        loop.step()  # It is its own again: the hook is gone, and nobody counts.
        assert loop.outer.steps == steps
        assert not all(torch.equal(before[name], each) for name, each in values(loop.model).items())


def test_several_optimizers_are_one_step(place: Path) -> None:
    model = cold_model()
    first, last = (torch.optim.SGD(part.parameters(), lr=0.05) for part in (model[0], model[2]))
    with serving(place) as served:
        outer = diloco.join(model, [first, last], syncer=served.address, site="fra")
        with outer:
            for number in range(3):
                outer.tokens(4)
                outer.tokens(3, loss=backward(model, number))
                first.step()
                last.step()
        assert (outer.steps, outer.ledger["processed"]) == (3, 21)


def test_steps_may_be_told_without_hooks(place: Path) -> None:
    with serving(place, "run.tokens=300") as served:
        loop = Loop(served, hooks=False, tokens_per_step=None)
        with loop.outer:
            steps = until_stop(lambda number: loop.step(number) or loop.outer.step(tokens=TOKENS, loss=0.5))
        assert loop.outer.ledger["processed"] == TOKENS * steps == TOKENS * loop.outer.steps


def test_a_step_that_nobody_has_measured_is_refused(place: Path) -> None:
    with serving(place) as served:
        loop = Loop(served, tokens_per_step=None)
        words = "tokens of this step are 0: give tokens_per_step, or call outer.tokens"
        with pytest.raises(ValueError, match=words), loop.outer:
            loop.step()


def test_a_wrong_call_is_refused_in_words(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "HELD_WAIT_S", 0.1)
    with serving(place) as served:
        loop = Loop(served)
        assert loop.outer.state_dict() == {}
        loop.outer.load_state_dict({})
        with pytest.raises(ValueError, match=r"state is nothing that state_dict gave: 'steps' is not in it"):
            loop.outer.load_state_dict({"model": 1})
        with loop.outer:
            for call, words in (
                (loop.outer.start, "start is called twice"),
                (loop.outer.step, "hooks is True: the optimizer's own hook has counted"),
                (lambda: loop.outer.tokens(3), "tokens_per_step=10 has said it"),
                (lambda: loop.outer.load_state_dict(loop.outer.state_dict()), "call it before the with"),
            ):
                with pytest.raises(ValueError, match=words):
                    call()
            with pytest.raises(ValueError, match=r"folder is 'runs/mine/sites/fra': .*started twice"):
                Loop(served, model=small_model()).outer.start()
        loop.outer.leave()  # Once is enough, twice is no harm.


def test_the_loops_own_exception_goes_on_with_a_note(place: Path) -> None:
    with serving(place) as served:
        loop = Loop(served)
        beside: list[threading.Thread] = []
        with pytest.raises(ZeroDivisionError) as raised:
            loop.broken_off(7, lambda: beside.extend(loop.outer._agent.threads))  # type: ignore[union-attr]
        (note,) = raised.value.__notes__
        assert note.startswith("diloco: site fra left run mine while it trained, its tokens: ")
        assert "20 unsent" in note or "70 unsent" in note
        assert beside
        assert not any(thread.is_alive() for thread in beside)
        assert loop.outer.ledger["processed"] == 70

        # Without a state it is taken in cold: it holds the run's version, and what was not sent is lost, and counted.
        again = Loop(served)
        with again.outer:
            assert again.outer.steps in (0, 5)
            assert all(torch.isfinite(each).all() for each in values(again.model).values())
            for number in range(5):
                again.step(number)
        ledger = again.outer.ledger
        assert (ledger["processed"], ledger["merged"] + ledger["lost"]) == (120, 120)
        assert balanced(ledger)
        assert ledger["lost"] in (20, 70)


def test_a_loop_goes_on_from_its_own_checkpoint(place: Path) -> None:
    with serving(place, "run.tokens=600") as served:
        loop = Loop(served)
        file = io.BytesIO()
        with pytest.raises(ZeroDivisionError):
            loop.broken_off(23, lambda: loop.save(file))
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        again = Loop(served)
        again.model.load_state_dict(saved["model"])
        again.outer.load_state_dict(saved["outer"])
        with again.outer:
            assert again.outer.steps == 23
            until_stop(again.step)
        ledger = again.outer.ledger
        assert ledger["processed"] == TOKENS * again.outer.steps
        assert (ledger["lost"], balanced(ledger)) == (0, True)


def test_what_was_not_in_the_checkpoint_is_lost_and_counted(place: Path) -> None:
    with serving(place, "run.tokens=600") as served:
        loop = Loop(served)
        saved: list[dict[str, Any]] = []

        def save_and_train_on() -> None:
            loop.settle()
            saved.extend([values(loop.model), loop.outer.state_dict()])
            for number in range(4):
                loop.step(number)

        with pytest.raises(ZeroDivisionError):
            loop.broken_off(12, save_and_train_on)
        again = Loop(served)
        again.model.load_state_dict(saved[0])
        again.outer.load_state_dict(saved[1])
        with again.outer:
            again_from = again.outer.steps
            until_stop(again.step)
        ledger = again.outer.ledger
        # Of 160 tokens the checkpoint holds 120; where the syncer had more by then it goes on from what that had.  An
        # update is made a step later for each step at whose end the one before it was still on its way.
        assert 12 <= again_from <= 16
        assert ledger["processed"] == 160 + TOKENS * (again.outer.steps - again_from)
        assert balanced(ledger)
        assert 0 < ledger["lost"] <= 70


def test_a_state_of_another_layout_is_refused(place: Path) -> None:
    with serving(place, "outer.num_fragments=2") as served:
        loop = Loop(served)
        with loop.outer:
            state = loop.outer.state_dict()
    with serving(place / "other", "outer.num_fragments=1") as served:
        again = Loop(served, folder=place / "again")
        again.outer.load_state_dict(state)
        with pytest.raises(ValueError, match=r"state is of another run, or another release: num_fragments is 1"):
            again.outer.start()


def test_a_site_that_is_put_out_says_so(place: Path) -> None:
    with serving(place) as served:
        loop = Loop(served)
        loop.outer.start()
        served.syncer.api.evict("fra")
        until_stop(loop.step)
        assert re.search("evicted|put out", loop.outer.why)
        with pytest.raises(diloco.SiteFailed, match=r"^site fra stopped: .*(evicted|put out)"):
            loop.outer.leave()


@pytest.mark.slow
def test_a_run_of_several_syncers_is_one_to_a_loop(place: Path) -> None:
    two = ["run.tokens=600", "outer.num_fragments=2", "outer.num_syncers=2"]
    with (
        serving(place / "0", *two, "cluster.syncer.index=0") as first,
        serving(place / "1", *two, "cluster.syncer.index=1") as second,
    ):
        loop = Loop(first, syncer=f"{first.address}/{second.address}")
        with loop.outer:
            steps = until_stop(loop.step)
            assert balanced(loop.outer.ledger)
    assert loop.outer.why == "the run is finished"
    ledger = loop.outer.ledger
    assert (ledger["processed"], balanced(ledger)) == (TOKENS * steps, True)
    assert all(torch.isfinite(each).all() for each in values(loop.model).values()), "both parts have come"


EPOCH, UNIT = 400, 4
LEASED = ("data.leased=true", f"data.unit_sequences={UNIT}")


class Reader(Loop):
    """A loop that reads what is leased to it, two samples a step, and remembers which."""

    def __init__(self, served: Served, **arguments: Any) -> None:
        super().__init__(served, **{"data": "essays", "samples": EPOCH, "samples_per_step": 2, **arguments})
        self.read: list[int] = []

    def batches(self) -> Iterator[list[int]]:
        for indices in self.outer.batches(2):
            self.read += indices
            yield indices
            supplied(self.outer, UNIT)

    def train(self, steps: int | None = None) -> None:
        for number, _ in enumerate(self.batches()):
            self.step(number)
            if steps is not None and number + 1 == steps:
                break


def units(served: Served) -> dict[str, int]:
    found = served.syncer.api.status()["units"]
    assert isinstance(found, dict)
    return found


def test_a_loop_of_ones_own_reads_what_is_leased_to_it(place: Path) -> None:
    with serving(place, "run.tokens=3000", *LEASED) as served:
        loop = Reader(served)
        with loop.outer:
            loop.train()
            assert loop.outer.should_stop, "the batches end with the run"
        assert len(loop.read) == 2 * loop.outer.steps >= 600
        assert sorted(loop.read[:EPOCH]) == list(range(EPOCH))
        found = units(served)
        assert found["merged"] == loop.outer.steps * 2 // UNIT, "each update named what it was made of"
        assert found["repeated"] == found["reissued"] == 0


@pytest.mark.slow
def test_what_one_loop_leaves_another_reads_and_nothing_twice(place: Path) -> None:
    with serving(place, "run.tokens=2400", *LEASED) as served:
        first, second = Reader(served), Reader(served, site="iad")
        with first.outer:
            first.train(steps=6)
        assert units(served)["given_back"] > 0
        with second.outer:
            second.train()
        both = first.read + second.read
        assert sorted(both[:EPOCH]) == list(range(EPOCH))
        assert units(served)["reissued"] > 0


@pytest.mark.slow
def test_a_loader_of_torchs_draws_them(place: Path) -> None:
    class Essays(torch.utils.data.Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

        def __len__(self) -> int:
            return EPOCH

    with serving(place, "run.tokens=600", *LEASED) as served:
        loop = Reader(served, samples_per_step=4)
        with loop.outer:
            loader = torch.utils.data.DataLoader(Essays(), batch_sampler=loop.batches())
            got = []
            for number, pair in enumerate(loader):
                got += pair.tolist()
                backward(loop.model, number)
                if number % 2:  # Two micro-batches are a step.
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
        assert got == loop.read
        assert len(got) >= 4 * loop.outer.steps >= 240
        assert len(set(got[:EPOCH])) == len(got[:EPOCH])


def test_a_loop_that_goes_on_reads_on_where_its_checkpoint_was(place: Path) -> None:
    with serving(place, "run.tokens=100000", *LEASED) as served:
        loop, file = Reader(served), io.BytesIO()
        with loop.outer:
            loop.train(steps=7)
            _ = next(loop.outer.batches(2))  # Drawn ahead, and not trained on.
            loop.save(file)
            later = Reader(served, model=loop.model)
            loop.outer.break_off()
        file.seek(0)
        later.outer.load_state_dict(torch.load(file)["outer"])
        with later.outer:
            assert later.outer.steps == 7
            later.train(steps=10)
            later.outer.leave()
        assert len(set(loop.read + later.read)) == 34
        assert units(served)["repeated"] == 0


def test_samples_that_were_not_drawn_are_not_counted(place: Path) -> None:
    with serving(place, *LEASED) as served:
        words = r"samples_per_step is 2, and the loop has drawn 0 for this step"
        loop = Reader(served)
        with pytest.raises(ValueError, match=words), loop.outer:
            loop.step()
        with pytest.raises(ValueError, match="before the site has joined, or after it has left"):
            next(Reader(served, site="iad").outer.batches(2))
    (place / "other").mkdir()
    with (
        serving(place / "other") as served,
        Loop(served, site="sgp").outer as outer,
        pytest.raises(ValueError, match="batches is called, and join was given no data"),
    ):
        next(outer.batches(2))
