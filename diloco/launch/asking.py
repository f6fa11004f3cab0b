"""Fetch a run's settings from its syncer, for a site that knows only the syncer's address."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.launch.placing import BETWEEN, BY_PART
from diloco.learner.transfer import JoinFailed
from diloco.sync.agreement import PROTOCOL
from diloco.wire.channel import Backoff, check_address, split_addresses
from diloco.wire.checkup import Checkup
from diloco.wire.messages import ProbeAsk, Refused, Status, Unreachable
from diloco.wire.options import ClientOptions

if TYPE_CHECKING:
    from diloco.wire.messages import ProbeAnswer
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
