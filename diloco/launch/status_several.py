"""``diloco status`` of a run with several syncers: one line on the whole, then each as if it were alone.

No figure of the whole is a sum over syncers: each syncer counts every token that its own fragments have merged, so
that the run's tokens are the mean over all fragments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diloco.launch.errors import ExitCode, VerbError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Status = Mapping[str, Any]


def asked_all(askers: Mapping[str, Callable[[], Status]]) -> dict[str, Status]:
    """Return each syncer's status by its address; ``{"unreachable": why}`` for one that does not answer."""
    found: dict[str, Status] = {}
    for address, ask in askers.items():
        try:
            found[address] = ask()
        except VerbError as error:
            if error.code is not ExitCode.UNREACHABLE:
                raise
            found[address] = {"unreachable": str(error)}
    return found


def answering(found: Mapping[str, Status]) -> list[Status]:
    """Return the status of each syncer that answered and leads; a standby does not."""
    return [each for each in found.values() if "fragments" in each]


def as_one(found: Mapping[str, Status]) -> dict[str, object]:
    """Return the whole run as one object; its tokens and versions are of the fragments whose syncers answered."""
    known = answering(found)
    versions = {
        place: fragment["version"]
        for each in known
        for place, fragment in zip(each.get("held") or range(len(each["fragments"])), each["fragments"], strict=True)
    }
    counts = [len(each["fragments"]) for each in known]
    weighted = sum(each["run_tokens"] * count for each, count in zip(known, counts, strict=True))
    return {
        "run_id": known[0]["run_id"] if known else None,
        "run_tokens": weighted // sum(counts) if known else None,
        "progress": [min(each["progress"] for each in known), max(each["progress"] for each in known)] if known else [],
        "versions": {str(place): versions[place] for place in sorted(versions)},
        "syncers": dict(found),
    }


def whole_line(found: Mapping[str, Status]) -> str:
    """Return one line about the run."""
    one = as_one(found)
    silent = [address for address, each in found.items() if "unreachable" in each]
    away = f"  DOES NOT ANSWER: {', '.join(silent)}" if silent else ""
    if one["run_id"] is None:
        return f"{len(found)} syncers{away}"
    known = answering(found)
    least, most = min(each["progress"] for each in known), max(each["progress"] for each in known)
    shares = f"{least:.0%}" if f"{least:.0%}" == f"{most:.0%}" else f"{least:.0%} to {most:.0%}"
    versions = one["versions"]
    assert isinstance(versions, dict)
    told = ",".join(f"{place}:{version}" for place, version in versions.items())
    return (
        f"run {one['run_id']} on {len(found)} syncers  {shares} of the run  versions {told}  "
        f"{one['run_tokens']:,} tokens merged, the mean over these fragments{away}"
    )


def one_line(address: str, status: Status) -> str:
    """Return the line above the table of one syncer."""
    if "unreachable" in status:
        return f"syncer {address}: {status['unreachable']}"
    held = ",".join(map(str, status.get("held", [])))
    return f"syncer {address} holds fragments {held} of the model, and counts them from 0:"


def code_of(found: Mapping[str, Status]) -> ExitCode:
    """Return exit code 3 where a syncer does not answer: its fragments stand still."""
    return ExitCode.UNREACHABLE if any("unreachable" in each for each in found.values()) else ExitCode.OK
