"""Coming to a data folder: version 0 in a new one, the last process's state in another."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from diloco.syncer.store import Store, StoreError, begun
from tests.loopback.cluster import Log
from tests.loopback.toy import Toy


def test_what_was_begun_is_what_is_recovered(tmp_path: Path) -> None:
    toy, log = Toy(folder=str(tmp_path)), Log()
    rules, card = toy.plan().rules(toy.options()), toy.plan().card
    store = Store(tmp_path / "syncer", card, emit=log.emit)
    with closing(store.journal):
        assert store.is_new()
        first = begun(store, rules, toy.version_zero())
    store = Store(tmp_path / "syncer", card, emit=log.emit)
    with closing(store.journal):
        assert not store.is_new()
        again = store.recover(rules)
    assert again.machine.state == first.machine.state
    assert [each.digest for each in again.holdings.values] == [each.digest for each in first.holdings.values]
    assert log.events == []


def test_a_run_does_not_begin_with_a_nan(tmp_path: Path) -> None:
    toy = Toy(folder=str(tmp_path))
    store = Store(tmp_path / "syncer", toy.plan().card)
    with closing(store.journal), pytest.raises(StoreError, match="version 0 of fragment 0 holds a NaN"):
        begun(store, toy.plan().rules(toy.options()), [torch.full_like(each, torch.nan) for each in toy.version_zero()])
