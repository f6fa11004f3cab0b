"""Trackers: the packages themselves, in their offline modes, with the curves of a recorded run."""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from diloco.cli import status
from diloco.cli.main import main
from diloco.config.compose import TRACKERS as NAMES
from diloco.config.compose import check_trackers, compose, to_yaml
from diloco.config.errors import ConfigError
from diloco.observe import track
from diloco.observe.eventlog import read_events
from diloco.observe.history import RunHistory
from diloco.observe.summary import summarize
from diloco.observe.track import TRACKERS, Point, Tracker
from diloco.runs import process
from tests.loopback.cluster import eventually
from tests.observe.recorded import SITES, Recorder, append
from tests.sooner import sooner

Curve = list[tuple[int, float]]
EVENTS = Recorder().record()
LOSS = "global/val_loss"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder with the first half of the events, and no server in reach."""
    monkeypatch.setattr(os, "environ", {**os.environ, "WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true"})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    folder = tmp_path / "runs" / "quiet-otter"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(compose(["run.seed=7", "run.name=quiet-otter"])))
    append(folder / "events.jsonl", EVENTS[: len(EVENTS) // 2])
    return folder


def of_jsonl(run: Path) -> tuple[Curve, object]:
    rows = [json.loads(line) for line in (run / "track/jsonl/metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row[LOSS]) for row in rows if LOSS in row], 7


def of_tensorboard(run: Path) -> tuple[Curve, object]:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    found = EventAccumulator(str(run / "track/tensorboard"), {"tensors": 0})
    found.Reload()
    curve = [(each.step, each.tensor_proto.float_val[0]) for each in found.Tensors(LOSS)]
    told = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    return curve, HParamsPluginData.FromString(told).session_start_info.hparams["run.seed"].number_value


def records_of(log: bytes) -> Iterator[bytes]:
    """The records of an offline file: LevelDB's log format, behind a head of seven bytes."""
    place, record = 7, b""
    while place < len(log):
        if (room := 32768 - place % 32768) < 7:
            place += room
        length, kind = struct.unpack_from("<4xHB", log, place)
        record += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # The whole of a record, or its last part.
            yield record
            record = b""


def of_wandb(run: Path) -> tuple[Curve, object]:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    curve, seed, ids = list[tuple[int, float]](), None, set[str]()
    for path in sorted(run.glob("track/wandb/offline-run-*/*.wandb")):
        ids.add(path.name)
        for data in records_of(path.read_bytes()):
            record = Record.FromString(data)
            row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if LOSS in row:
                curve.append((json.loads(row["tokens"]), json.loads(row[LOSS])))
            for item in record.run.config.update:
                seed = json.loads(item.value_json)["seed"] if item.key == "run" else seed
    assert len(ids) == 1, "one run of the tracker"
    return curve, seed


def of_mlflow(run: Path) -> tuple[Curve, object]:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("diloco")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("quiet-otter", "FINISHED")
    curve = [(each.step, each.value) for each in client.get_metric_history(found.info.run_id, LOSS)]
    return curve, int(found.data.params["run.seed"])


READ: Mapping[str, Callable[[Path], tuple[Curve, object]]] = {
    "jsonl": of_jsonl,
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
    "mlflow": of_mlflow,
}


@pytest.mark.parametrize("name", sooner(NAMES, "jsonl", "tensorboard"))
def test_a_tracker_has_the_losses_of_the_summary_and_a_resumed_run_goes_on_in_the_same_run(
    run: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if name != "jsonl":
        pytest.importorskip(name)
    assert tuple(TRACKERS) == NAMES
    assert main(["track", str(run), name]) == 0
    append(run / "events.jsonl", EVENTS[len(EVENTS) // 2 :])
    assert main(["track", str(run), name]) == 0
    assert main(["track", str(run), name]) == 0
    assert f"{name}: 0 points sent of quiet-otter" in capfd.readouterr().out
    history = RunHistory(EVENTS)
    reached: Any = summarize(history, None, {})["global"]
    curve, seed = READ[name](run)
    assert [step for step, _ in curve] == [each.tokens for each in history.evaluations]
    assert [loss for _, loss in curve] == pytest.approx([each.val_loss for each in history.evaluations])
    assert (curve[0][1], curve[-1][1]) == pytest.approx((reached["val_loss_start"], reached["val_loss"]))
    assert seed == 7


def test_curves_are_of_every_site_and_every_round(run: Path) -> None:
    curves = track.Curves()
    points = [point for event in EVENTS for point in curves.take(event)]
    history = RunHistory(EVENTS)
    named = {name for point in points for name in point.values}
    for site in SITES:
        of_site = [point for point in points if f"sites/{site}/loss" in point.values]
        known = {point[1:] for point in history.sites[site].losses.whole() if point}
        assert {(point.step, point.values[f"sites/{site}/loss"]) for point in of_site} <= known
        assert of_site[-1].step == history.sites[site].tokens
        assert {f"sites/{site}/{key}" for key in ("tokens_per_second", "stall", "bytes_up_per_second")} <= named
    for fragment, version in enumerate(history.versions):
        made = [point.values for point in points if f"fragments/{fragment}/version" in point.values]
        assert [each[f"fragments/{fragment}/version"] for each in made] == [*range(1, version + 1)]
        assert {f"fragments/{fragment}/{key}" for key in ("norm", "updates", "staleness")} <= made[-1].keys()
        shares = [value for name, value in made[-1].items() if "/share/" in name]
        assert len(shares) == made[-1][f"fragments/{fragment}/updates"]


def notes(run: Path) -> list[str]:
    return [str(event["why"]) for event in read_events(run / "events.jsonl") if event["what"] == "note"]


def test_a_tracker_that_is_down_gets_everything_later_and_is_noted_once(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Sequence[Point]]()

    class Unsteady(Tracker):
        def log(self, points: Sequence[Point]) -> None:
            asked.append(points)
            if len(asked) == 2:  # What has come meanwhile is sent as well, at the end.
                append(run / "events.jsonl", EVENTS[len(EVENTS) // 2 :])
                os.kill(os.getpid(), signal.SIGTERM)
            if len(asked) <= 2:
                raise ConnectionError("no answer")

    monkeypatch.setattr(track, "TRACKERS", {**TRACKERS, "jsonl": Unsteady})
    monkeypatch.setattr(status, "TRACK_AGAIN_S", 0.0)
    before = len(notes(run))
    assert main(["track", str(run), "jsonl", "--follow"]) == 0
    curves = track.Curves()
    known = [point for event in EVENTS for point in curves.take(event)]
    # The note of it is of today, years after the recorded run: seconds of that run mean nothing behind it.
    sent = [point._replace(seconds=each.seconds) for point, each in zip(chain(*asked[2:]), known, strict=True)]
    assert sent == known
    (note,) = notes(run)[before:]
    assert note == "jsonl takes no points, and what waits is sent once it does: ConnectionError('no answer')"


def test_a_damaged_state_is_named(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    state = run / "track" / "jsonl" / "state.json"
    assert main(["track", str(run), "jsonl"]) == 0
    state.write_text("{")
    assert main(["track", str(run), "jsonl"]) == 1
    assert f"{state} is damaged; without it the tracker gets a new run" in capfd.readouterr().err
    state.unlink()
    assert main(["track", str(run), "jsonl"]) == 0


def test_a_tracker_that_blocks_keeps_no_run_from_its_end(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    monkeypatch.setattr(process, "verb", lambda *_: [sys.executable, "-c", deaf])
    monkeypatch.setattr(status, "TRACK_END_S", 0.2)
    before, log = len(notes(run)), run / "logs/track-wandb.log"
    config = compose([f"run.dir={run.parent}", "run.name=quiet-otter", "run.track=wandb"])
    with status.tracked(config):
        eventually(lambda: log.is_file() and log.read_text() != "", 30.0, "the tracker has begun")
    (note,) = notes(run)[before:]
    assert note == f"wandb did not end in time: diloco track {run} wandb sends the rest"
    assert note in capfd.readouterr().out


def test_an_unknown_tracker_and_a_missing_package_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compose(["run.track=wandb,jsonl"]).run.track == compose(["run.track=[wandb,jsonl]"]).run.track
    assert compose(["run.track="]).run.track == []
    with pytest.raises(ConfigError, match=r"run.track is 'jsonl,jsonl': each tracker once"):
        check_trackers(["jsonl", "jsonl"])
    with pytest.raises(ConfigError, match=r"run.track is 'aim': one of tensorboard, wandb, mlflow, jsonl"):
        check_trackers(["aim"])
    monkeypatch.setattr("diloco.config.compose.find_spec", lambda name: None)
    check_trackers(["jsonl"])
    with pytest.raises(ConfigError, match=r"run.track is 'wandb': wandb is not installed: pip install 'diloco\[wandb"):
        check_trackers(["jsonl", "wandb"])
