"""What a site that knows only an address is told, by whom, and what it says when nobody tells it."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.config import syncer_settings
from diloco.config.compose import compose, shared_config
from diloco.learner.transfer import JoinFailed
from diloco.sync.agreement import PROTOCOL
from diloco.wire.messages import ProbeAnswer, Refused, Status, Unreachable
from diloco.wire.options import SecurityOptions
from tests.launch.serving import serving
from tests.loopback.cluster import free_port

PLAIN = SecurityOptions()


def test_the_run_is_told_by_whoever_answers(tmp_path: Path) -> None:
    with serving(tmp_path, "outer.lr=0.25") as served:
        told = syncer_settings.ask(f"127.0.0.1:{free_port()},{served.address}/127.0.0.1:1", PLAIN, 20.0)
    assert told.run_id == "mine"
    assert told.shared["outer.lr"] == "0.25"
    assert told.shared.keys() == shared_config(compose(["model.kind=file"])).keys()


def test_what_is_a_syncers_own_is_no_rule_of_the_run() -> None:
    several = {"outer.lr": "0.7", "cluster.syncer.index": "1", "placement": "0,1/2"}
    assert syncer_settings._told(answer(shared_config=several)).shared == {"outer.lr": "0.7"}


def answer(**changes: object) -> ProbeAnswer:
    return replace(ProbeAnswer(PROTOCOL, PROTOCOL - 1, "mine", shared_config={"outer.lr": "0.7"}), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        (answer(shared_config={}), "mismatch", "of an earlier release"),
        (answer(protocol=PROTOCOL + 3, protocol_oldest=PROTOCOL + 2), "mismatch", "the syncer speaks"),
        (Refused(Status.UNIMPLEMENTED, "no such method"), "mismatch", "of an earlier release"),
        (Refused(Status.UNAUTHENTICATED, "who are you"), "refused", "who are you"),
        (Unreachable("Probe: nobody there"), "unreachable", "nobody there"),
    ],
)
def test_why_nothing_is_told(monkeypatch: pytest.MonkeyPatch, found: object, kind: str, words: str) -> None:
    def asked(address: str, security: SecurityOptions) -> ProbeAnswer:
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, ProbeAnswer)
        return found

    monkeypatch.setattr(syncer_settings, "_asked", asked)
    with pytest.raises(JoinFailed, match=words) as failed:
        syncer_settings.ask("127.0.0.1:1", PLAIN, 0.1)
    assert failed.value.kind == kind


def test_who_is_not_there_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = threading.Semaphore(2)

    def asked(address: str, security: SecurityOptions) -> ProbeAnswer:
        if tries.acquire(blocking=False):
            raise Unreachable("not yet", retry_after_s=0.01)
        return answer()

    monkeypatch.setattr(syncer_settings, "_asked", asked)
    assert syncer_settings.ask("127.0.0.1:1", PLAIN, 60.0).run_id == "mine"


def test_what_is_no_address_is_named() -> None:
    with pytest.raises(ValueError, match="address is 'here': host:port wanted"):
        syncer_settings.ask("here/there", PLAIN, 1.0)
