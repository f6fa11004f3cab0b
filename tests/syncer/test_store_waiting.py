"""What is acknowledged and not merged yet is looked at on start: it is as it was, or the start says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.sync.events import JoinRequested
from diloco.syncer.store import StoreError
from tests.syncer.building import files, update
from tests.syncer.desk import Desk


def waits(desk: Desk) -> str:
    """Updates of which one is being merged, one waits behind it, and nothing is merged; the latter's payload."""
    desk.begin()
    for site in ("a", "b"):
        desk.handle(JoinRequested(1, site, "0123abcd"))
        desk.push(*update(site, 1, 1))
    desk.close()
    (pending,) = desk.machine.state.sites["b"].lines[1].undecided
    assert not pending.merging
    return pending.payload


@pytest.mark.parametrize("with_snapshot", [False, True])
@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
def test_a_payload_that_waits_is_looked_at_on_start_and_its_update_named(
    tmp_path: Path, how: str, with_snapshot: bool
) -> None:
    """It had started without a word, and had ended for ever at the outer step of that update."""
    payload = waits(Desk(tmp_path))
    if with_snapshot:
        desk = Desk(tmp_path)
        desk.snapshot()
        desk.close()
    path = tmp_path / "spool" / payload
    whole = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(whole[:-1] if how == "cut" else whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    before = files(tmp_path)
    words = "missing" if how == "missing" else "damaged"
    with pytest.raises(StoreError, match=rf"{path} is {words}.*it is update 1 of fragment 1 from site b, .*restore"):
        Desk(tmp_path)
    assert files(tmp_path) == before
    path.write_bytes(whole)
    again = Desk(tmp_path)
    again.begin()
    for _ in range(2):
        again.finish(1)
    assert again.values[1].version == 2, "put back, it is merged"
    again.close()


def test_a_disk_that_cannot_read_a_payload_is_said_in_words(tmp_path: Path) -> None:
    path = tmp_path / "spool" / waits(Desk(tmp_path))
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreError, match=rf"{path} cannot be read: .*it is update 1 of fragment 1 from site b"):
        Desk(tmp_path)
