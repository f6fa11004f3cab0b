"""Fetch a run's settings from its syncer, for a site or a client that knows only the syncer's address."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from diloco.config import compose as configs
from diloco.config import connecting
from diloco.config.errors import ConfigError, ExitCode, VerbError
from diloco.config.placing import BETWEEN, BY_PART
from diloco.learner.transfer import JoinFailed
from diloco.sync.agreement import PROTOCOL
from diloco.wire.channel import Backoff, check_address, split_addresses
from diloco.wire.checkup import Checkup
from diloco.wire.messages import ProbeAnswer, ProbeAsk, Refused, Status, Unreachable
from diloco.wire.options import ClientOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.config.schema import RunConfig
    from diloco.wire.options import SecurityOptions


EARLIER = "it is of an earlier release, which does not tell a site what the run is: install this one's there first"


@dataclass(frozen=True, slots=True)
class Told:
    """The run's name, and the settings that all its processes must agree on, as dotted names and text."""

    run_id: str
    shared: Mapping[str, str]


def ask(syncer: str, security: SecurityOptions, timeout_s: float) -> Told:
    """Ask the first syncer in ``syncer`` (in the format of ``site.syncer``) or its standby, whichever answers.

    Retries for ``timeout_s`` seconds.  Raises ``JoinFailed`` with the reason, ``ValueError`` for a bad address.
    """
    addresses = split_addresses(syncer.split(BETWEEN)[0])
    for address in addresses:
        check_address(address, security)
    until, backoff = time.monotonic() + timeout_s, Backoff(base_s=0.2, cap_s=2.0)
    while True:
        for address in addresses:
            try:
                return _told(_asked(address, security))
            except Refused as error:
                old = error.status is Status.UNIMPLEMENTED
                raise JoinFailed("mismatch" if old else "refused", EARLIER if old else error.text) from error
            except Unreachable as error:
                last = error
        if (left_s := until - time.monotonic()) <= 0:
            raise JoinFailed("unreachable", last.why) from last
        time.sleep(min(left_s, backoff.next_s(random.random(), last.retry_after_s or 0.0)))


def _asked(address: str, security: SecurityOptions) -> ProbeAnswer:
    with Checkup(address, security, ClientOptions()) as checkup:
        return checkup.probe(ProbeAsk(PROTOCOL)).answer


def _told(answer: ProbeAnswer) -> Told:
    if not answer.shared_config:
        raise JoinFailed("mismatch", EARLIER)
    if not answer.protocol_oldest <= PROTOCOL <= answer.protocol:
        spoken = f"{answer.protocol_oldest} to {answer.protocol}"
        raise JoinFailed("mismatch", f"protocol is {PROTOCOL} at the site, and the syncer speaks {spoken}")
    return Told(answer.run_id, {key: text for key, text in answer.shared_config.items() if key not in BY_PART})


# --- Fetch a run's settings from its syncer, for a client that has no local configuration ----------------------------

OF_THE_MODEL = (
    "model.",
    "data.tokenizer",
    "data.end_of_file",
    "outer.num_fragments",
    "outer.num_syncers",
    "outer.syncer_mbps",
)
"""The settings that turn bytes into a model, and tokens into a text: equal at a region and the run above."""
OF_A_FILE = "file-"


def told_by(address: str, settings: Sequence[str]) -> RunConfig:
    """Return the configuration of ``settings`` for the run at ``address``, whose values fill in what they leave out.

    VerbError where the syncer cannot be asked, or ``settings`` contradict the run.
    """
    given = configs.compose(settings)
    answer = _answer_of(address, given)
    theirs = {key: value for key, value in answer.shared_config.items() if key.startswith(OF_THE_MODEL)}
    said = {text.partition("=")[0].lstrip("+") for text in settings}
    if theirs.get("data.tokenizer", "").startswith(OF_A_FILE) and "data.tokenizer" not in said:
        raise ConfigError(
            f"the tokenizer of run {answer.run_id} is of a file: give data.tokenizer=PATH of the same one"
        )
    config = configs.compose(settings, {key: value for key, value in theirs.items() if key not in said})
    if config.run.name is None:
        config.run.name = answer.run_id or None
    ours = configs.shared_config(config)
    for key, value in sorted(theirs.items()):
        if ours.get(key) != value:
            text = f"{key} is {value} in run {answer.run_id} and {ours.get(key, 'not set')} here"
            raise VerbError(ExitCode.MISMATCH, text)
    if config.run.name is None:
        raise ConfigError("run.name is null: say which run is meant")
    return config


def _answer_of(address: str, config: RunConfig) -> ProbeAnswer:
    """Return the first syncer's answer about its run; only its protocol, where the syncer is of an earlier release."""
    security = connecting.site_security(replace(config, site=replace(config.site, syncer=address)))
    why = ""
    for each in address.replace(BETWEEN, ",").split(","):
        try:
            with Checkup(each.strip(), security, ClientOptions()) as checkup:
                return checkup.probe(ProbeAsk(PROTOCOL)).answer
        except Unreachable as error:
            why = why or f"the syncer at {each.strip()} does not answer: {error.why}"
        except Refused as error:
            if error.status is Status.UNIMPLEMENTED:
                return ProbeAnswer(PROTOCOL, PROTOCOL, "")
            raise VerbError(ExitCode.MISMATCH, error.text) from error
        except (ValueError, OSError) as error:
            raise ConfigError(f"syncer {each.strip()}: {error}") from error
    raise VerbError(ExitCode.UNREACHABLE, why)
