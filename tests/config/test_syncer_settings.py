"""What a site that knows only an address is told, by whom, and what it says when nobody tells it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from diloco.config import syncer_settings
from diloco.config.compose import as_text, compose, shared_config, write
from diloco.config.errors import ConfigError, ExitCode, VerbError
from diloco.config.syncer_settings import Told, fill_in, of_client, of_site
from diloco.inner.tokenizer import END, make_tokenizer
from diloco.learner.transfer import JoinFailed
from diloco.sync.options import PROTOCOL
from diloco.wire.checkup import Checkup
from diloco.wire.messages import ProbeAnswer, Refused, Status, Unreachable
from diloco.wire.options import SecurityOptions
from tests.integrations.serving import serving
from tests.loopback.cluster import closed_port
from tests.models.pasts import Hand, configured

PLAIN = SecurityOptions()
PRESET = ["experiment=default"]


def test_any_syncer_or_standby_that_answers_tells_the_run(tmp_path: Path) -> None:
    with serving(tmp_path, "outer.lr=0.25") as served:
        told = syncer_settings.ask(f"127.0.0.1:{closed_port()},{served.address}/127.0.0.1:1", PLAIN, 20.0)
    assert told.run_id == "mine"
    assert told.shared["outer.lr"] == "0.25"
    assert told.shared.keys() == shared_config(compose(["model.kind=file"])).keys()
    with pytest.raises(ValueError, match="address is 'here': host:port wanted"):
        syncer_settings.ask("here/there", PLAIN, 1.0)


def test_what_is_a_syncers_own_is_no_rule_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    several = {"outer.lr": "0.7", "cluster.syncer.index": "1", "placement": "0,1/2"}
    probed = SimpleNamespace(answer=answer(shared_config=several))
    monkeypatch.setattr(Checkup, "probe", lambda checkup, ask: probed)
    assert syncer_settings.ask("127.0.0.1:1", PLAIN, 0.1).shared == {"outer.lr": "0.7"}


def answer(**changes: object) -> ProbeAnswer:
    return replace(ProbeAnswer(PROTOCOL, PROTOCOL - 1, "mine", shared_config={"outer.lr": "0.7"}), **changes)  # type: ignore[arg-type]


def test_why_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, kind, words in (
        (answer(shared_config={}), "mismatch", "of an earlier release"),
        (answer(protocol=PROTOCOL + 3, protocol_oldest=PROTOCOL + 2), "mismatch", "the syncer speaks"),
        (Refused(Status.UNIMPLEMENTED, "no such method"), "mismatch", "of an earlier release"),
        (Refused(Status.UNAUTHENTICATED, "who are you"), "refused", "who are you"),
        (Unreachable("Probe: nobody there"), "unreachable", "nobody there"),
    ):
        answers = found if isinstance(found, Exception) else SimpleNamespace(answer=found)
        monkeypatch.setattr(Checkup, "probe", Mock(side_effect=[answers] * 9))
        with pytest.raises(JoinFailed, match=words) as failed:
            syncer_settings.ask("127.0.0.1:1", PLAIN, 0.1)
        assert failed.value.kind == kind


def test_who_is_not_there_yet_is_waited_for_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(syncer_settings, "SILENT_S", 0.0)
    late, found = Unreachable("not yet", retry_after_s=0.01), answer(shared_config=shared_config(compose([])))
    there = SimpleNamespace(answer=found)
    monkeypatch.setattr(Checkup, "probe", Mock(side_effect=[late, late, there, late, there]))
    assert syncer_settings.ask("127.0.0.1:1", PLAIN, 60.0).run_id == "mine"
    said = "no answer from 127.0.0.1:1 yet: not yet; trying for 60 s more (site.join_timeout_s)\n"
    assert capsys.readouterr().err == said
    assert of_client("127.0.0.1:1", [], 60.0).run.name == "mine"


@pytest.fixture
def hand(tmp_path: Path) -> Iterator[Hand]:
    made = Hand(configured(tmp_path, "model.rope_theta=70000", "model.tied=true"))
    yield made
    made.stop()


def of_run(monkeypatch: pytest.MonkeyPatch, *overrides: str, without: str = "", **more: str) -> Told:
    """The syncer's run is of ``overrides``, and its settings come ``without`` that one and with ``more``."""
    told = Told("mine", {key: text for key, text in shared_config(compose(overrides)).items() if key != without} | more)
    monkeypatch.setattr(syncer_settings, "ask", lambda *asked: told)
    return told


def test_a_site_says_what_is_its_own_and_takes_the_rest_from_its_syncer(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = ["run.tokens=2e9", "run.seed=7", "outer.lr=0.4", "model.dim=64", "codec.up=int8", "data.leased=true"]
    of_run(monkeypatch, *theirs)
    config = of_site(["site.id=fra", "site.syncer=127.0.0.1:1", "inner.lr=0.01"])
    assert (config.run.name, config.site.id, config.inner.lr) == ("mine", "fra", 0.01)
    assert shared_config(config) == shared_config(compose(theirs))
    assert shared_config(of_site(["site.id=fra", "run.name=mine", *theirs])) == shared_config(config)


def test_a_preset_of_another_release_yields_to_the_run_in_what_came_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a run that goes on: the setting is not named, and the first release had none of its name."""
    assert compose(PRESET).outer.share_weighted
    of_run(monkeypatch, *PRESET, without="outer.share_weighted")
    assert not of_site(["site.id=fra", *PRESET]).outer.share_weighted
    assert of_site(["site.id=fra", *PRESET, "outer.share_weighted=true"]).outer.share_weighted, "the syncer's own"
    with pytest.raises(
        VerbError, match=r"outer\.staleness_power is not set in run mine and 0\.5 here: leave that setting out"
    ):
        of_site(["site.id=fra", *PRESET, "outer.staleness_power=0.5"])


def test_a_site_that_contradicts_its_run_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    of_run(monkeypatch, "run.tokens=2e9", "outer.lr=0.4", "data.tokenizer=bytes")
    for said, words in (
        ("outer.lr=0.5", r"outer\.lr is 0\.4 in run mine and 0\.5 here: leave that setting out"),
        ("outer.lr=0.7", r"outer\.lr is 0\.4 in run mine and 0\.7 here"),  # The default, but said.
        ("run.name=other", r"run\.name is other here, and the syncer at 127\.0\.0\.1:7077 has run mine"),
        ("experiment=default", r"outer\.inner_steps is 15 in run mine and 30 here"),
        ("run.seconds=60", r"run\.seconds is null in run mine and 60\.0 here"),
    ):
        with pytest.raises(VerbError, match=words) as refused:
            of_site(["site.id=fra", said])
        assert refused.value.code is ExitCode.MISMATCH
    with pytest.raises(ConfigError, match=r"data\.tokenizer is bytes in run mine: model\.vocab_size is 257"):
        of_site(["site.id=fra", "data.tokenizer=bpe1024"])


def test_a_syncer_decides_nothing_that_is_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("run.dir", "data.cache", "site.memory_folder", "cluster.syncer.folder"):
        told = of_run(monkeypatch, **{key: "/elsewhere"})
        assert "/elsewhere" not in as_text(fill_in(["site.id=fra"], told)).values()
        with pytest.raises(VerbError, match=f"{key} is /elsewhere in run mine"):
            of_site(["site.id=fra"])


def test_a_site_that_was_here_before_needs_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Mock(side_effect=JoinFailed("unreachable", "nobody"))
    monkeypatch.setattr(syncer_settings, "ask", ask)
    words = [f"run.dir={tmp_path}", "site.id=fra", "site.syncer=127.0.0.1:1"]
    with pytest.raises(JoinFailed):
        of_site(words)
    before = compose([*words, "run.name=mine", "outer.lr=0.4"])
    write(before, tmp_path / "mine" / "sites" / "fra" / "config.yaml")
    (tmp_path / "latest").symlink_to("mine")
    assert of_site(words).outer.lr == 0.4
    assert of_site([*words, "run.name=mine"]) == before
    assert [call.args[2] for call in ask.call_args_list] == [60.0, 60.0, 0.0], (
        "another run may be about to begin at that address"
    )
    write(before, tmp_path / "second" / "sites" / "fra" / "config.yaml")
    with pytest.raises(JoinFailed):
        of_site(words)


def test_a_token_that_nobody_reads_is_said(hand: Hand, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("token-of-fra-0123456789")
    (tmp_path / "token").chmod(0o600)
    words = [f"site.syncer={hand.address}", "site.id=fra"]
    of_site(words)
    assert capsys.readouterr().err == ""
    assert of_site([*words, f"site.token_file={tmp_path}/token"]).run.name == "past"
    said = capsys.readouterr()
    assert "the syncer has no cluster.syncer.tokens_file" in said.err
    assert said.out == "", "where --print-config writes"


def test_a_tokenizer_of_a_file_must_be_here_too(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(make_tokenizer("bytes").field_form().to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    chosen = f"data.tokenizer={tmp_path}/tokenizer.json"
    hand = Hand(configured(tmp_path, chosen))
    try:
        with pytest.raises(ConfigError, match=r"the tokenizer of run past is a file: give data\.tokenizer=PATH"):
            of_client(hand.address, [])
        assert of_client(hand.address, [chosen]).data.tokenizer == f"{tmp_path}/tokenizer.json"
        with pytest.raises(VerbError, match=r"data\.tokenizer is file-.* in run past and bytes here"):
            of_client(hand.address, ["data.tokenizer=bytes"])
    finally:
        hand.stop()


def test_a_file_that_is_not_there_is_named_by_its_setting() -> None:
    with pytest.raises(ConfigError, match=r"^site\.token_file is '/nowhere'"):
        of_site(["site.token_file=/nowhere"], wait=False)
    with pytest.raises(ConfigError, match=r"^site\.syncer is 'here:99999'"):
        of_site(["site.syncer=here:99999"], wait=False)


def test_an_earlier_release_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkup, "probe", Mock(side_effect=Refused(Status.UNIMPLEMENTED, "Method not found!")))
    with pytest.raises(ConfigError, match=r"run\.name is null"):
        of_client("127.0.0.1:1", [])
    assert of_client("127.0.0.1:1", ["run.name=x", "model.dim=64"]).model.dim == 64


def test_what_a_syncer_says_is_the_value_of_its_key_or_nothing(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    told = syncer_settings.ask(hand.address, PLAIN, 0.0)
    for key, text, words in (
        ("data.tokenizer", "${oc.env:HOME}", r"data\.tokenizer is '\$\{oc\.env:HOME\}': text"),
        ("data.tokenizer", "???", r"data\.tokenizer is '\?\?\?': text"),
        ("data.tokenizer", "bytes,bpe1024", r"data\.tokenizer is 'bytes,bpe1024'"),
        ("model.layers", "2 model.dim=8", r"model\.layers is '2 model\.dim=8': a whole number"),
        ("data.tokenizer@run", "bytes", r"unknown key data\.tokenizer@run"),
    ):
        strange = replace(told, shared={**told.shared, key: text})
        monkeypatch.setattr(syncer_settings, "ask", lambda *asked, strange=strange, **more: strange)
        with pytest.raises(ConfigError, match=words) as refused:
            of_client(hand.address, [])
        assert "\n" not in str(refused.value)
