"""A site whose model lies on an accelerator, run on the CPU, with elsewhere.py in the accelerator's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.learner.direct import started
from tests.learner.elsewhere import Elsewhere
from tests.learner.test_agent import ALONE, balanced, versions
from tests.syncer.building import serving


def test_a_model_that_lies_elsewhere_is_trained_and_told_of_as_one_that_lies_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: None
) -> None:
    """What an accelerator does, on the CPU: updates by the kernels, which the syncer compares with what they say."""
    monkeypatch.setattr("diloco.learner.exchange.place_of", lambda parameters: Elsewhere())
    settings: dict[str, Any] = {"down_codec": "int8", "up_codecs": ["int4"], **ALONE}
    with (
        serving(tmp_path / "syncer", **settings) as syncer,
        started(tmp_path / "a", syncer, up_codec="int4") as site,
    ):
        assert site.events.of("joined")[0]["encodes"] == "cpu, Triton"
        site.train_until(lambda: min(versions(syncer)) >= 3, "versions are made of its updates")
        site.client.training = None
        done = site.agent.finish()
        assert balanced(done.ledger)
        assert done.ledger["merged"] > 0
        assert [note for note in site.events.of("note") if note["note"] in {"digest_differs", "thread_died"}] == []
