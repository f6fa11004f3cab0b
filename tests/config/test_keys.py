from __future__ import annotations

import pytest

from diloco.config.errors import ConfigError
from diloco.config.keys import default_text, leaves, meanings, nearest, type_of, unknown, wanted
from diloco.plan import estimate


def test_every_leaf_has_a_type_that_can_be_put_in_words() -> None:
    for key, _, _ in leaves():
        assert type_of(key.replace("<name>", "anything")) is not None
        assert "section" not in wanted(key)


def test_free_names_take_any_name_and_no_other_key_does() -> None:
    assert type_of("cluster.sites.anything.slowdown") is float
    for key in ("cluster.sites.a.b", "run.anything", "", "run.", "run..name", "run.name.x"):
        with pytest.raises(ConfigError, match="unknown key"):
            type_of(key)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("outter.lr", "outer.lr"),
        ("inner.batchsequences", "inner.batch_sequences"),
        ("sede", "run.seed"),
        ("seed", "run.seed"),
        ("cluster.syncer.listn", "cluster.syncer.listen"),
        ("modle", "model"),
    ],
)
def test_the_nearest_name_is_the_one_meant(typed: str, meant: str) -> None:
    assert unknown(typed) == f"unknown key {typed}: did you mean {meant}?"


def test_nothing_is_near_to_something_else_entirely() -> None:
    assert nearest("zzzz", ["outer.lr", "inner.lr"]) == ""


def test_meanings_and_defaults_are_read_from_the_source() -> None:
    told = meanings()
    assert told["OuterSection", "inner_steps"] == "H: inner steps between two updates of one fragment."
    assert told["OuterSection", ""] == "The outer optimizer, and how sites and the syncer exchange."
    assert meanings(estimate)["Question", "layers"].startswith("No more fragments")
    defaults = {key: default_text(item) for key, _, item in leaves()}
    assert defaults["run.name"] == "null"
    assert defaults["outer.lock_step"] == "false"
    assert defaults["inner.betas"] == "[0.9, 0.95]"
    assert defaults["data.path"] == '""'
