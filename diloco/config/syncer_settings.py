"""Fetch a run's settings from its syncer, for a site or a client that knows only the syncer's address."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.config import compose as configs
from diloco.config import connecting
from diloco.config.errors import ConfigError, ExitCode, VerbError, refusing, section
from diloco.config.placing import BETWEEN, BY_PART
from diloco.config.schema import RunConfig
from diloco.learner.transfer import SILENT_S, JoinFailed
from diloco.sync.options import OF_THE_SYNCER, PROTOCOL
from diloco.wire.channel import Backoff, check_address, split_addresses
from diloco.wire.checkup import Checkup
from diloco.wire.messages import ProbeAsk, Refused, Status, Unreachable
from diloco.wire.options import ClientOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.wire.options import SecurityOptions


class EarlierRelease(JoinFailed):
    """The syncer's release does not send a run's settings."""

    def __init__(self) -> None:
        text = "it is of an earlier release, which does not send a run's settings: install this release there first"
        super().__init__("mismatch", text)


@dataclass(frozen=True, slots=True)
class Told:
    """The run's name, and the settings that all its processes must agree on, as dotted names and text."""

    run_id: str
    shared: Mapping[str, str]
    identity: str = "?"
    """The identity under which the syncer knows the calling process; empty where authentication is off."""


def ask(syncer: str, security: SecurityOptions, timeout_s: float, setting: str = "site.join_timeout_s") -> Told:
    """Ask the syncers in ``syncer`` (in the format of ``site.syncer``) and their standbys, until one answers.

    Retries for ``timeout_s`` seconds, which ``setting`` decides.  Raises ``JoinFailed`` with the reason, ``ValueError``
    for a bad address.
    """
    addresses = [address for each in syncer.split(BETWEEN) for address in split_addresses(each)]
    for address in addresses:
        check_address(address, security)
    until, backoff = time.monotonic() + timeout_s, Backoff(base_s=0.2, cap_s=2.0)
    say_at = until - timeout_s + SILENT_S
    while True:
        for address in addresses:
            try:
                with Checkup(address, security, ClientOptions()) as checkup:
                    answer = checkup.probe(ProbeAsk(PROTOCOL)).answer
            except Refused as error:
                if error.status is Status.UNIMPLEMENTED:
                    raise EarlierRelease from error
                raise JoinFailed("refused", error.text) from error
            except Unreachable as error:
                last = error
                continue
            if not answer.shared_config:
                raise EarlierRelease
            if not answer.protocol_oldest <= PROTOCOL <= answer.protocol:
                spoken = f"{answer.protocol_oldest} to {answer.protocol}"
                raise JoinFailed("mismatch", f"protocol is {PROTOCOL} at the site, and the syncer speaks {spoken}")
            shared = {key: text for key, text in answer.shared_config.items() if key not in BY_PART}
            return Told(answer.run_id, shared, answer.identity)
        if (left_s := until - time.monotonic()) <= 0:
            raise JoinFailed("unreachable", last.why) from last
        if until - left_s >= say_at:
            say_at, bound = math.inf, f" ({setting})" if setting else ""
            print(f"no answer from {syncer} yet: {last.why}; trying for {left_s:.0f} s more{bound}", file=sys.stderr)
        time.sleep(min(left_s, backoff.next_s(random.random(), last.retry_after_s or 0.0)))


# --- Settings that the command line leaves out, from the run's syncer ------------------------------------------------

OF_THE_MODEL = (
    "model.",
    "data.tokenizer",
    "data.end_of_file",
    "outer.num_fragments",
    "outer.num_syncers",
    "outer.publish",
    "outer.syncer_mbps",
)
"""The settings that turn bytes into a model, and tokens into a text: equal at a region and the run above."""
OF_A_FILE = "file-"


def fill_in(settings: Sequence[str], told: Told, only: str | tuple[str, ...] = "") -> RunConfig:
    """Return the configuration of ``settings``, with the run's values for shared settings that they leave out.

    ``settings`` win, also where they contradict the run.  The run decides only settings whose names begin with
    ``only``.  ConfigError for an impossible value.
    """
    decided = configs.said(settings)
    if told.shared.get("data.tokenizer", "").startswith(OF_A_FILE) and "data.tokenizer" not in decided:
        raise ConfigError(f"the tokenizer of run {told.run_id} is a file: give data.tokenizer=PATH of the same file")
    # A shared setting that the syncer does not send has its default there, whatever a preset of this release sets.
    usual = configs.as_text(RunConfig())
    default = {key: usual[key] for key in configs.shared_config(configs.compose(settings)) if key not in told.shared}
    told_here = {key: text for key, text in told.shared.items() if key.startswith(configs.SHARED)}
    values = {key: text for key, text in (default | told_here).items() if key.startswith(only)}
    values["run.name"] = told.run_id
    try:
        return configs.compose(settings, {key: text for key, text in values.items() if key not in decided})
    except ConfigError as error:
        # The error names the setting that contradicts the run, since only together with the run's it is impossible.
        names = (name for name in decided if told.shared.get(name, decided[name]) != decided[name])
        contradicts = next((f"{name} is {told.shared[name]} in run {told.run_id}: " for name in names), "")
        raise ConfigError(f"{contradicts}{error}") from error


def _as_told(settings: Sequence[str], told: Told, only: str | tuple[str, ...] = "") -> RunConfig:
    """As ``fill_in``; VerbError where ``settings`` contradict the run."""
    config = fill_in(settings, told, only)
    ours, here = configs.shared_config(config), configs.as_text(config)
    for key, (theirs, own) in configs.differences(told.shared, ours).items():
        if key.startswith(only) and key not in OF_THE_SYNCER:
            what = "leave that setting out" if key in configs.said(settings) else "install the syncer's release"
            own = own or here.get(key, "unknown")
            text = f"{key} is {theirs or 'not set'} in run {told.run_id} and {own} here: {what}"
            raise VerbError(ExitCode.MISMATCH, text)
    return config


def of_client(address: str, settings: Sequence[str], timeout_s: float = 0.0) -> RunConfig:
    """Return the configuration of ``settings`` for a client of the run at ``address``, with the run's own model.

    Try for ``timeout_s`` seconds, at least once.  VerbError where the syncer does not answer, or ``settings``
    contradict the run.
    """
    given = configs.compose(settings)
    security = connecting.site_security(replace(given, site=replace(given.site, syncer=address)))
    try:
        told = ask(address, security, timeout_s, setting="")
    except EarlierRelease:
        if given.run.name is None:
            raise ConfigError("run.name is null: name the run") from None
        return given
    except JoinFailed as error:
        gone = f"the syncer at {address} does not answer: {error.text}"
        code = ExitCode.UNREACHABLE if error.kind == "unreachable" else ExitCode.MISMATCH
        raise VerbError(code, gone if code is ExitCode.UNREACHABLE else error.text) from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"syncer {address}: {error}") from error
    return _as_told(settings, told, OF_THE_MODEL)


def of_site(settings: Sequence[str], *, wait: bool = True) -> RunConfig:
    """Return the configuration of ``settings`` for a site, with its syncer's shared settings where they have none.

    ``wait``: try for ``site.join_timeout_s``; False, or where the site was in the run of that name before: once.

    Where the syncer does not answer, a site that was in the run before uses the settings that it got then.  A syncer of
    an earlier release sends none: ``settings`` must then be complete, ``run.name`` included.  JoinFailed where the
    run's settings are unknown, VerbError where ``settings`` contradict them.
    """
    given = configs.compose(settings)
    before = _of_an_earlier_start(given)
    # Without a run's name, the earlier run at this address may have ended, and another may be about to begin.
    known = before is not None and given.run.name is not None
    timeout_s = given.site.join_timeout_s if wait and not known else 0.0
    try:
        with section("site", address="syncer"), refusing(OSError, begin="site: "):
            told = ask(given.site.syncer, connecting.site_security(given), timeout_s)
    except EarlierRelease:
        if given.run.name is None:
            raise
        return given
    except JoinFailed as error:
        if before is None or error.kind != "unreachable":
            raise
        told = before
    if given.site.token_file and not told.identity:
        text = "the syncer has no cluster.syncer.tokens_file"
        print(f"note: site.token_file={given.site.token_file} is not used: {text}", file=sys.stderr)
    if given.run.name not in (None, told.run_id):
        text = f"run.name is {given.run.name} here, and the syncer at {given.site.syncer} has run {told.run_id}"
        raise VerbError(ExitCode.MISMATCH, text)
    return _as_told(settings, told)


def _of_an_earlier_start(given: RunConfig) -> Told | None:
    """Return the run's settings from the site's own folder; None without a folder, or with folders of several runs."""
    here = list[RunConfig]()
    for path in Path(given.run.dir).glob(f"{given.run.name or '*'}/sites/{given.site.id}/config.yaml"):
        with suppress(ConfigError):  # A file that is damaged, or of another release, does not count.
            found, is_link = configs.read(path), path.parents[2].is_symlink()  # runs/latest is another's name.
            here += [found] if given.run.name or (found.site.syncer == given.site.syncer and not is_link) else []
    return Told(here[0].run.name or "", configs.shared_config(here[0])) if len(here) == 1 else None
