from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diloco.inner import checkpoint
from diloco.inner.checkpoint import CheckpointError, LateError, names
from diloco.inner.data import CorpusManifest, TokenStream
from diloco.inner.optimizer import InnerOptions, build_optimizers
from diloco.inner.parallel import SiteGroup
from diloco.inner.trainer import (
    StepInfo,
    Trainer,
    TrainingError,
    Verdict,
    capture_state,
    load_parameters,
)
from tests.inner.conftest import held_back, resumed, steps_of, tiny, written
from tests.inner.spread_program import Case, build, trained
from tests.sooner import sooner

Facts = list[tuple[str, dict[str, object]]]


def make(
    manifest: CorpusManifest,
    folder: Path | None = None,
    *,
    inner: dict[str, Any] | None = None,
    facts: Facts | None = None,
    progress: Any = None,
    dim: int = 16,
    **options: Any,
) -> Trainer:
    model = {"vocab_size": 257, "layers": 1, "dim": dim, "heads": 2, "context": 16}
    case = Case({}, {"optimizer": "muon", "batch_sequences": 4, "warmup_steps": 3, **(inner or {})}, model)
    log = None if facts is None else lambda what, fields: facts.append((what, fields))
    group = SiteGroup(device="cpu")
    return build(case, manifest.directory, group, folder, seed=0, log=log, progress=progress, **options)


def everything(made: Trainer) -> dict[str, torch.Tensor]:
    """All tensors that a trainer's future depends on."""
    optimizer = made.optimizers.state_dict()
    counters = torch.tensor([made.step, made.tokens, made.cursor, made.nonfinite_steps])
    named = {name: parameter.detach() for name, parameter in made.model.named_parameters()}
    return {"random": torch.get_rng_state(), "counters": counters, **named, **optimizer}


def put(made: Trainer, value: float) -> None:
    """A value that is written into the model between two steps."""
    with torch.no_grad():
        made.model.get_parameter("norm.weight")[0] = value


def notes(facts: Facts, field: str = "why") -> list[object]:
    return [fields.get(field) for what, fields in facts if what == "note"]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("stop", sooner([4, 5], 5))
def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(
    manifest: CorpusManifest, tmp_path: Path, deterministic: bool, stop: int
) -> None:
    """Step 4 is left by its own checkpoint (before after_step), step 5 by the one at the end of the run."""

    def run(folder: Path, until: int, die: bool) -> Trainer:
        made = make(manifest, folder, deterministic=deterministic, inner={"accumulation": 2})
        made._asked_progress = lambda: made.step / 8
        made.resume()

        def also(info: StepInfo) -> None:
            torch.rand(1)  # moves the random state, as a model with dropout would
            if die and info.step == stop == 4:
                raise InterruptedError
            with torch.no_grad():  # what adopting a version does
                made.model.get_parameter("norm.weight").mul_(1.0 + info.step / 100)

        trained(made, until, also=also)
        return made

    wanted = everything(run(tmp_path / "a", 8, die=False))
    with contextlib.suppress(InterruptedError):
        run(tmp_path / "b", stop, die=True)
    wanted_names = ["step-0000000002", "step-0000000004"] + (["step-0000000005-end"] if stop == 5 else [])
    assert names(tmp_path / "b") == wanted_names
    torch.manual_seed(999)
    found = everything(run(tmp_path / "b", 8, die=False))
    assert found.keys() == wanted.keys()
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []


def test_a_checkpoint_comes_before_after_step_and_a_resume_calls_it_again(
    manifest: CorpusManifest, tmp_path: Path
) -> None:
    calls: list[object] = []
    infos: list[StepInfo] = []

    def extra_state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        calls.append("extra")
        return {"agent/d": torch.tensor([float(len(calls))])}, {"calls": len(calls)}

    def also(info: StepInfo) -> None:
        calls.append(info.step)
        infos.append(info)
        if info.step == 4:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        steps_of(make(manifest, tmp_path, deterministic=True), 9, also, extra_state)
    assert calls == [1, "extra", 2, 3, "extra", 4]

    second = make(manifest, tmp_path, deterministic=True)
    found = resumed(second)
    assert (found.step, second.tokens, second.cursor) == (4, 4 * 64, 16)
    assert found.meta == {"calls": 5}
    assert found.tensors["agent/d"].tolist() == [5.0]
    again: list[StepInfo] = []

    def once_more(info: StepInfo) -> Verdict:
        again.append(info)
        return Verdict(stop=True, reason="drained")

    end = second.run(after_step=once_more)
    assert again == infos[-1:]
    assert (end, second.step) == ("drained", 4)
    # The checkpoint at the end of a run was taken after after_step, which is therefore not called again.
    assert names(tmp_path)[-1] == "step-0000000004-end"
    third = make(manifest, tmp_path, deterministic=True)
    third.resume()
    third.run(until_step=5, after_step=once_more)
    assert [info.step for info in again] == [4, 5]
    facts: Facts = []
    fourth = make(manifest, tmp_path, deterministic=True, facts=facts)
    fourth.resume()
    fourth.run(until_step=5)
    assert [what for what, _ in facts] == ["resumed"], "it is written already"


def test_a_resume_passes_over_a_damaged_checkpoint_in_words(manifest: CorpusManifest, tmp_path: Path) -> None:
    make(manifest, tmp_path, deterministic=True).run(until_step=4)
    (tmp_path / "step-0000000004-end" / "optimizer.safetensors").write_bytes(b"x")
    facts: Facts = []
    assert resumed(make(manifest, tmp_path, facts=facts)).step == 4
    assert "optimizer.safetensors" in str(notes(facts)[0])
    assert [what for what, _ in facts] == ["note", "resumed"]
    with pytest.raises(CheckpointError, match=r"is of another model: blocks\.0"):
        make(manifest, tmp_path, dim=32).resume()
    other = make(manifest, tmp_path, facts=facts)
    other.stream = TokenStream(manifest, "train", 16, 4, seed=4)
    other.resume()
    assert "other data than before" in notes(facts, "note")
    with pytest.raises(CheckpointError, match="already holds step-0000000004-end, and this run did not resume"):
        make(manifest, tmp_path).run(until_step=2)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_checkpoint_that_cannot_be_written_is_said_and_training_goes_on(
    manifest: CorpusManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    real = checkpoint.save

    def full(root: Path, name: str, *rest: Any) -> Path:
        if name in ("step-0000000002", "step-0000000004"):
            raise CheckpointError(f"{root / name} could not be written: No space left on device")
        return real(root, name, *rest)

    monkeypatch.setattr(checkpoint, "save", full)
    facts: Facts = []
    assert len(trained(make(manifest, tmp_path, facts=facts, deterministic=deterministic), 5)) == 5
    assert [str(why).split("/")[-1] for why in notes(facts)] == [
        f"step-000000000{number} could not be written: No space left on device" for number in (2, 4)
    ]
    assert names(tmp_path) == ["step-0000000005-end"]


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_last_checkpoint_must_be_written_unless_its_parameters_are_not_finite(
    manifest: CorpusManifest, tmp_path: Path, deterministic: bool
) -> None:
    facts: Facts = []
    (tmp_path / "file").write_text("in the way")
    made = make(manifest, tmp_path / "file", deterministic=deterministic, facts=facts)
    with pytest.raises(CheckpointError, match=r"file/step-0000000006-end could not be written"):
        made.run(until_step=6)
    facts.clear()
    made = make(manifest, tmp_path / "folder", deterministic=deterministic, facts=facts, checkpoint_steps=0)
    steps_of(made, 1, lambda info: put(made, torch.nan))
    assert names(tmp_path / "folder") == []
    assert "parameter norm.weight is not finite" in notes(facts)
    with pytest.raises(ValueError, match="checkpoint_steps is 5: "):
        make(manifest, checkpoint_steps=5)


def test_a_write_under_way_makes_the_next_checkpoint_wait_and_not_the_training(
    manifest: CorpusManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, facts = held_back(monkeypatch, "save"), Facts()
    made = make(manifest, tmp_path, facts=facts)
    at_step_2: list[torch.Tensor] = []

    def also(info: StepInfo) -> None:
        if info.step == 2:
            at_step_2.append(made.model.get_parameter("norm.weight").detach().clone())
        if info.step == 7:
            gate.set()
            written(made)

    steps_of(made, 9, also)
    # Step 4 was due while step 2 was being written; the first step with a free writer is 8.
    wanted = ["step-0000000002", "step-0000000008", "step-0000000009-end"]
    assert [fields["name"] for what, fields in facts if what == "checkpoint"] == wanted
    first, last = (checkpoint.load(tmp_path / name).part("model") for name in (names(tmp_path)[0], names(tmp_path)[-1]))
    assert torch.equal(first["norm.weight"], at_step_2[0])  # whatever training did while it was being written
    assert torch.equal(last["norm.weight"], made.model.get_parameter("norm.weight"))


def test_a_last_checkpoint_that_failed_late_is_written_by_the_next_run(
    manifest: CorpusManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts: Facts = []
    made = make(manifest, tmp_path, facts=facts, checkpoint_wait_s=0.1)
    with monkeypatch.context() as patch:
        gate = held_back(patch, "save", CheckpointError("No space left on device"))
        with pytest.raises(LateError, match="is still being written"):
            made.run(until_step=1)
    gate.set()
    written(made)
    assert made.saving is not None
    made.saving.writer._wait_s = 60.0
    made.run(until_step=1)
    assert notes(facts) == ["No space left on device"]
    assert names(tmp_path) == ["step-0000000001-end"]


def test_lost_steps_are_not_applied_but_told_and_end_in_words(manifest: CorpusManifest, tmp_path: Path) -> None:
    facts: Facts = []
    made = make(manifest, tmp_path, facts=facts, checkpoint_steps=3, precision="bf16")
    infos: list[StepInfo] = []

    def also(info: StepInfo) -> None:
        infos.append(info)
        if info.step in (1, 3, 4):  # After two lost steps the outer world gives a sound version.
            put(made, 1.0 if info.step == 3 else torch.nan)

    head = made.model.get_parameter("head.weight").detach().clone()
    with pytest.raises(TrainingError, match=r"steps 5 to 7 gave no finite loss .* nonfinite_max=3"):
        steps_of(made, 20, also)
    assert [info.applied for info in infos] == [True, False, False, True, False, False, False]
    assert [math.isnan(info.loss) for info in infos] == [not info.applied for info in infos]
    assert made.nonfinite_steps == 5
    assert infos[-1].tokens_total == 7 * 64
    assert torch.isfinite(made.model.get_parameter("head.weight")).all()
    assert not torch.equal(made.model.get_parameter("head.weight"), head)
    # What was due at step 3 waited for the next sound one; nothing was written with a NaN in it.
    written(made)
    assert names(tmp_path) == ["step-0000000004"]
    assert [fields["step"] for what, fields in facts if fields.get("note") == "step not applied"] == [2, 3, 5, 6, 7]


def test_accumulating_small_batches_is_one_large_batch_and_bounds_stop_before_a_step(manifest: CorpusManifest) -> None:
    large = make(manifest, inner={"optimizer": "sgd", "lr": 0.5, "batch_sequences": 8})
    small = make(manifest, inner={"optimizer": "sgd", "lr": 0.5, "batch_sequences": 2, "accumulation": 4})
    for made in (large, small):
        assert made.run(until_tokens=200) == "reached 200 tokens"
        made.run(until_step=3)
        end = made.run(until_step=3)
        assert (end, made.step, made.tokens, made.cursor) == ("reached step 3", 3, 3 * 8 * 16, 24)
    for name, parameter in large.model.named_parameters():
        assert torch.allclose(parameter, small.model.get_parameter(name), rtol=1e-4, atol=1e-6), name
    large.skip_data(5)
    assert large.cursor == 24
    large.skip_data(40)
    assert [info.cursor for info in steps_of(large, 4)] == [48]
    assert large.run(until_step=9, after_step=lambda info: Verdict(stop=True)) == "asked to stop"
    assert (large.step, large.tokens) == (5, 5 * 8 * 16)


def test_the_schedule_follows_the_progress_that_is_told(manifest: CorpusManifest) -> None:
    inner = {"optimizer": "sgd", "lr": 1.0, "warmup_steps": 0, "decay_share": 0.5}
    told = iter([0.0, 0.5, 0.75, 1.0])
    infos = steps_of(make(manifest, inner=inner, progress=lambda: next(told)), 3)
    infos += steps_of(make(manifest, inner=inner), 4)
    assert [info.lr for info in infos] == pytest.approx([1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 0.5])


def test_a_step_is_timed_without_what_comes_after_it_and_told_as_a_share_of_the_devices_peak(
    manifest: CorpusManifest,
) -> None:
    facts: Facts = []
    began = time.perf_counter()
    infos = steps_of(make(manifest, facts=facts, peak_tflops=2.0), 2, lambda info: time.sleep(0.25))
    steps = [fields for what, fields in facts if what == "step"]
    spent = sum(float(str(fields["step_s"])) for fields in steps)
    assert 0 < spent < time.perf_counter() - began - 0.5
    assert (steps[0]["tokens"], steps[-1]["tokens_total"]) == (64, 128)
    # Of one layer of 16: 4 x 16 x 16 for attention, 3 x 16 x 64 for SwiGLU, the head's 16 x 257, and 16 positions.
    operations = 6 * (4 * 16 * 16 + 3 * 16 * 64 + 16 * 257) + 12 * 1 * 16 * 16
    for fields, info in zip(steps, infos, strict=True):
        assert fields["mfu"] == pytest.approx(operations * 64 / (info.step_ns / 1e9) / 2e12)
    facts.clear()
    make(manifest, facts=facts).run(until_step=1)
    assert "mfu" not in facts[0][1], "where the peak is not known"


def test_emulated_slowness_sleeps_in_proportion(manifest: CorpusManifest, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("diloco.inner.trainer.time", SimpleNamespace(**{**vars(time), "sleep": slept.append}))
    for seconds, info in zip(slept, steps_of(make(manifest, slowdown=4.0), 3), strict=True):
        assert 0 < seconds / 3.0 <= info.step_ns / 1e9
    make(manifest).run(until_step=1)
    assert len(slept) == 3
    monkeypatch.setattr(SiteGroup, "is_first", False)
    make(manifest, slowdown=4.0).run(until_step=1)
    assert len(slept) == 3, "other ranks wait for the first: two that sleep by each other's step sleep longer each time"


def test_of_a_tied_pair_one_is_saved_and_what_is_of_another_model_is_named(tmp_path: Path) -> None:
    model = tiny(tied=True)
    tensors = capture_state(model, build_optimizers(model, InnerOptions()))
    found = checkpoint.load(checkpoint.save(tmp_path, "step-1", tensors, {}))
    assert set(found.part("model")) == {name for name, _ in model.named_parameters()}, "and no tables"
    with pytest.raises(CheckpointError, match=r"another model: .* is \(.*\) here and \(.*\) there"):
        load_parameters(found, tiny(dim=32, tied=True))
    with pytest.raises(CheckpointError, match=r"head\.weight is \(40, 16\) here and nothing there"):
        load_parameters(found, tiny())
