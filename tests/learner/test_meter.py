"""The meter counts every step, however long the run, and little is kept for its percentiles."""

from __future__ import annotations

import threading
import time

from diloco.learner.agent import SAMPLES_MAX, Meter

MS = 1_000_000


def test_nothing_was_trained_yet() -> None:
    reading = Meter().read()
    assert (reading.inner_steps, reading.tokens, reading.train_s, reading.loss, reading.tokens_per_s) == (
        0,
        0,
        0,
        None,
        0,
    )
    assert (reading.step_s_p50, reading.step_s_p95, reading.step_s_max) == (0, 0, 0)


def test_totals_and_percentiles_of_a_short_run_are_exact() -> None:
    meter = Meter()
    for number in range(1, 101):
        meter.step(number * MS, 7, 2.0)
        meter.stalled(number * 1000, number * 10)
    reading = meter.read()
    assert (reading.inner_steps, reading.tokens) == (100, 700)
    assert (reading.step_s_p50, reading.step_s_p95, reading.step_s_max) == (0.051, 0.096, 0.1)
    assert reading.stall_s == 5050 * 1e-6
    assert reading.adopt_s == 50500e-9
    assert reading.after_step_s_max == 100e-6
    assert reading.loss == 2.0


def test_a_long_run_is_counted_to_the_end_and_sampled_evenly() -> None:
    meter, count = Meter(), 5 * SAMPLES_MAX + 17
    for number in range(count):
        meter.step(2 * MS if number < count // 2 else 4 * MS, 1, 1.0)
    meter.step(9 * MS, 1, 1.0)
    reading = meter.read()
    assert (reading.inner_steps, reading.tokens) == (count + 1, count + 1)
    assert reading.step_s_max == 0.009, "the slowest step is remembered whether or not it was sampled"
    assert reading.step_s_p95 == 0.004
    assert len(meter._samples_ns) < SAMPLES_MAX
    late = sum(sample == 4 * MS for sample in meter._samples_ns) / len(meter._samples_ns)
    assert 0.45 < late < 0.55, late


def test_the_time_of_training_ends_with_the_loop() -> None:
    meter = Meter()
    meter.step(10 * MS, 100, 1.0)
    time.sleep(0.02)
    meter.end()
    first = meter.read()
    time.sleep(0.05)
    meter.end()
    again = meter.read()
    assert first.train_s == again.train_s
    assert 0.03 <= first.train_s < 10
    assert again.tokens_per_s == 100 / first.train_s


def test_a_loss_that_was_no_number_is_got_over() -> None:
    meter = Meter()
    for loss in (4.0, float("nan"), 2.0, 2.0):
        meter.step(MS, 1, loss)
    assert meter.read().loss == 2.0


def test_readers_and_the_training_thread_do_not_disturb_each_other() -> None:
    meter, done = Meter(), threading.Event()

    def read() -> None:
        while not done.is_set():
            meter.read()

    reader = threading.Thread(target=read)
    reader.start()
    slowest = 0.0
    for _ in range(20_000):
        began = time.perf_counter()
        meter.step(MS, 1, 1.0)
        slowest = max(slowest, time.perf_counter() - began)
    done.set()
    reader.join(10.0)
    assert meter.read().inner_steps == 20_000
    assert slowest < 1.0
