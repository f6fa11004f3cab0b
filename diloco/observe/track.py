"""A run's curves in an experiment tracker, from the events and the reduction that the report reads.

``Sender`` reads ``events.jsonl`` and sends a tracker what it lacks.  The file is its queue: what a tracker does not
take waits there, and takes no memory.  ``state.json`` in its folder names the tracker's run and the last event sent
of each process, so that a later sender continues both.  Only ``diloco track`` uses it: ``diloco up`` and the syncer
start that as a process of its own, since a tracker's package may block, also at the exit of its process.

The step of a point is the report's axis: a site's are the tokens that it has read, all others the tokens merged.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from diloco.config.compose import flat
from diloco.durable import write_file
from diloco.observe.eventlog import event_blocks
from diloco.observe.history import RunHistory
from diloco.observe.text import whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from diloco.observe.eventlog import Event

EVERY_S = 5.0
"""Seconds between two points of a site: a syncer records heartbeats as often."""


class Point(NamedTuple):
    """Values of one step.  ``who`` and ``at`` are of the event that they come from, ``seconds`` is the run's time."""

    who: str
    at: float
    seconds: float
    step: int
    values: Mapping[str, float]


class Curves:
    """Turns events into points."""

    def __init__(self) -> None:
        self._history = RunHistory()
        self._last: dict[str, tuple[float, int, int, int]] = {}
        """By site: the instant, tokens, and bytes up and down at its last point."""

    def take(self, event: Event) -> Iterator[Point]:
        """Take the next event and yield its point, if it has one."""
        history, what, who = self._history, event["what"], str(event["who"])
        rounds, evaluations = history.num_rounds, len(history.evaluations)
        history.take(event)
        step, values = history.run_tokens, dict[str, float | None]()
        if what in ("step", "reported", "site_done"):
            step, values = self._of_site(str(event.get("site", who)), event)
        elif history.num_rounds > rounds:
            values = self._of_round(whole(event, "fragment"), whole(event, "version"))
        elif len(history.evaluations) > evaluations:
            score = history.evaluations[-1]
            step = score.tokens
            values = {"global/val_loss": score.val_loss, "global/val_bits_per_byte": score.val_bits_per_byte}
        if sent := {name: value for name, value in values.items() if value is not None}:
            yield Point(who, float(str(event["at"])), round(history.seconds, 3), step, sent)

    def _of_site(self, name: str, event: Event) -> tuple[int, dict[str, float | None]]:
        site, at = self._history.sites[name], float(str(event["at"]))
        before = self._last.get(name)
        if not site.tokens or (event["what"] == "reported" and site.has_own_events):
            return 0, {}
        late = before is None or at >= before[0] + EVERY_S or event["what"] == "site_done"
        if not late or (before is not None and site.tokens <= before[1]):
            return 0, {}
        self._last[name] = at, site.tokens, site.bytes_up, site.bytes_down
        train_s = site.meter("train_s")
        values: dict[str, float | None] = {
            "loss": site.loss,
            "tokens_per_second": site.tokens_per_s,
            "stall": site.meter("stall_s") / train_s if train_s else None,
            "staleness": self._history.staleness(site),
        }
        if before is not None and at > before[0]:
            values["bytes_up_per_second"] = max(0, site.bytes_up - before[2]) / (at - before[0])
            values["bytes_down_per_second"] = max(0, site.bytes_down - before[3]) / (at - before[0])
        return site.tokens, {f"sites/{name}/{key}": value for key, value in values.items()}

    def _of_round(self, fragment: int, version: int) -> dict[str, float | None]:
        made = self._history.round(fragment, version)
        if made is None:  # Another of several syncers made it, and its events are elsewhere.
            return {}
        values: dict[str, float | None] = {
            "version": version,
            "norm": made.norm,
            "updates": len(made.weights),
            "staleness": max(made.staleness.values(), default=0),
            "seconds": made.seconds,
            **{f"share/{site}": weight for site, weight in made.weights.items()},
        }
        return {f"fragments/{fragment}/{key}": value for key, value in values.items()}


class Sender:
    """Sends one tracker what it lacks of a run, whenever ``send`` is called."""

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        """``folder`` is RUN/track/TRACKER, with the name of one of ``TRACKERS``; ``config`` the run's settings."""
        run = folder.parents[1].resolve()
        self._open = partial(TRACKERS[folder.name], folder, run.name, config)
        self._tracker: Tracker | None = None
        self._state, self._id, self._sent = folder / "state.json", "", dict[str, float]()
        try:
            with suppress(FileNotFoundError):
                told = json.loads(self._state.read_text())
                self._id, self._sent = told["id"], told["sent"]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{self._state} is damaged; without it the tracker gets a new run") from error
        self._events, self._waiting = run / "events.jsonl", list[Point]()
        self._blocks, self._curves = event_blocks(self._events), Curves()

    def send(self, *, ends: bool) -> int:
        """Send what is new, and return how many points; the next call sends again what the tracker did not take.

        ``ends``: this process sends no more.
        """
        count, more = 0, True
        try:
            while more:
                more = bool(self._waiting) or self._read()
                if self._waiting:
                    self._tracker = self._tracker or self._open(self._id)
                    self._id = self._tracker.id
                    self._tracker.log(self._waiting)
                    self._sent |= {point.who: point.at for point in self._waiting}
                    write_file(self._state, json.dumps({"id": self._id, "sent": self._sent}).encode())
                    count += len(self._waiting)
                    self._waiting = []
            if ends and self._tracker is not None:
                self._tracker.close()
        except Exception:
            self._tracker = None  # Opened again by the next call.
            raise
        return count

    def _read(self) -> bool:
        """Read a block of events, and return whether there was one."""
        try:
            block = next(self._blocks)
            points = [point for event in block for point in self._curves.take(event)]
        except Exception:  # Half of it is no history: read all of it again.
            self._blocks, self._curves = event_blocks(self._events), Curves()
            raise
        self._waiting = [point for point in points if point.at > self._sent.get(point.who, 0.0)]
        return bool(block)


# --- The trackers -----------------------------------------------------------------------------------------------------


class Tracker:
    """A run in a tracker, which has it under ``id``.  This one is a plain file.

    Where a run is kept and with which credentials is only in the environment variables of the tracker's package.
    """

    def __init__(self, folder: Path, name: str, config: Mapping[str, object], again: str) -> None:
        """``again`` is the id of the run to continue; "" for a new one."""
        self.id, self._path = name, folder / "metrics.jsonl"

    def log(self, points: Sequence[Point]) -> None:
        """Hand the points to the tracker."""
        rows = [{"step": each.step, "seconds": each.seconds, "at": each.at, **each.values} for each in points]
        with self._path.open("a") as file:
            file.write("".join(f"{json.dumps(row)}\n" for row in rows))

    def close(self) -> None:
        """End this process's part of the run."""


class _TensorBoard(Tracker):
    def __init__(self, folder: Path, name: str, config: Mapping[str, object], again: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.id, self._event, self._scalar = name, Event, scalar_pb
        self._writer = EventFileWriter(str(folder))
        if not again:
            self._writer.add_event(Event(summary=hparams_pb(_flat(config), name)))

    def log(self, points: Sequence[Point]) -> None:
        for each in points:
            for name, value in each.values.items():
                summary = self._scalar(name, value)
                self._writer.add_event(self._event(wall_time=each.at, step=each.step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb(Tracker):
    def __init__(self, folder: Path, name: str, config: Mapping[str, object], again: str) -> None:
        usual = {"WANDB_PROJECT": "diloco", "WANDB_NAME": name, "WANDB_DIR": str(folder.parent), "WANDB_CONSOLE": "off"}
        for key, value in usual.items():
            os.environ.setdefault(key, value)
        import wandb

        self._run = wandb.init(id=again or None, resume="allow", config=dict(config))
        self.id = str(self._run.id)
        # Its own step only rises, and sites are at different tokens.
        self._run.define_metric("tokens")
        self._run.define_metric("*", step_metric="tokens")

    def log(self, points: Sequence[Point]) -> None:
        for each in points:
            self._run.log({"tokens": each.step, "seconds": each.seconds, **each.values})

    def close(self) -> None:
        self._run.finish()


class _MLflow(Tracker):
    METRICS_MAX, PARAMS_MAX = 1000, 100
    """In one call; the server refuses more."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, object], again: str) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._client, self._metric = MlflowClient(), Metric
        self.id, self._params = again, [Param(key, str(value)) for key, value in _flat(config).items()]
        if again:
            known = self._client.get_run(again).data.params
            self._params = [each for each in self._params if each.key not in known]
            self._client.update_run(again, status="RUNNING")
            return
        called = os.environ.get("MLFLOW_EXPERIMENT_NAME", "diloco")
        known = self._client.get_experiment_by_name(called)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(called)
        self.id = str(self._client.create_run(experiment, run_name=name).info.run_id)

    def log(self, points: Sequence[Point]) -> None:
        while self._params:
            self._client.log_batch(self.id, params=self._params[: self.PARAMS_MAX])
            del self._params[: self.PARAMS_MAX]
        found = [
            self._metric(name, value, int(each.at * 1000), each.step)
            for each in points
            for name, value in each.values.items()
        ]
        for begin in range(0, len(found), self.METRICS_MAX):
            self._client.log_batch(self.id, metrics=found[begin : begin + self.METRICS_MAX])

    def close(self) -> None:
        self._client.set_terminated(self.id)


TRACKERS: Mapping[str, type[Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _MLflow,
    "jsonl": Tracker,
}


def _flat(config: Mapping[str, object]) -> dict[str, int | float | str]:
    """Return nested settings by dotted name, for trackers whose parameters are numbers and text."""
    return {name: value if isinstance(value, int | float | str) else json.dumps(value) for name, value in flat(config)}
