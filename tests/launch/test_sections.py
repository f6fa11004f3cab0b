"""What a section's values become; what each says of a value that cannot be is in test_build.py as well."""

from __future__ import annotations

import pytest

from diloco.launch.errors import ConfigError
from diloco.launch.sections import quorum, section, to_ns


def test_an_options_class_says_its_field_and_the_section_its_name() -> None:
    with pytest.raises(ConfigError, match=r"^inner\.lr is -1: positive$"), section("inner"):
        raise ValueError("lr is -1: positive")
    with pytest.raises(ConfigError, match=r"^run\.name is null$"), section("inner"):
        raise ConfigError("run.name is null")


def test_a_quorum_is_a_number_or_all() -> None:
    assert (quorum("all"), quorum("3")) == ("all", 3)
    with pytest.raises(ConfigError, match=r"outer\.quorum is '-1': a number of sites, or all"):
        quorum("-1")


def test_seconds_become_nanoseconds() -> None:
    assert to_ns("outer.grace_s", 1.5) == 1_500_000_000
    for seconds, least_s, words in (
        (-1.0, 0.0, "not negative"),
        (0.0, 0.1, "at least 0.1"),
        (float("nan"), 0.0, "not"),
    ):
        with pytest.raises(ConfigError, match=f"outer.grace_s is .*: seconds, {words}"):
            to_ns("outer.grace_s", seconds, least_s)
