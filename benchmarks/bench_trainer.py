"""How much slower does a site train with everything on, compared with the same trainer without an agent, in turns?

Two processes train the demo's model on the standard library's text in alternating blocks of steps: one with an agent
that seals, sends, fetches and adopts (int4, four fragments, overlap 2), the other without.  Before the agent's process
hands over, it finishes all work in progress, so that none falls into the other's time.  The trainer has one thread and
one core.  Two cases: with another core for the agent's and gRPC's threads (``core_free``), and with the whole site on
the trainer's core (``no_core_free``), where the agent's CPU time (its threads and ``after_step``) is deducted, because
that work must be done somewhere.  The syncer is another machine's load, and runs on the other core.

A third case, ``watched``: two sites in turns, with no core free.  Both log their events, and OpenTelemetry's traces and
a tracker follow the log of one.  ``watching_cpu_share`` is the CPU time that this takes, the tracker's process
included, as a share of the time of training.  The step times do not show so little: two processes of one program differ
by up to 9 % for as long as they live.

A slowdown is 1 - (steps per second with) / (without), the median over neighbouring blocks; ``p99_over_p50`` is for the
time from the end of one step to the end of the next.  ``trainer_cpu_ratio`` compares the training thread's CPU time per
step: other load on the machine disturbs it less, but it contains no waiting.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from benchmarks.record import finish, parser_of, percentile, record
from benchmarks.rounds import agreement_of, answer, quiet, started
from diloco.inner.corpus import DataOptions, prepare_corpus
from diloco.inner.data import TokenStream
from diloco.inner.holding import Holding, Spread
from diloco.inner.model import ModelOptions, Transformer
from diloco.inner.optimizer import InnerOptions, build_optimizers
from diloco.inner.parallel import SiteGroup
from diloco.inner.precision import resolve_precision
from diloco.inner.trainer import StepInfo, Trainer, TrainerOptions, Verdict
from diloco.learner.agent import Agent
from diloco.learner.exchange import AgentOptions
from diloco.learner.ranks import Orders
from diloco.observe.eventlog import EventLog
from diloco.observe.traces import Traces
from diloco.observe.track import Sender
from diloco.outer.fragments import Layout, gather, named_parameters_once, plan_layout
from diloco.outer.optimizer import OuterOptimizerOptions, OuterRule
from diloco.sync.link import AdaptOptions, Way
from diloco.sync.options import LearnerOptions, OuterOptions
from diloco.syncer.options import RunPlan, SyncerOptions
from diloco.syncer.server import Syncer
from diloco.wire.client import SyncClient
from diloco.wire.options import SecurityOptions, ServerOptions

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    Emit = Callable[[str, dict[str, object]], None]

CODEC = "int4:32"
NUM_FRAGMENTS = 4
OVERLAP_STEPS = 2
MODEL = ModelOptions(vocab_size=1025, layers=2, dim=128, heads=4, context=128)
"""The model of ``configs/model/tiny.yaml``, which the demo trains."""
BATCH = 16
START_S_MAX = 120.0
CALM_S, CALM_SHARE, CALM_S_MAX = 0.2, 0.02, 20.0
"""The agent is idle once it has used less than this share of a core for ``CALM_S``."""
STEPS_MAX = 1 << 40
CASES = ("core_free", "no_core_free", "watched")
TRACKER = "tensorboard"
TRACK_S = 2.0


@dataclass(frozen=True, slots=True)
class Facts:
    """The arguments of both trainers."""

    steps: int
    inner_steps: int
    seed: int
    own_core: int
    """The core of the training thread."""
    others_core: int
    """The core of all other threads of the site's process."""


def layout_of(model: torch.nn.Module) -> Layout:
    parameters = named_parameters_once(model)
    return plan_layout([(name, tuple(values.shape)) for name, values in parameters.items()], NUM_FRAGMENTS)


def run_syncer(folder: str, seed: int, core: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {core})
    torch.manual_seed(seed)
    model = Transformer(MODEL)
    layout = layout_of(model)
    outer = OuterOptions(num_fragments=NUM_FRAGMENTS, quorum=1, overlap_steps=OVERLAP_STEPS)
    rule = OuterRule(OuterOptimizerOptions(kind="sgd", lr=1.0, momentum=0.0))
    plan = RunPlan(agreement_of(layout, CODEC), layout, "bench", outer, rule)
    options = SyncerOptions(folder=folder, up_codecs=[CODEC], down_codec=CODEC, linger_s=0.0)
    values = {name: tensor.detach() for name, tensor in named_parameters_once(model).items()}
    first = [gather(fragment, values) for fragment in layout.fragments]
    syncer = Syncer(options, plan, lambda: first, ServerOptions(run_id="bench"), SecurityOptions(), quiet)
    pipe.send((syncer.start(), os.getpid()))
    pipe.recv()


def started_agent(
    folder: str, address: str, site: str, inner_steps: int, model: torch.nn.Module, group: SiteGroup, emit: Emit
) -> Agent:
    """Return the agent of rank 0 of a site, which has joined the syncer at ``address``."""
    layout = layout_of(model)
    agent = Agent(
        AgentOptions(folder=folder, adapt=AdaptOptions(ways=(Way(CODEC, 0),)), finish_timeout_s=5.0),
        LearnerOptions(inner_steps=inner_steps, num_fragments=NUM_FRAGMENTS),
        layout,
        Holding(named_parameters_once(model), group),
        agreement_of(layout, CODEC),
        SyncClient(address, site, "bench"),
        emit,
        Orders(group),
    )
    agent.start()
    return agent


def rest() -> None:
    """Wait until the other threads of this process are idle, for at most ``CALM_S_MAX``."""
    until = time.monotonic() + CALM_S_MAX
    while time.monotonic() < until:
        before = time.process_time()
        time.sleep(CALM_S)
        if time.process_time() - before < CALM_SHARE * CALM_S:
            return


class Turns:
    """The hook after each step: counts a block's steps, hands the turn over, and waits for the next turn."""

    def __init__(self, agent: Agent | None, steps: int, pipe: Any) -> None:
        self._agent, self._steps, self._pipe = agent, steps, pipe
        self._step_s: list[float] = []
        self._began_own_s = 0.0
        self._in_agent_s = 0.0
        self._last = time.perf_counter()
        self._began_cpu_s = self._others_cpu_s()

    def after_step(self, info: StepInfo) -> Verdict:
        """Pass the step to the agent, if there is one, and record the times."""
        verdict = Verdict()
        if self._agent is not None:
            began = time.thread_time()
            verdict = self._agent.after_step(info)
            self._in_agent_s += time.thread_time() - began
        now = time.perf_counter()
        self._step_s.append(now - self._last)
        self._last = now
        return self._hand_over() if len(self._step_s) == self._steps else verdict

    def _hand_over(self) -> Verdict:
        agent_cpu_s = self._others_cpu_s() - self._began_cpu_s + self._in_agent_s if self._agent is not None else 0.0
        own_cpu_s = time.thread_time() - self._began_own_s
        if self._agent is not None:
            rest()
        self._pipe.send({"step_s": self._step_s, "agent_cpu_s": agent_cpu_s, "own_cpu_s": own_cpu_s})
        self._pipe.recv()
        self._step_s, self._in_agent_s = [], 0.0
        self._began_cpu_s = self._others_cpu_s()
        self._began_own_s, self._last = time.thread_time(), time.perf_counter()
        return Verdict()

    def _others_cpu_s(self) -> float:
        """Return the CPU seconds of all threads of this process except the trainer's."""
        return time.process_time() - time.thread_time()


class Collector(BaseHTTPRequestHandler):
    """Takes spans, and forgets them."""

    def do_POST(self) -> None:
        """Answer that they were taken."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def run_tracker(folder: str, core: int, pipe: Any) -> None:
    """Send the curves of the run in ``folder`` to a tracker, as its process does in a run, and tell the CPU time."""
    os.sched_setaffinity(0, {core})
    kept = Path(folder) / "of-site" / "track" / TRACKER
    kept.mkdir(parents=True)
    sender = Sender(kept, {})
    sender.send(ends=False)
    began = time.process_time()
    pipe.send("ready")
    while not pipe.poll(TRACK_S):
        sender.send(ends=False)
    pipe.send(time.process_time() - began)


def run_trainer(
    folder: str, data: str, address: str, facts: Facts, site: str, collector: str | None, pipe: Any
) -> None:
    """Run a site's process; with an empty ``address`` it has no agent, with a ``collector`` a log;
    "" takes no traces."""
    torch.set_num_threads(1)
    torch.manual_seed(facts.seed)
    os.sched_setaffinity(0, {facts.others_core})  # Threads inherit it; the trainer's own is set last.
    group, model = SiteGroup(device="cpu"), Transformer(MODEL)
    stream = TokenStream(prepare_corpus(DataOptions(), Path(data)), "train", MODEL.context, BATCH, seed=facts.seed)
    precision = resolve_precision("auto", group.device)
    optimizers = build_optimizers(model, InnerOptions(optimizer="muon"), precision)
    emit: Emit = quiet
    if collector is not None:
        log = EventLog(Path(folder) / f"of-{site}" / "events.jsonl", site)
        if collector:
            log.follow(Traces("bench", site, OTLPSpanExporter(endpoint=collector)).take)
        emit = log.emit
    options = TrainerOptions(precision=precision, seed=facts.seed)
    trainer = Trainer(model, optimizers, stream, options, Spread(model, group), log=emit)
    agent = None
    if address:
        agent = started_agent(str(Path(folder) / site), address, site, facts.inner_steps, model, group, emit)
    pipe.send("ready")
    pipe.recv()
    os.sched_setaffinity(0, {facts.own_core})
    turns = Turns(agent, facts.steps, pipe)
    trainer.run(until_step=STEPS_MAX, after_step=turns.after_step)


def measure(case: str, blocks: int, arguments: argparse.Namespace, data: str) -> dict[str, Any]:
    """Run the blocks of one case in turns, every second pair in reverse order, and return the row."""
    core, free = sorted(os.sched_getaffinity(0))[:2]
    others = free if case == "core_free" else core
    facts = Facts(arguments.steps, arguments.inner_steps, arguments.seed, core, others)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        syncer = started(stack, run_syncer, str(Path(folder) / "syncer"), arguments.seed, free)
        (address, _), is_watched = answer(syncer, START_S_MAX), case == "watched"
        collector = stack.enter_context(collecting()) if is_watched else None
        pipes = {True: started(stack, run_trainer, folder, data, address, facts, "site", collector)}
        alone = (address, facts, "beside", "") if is_watched else ("", facts, "beside", None)
        pipes[False] = started(stack, run_trainer, folder, data, *alone)
        for pipe in pipes.values():
            answer(pipe, START_S_MAX)
        tracker = started(stack, run_tracker, folder, others) if is_watched else None
        if tracker is not None:
            answer(tracker, START_S_MAX)
        found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for pair in range(blocks + 1):
            for kind in (True, False) if pair % 2 else (False, True):
                pipes[kind].send("go on")
                found[kind].append(answer(pipes[kind], 600.0))
        tracker_s = 0.0
        if tracker is not None:
            tracker.send("end")
            tracker_s = answer(tracker, START_S_MAX)
    # The first pair is the warm-up, in which the agent joins and adopts.
    made = row(case, found[True][1:], found[False][1:])
    if is_watched:
        beside = row(case, found[False][1:], found[True][1:])["agent_cpu_share"]
        both_s = sum(sum(block["step_s"]) for blocks_of_one in found.values() for block in blocks_of_one)
        made["tracker_cpu_share"] = tracker_s / both_s  # It ran in the turns of both.
        made["watching_cpu_share"] = made["agent_cpu_share"] - beside + made["tracker_cpu_share"]
    return made


@contextmanager
def collecting() -> Iterator[str]:
    """Serve a collector; yield its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        server.shutdown()


def row(case: str, with_agent: list[dict[str, Any]], without: list[dict[str, Any]]) -> dict[str, Any]:
    whole_s = [sum(block["step_s"]) for block in with_agent]
    alone_s = [sum(block["step_s"]) for block in without]
    own_s = [block["agent_cpu_s"] for block in with_agent]
    taken_off_s = own_s if case == "no_core_free" else [0.0] * len(own_s)
    kept = [alone / (whole - own) for alone, whole, own in zip(alone_s, whole_s, taken_off_s, strict=True)]
    steps = {"on": [s for b in with_agent for s in b["step_s"]], "off": [s for b in without for s in b["step_s"]]}
    tails = {name: percentile(each, 99) / percentile(each, 50) for name, each in steps.items()}
    return {
        "case": case,
        "slowdown": 1 - percentile(kept, 50),
        "steps_per_s_kept_p5": percentile(kept, 5),
        "steps_per_s_kept_p50": percentile(kept, 50),
        "slowdown_agent_s_left_in": 1 - percentile([a / w for a, w in zip(alone_s, whole_s, strict=True)], 50),
        "agent_cpu_share": sum(own_s) / sum(whole_s),
        "trainer_cpu_ratio": percentile(
            [on["own_cpu_s"] / off["own_cpu_s"] for on, off in zip(with_agent, without, strict=True)], 50
        ),
        "step_ms_p50_on": 1e3 * percentile(steps["on"], 50),
        "step_ms_p50_off": 1e3 * percentile(steps["off"], 50),
        "step_ms_p99_on": 1e3 * percentile(steps["on"], 99),
        "step_ms_p99_off": 1e3 * percentile(steps["off"], 99),
        "p99_over_p50": {**tails, "ratio": tails["on"] / tails["off"]},
        "pairs": len(kept),
        "steps": len(steps["on"]),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=60, help="inner steps in a block")
    parser.add_argument("--blocks", type=int, default=9, help="pairs of blocks, with and without, in each case")
    parser.add_argument("--inner-steps", type=int, default=20, help="inner steps between two updates of one fragment")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        print("bench_trainer: skipped: it needs two cores, one of them for the syncer")
        return
    blocks = 2 if arguments.quick else arguments.blocks
    if arguments.quick:
        arguments.steps, arguments.inner_steps = 8, 4
    with tempfile.TemporaryDirectory() as data:
        prepare_corpus(DataOptions(), Path(data))
        rows = []
        for case in arguments.cases:
            rows.append(measure(case, blocks, arguments, data))
            print(json.dumps(rows[-1]), flush=True)
    config = {name: getattr(arguments, name) for name in ("steps", "inner_steps")}
    config |= {
        "codec": CODEC,
        "fragments": NUM_FRAGMENTS,
        "overlap_steps": OVERLAP_STEPS,
        "model": f"{MODEL.layers}x{MODEL.dim}",
    }
    top = {f"slowdown_{found['case']}": found["slowdown"] for found in rows}
    top |= {"p99_over_p50": {found["case"]: found["p99_over_p50"] for found in rows}}
    finish({**record("trainer", config, rows, arguments.seed, repeats=blocks), **top}, save=arguments.save)


if __name__ == "__main__":
    main()
