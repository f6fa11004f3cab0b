"""``diloco plan``: estimate what a run needs of links, memory, money and time, by its parameters and sites."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

from diloco.config.arguments import OneLineParser
from diloco.config.errors import ConfigError, ExitCode, refusing
from diloco.config.keys import WANTED, default_text, hint, meanings
from diloco.durable import write_file
from diloco.plan import estimate
from diloco.plan.estimate import PRESETS, MeasuredLink, Question, read_link, settings_of

if TYPE_CHECKING:
    from collections.abc import Sequence

EXPERIMENT = "experiment"


class _Parser(OneLineParser):
    """Reads the meanings of all settings only for --help."""

    def format_help(self) -> str:
        told = meanings(estimate)
        lines = [f"  experiment=   {' | '.join(PRESETS)}", ""]
        for item in fields(Question):
            default, text = item.default, ""  # As a user would type it.
            if isinstance(default, tuple):
                text = ",".join(f"{each:g}" for each in default)
            elif isinstance(default, float):
                text = f"{default:g}"
            elif default is not MISSING:
                text = default_text(item)
            name = f"{item.name} [{text}]" if text else item.name
            meaning = " ".join(told.get((Question.__name__, item.name), "").split())
            lines.append(f"  {name:<34} {meaning}")
        return "\n".join(
            [super().format_help(), "Settings (in brackets: the defaults without an experiment):", *lines, ""]
        )


def main(arguments: Sequence[str]) -> ExitCode:
    """Estimate a run before any machine is rented: the bytes of a round, the link rates that keep sites training for a
    given share of the time, the inner steps per round that your links allow, the syncer's memory, the price, the
    goodput, and how each grows with the model and the sites.  The codecs give the bytes; a formula and a simulation
    give the rest.

      diloco plan +experiment=100t_20dc
      diloco plan +experiment=100t_20dc sites=40 utilisation=0.9 --json
      diloco plan parameters=70e9 step_s=6 sites=3 up_gbps=10,2.5,10 rtt_ms=80
      diloco plan parameters=70e9 step_s=6 --link fra.json --link osl.json --link nyc.json

    Links are stated or measured: each FILE of --link is what `diloco doctor HOST:PORT --json` printed at one site (at
    the syncer's own site, towards another machine far away), or one FILE for all.
    """
    parser = _Parser("plan", main.__doc__)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, listed below")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="write a chart: bytes by number of sites")
    told_link = "a site's link as `diloco doctor` measured it; once for each site"
    parser.add_argument("--link", type=Path, action="append", default=[], metavar="FILE", help=told_link)
    given = parser.parse_intermixed_args(list(arguments))
    began_s = time.monotonic()
    links = [read_link(file) for file in given.link]
    name, question = question_of(given.settings, links)
    from diloco.plan.answer import answer, picture, show

    with refusing(ValueError):  # An unknown codec, or outer optimizer.
        told = answer(question)
    measured = [asdict(link) for link in links]
    told = {EXPERIMENT: name, "measured": measured, **told, "took_s": round(time.monotonic() - began_s, 3)}
    if given.plot:
        write_file(given.plot, picture(question).encode())
    if given.json:
        print(json.dumps(told))
    else:
        show(told)
    return ExitCode.OK


def question_of(settings: Sequence[str], links: Sequence[MeasuredLink] = ()) -> tuple[str | None, Question]:
    """Return the named preset, if any, and the question; raise ConfigError for a wrong setting."""
    hints, name, values = get_type_hints(Question), None, dict[str, object]()
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text!r} is no setting: key=value, or +experiment=NAME")
        if key.removeprefix("+") == EXPERIMENT:
            name = value
        elif key in hints:
            values[key] = _value(key, value, hints[key])
        else:
            raise ConfigError(f"unknown key {key}: {hint(key, hints)}")
    if name is not None and name not in PRESETS:
        raise ConfigError(f"+experiment is {name!r}: {hint(name, PRESETS)}")
    if name is None and "parameters" not in values:
        raise ConfigError("parameters is not set: parameters=70e9, or +experiment=NAME")
    if links:
        values.update(settings_of(links, values))
    with refusing(ValueError):
        if name is not None:
            return name, replace(PRESETS[name], **values)  # type: ignore[arg-type]
        return None, Question(**values)  # type: ignore[arg-type]


def _value(key: str, text: str, kind: Any) -> object:
    with suppress(ValueError, OverflowError):
        if kind is str:
            return text
        numbers = [float(part) for part in text.split(",")] if text else []
        if kind == tuple[float, ...]:
            return tuple(numbers)
        (number,) = numbers
        if kind is float:
            return number
        if number.is_integer():  # Such as 1e3.
            return int(number)
    raise ConfigError(f"{key} is {text!r}: {WANTED[get_origin(kind) or kind]}")
