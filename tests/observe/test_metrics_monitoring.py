"""The example alerts and dashboard speak of metrics that exist, with labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics_core import Metric

from tests.observe.test_site_metrics import page_of_a_site
from tests.observe.test_syncer_metrics import page_in_trouble, page_of_a_run
from tests.observe.test_syncer_metrics_standby import page_of_a_standby
from tests.runs.processes import ROOT

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
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Every name that a page can have, with its labels."""
    made: Path = tmp_path_factory.mktemp("pages")
    (made / "checkpoints").mkdir()
    families: list[Metric] = [*page_of_a_run(made / "syncer")[0], *page_in_trouble()]
    families += [*page_of_a_site(made / "checkpoints"), *page_of_a_standby()]
    names = {family.name + ("_total" if family.type == "counter" else ""): set[str]() for family in families}
    for family in families:
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    return names


def test_every_metric_that_is_mentioned_is_on_a_page(exported: dict[str, set[str]]) -> None:
    mentioned = {name for expression in expressions() for name in NAME.findall(expression)}
    assert mentioned
    assert mentioned <= set(exported), mentioned - set(exported)


def test_every_label_that_is_mentioned_is_one_that_its_metrics_have(exported: dict[str, set[str]]) -> None:
    # A family without a sample in this small run shows no labels; those are on the page of every real one.
    bare = {"diloco_updates_corrupt_total", "diloco_calls_refused_total"}
    for expression in expressions():
        for name, label in SELECTED.findall(expression):
            assert label in exported[name], expression
        labels = {label.strip() for group in GROUPED.findall(expression) for label in group.split(",")} - {""}
        having = set().union(*(exported[name] for name in NAME.findall(expression)))
        assert labels <= having or set(NAME.findall(expression)) & bare, expression


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_a_rule_is_whole(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("page", "warn")
    assert set(rule["annotations"]) == {"summary", "what"}
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))


@pytest.mark.parametrize(
    "metric",
    [
        "updates_held",
        "backup_failing",
        "backup_age_seconds",
        "replication_following",
        "replication_detached",
        "replication_slow",
        "replication_behind_bytes",
        "identity_complaints",
        "lease_valid",
        "lease_trouble",
        "lease_heir",
        "standby_following",
        "standby_failed",
    ],
)
def test_what_an_operator_must_act_on_has_an_alert_and_a_panel(metric: str) -> None:
    assert [rule for rule in alerts() if f"diloco_{metric}" in NAME.findall(rule["expr"])]
    assert [panel for panel in panels() for each in panel["targets"] if f"diloco_{metric}" in each["expr"]]


def test_expressions_are_balanced() -> None:
    for expression in expressions():
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), expression
        assert re.search(r"\[\d+[smh]\]", expression) or "rate(" not in expression, expression


def test_panels_do_not_lie_on_each_other() -> None:
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in panels()]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in panels()}) == len(places)
