"""A loop that is a site: how it counts, leaves, fails, and goes on."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import diloco
from diloco.config import run_dir
from diloco.durable import locked
from diloco.inner.parallel import SiteGroup
from diloco.integrations.join import STEPS_AHEAD_MAX, Batches, Drawing, OwnData
from diloco.outer.fragments import gather, named_parameters_once
from diloco.sync.events import FinalAnnounced
from diloco.syncer.snapshots import full_parameters
from tests.integrations.serving import (
    PATIENT,
    TOKENS,
    Served,
    backward,
    balanced,
    batch_loss,
    cold_model,
    mean_loss,
    serving,
    small_model,
    supplied,
    until_stop,
    values,
)
from tests.loopback.cluster import closed_port
from tests.runs.processes import ROOT, wait_for

EPOCH, UNIT = 400, 4

LEASED = ("data.leased=true", f"data.unit_sequences={UNIT}")

ESSAYS = {"data": "essays", "samples": EPOCH, "samples_per_step": 2}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sgd(*parts: nn.Module) -> torch.optim.Optimizer:
    parameters = [each for part in parts for each in part.parameters()]
    return torch.optim.SGD(parameters or cold_model().parameters(), lr=0.05)


def joined(served: Served, model: Any = None, **arguments: Any) -> diloco.Outer:
    model = model or cold_model()
    parts = [each for each in (model if isinstance(model, list) else [model]) if isinstance(each, nn.Module)]
    usual = {"optimizer": sgd(*parts), "syncer": served.address, "site": "fra", "tokens_per_step": 1}
    return diloco.join(model, **{**usual, **arguments})


class Loop:
    """A user's own loop."""

    def __init__(self, served: Served, model: nn.Module | None = None, lr: float = 0.05, **arguments: Any) -> None:
        self.model = model or cold_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        own = {"optimizer": self.optimizer, "tokens_per_step": TOKENS}
        self.outer = joined(served, self.model, **{**own, **arguments})

    def step(self, number: int = 0) -> bool:
        backward(self.model, number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.outer.should_stop

    def save(self, file: io.BytesIO) -> None:
        """Once nothing is on its way, so that no later word of the syncer's makes the checkpoint an old one."""
        wait_for(lambda: self.outer.ledger["in_flight"] == 0, "the fates of what was sent")
        torch.save({"model": self.model.state_dict(), "outer": self.outer.state_dict()}, file)

    def load(self, file: io.BytesIO) -> None:
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.outer.load_state_dict(saved["outer"])
        self.base = weakref.ref(saved["outer"]["tensors"]["base.0"])

    def broken_off(self, steps: int, then: Callable[[], object]) -> None:
        """So many steps, ``then``, and an exception of the loop's own."""
        try:
            with self.outer:
                for number in range(steps):
                    self.step(number)
                then()
                _ = 1 / 0
        except ZeroDivisionError as error:
            self.notes = error.__notes__


def test_a_loop_trains_a_run_to_its_end(place: Path) -> None:
    with serving(place, "run.tokens=1500") as served:
        loop = Loop(served)
        with loop.outer:
            assert loop.outer.progress == 0.0
            first_loss = mean_loss(loop.model)
            steps = until_stop(loop.step)
        assert loop.outer.progress == 1.0, "the last word of it may come during the last step"
        ledger = loop.outer.ledger
        assert ledger == {**dict.fromkeys(ledger, 0), "processed": 10 * steps, "merged": 10 * steps}
        assert steps >= 150
        assert mean_loss(loop.model) < first_loss
        before = values(loop.model)
        loop.step()  # It is its own again: the hook is gone, and no step is counted.
        assert loop.outer.steps == steps
        assert not all(torch.equal(before[name], each) for name, each in values(loop.model).items())


def train_together(*loops: Loop) -> None:
    """Each on batches of its own to the end of the run, from when all have joined."""
    meet = threading.Barrier(len(loops))

    def train(at: int) -> None:
        with loops[at].outer:
            meet.wait(60.0)
            until_stop(lambda number: loops[at].step(1000 * at + number))

    with ThreadPoolExecutor(len(loops)) as threads:
        list(threads.map(train, range(len(loops))))


@pytest.mark.parametrize("adopt", ["rebase", "blend"])
def test_every_site_ends_with_the_final_version_of_a_finished_run_whatever_the_codec_rounds_off(
    place: Path, adopt: str
) -> None:
    rules = (f"outer.adopt={adopt}", "codec.up=int4", "outer.num_fragments=2", PATIENT)
    with serving(place, "run.tokens=900", *rules) as served:
        loops = [Loop(served, small_model(), site=site) for site in ("fra", "iad")]
        train_together(*loops)
        final = [each.published for each in served.syncer.holdings.values]
    for loop in loops:
        assert loop.outer.why == "the run is finished"
        assert loop.outer.final
        parameters = named_parameters_once(loop.model)
        for fragment, last in zip(served.syncer.plan.layout.fragments, final, strict=True):
            assert torch.equal(gather(fragment, parameters), last)


def test_a_site_that_cannot_have_the_final_version_says_so(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a syncer of an earlier release, which does not tell the final versions.
    monkeypatch.setattr("diloco.syncer.server.FinalAnnounced", lambda ending, versions=(): FinalAnnounced(ending))
    monkeypatch.setattr("diloco.syncer.api.FinalAnnounced", lambda ending, versions=(): FinalAnnounced(ending))
    events: list[dict[str, object]] = []
    with serving(place, "run.tokens=300") as served:
        loop = Loop(served, log=lambda what, fields: events.append(fields), finish_timeout_s=0.5)
        with loop.outer:
            until_stop(loop.step)
    assert not loop.outer.final
    notes = [str(event["why"]) for event in events if event.get("note") == "final_missed"]
    assert [note.endswith("finish_timeout_s=0.5") for note in notes] == [True]
    with serving(place / "again") as served:
        loop = Loop(served)
        with loop.outer:
            loop.step()
        assert not loop.outer.final, "it has left a run that goes on"


def test_a_step_is_of_several_optimizers_or_is_told_without_hooks(place: Path) -> None:
    model = cold_model()
    first, last = (sgd(part) for part in (model[0], model[2]))
    with serving(place) as served:
        outer = joined(served, model, optimizer=[first, last], tokens_per_step=None)
        with outer:
            for number in range(3):
                outer.tokens(4)
                outer.tokens(3, loss=backward(model, number))
                first.step()
                last.step()
        assert (outer.steps, outer.ledger["processed"]) == (3, 21)
        loop = Loop(served, site="iad", hooks=False, tokens_per_step=None)
        with loop.outer:
            for number in range(4):
                loop.step(number)
                loop.outer.step(tokens=TOKENS, loss=0.5)
        assert (loop.outer.steps, loop.outer.ledger["processed"]) == (4, 4 * TOKENS)


def test_a_wrong_call_is_refused_in_words(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "HELD_WAIT_S", 0.1)
    with serving(place) as served:
        loop = Loop(served)
        assert loop.outer.state_dict() == {}
        loop.outer.load_state_dict({})
        with pytest.raises(ValueError, match=r"state does not come from state_dict: it has no 'steps'"):
            loop.outer.load_state_dict({"model": 1})
        with loop.outer:
            for call, words in (
                (loop.outer.start, "start is called twice"),
                (loop.outer.step, "hooks is True: the optimizer's own hook has counted"),
                (lambda: loop.outer.tokens(3), "tokens_per_step=10 sets them"),
                (lambda: loop.outer.load_state_dict(loop.outer.state_dict()), "call it before the with"),
                (lambda: next(loop.outer.batches(2)), "batches is called, and join was given no data"),
                (Loop(served).outer.start, r"folder is 'runs/mine/sites/fra': .*started twice"),
            ):
                with pytest.raises(ValueError, match=words):
                    call()
        loop.outer.leave()  # Once is enough, twice is no harm.
        Path("file").touch()
        with pytest.raises(ValueError, match=r"folder is 'file': .*File exists"):
            Loop(served, folder="file").outer.start()
        untold = Loop(served, tokens_per_step=None)
        untold.outer.tokens(torch.tensor(0))  # type: ignore[arg-type]  # Any whole number will do.
        for count in (3.5, torch.tensor(3.5), "3"):
            with pytest.raises(ValueError, match="a whole number of tokens"):
                untold.outer.tokens(count)  # type: ignore[arg-type]
        words = "tokens of this step are 0: give tokens_per_step, or call outer.tokens"
        with pytest.raises(ValueError, match=words), untold.outer:
            untold.step()


def test_the_loops_own_exception_goes_on_with_a_note_and_the_next_loop_is_taken_in_cold(place: Path) -> None:
    with serving(place) as served:
        loop = Loop(served)
        beside: list[threading.Thread] = []
        loop.broken_off(7, lambda: beside.extend(loop.outer._agent.threads))
        (note,) = loop.notes
        assert note.startswith("diloco: site fra left run mine while it trained, its tokens: ")
        assert "20 unsent" in note or "70 unsent" in note
        assert beside
        assert not any(thread.is_alive() for thread in beside)
        assert loop.outer.ledger["processed"] == 70

        # It holds the run's version; what was not sent is lost, and counted.
        again = Loop(served)
        with again.outer:
            assert again.outer.steps in (0, 5)
            assert all(torch.isfinite(each).all() for each in values(again.model).values())
            for number in range(5):
                again.step(number)
        ledger = again.outer.ledger
        assert balanced(ledger)
        assert ledger["processed"] == 120
        assert ledger["lost"] == 120 - ledger["merged"]
        assert ledger["lost"] in (20, 70)


@pytest.mark.parametrize(
    ("setting", "site", "width", "named"),
    [
        ("run.name=mine", "iad", 1, "its site is 'fra', and here it is "),
        ("run.name=other", "fra", 1, "its run_id is 'mine', and here it is "),
        ("run.name=mine", "fra", 2, "its layout_fingerprint is .*, and here it is "),
        ("outer.num_fragments=2", "fra", 1, "num_fragments is 2"),
    ],
)
def test_a_state_of_another_run_site_model_or_layout_is_refused(
    place: Path, setting: str, site: str, width: int, named: str
) -> None:
    """Its updates would be taken for those of this one: refused without end, or merged though they measure from other
    values."""
    with serving(place) as served:
        loop = Loop(served)
        with loop.outer:
            loop.step()
            state = loop.outer.state_dict()
    model = nn.Linear(8, width) if width > 1 else small_model()
    with serving(place / "again", setting, model=model) as served:
        again = Loop(served, model, site=site, folder=place / "again")
        again.outer.load_state_dict(state)
        with pytest.raises(ValueError, match=f"^state is of another site, run or release: {named}"):
            again.outer.start()


def test_a_site_that_is_put_out_says_so_and_is_refused_from_then_on(place: Path) -> None:
    with serving(place) as served:
        loop = Loop(served)
        loop.outer.start()
        served.syncer.api.evict("fra")
        until_stop(loop.step)
        assert re.search("evicted|put out", loop.outer.why)
        with pytest.raises(diloco.SiteFailed, match=r"^site fra stopped: .*(evicted|put out)"):
            loop.outer.leave()
        assert "refuses site fra: " in refused("refused", lambda: joined(served))


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
    assert loop.outer.why == "the run is finished"
    assert (loop.outer.ledger["processed"], balanced(loop.outer.ledger)) == (TOKENS * steps, True)
    assert all(torch.isfinite(each).all() for each in values(loop.model).values()), "both parts have come"


class Reader(Loop):
    """A loop that reads what is leased to it, two samples a step, and remembers which."""

    def __init__(self, served: Served, **arguments: Any) -> None:
        super().__init__(served, **{**ESSAYS, **arguments})
        self.read: list[int] = []

    def train(self, steps: int | None = None) -> None:
        for number, indices in enumerate(self.outer.batches(2), 1):
            self.read += indices
            self.step(number)
            if number == steps:
                break
            supplied(self.outer, UNIT)


def units(served: Served) -> dict[str, int]:
    found = served.syncer.api.status()["units"]
    assert isinstance(found, dict)
    return found


def test_loops_read_what_is_leased_to_them_and_one_what_another_leaves_but_nothing_twice(place: Path) -> None:
    with serving(place, "run.tokens=2400", *LEASED) as served:
        first, second = Reader(served), Reader(served, site="iad")
        with first.outer:
            first.train(steps=6)
        assert units(served)["given_back"] > 0
        with second.outer:
            second.train()
            assert second.outer.should_stop, "the batches end with the run"
        both = first.read + second.read
        steps = first.outer.steps + second.outer.steps
        assert len(both) == 2 * steps >= 480
        assert sorted(both[:EPOCH]) == list(range(EPOCH))
        found = units(served)
        assert found["merged"] == steps * 2 // UNIT, "each update named what it was made of"
        assert found["repeated"] == 0
        assert found["reissued"] > 0


@pytest.mark.parametrize("more", [0, 4])
def test_a_loop_goes_on_from_its_own_checkpoint_and_what_came_after_it_is_lost_and_counted(
    place: Path, more: int
) -> None:
    with serving(place, "run.tokens=600") as served:
        loop, file = Loop(served), io.BytesIO()

        def save_and_train_on() -> None:
            loop.save(file)
            for number in range(more):
                loop.step(number)

        loop.broken_off(12, save_and_train_on)
        again = Loop(served)
        again.load(file)
        with again.outer:
            again_from = again.outer.steps
            until_stop(again.step)
            assert again.base() is None, "it has another version now, and the state would be as large as the model"
        ledger = again.outer.ledger
        # The checkpoint holds 12 steps; where the syncer had more by then it goes on from what that had.  An update is
        # made a step later for each step at whose end the one before it was still on its way.
        assert 12 <= again_from <= 12 + more
        assert ledger["processed"] == TOKENS * (12 + more + again.outer.steps - again_from)
        assert balanced(ledger)
        assert 0 < ledger["lost"] <= 70 if more else ledger["lost"] == 0


def test_a_loop_that_goes_on_reads_on_where_its_checkpoint_was_and_only_of_the_same_data(place: Path) -> None:
    with serving(place, "run.tokens=100000", *LEASED) as served:
        loop, file = Reader(served), io.BytesIO()
        with pytest.raises(ValueError, match="before the site has joined, or after it has left"):
            next(loop.outer.batches(2))
        with loop.outer:
            loop.train(steps=7)
            _ = next(loop.outer.batches(2))  # Drawn ahead, and not trained on.
            loop.save(file)
            later = Reader(served, model=loop.model)
            loop.outer.break_off()
        later.load(file)
        with later.outer:
            assert later.outer.steps == 7
            later.train(steps=10)
            later.outer.leave()
        assert len(set(loop.read + later.read)) == 34
        assert units(served)["repeated"] == 0
        other = lambda: joined(served, site="iad", **{**ESSAYS, "samples": EPOCH + 1})  # noqa: E731
        assert "the run leases units of one text" in refused("mismatch", other)


def test_a_step_that_is_skipped_has_read_its_samples_and_may_be_the_first(place: Path) -> None:
    """As torch's GradScaler skips steps, most often the first ones."""
    with serving(place, "run.tokens=100000", *LEASED) as served:
        loop = Reader(served, hooks=False, tokens_per_step=None)
        with loop.outer:
            for number, _ in enumerate(loop.outer.batches(2), 1):
                loop.outer.step(tokens=TOKENS if number > 6 else 0)
                supplied(loop.outer, UNIT)
                if number == 12:
                    break
            assert (loop.outer.steps, loop.outer._drawing.cursor) == (12, 24)
        assert loop.outer.ledger["merged"] == 6 * TOKENS
        assert (units(served)["merged"], units(served)["repeated"]) == (24 // UNIT, 0)


# --- ``diloco.join`` with a real syncer over gRPC: what comes from where, and what is refused in which words ----------


def test_the_five_lines_of_the_reference_are_a_site(place: Path) -> None:
    """The text of the docstring itself, with the names that it leaves to its reader."""
    text = inspect.getdoc(diloco.join) or ""
    example = textwrap.dedent(text.split("::\n\n", 1)[1].split("\n\n")[0])
    assert "diloco.join(model, optimizer," in example
    assert len(example.strip().splitlines()) == 5
    model = cold_model()
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
    there = {"diloco": diloco, "model": model, "optimizer": sgd(model), "loss_of": nn.functional.mse_loss}
    with serving(place, "run.tokens=200000") as served:
        there["data"] = repeat((inputs, inputs.sum(1, keepdim=True).sin()))
        exec(example.replace("host:7077", served.address), there)
    outer = there["outer"]
    assert isinstance(outer, diloco.Outer)
    assert outer.why == "the run is finished"
    ledger = outer.ledger
    assert ledger["processed"] == ledger["merged"] == 4096 * outer.steps >= 200_000
    assert all(torch.isfinite(each).all() for each in model.parameters()), "it had only NaN before it joined"
    assert (place / "runs/mine/sites/fra/events.jsonl").is_file()


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    ask = "import sys, diloco; print(sorted({'torch', 'grpc', 'hydra', 'omegaconf'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout == "[]\n"
    with pytest.raises(AttributeError, match=r"has no attribute 'joint'"):
        _ = diloco.joint  # type: ignore[attr-defined]


def test_the_rules_are_the_syncers_and_the_parts_of_a_model_are_the_model(place: Path) -> None:
    rules = ["outer.inner_steps=7", "outer.num_fragments=2", "outer.adopt=overwrite", "codec.up=int8:128"]
    seen: list[Any] = []
    model = cold_model()
    parts = [nn.ModuleDict({name: each}) for name, each in model.named_children()]
    with serving(place, *rules, "outer.discards_max=9") as served:
        outer = joined(served, parts, log=lambda *told: seen.append(told))
        with outer:
            assert outer.run == "mine"
            assert all(torch.isfinite(each).all() for each in model.parameters())
    config = outer._config
    assert (config.outer.inner_steps, config.outer.num_fragments, config.outer.discards_max) == (7, 2, 9)
    assert (config.outer.adopt, config.codec.up) == ("overwrite", "int8:128")
    assert [dict(fields)["versions"] for what, fields in seen if what == "joined"] == [[0, 0]]


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, Served]]:
    """Syncers that no site joins: one that leases data, and one that does not."""
    folder = tmp_path_factory.mktemp("idle")
    with serving(folder / "leases", *LEASED) as leases, serving(folder / "none") as none:
        yield {True: leases, False: none}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"site": "a b"}, r"^site is 'a b': letters, digits"),
        ({"syncer": ""}, "^syncer is '': host:port"),
        ({"syncer": "nowhere"}, "^syncer is 'nowhere': host:port wanted"),
        ({"syncer": "{}/127.0.0.1:1"}, r"syncer is '127.+': one address, since outer.num_syncers=1"),
        ({"tokens_per_step": 0}, "^tokens_per_step is 0: a whole number from 1 on"),
        ({"tokens_per_step": 1.5}, "^tokens_per_step is 1.5: a whole number"),
        ({"overlap_step": 3}, "^overlap_step is no argument of join: did you mean overlap_steps?"),
        ({"adapt": "often"}, "^adapt is 'often': true or false"),
        ({"join_timeout_s": 0.0}, "^join_timeout_s is 0.0: positive"),
        ({"token_file": "/nowhere"}, "^token_file is '/nowhere': No such file"),
        ({"overlap_steps": 99}, "^overlap_steps is 99: from 0 to less than outer.inner_steps=5"),
        ({"finish_timeout_s": -1.0}, "^finish_timeout_s is -1.0: positive"),
        ({"model": "gpt"}, "^model is 'gpt': a torch.nn.Module"),
        ({"model": [small_model(), nn.Tanh(), small_model()]}, "^model has two parts with a parameter 0.bias"),
        ({"model": [nn.Tanh()]}, "^model has no parameters"),
        ({"model": small_model().requires_grad_(False)}, "^model has no parameters that are trained"),
        ({"optimizer": "adam"}, "^optimizer is 'adam': a torch.optim.Optimizer, or several"),
        ({"optimizer": []}, r"^optimizer is \[\]: a torch.optim.Optimizer"),
        ({"optimizer": sgd(small_model())}, "^optimizer trains none of the model's parameters"),
        ({"samples": 40}, "^samples is 40, and data is None: give all three"),
        ({"samples_per_step": 2}, "^samples_per_step is 2, and data is None"),
        ({**ESSAYS, "data": ""}, "^data is '': the data set's name at all sites"),
        ({**ESSAYS, "data": "x" * 300}, "^data is 'xxx"),
        ({**ESSAYS, "samples": 0}, "^samples is 0: a whole number from 1 on, where data is given"),
        ({**ESSAYS, "samples_per_step": True}, "^samples_per_step is True: a whole number"),
        ({**ESSAYS, "samples_per_step": 10**7}, "two steps of this site draw .* units, more than"),
    ],
)
def test_an_argument_that_cannot_be_is_named(idle: dict[bool, Served], arguments: dict[str, Any], words: str) -> None:
    served = idle["samples_per_step" in arguments]
    if "syncer" in arguments:
        arguments = {**arguments, "syncer": arguments["syncer"].format(served.address)}
    with pytest.raises(ValueError, match=words):
        joined(served, **arguments)


@pytest.mark.parametrize(
    ("leases", "arguments", "words"),
    [
        (True, {}, r"data.leased is true at the syncer: give data, samples and samples_per_step, and read"),
        (False, ESSAYS, r"data is 'essays', and the syncer leases none \(data.leased\)"),
        (False, {"run": "other"}, r"run is 'other' at the site and 'mine' at the syncer"),
        (False, {"model": nn.Linear(3, 3)}, r"parameter 0.bias is there and not here"),
    ],
)
def test_another_run_or_model_or_kind_of_data_is_refused_in_words(
    idle: dict[bool, Served], place: Path, leases: bool, arguments: dict[str, Any], words: str
) -> None:
    text = refused("mismatch", lambda: joined(idle[leases], **arguments))
    assert text.startswith(f"the syncer at {idle[leases].address} refuses site fra: ")
    assert re.search(words, text)


def refused(kind: str, join: Callable[[], diloco.Outer]) -> str:
    """What a site is told that is not taken in."""
    with pytest.raises(diloco.JoinFailed) as failed, join():
        raise AssertionError("it was taken in")
    assert failed.value.kind == kind
    return str(failed.value)


def test_a_state_that_was_read_to_an_accelerator_is_held_on_the_host(idle: dict[bool, Served]) -> None:
    with FakeTensorMode():
        there = torch.empty(161, device="cuda")
    outer = joined(idle[False])
    outer.load_state_dict({"steps": 1, "tokens": 10, "tensors": {"base.0": there}, "agent": {}})
    assert outer._restored.tensors["base.0"].device.type == "cpu"


def test_a_syncer_that_does_not_answer_is_named(place: Path) -> None:
    gone = Served(None, f"127.0.0.1:{closed_port()}")
    text = refused("unreachable", lambda: joined(gone, join_timeout_s=0.3))
    assert text.startswith("site fra cannot reach the syncer at 127.0.0.1:")
    assert "tried for 0.3 s (join_timeout_s); a finished run has no syncer" in text


def frozen_model(seed: int = 1) -> nn.Sequential:
    """The first layer is the base model, which stays as it is; what is trained is the second one."""
    model = small_model(seed)
    model[0].requires_grad_(False)
    return model


def test_frozen_parameters_stay_at_home_and_are_the_same_at_all_sites(place: Path) -> None:
    with serving(place, "run.tokens=300", "outer.num_fragments=2", model=frozen_model()) as served:
        assert served.syncer.plan.layout.numel == 17
        loop = Loop(served, frozen_model(), site="iad")
        words = r"parameter 0\.(weight|bias) is trained now and was frozen when the site joined: .* learning rate of 0"
        with loop.outer:
            loop.model[0].requires_grad_(True)
            with pytest.raises(ValueError, match=words):
                until_stop(loop.step)
        loop = Loop(served, frozen_model())
        with loop.outer:
            until_stop(loop.step)
        assert torch.equal(loop.model[0].weight, small_model(1)[0].weight)
        assert torch.isfinite(loop.model[2].weight).all()
        text = refused("mismatch", lambda: joined(served, frozen_model(2)))
        assert re.search(
            r"the frozen parameters are of digest \w+ here and of digest \w+ there: .*the same base.* buffer", text
        )
        for other in (small_model(1), frozen_model().requires_grad_(True)):  # Such as version 0 of an earlier release.
            assert "the frozen parameters are none here and of digest" in refused(
                "mismatch", lambda other=other: joined(served, other)
            )


def batch_norm() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


@pytest.mark.parametrize("adopt", ["rebase", "blend"])
def test_buffers_that_the_run_publishes_end_as_the_average_of_the_sites_and_others_stay_at_home(
    place: Path, adopt: str
) -> None:
    """Nothing else changes with a learning rate of 0, so that a plain loop has the same statistics."""
    rules = ["outer=nesterov", f"outer.adopt={adopt}", "outer.quorum=all", "outer.lock_step=true", PATIENT]
    rules += ["codec.up=int4", "codec.down=int4", "outer.publish=*.running_mean,*.running_var"]
    with serving(place, "run.tokens=190", *rules, model=batch_norm()) as served:
        loops = [Loop(served, batch_norm(), lr=0.0, site=site) for site in ("fra", "iad")]
        train_together(*loops)
    alone = [batch_norm() for _ in range(2)]
    most = max(loop.outer.steps for loop in loops)
    assert most >= 9, "after steps 4 and 9 the sites have exchanged their buffers"
    for number in range(most):
        for at, model in enumerate(alone):
            if number < loops[at].outer.steps:
                batch_loss(model, 1000 * at + number)
        if number % 5 == 3 or number == most - 1:
            for name in ("running_mean", "running_var"):
                mean = torch.stack([getattr(model[1], name) for model in alone]).mean(0)
                for model in alone:
                    getattr(model[1], name).copy_(mean)
    for name in ("running_mean", "running_var"):
        ours, theirs = (getattr(loop.model[1], name) for loop in loops)
        assert torch.equal(ours, theirs)
        assert torch.allclose(ours, getattr(alone[0][1], name), atol=1e-6)
    assert [int(loop.model[1].num_batches_tracked) for loop in loops] == [loop.outer.steps for loop in loops]


def test_ranks_that_know_nothing_of_each_other_are_not_one_site_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 4, and torch.distributed is not initialised"):
        joined(Served(None, "127.0.0.1:1"))


def test_a_site_shows_its_token_from_the_first_question_on(place: Path) -> None:
    tokens = '{"sites": {"fra": "the-secret-of-fra-alone"}, "admin": "the-secret-of-the-admin"}'
    for name, text in (("tokens", tokens), ("mine", "the-secret-of-fra-alone")):
        (place / name).write_text(text)
        (place / name).chmod(0o600)
    with serving(place, f"cluster.syncer.tokens_file={place / 'tokens'}") as served:
        assert re.search("refuses site fra: .*token", refused("refused", lambda: joined(served)))
        with joined(served, token_file=str(place / "mine")) as outer:
            assert outer.steps == 0


@pytest.mark.parametrize(("library", "extra"), [("transformers", "hf"), ("lightning.pytorch", "lightning")])
def test_a_callback_without_its_library_says_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, library: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"diloco.{extra}", raising=False)
    with pytest.raises(ImportError, match=rf"diloco.{extra} needs {library} \(.+\): pip install 'diloco\[{extra}\]'"):
        import_module(f"diloco.{extra}")


# --- What a loop of one's own draws of leased data --------------------------------------------------------------------


def drawing(*units: int, samples: int = 40, per_step: int = 2, seed: int = 3) -> Drawing:
    def listed(place: int, count: int) -> list[tuple[int, int]]:
        # Who is told none asks again, for ever.
        assert place < len(units), f"{len(units)} units are all that this test draws of, and there is no place {place}"
        return [(unit, 1) for unit in units[place : place + count]]

    return Drawing(OwnData("essays", samples, per_step), UNIT, listed, SiteGroup(device="cpu"), seed)


def drawn(one: Drawing, batches: int, count: int = 2) -> list[int]:
    return [index for _ in range(batches) for index in one.batch(count)]


def test_all_units_of_an_epoch_are_every_sample_once_and_the_next_has_another_order() -> None:
    first, second = drawn(drawing(*range(10)), 20), drawn(drawing(*range(10, 20)), 20)
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second
    assert drawn(drawing(*range(10), seed=4), 20) != first
    assert drawn(drawing(*range(10)), 20) == first
    assert drawn(drawing(7, 2), 4) == [*first[28:32], *first[8:12]], "a unit is the same samples at every site"
    found = drawn(drawing(*range(10), samples=38), 20)
    assert sorted(found[:38]) == list(range(38)), "the last unit of an epoch goes on into the next"
    whole, ranks = drawn(drawing(*range(10)), 5, 4), [drawing(*range(10)), drawing(*range(10))]
    parts = [index for _ in range(5) for rank, one in enumerate(ranks) for index in one.batch(2, rank, 2)]
    assert parts == whole, "ranks draw parts of what the site draws"
    here = OwnData("essays", 40, 2)
    assert here.identity == OwnData("essays", 40, 8).identity, "how many a step reads is each site's own"
    assert len({here.identity, OwnData("essays", 41, 2).identity, OwnData("poems", 40, 2).identity}) == 3


def loader(batches: Batches, ahead: int) -> Iterator[list[int]]:
    """As torch's with workers: it holds so many batches more than it has handed out."""
    here, held = iter(batches), list[list[int]]()
    while True:
        held += [next(here) for _ in range(ahead + 1 - len(held))]
        yield held.pop(0)


def test_a_loader_that_is_left_and_begun_again_leaves_nothing_out() -> None:
    units = range(STEPS_AHEAD_MAX)
    one, read = drawing(*units), list[int]()
    batches = Batches(one, lambda: True, 2, None, None)
    for _ in range(STEPS_AHEAD_MAX // 4):  # So often that what was drawn in vain would be too much.
        for number, pair in enumerate(loader(batches, 4)):
            read += pair
            one.stepped()
            if number == 4:
                break
    straight, whole = drawing(*units), list[int]()
    while straight.cursor < one.cursor:
        whole += straight.batch(2)
        straight.stepped()
    assert read == whole, "what updates name is what steps were made of"


def test_a_step_needs_samples_that_were_drawn() -> None:
    one = drawing(*range(10), per_step=4)
    one.batch(2)
    with pytest.raises(ValueError, match=r"samples_per_step is 4, and the loop has drawn 2 for this step: take the"):
        one.stepped()
    one.batch(2)
    one.stepped()
    for given, words in (((0,), "count is 0"), ((2, 2, 2), "rank is 2: 0 to ranks-1=1"), ((2, 0, 0), "ranks is 0")):
        with pytest.raises(ValueError, match=words):
            one.batch(*given)


def test_who_draws_ever_further_ahead_has_said_too_little() -> None:
    one = drawing(*range(STEPS_AHEAD_MAX * 8))
    for _ in range(STEPS_AHEAD_MAX - 2):
        one.batch(4)
        one.stepped()
    with pytest.raises(ValueError, match=r"samples_per_step is 2, and 2,052 samples would be drawn ahead of the steps"):
        drawn(one, 2, 4)
    right = drawing(*range(STEPS_AHEAD_MAX * 8), per_step=4)
    for _ in range(STEPS_AHEAD_MAX + 2):
        right.batch(4)
        right.stepped()


# --- Ranks of a user's own torchrun as one site ---------------------------------------------------------------------


def both(address: str, folder: Path, layout: str) -> list[Any]:
    """What two ranks under torchrun write down."""
    program = [str(ROOT / "tests/integrations/joined_rank.py"), address, str(folder), layout]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run([*torchrun, *program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_what_keeps_rank_0_from_beginning_is_told_to_the_others(tmp_path: Path) -> None:
    with serving(tmp_path) as served, locked(tmp_path / "fra"):
        first, second = both(served.address, tmp_path, "held")
    assert first == second, "none of them waits for one that has gone"
    assert "is it started twice?" in first


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "frozen", "leased", "stages"])
def test_two_ranks_are_one_site(tmp_path: Path, layout: str) -> None:
    model = frozen_model() if layout == "frozen" else None
    more = ("run.tokens=300", "codec.up=int4", PATIENT, *(LEASED if layout == "leased" else ()))
    with serving(tmp_path, *more, model=model) as served:
        first, second = both(served.address, tmp_path, layout)
        final = full_parameters(served.syncer.plan.layout, [each.published for each in served.syncer.holdings.values])
    held = {name.removeprefix("module."): each for name, each in (first["held"] | second["held"]).items()}
    assert {name: held[name] for name in final} == {name: each.tolist() for name, each in final.items()}
    assert first["final"] is second["final"] is True
    if layout == "stages":
        held = [sorted(each["held"]) for each in (first, second)]
        assert held == [["0.bias", "0.weight"], ["2.bias", "2.weight"]]
    else:
        assert first["held"] == second["held"], "every rank holds the same model"
    assert first["steps"] == second["steps"] >= 30
    assert first["why"] == "the run is finished"
    assert second["why"], "every rank stops at the same step"
    assert first["progress"] == second["progress"]
    assert first["progress"][-1] > 0
    ledger = first["ledger"]
    assert ledger["processed"] == ledger["merged"] == 10 * first["steps"], "tokens of both ranks"
    assert second["ledger"] == {}
    if layout == "leased":
        read = [index for step in zip(first["read"], second["read"], strict=True) for pair in step for index in pair]
        assert len(read) == 4 * first["steps"], "each rank reads a part of each step"
        assert len(set(read[:400])) == len(read[:400]), "and no sample twice"
