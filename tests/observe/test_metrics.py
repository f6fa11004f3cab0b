"""A page of metrics is what Prometheus reads, on loopback unless told, and its labels cannot break it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from diloco.config.compose import compose
from diloco.config.errors import ConfigError
from diloco.observe import metrics
from diloco.observe.metrics import (
    SiteMetrics,
    Spread,
    SyncerMetrics,
    about,
    counter,
    gauge,
    histogram,
    page_at,
    standby_metrics,
)
from diloco.sync.events import Reason
from diloco.sync.options import PROTOCOL
from tests.hunts.flooding import dial, is_over
from tests.loopback.cluster import serving
from tests.runs.processes import ROOT, wait_for
from tests.syncer.building import eventually, join, new_syncer, push, report, update
from tests.syncer.test_standby import BOUND_S, a_toy
from tests.syncer.test_standby_alone import standing_by


def test_a_page_is_on_loopback_unless_told_and_escapes_what_it_must() -> None:
    with page_at("site.metrics", "", some) as address:
        assert address == ""
    for text, host in (("0", "127.0.0.1"), (":0", "127.0.0.1"), ("0.0.0.0:0", "0.0.0.0"), ("[::1]:0", "[::1]")):
        if host == "[::1]" and not socket.has_dualstack_ipv6():
            continue
        with page_at("site.metrics", text, some) as address:
            assert address.startswith(f"http://{host}:")
            page = read(address)
        assert page["diloco_a"].samples[0].labels == {"site": NASTY}
        assert [(sample.name, sample.value) for sample in page["diloco_b"].samples] == [("diloco_b_total", 3.0)]
        buckets = {s.labels.get("le"): s.value for s in page["diloco_c_seconds"].samples if s.name.endswith("bucket")}
        assert buckets == {"1.0": 2.0, "2.0": 3.0, "+Inf": 4.0}
        assert page["diloco_run_info"].samples[0].labels == {"run": "otter", "model": "2x128", "mode": "rebase"}
        assert page["diloco_build_info"].samples[0].labels["proto"] == str(PROTOCOL)
        assert not [name for name in page if not name.startswith("diloco_")], "nothing of the process is on it"
    with pytest.raises(OSError):  # noqa: PT011 — whichever way the system says that nobody listens
        read(address)


NASTY = 'a"b\\c\nd'


def read(address: str) -> dict[str, Metric]:
    with urllib.request.urlopen(address, timeout=20) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def some() -> Iterator[Metric]:
    yield from about(compose(["run.name=otter"]))
    spread = Spread((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        spread.add(value)
    yield gauge("a", "A gauge.", {(NASTY,): 1.5}, "site")
    yield counter("b", "A counter.", {(): 3})
    yield histogram("c_seconds", "A histogram.", {("x",): spread}, "site")


def dialled(address: str, count: int) -> list[socket.socket]:
    return [dial(address.removeprefix("http://").removesuffix("/metrics")) for _ in range(count)]


def test_silent_connections_make_room_and_a_scrape_is_answered_all_the_same() -> None:
    told: list[dict[str, object]] = []
    page = page_at("site.metrics", "0", some, lambda what, fields: told.append({"what": what, **fields}))
    with page as address, ExitStack() as open_sockets:
        silent = [open_sockets.enter_context(each) for each in dialled(address, 3 * metrics.CONNECTIONS_MAX)]
        for _ in range(10):  # The scrape may itself be taken for a silent connection before its request is read.
            with suppress(OSError):
                assert "diloco_a" in read(address)
                break
        else:
            pytest.fail("a crowd of silent connections keeps every scrape out")
        few = lambda: sum(not is_over(each) for each in silent) <= metrics.SILENT_MAX  # noqa: E731
        wait_for(few, "the others are hung up on", bound_s=metrics.REQUEST_S / 2)
        assert "diloco_a" in read(address)
        wait_for(lambda: told, "a word of it")
        (note,) = told
        assert (note["what"], note["note"]) == ("note", "crowded")
        assert "site.metrics: " in str(note["why"])
        assert "connections closed so far" in str(note["why"])


def test_who_sends_a_byte_now_and_then_is_hung_up_on_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "REQUEST_S", 0.3)
    with page_at("site.metrics", "0", some) as address:
        (slow,) = dialled(address, 1)
        with slow, suppress(OSError):
            for byte in b"GET /metrics HTTP/1.1\r\n":
                slow.sendall(bytes([byte]))
                time.sleep(0.1)
                if is_over(slow):
                    return
            pytest.fail("it was listened to for ever")


def test_one_page_too_many_is_told_to_come_back() -> None:
    making, made = threading.Event(), threading.Event()

    def slow() -> Iterator[Metric]:
        making.set()
        made.wait(20)
        yield gauge("a", "A gauge.", {(): 1.0})

    with page_at("site.metrics", "0", slow) as address:
        asked = dialled(address, metrics.PAGES_MAX // 2)
        for each in asked:
            each.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert making.wait(20)
        time.sleep(0.2)  # For the others, whose pages wait for the first.
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(address, timeout=20)
        with caught.value as refused:
            assert (refused.code, refused.headers["Retry-After"]) == (503, "1")
            assert b"come back" in refused.read()
        made.set()
        assert all(each.recv(8) == b"HTTP/1.0" for each in asked)
        for each in asked:
            each.close()


@pytest.mark.parametrize("text", ["host", "host:", "host:port", "1.2.3.4:70000", "::x", "taken"])
def test_an_address_that_is_none_or_taken_is_named_with_its_key(text: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = "is .*: host:port, or a port"
        if text == "taken":
            text, words = f"127.0.0.1:{taken.getsockname()[1]}", ".* cannot listen there"
        with (
            pytest.raises(ConfigError, match=rf"cluster\.syncer\.metrics {words}"),
            page_at("cluster.syncer.metrics", text, some),
        ):
            pass


# --- The syncer's page says what its status and its events say --------------------------------------------------------

OUTER_STEP = {"what": "outer_step", "sites": {"a": 0.75, "b": 0.25}, "staleness": {"a": 0, "b": 4}, "norm": 2.5}
UNITS = {"processed": 9, "merged": 5, "partly": 1, "in_hand": 2, "given_back": 0, "reissued": 4, "repeated": 3}
SNAPSHOT = {"what": "snapshot", "at": 1234.5, "seconds": 0.2, "bytes": 4096}


AWAY = {"away_seconds": 9.5, "detached": False, "behind_bytes": 4096}


def values(families: list[Metric]) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("diloco_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def page_of_a_run(folder: Path) -> tuple[list[Metric], list[Metric]]:
    """The families of a syncer after one merged update, one refused, heartbeats, and two sites that are gone; and
    after it has stopped."""
    told: list[dict[str, Any]] = []
    syncer = new_syncer(folder, lambda what, fields: told.append({"at": time.time(), "what": what, **fields}))
    metrics = SyncerMetrics(compose(["run.name=x"]), syncer.status)
    assert {family.name for family in metrics.families()} >= {"diloco_run"}, "it can be asked before the start"
    syncer.start()
    try:
        join(syncer)
        push(syncer, *update())
        eventually(lambda: syncer.holdings.values[0].version == 1, "a version")
        push(syncer, *update(sequence=2, base_version=7))
        for name in "bc":
            join(syncer, name)
        for name in "abc":
            syncer.api.report(report(name, tokens_processed=500, step=50, versions=(0, 0)))
        syncer.api.leave("b", 1)
        syncer.api.evict("c")
        syncer.api.snapshot()
        eventually(lambda: any(event["what"] == "snapshot" for event in told), "a snapshot's event")
        for event in [*told, {**OUTER_STEP, "at": 1.0, "seconds": 0.02}, SNAPSHOT]:
            metrics.take(event)
        running = list(metrics.families())
    finally:
        syncer.stop(0.1)
    return running, list(metrics.families())


def test_the_page_of_a_run_says_nothing_of_a_site_that_is_gone_in_the_present(tmp_path: Path) -> None:
    running, stopped = page_of_a_run(tmp_path)
    found = values(running)
    assert found["outer_version",] == 1
    assert found["updates_total", "a", "merged"] == 1
    assert found["refused_at_the_door_total", Reason.BAD_BASE.value] == 1
    assert (found["sites", "left"], found["sites", "evicted"], found["sites", "live"]) == (1, 1, 1)
    for name in ("heartbeat_timestamp_seconds", "tokens_per_second", "staleness_versions", "stall_ratio"):
        assert {key[1] for key in found if key[0] == f"site_{name}"} == {"a"}, name
    assert {found["site_tokens_total", name] for name in "abc"} == {500}
    assert found["site_steps_total", "a"] == 50
    assert found["site_staleness_versions", "a"] == 1
    assert 0 <= time.time() - found["site_heartbeat_timestamp_seconds", "a"] < 60
    assert (found["update_weight_ratio", "a"], found["update_weight_ratio", "b"]) == (0.75, 0.25)
    assert found["update_staleness_versions_bucket", "b", "3.0"] == 0
    assert found["update_staleness_versions_bucket", "b", "5.0"] == 1
    assert found["outer_step_duration_seconds_count",] == 2
    for stage in ("receive", "read", "fused", "digest", "publish"):
        assert found["round_stage_duration_seconds_count", stage] == 1
        assert found["round_stage_duration_seconds_sum", stage] > 0
    assert (found["snapshot_timestamp_seconds",], found["snapshot_bytes",]) == (1234.5, 4096)
    assert (found["syncer_ready",], found["syncer_epoch",], found["run_lineage",]) == (1, 1, 1)
    assert ("run_restored_timestamp_seconds",) not in found, "it never was"
    after = values(stopped)
    assert after["outer_step_duration_seconds_count",] == 2
    assert ("outer_version",) not in after, "what is not known is not said"
    assert ("run_info",) in {key[:1] for key in after}


def in_trouble() -> dict[str, Any]:
    """What a restored syncer says that an operator must look after."""
    unsaid = ("staleness", "loss", "tokens_per_s", "stall_share", "tokens_processed", "step", "heard_seconds_ago")
    held = {"fragment": 0, "norm": 9.0, "ratio": None, "cosine": None, "z": None, "why": "its norm"}
    quiet: dict[str, Any] = {"status": "silent", "updates_refused": {"stale": 2}, "incarnation": 3}
    quiet |= dict.fromkeys(unsaid) | {"undecided": 0, "tokens_merged": 0, "updates_merged": 0}
    quiet |= {"updates_corrupt": 1, "bases_differed": 2}
    quiet["held"] = [{**held, "sequence": 3, "seconds": 12.5}, {**held, "sequence": 4, "seconds": 2.0}]
    return {
        **{"fragments": [], "sites": {"quiet": quiet}, "units": UNITS, "progress": 0.0, "run_tokens": 0},
        **{"epoch": 1, "lineage": 1_795_235_467, "staleness_max": 8, "not_ready": ["disk_full"]},
        **{"disk_free_bytes": 40_000_000, "memory_bytes_max": 300_000_000, "refused_at_the_door": {}},
        "calls": {"refused_not_found": 3, "internal": 1, "payload_bytes_in": 7},
        "identity_complaints": ["tokens.yaml cannot be read"],
        "backup": {"url": "vault", "age_s": 100.0, "without_s": 100.0, "last": "x", "failing": "no route"},
        "replication": {"mode": "sync", "standby": "iad", "following": False, "slow": True, **AWAY},
        "lease": {"place": "/x", "epoch": 4, "valid": False, "heir": "", "renewed_seconds_ago": 3.0, "trouble": "x"},
    }


def test_what_an_operator_must_act_on_is_on_the_page_and_what_is_not_known_or_used_is_not() -> None:
    found = values(page_in_trouble())
    wanted = {
        **{("updates_held", "quiet"): 2, ("update_held_seconds", "quiet"): 12.5, ("identity_complaints",): 1},
        **{("updates_total", "quiet", "stale"): 2, ("site_restarts_total", "quiet"): 2},
        **{("updates_corrupt_total", "quiet"): 1, ("bases_differed_total", "quiet"): 2},
        **{("backup_failing",): 1, ("backup_age_seconds",): 100},  # By no clock, which may differ from Prometheus's.
        ("backup_interval_seconds",): compose(["run.name=x"]).cluster.syncer.backup_every_s,
        **{("replication_following",): 0, ("replication_detached",): 0, ("replication_slow",): 1},
        **{("replication_away_seconds",): 9.5, ("replication_behind_bytes",): 4096},
        **{("lease_valid",): 0, ("lease_trouble",): 1, ("lease_heir",): 0},
        **{("data_units", "merged"): 5, ("data_units", "partly"): 1, ("data_units", "in_hand"): 2},
        **{("data_units", "given_back"): 0, ("data_units_processed_total",): 9},
        **{("data_units_reissued_total",): 4, ("data_units_repeated_total",): 3},
        **{("syncer_ready",): 0, ("syncer_disk_free_bytes",): 40_000_000, ("syncer_memory_bytes_max",): 300_000_000},
        **{("run_lineage",): 1_795_235_467, ("run_restored_timestamp_seconds",): 1_795_235_467},
        **{("calls_refused_total", "NOT_FOUND"): 3, ("calls_failed_total",): 1},
        ("syncer_payload_bytes_total", "up"): 7,
    }
    assert {key: found[key] for key in wanted} == wanted
    assert 100 <= time.time() - found["backup_timestamp_seconds",] < 160
    assert 3 <= time.time() - found["lease_renewed_timestamp_seconds",] < 60
    assert not [key for key in found if key[0] in ("site_loss_nats", "site_heartbeat_timestamp_seconds")]
    replication = in_trouble()["replication"]
    none = {"backup": None, "lease": None, "replication": {**replication, "mode": "off"}, "identity_complaints": []}
    found = values(page_in_trouble(**none, units=None))
    assert not [name for name, *_ in found if name.startswith(("backup", "lease", "replication", "data_units"))]
    assert found["identity_complaints",] == 0
    backup = {**in_trouble()["backup"], "age_s": None, "without_s": 7200.0, "failing": ""}
    following = {**replication, "following": True, "away_seconds": None, "behind_bytes": None}
    found = values(page_in_trouble(backup=backup, replication=following))
    assert found["backup_failing",] == 0
    assert ("backup_timestamp_seconds",) not in found, "none was made yet"
    assert found["backup_age_seconds",] == 7200, "since the process began: an alert must fire if none is ever made"
    assert (found["replication_following",], found["replication_away_seconds",]) == (1, 0)
    assert ("replication_behind_bytes",) not in found, "it is whole segments behind"


def test_the_page_of_a_standby_says_whether_it_follows_or_is_alone(tmp_path: Path) -> None:
    toy = a_toy(tmp_path)
    with serving(toy) as (_, first, log):
        standing = standing_by(toy, first, 0)
        families = partial(standby_metrics, compose(["run.name=x"]), standing.status)
        standing.start()
        try:
            log.wait_for("standby_follows", 1, BOUND_S)
            eventually(lambda: values(list(families()))["standby_following",] == 1, "that it follows", BOUND_S)
            found = values(list(families()))
        finally:
            standing.stop()
    assert found["standby_failed",] == 0
    assert 0 <= time.time() - found["standby_heard_timestamp_seconds",] < BOUND_S
    assert ("standby_is_heir",) not in found, "there is no lease"
    assert not [name for name, *_ in found if name.startswith(("syncer", "outer", "site"))]
    found = values(page_of_a_standby())
    assert (found["standby_following",], found["standby_failed",], found["standby_turns_behind",]) == (0, 1, 7)
    assert 40 <= time.time() - found["standby_heard_timestamp_seconds",] < 60
    assert found["standby_outer_version",] == 7
    assert (found["standby_is_heir",], found["standby_lease_readable",]) == (1, 0)


def page_in_trouble(**changes: Any) -> list[Metric]:
    return list(SyncerMetrics(compose(["run.name=x"]), lambda: in_trouble() | changes).families())


# --- A site's page says what its events and its newest checkpoint say -------------------------------------------------

STEP = {"step": 7, "loss": 2.5, "grad_norm": 0.5, "lr": 0.01, "step_s": 0.2}
METER = {"train_s": 100.0, "stall_s": 2.0, "bytes_up": 10, "bytes_down": 20, "in_flight": 1}
EVENTS: list[dict[str, Any]] = [
    {"what": "connected"},
    {"what": "step", **STEP},
    {"what": "step", **STEP, "loss": None, "step": 8},
    {"what": "meter", **METER},
    {"what": "sealed", "norm": 3.5},
    {"what": "pushed", "fragment": 1, "outcome": "accepted"},
    {"what": "pushed", "fragment": 1, "outcome": "retry"},
    {"what": "fetched", "fragment": 0},
    {"what": "disconnected"},
    {"what": "canary", "same": True},
    {"what": "canary", "same": None},
    {"what": "something else"},
]


def page_of_a_site(folder: Path) -> list[Metric]:
    (folder / "step-0000000004").mkdir()
    (folder / "step-0000000004" / "model.safetensors").write_bytes(b"x" * 100)
    metrics = SiteMetrics(compose(["run.name=x", "site.id=a"]), [10, 30], folder)
    for event in EVENTS:
        metrics.take({"at": 1.0, "who": "a", **event})
    return list(metrics.families())


def test_the_page_of_a_site(tmp_path: Path) -> None:
    found = values(page_of_a_site(tmp_path))
    assert found["site_step_duration_seconds_count", "a"] == 2
    assert found["site_step_duration_seconds_sum", "a"] == 0.4
    assert (found["site_grad_norm", "a"], found["site_learning_rate", "a"]) == (0.5, 0.01)
    assert ("site_step_loss_nats", "a") not in found, "the latest loss was no number"
    assert found["site_time_seconds_total", "a", "compute"] == 98.0
    assert found["site_time_seconds_total", "a", "sync_wait"] == 2.0
    assert found["wan_bytes_total", "a", "up", "update"] == 10
    assert found["wan_bytes_total", "a", "down", "version"] == 20
    assert found["wan_raw_bytes_total", "a", "up", "update"] == 120, "what was sent and not accepted is sent again"
    assert found["wan_raw_bytes_total", "a", "down", "version"] == 40
    assert (found["site_pushes_total", "a", "accepted"], found["site_pushes_total", "a", "retry"]) == (1, 1)
    assert (found["site_connected", "a"], found["site_disconnects_total", "a"]) == (0, 1)
    assert (found["canaries_total", "a", "same"], found["canaries_total", "a", "failed"]) == (1, 1)
    assert found["pseudo_gradient_norm", "a"] == 3.5
    assert found["checkpoint_bytes", "a"] == 100
    assert found["site_updates_in_flight", "a"] == 1


def test_a_site_is_connected_when_it_hears_every_syncer(tmp_path: Path) -> None:
    found = values(list(SiteMetrics(compose(["run.name=x", "site.id=a"]), [1], tmp_path / "none").families()))
    assert found["site_connected", "a"] == 0
    assert not [key for key in found if key[0] in ("checkpoint_bytes", "site_grad_norm", "wan_bytes_total")]
    metrics = SiteMetrics(compose(["run.name=x", "site.id=a"]), [10, 30], tmp_path)

    def after(what: str, syncer: int) -> float:
        metrics.take({"at": 1.0, "who": "a", "what": what, "of_syncer": syncer})
        return values(list(metrics.families()))["site_connected", "a"]

    assert after("connected", 0) == 1
    assert after("disconnected", 0) == 0
    assert after("disconnected", 1) == 0
    assert after("connected", 0) == 0, "the other is still away"
    assert after("connected", 1) == 1


# --- A standby's page says how it follows -----------------------------------------------------------------------------

ALONE: dict[str, Any] = {
    **{"role": "standby", "name": "iad", "following": False, "heard_seconds_ago": 40.0, "versions": [3, 4]},
    **{"epoch": 1, "turns_behind": 7, "trouble": "no route", "failed": "other bits", "primary": "fra:1"},
    "lease": {"place": "/x", "epoch": 1, "holder": "fra", "is_heir": True, "vacant": False, "trouble": "no server"},
}


def page_of_a_standby() -> list[Metric]:
    return list(standby_metrics(compose(["run.name=x"]), lambda: ALONE))


def test_every_rule_expression_and_panel_is_whole_and_what_an_operator_must_act_on_has_both() -> None:
    for rule in alerts():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("page", "warn")
        assert set(rule["annotations"]) == {"summary", "what"}, rule
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m")), rule
    for expression in expressions():
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), expression
        assert re.search(r"\[\d+[smh]\]", expression) or "rate(" not in expression, expression
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in panels()]
    assert len(set(places)) == len({panel["id"] for panel in panels()}) == len(places), "one lies on another"
    shown = {name for panel in panels() for each in panel["targets"] for name in NAME.findall(each["expr"])}
    alerted = {name for rule in alerts() for name in NAME.findall(rule["expr"])}
    assert {f"diloco_{metric}" for metric in TO_ACT_ON.split()} <= shown & alerted


# --- The example alerts and dashboard speak of metrics that exist, with labels that they have ------------------------

NAME = re.compile(r"\bdiloco_[a-z_]+")
GROUPED = re.compile(r"\b(?:by|on)\s*\(([a-z, ]*)\)")
SELECTED = re.compile(r"(diloco_[a-z_]+)\{([a-z_]+)(?:!=|=~|=)\"[^\"]*\"\}")


def alerts() -> list[dict[str, Any]]:
    plain = yaml.safe_load((ROOT / "configs" / "monitoring" / "alerts.yaml").read_text())
    assert [group["name"] for group in plain["groups"]] == ["diloco"]
    return list(plain["groups"][0]["rules"])


def panels() -> list[dict[str, Any]]:
    return list(json.loads((ROOT / "configs" / "monitoring" / "dashboard.json").read_text())["panels"])


def expressions() -> list[str]:
    return [rule["expr"] for rule in alerts()] + [target["expr"] for panel in panels() for target in panel["targets"]]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> list[Metric]:
    """Every family that a page can have."""
    made: Path = tmp_path_factory.mktemp("pages")
    (made / "checkpoints").mkdir()
    found: list[Metric] = [*page_of_a_run(made / "syncer")[0], *page_in_trouble()]
    return [*found, *page_of_a_site(made / "checkpoints"), *page_of_a_standby()]


@pytest.fixture(scope="module")
def exported(families: list[Metric]) -> dict[str, set[str]]:
    """The names of all families, with their labels."""
    names = {family.name + ("_total" if family.type == "counter" else ""): set[str]() for family in families}
    for family in families:
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    return names


def test_every_metric_that_is_mentioned_is_on_a_page_with_the_labels_that_are_mentioned(
    exported: dict[str, set[str]],
) -> None:
    mentioned = {name for expression in expressions() for name in NAME.findall(expression)}
    assert mentioned
    assert mentioned <= set(exported), mentioned - set(exported)
    # A family without a sample in this small run shows no labels; those are on the page of every real one.
    bare = {"diloco_updates_corrupt_total", "diloco_calls_refused_total"}
    for expression in expressions():
        for name, label in SELECTED.findall(expression):
            assert label in exported[name], expression
        labels = {label.strip() for group in GROUPED.findall(expression) for label in group.split(",")} - {""}
        having = set().union(*(exported[name] for name in NAME.findall(expression)))
        assert labels <= having or set(NAME.findall(expression)) & bare, expression


def test_the_page_of_the_reference_has_every_metric(families: list[Metric], request: pytest.FixtureRequest) -> None:
    """``pytest tests/observe/test_metrics.py --rewrite`` writes the table anew."""
    rows = {}
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = ", ".join(family._labelnames)  # type: ignore[attr-defined]  # There may be no sample that has them.
        shown = f"{name}{{{labels}}}" if labels else name
        rows[name] = f"| `{shown}` {family.type} | {family.documentation} |\n"
    page = ROOT / "docs" / "reference" / "metrics.md"
    above = page.read_text(encoding="utf-8").partition("|---|---|\n")
    wanted = above[0] + above[1] + "".join(rows[name] for name in sorted(rows))
    if request.config.getoption("--rewrite"):
        page.write_text(wanted, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == wanted


NO_BASE_UNIT = r"(?:nano|micro|milli)seconds|[num]s|minutes?|hours?|days?|[kmgt]i?b|(?:kilo|mega|giga)bytes|percent"
BELONGS_TO_A_TYPE = ("_total", "_count", "_sum", "_bucket", "_info", "_created")


def test_every_name_keeps_to_the_conventions_of_prometheus(families: list[Metric]) -> None:
    """As https://prometheus.io/docs/practices/naming says, and ``promtool check metrics``, which runs where it is."""
    for family in families:
        assert re.fullmatch(r"diloco(_[a-z]+)+", family.name)
        assert not re.search(rf"_(?:{NO_BASE_UNIT}|gauge|counter|histogram)(_|$)", family.name), "a base unit, no type"
        assert not family.name.endswith(BELONGS_TO_A_TYPE), "the library adds what belongs to a type"
        assert family.type != "histogram" or family.name.endswith(("_seconds", "_versions")), "its unit is last"
        labels = set(family._labelnames)  # type: ignore[attr-defined]
        assert all(re.fullmatch("[a-z_]+", label) for label in labels)
        assert not labels & {"le", "quantile"}
        assert family.documentation.endswith(".")
    if (promtool := shutil.which("promtool")) is not None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(metrics.Page(lambda: iter({family.name: family for family in families}.values())))
        done = subprocess.run([promtool, "check", "metrics"], input=generate_latest(registry), capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")


TO_ACT_ON = """
    updates_held backup_failing backup_age_seconds replication_following replication_detached replication_slow
    replication_behind_bytes identity_complaints lease_valid lease_trouble lease_heir standby_following standby_failed
"""
