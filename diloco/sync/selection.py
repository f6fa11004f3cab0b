"""Which updates an operator means: ``site=b:versions=17..19:fragment=0``, in words that a person can type."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("versions", "sequences")
WANTED = "site=NAME:versions=FIRST..LAST or site=NAME:sequences=FIRST..LAST, and :fragment=NUMBER for one alone"


@dataclass(frozen=True, slots=True)
class Selection:
    """Updates of one site.

    ``kind`` "versions": those merged into the versions ``first`` to ``last``; "sequences": those with these numbers.
    ``fragment`` None means every fragment.
    """

    site: str
    kind: str
    first: int
    last: int
    fragment: int | None = None

    def takes(self, site: str, fragment: int, sequence: int, version: int) -> bool:
        """Whether the update ``sequence`` of (``site``, ``fragment``), merged into ``version``, is meant."""
        number = version if self.kind == "versions" else sequence
        return self.of(site, fragment) and self.first <= number <= self.last

    def of(self, site: str, fragment: int) -> bool:
        """Whether any update of (``site``, ``fragment``) can be meant."""
        return site == self.site and self.fragment in (None, fragment)

    def __str__(self) -> str:
        where = "" if self.fragment is None else f":fragment={self.fragment}"
        return f"site={self.site}:{self.kind}={self.first}..{self.last}{where}"


def parse_selection(text: str) -> Selection:
    """The selection that ``text`` describes; ``ValueError`` says what is wrong with it."""
    fields: dict[str, str] = {}
    for part in text.split(":"):
        name, equals, value = part.partition("=")
        if not equals or not value or name not in ("site", "fragment", *KINDS):
            raise ValueError(f"{text!r} has {part!r}: {WANTED}")
        if name in fields:
            raise ValueError(f"{text!r} says {name} twice")
        fields[name] = value
    kinds = [kind for kind in KINDS if kind in fields]
    if "site" not in fields or len(kinds) != 1:
        raise ValueError(f"{text!r} selects nothing: {WANTED}")
    kind = kinds[0]
    first, dots, last = fields[kind].partition("..")
    least, most = _number(text, kind, first), _number(text, kind, last if dots else first)
    if least < 1 or most < least:
        raise ValueError(f"{text!r} has {kind}={fields[kind]}: from 1 on, and the first is not above the last")
    fragment = _number(text, "fragment", fields["fragment"]) if "fragment" in fields else None
    return Selection(fields["site"], kind, least, most, fragment)


def _number(text: str, name: str, value: str) -> int:
    if not value.isascii() or not value.isdecimal():
        raise ValueError(f"{text!r} has {name}={value}: a whole number")
    return int(value)
