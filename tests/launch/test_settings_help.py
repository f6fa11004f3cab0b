from __future__ import annotations

from diloco.config.arguments import settings_help
from diloco.config.compose import GROUPS, choices
from diloco.config.keys import leaves


def test_every_group_choice_and_key_is_listed_once() -> None:
    lines = settings_help().splitlines()
    for group in GROUPS:
        (line,) = [line for line in lines if line.startswith(f"  {group}=")]
        assert line.partition("=")[2].replace("|", " ").split() == choices()[group]
    for key, _, _ in leaves():
        assert sum(line.startswith(f"  {key} [") for line in lines) == 1, key
    (line,) = [line for line in lines if line.startswith("  outer.grace_s [")]
    assert line.split(maxsplit=2) == ["outer.grace_s", "[1.0]", "The longest grace."]
