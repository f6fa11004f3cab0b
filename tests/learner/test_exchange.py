"""What the machine orders goes to who does it, and what was done is told when the tensors are changed, not before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.codec.base import digest
from diloco.inner.parallel import SiteGroup
from diloco.learner.exchange import AgentOptions, Exchange, Source
from diloco.learner.ranks import Orders
from diloco.learner.seal import Outbox, SealJob, encoders, seal
from diloco.learner.tensors import SiteTensors
from diloco.outer.optimizer import OuterOptimizerOptions
from diloco.sync.effects import Adopt, Fetch, Forget, Release, Retake, Seal, Send, StartOver
from diloco.sync.events import LearnerEvent, Sealed, VersionFetched
from diloco.sync.link import AdaptOptions, Way
from diloco.wire.messages import PullHeader
from tests.learner.direct import DirectClient
from tests.learner.held import held
from tests.syncer.building import LAYOUT, Events, dice

SEAL = Seal(0, 1, 0, (), 10, 1, 1_000, 1, final=False)


class Held(Exchange):
    """An exchange whose machine is a list of what it is told."""

    incarnation, epoch, lineage = 1, 3, 1
    known: Any = property(lambda self: self)  # type: ignore[assignment]

    def __init__(self, folder: Path) -> None:
        self.events, self.told, self.knows = Events(), list[Any](), True
        self.parameters = {name: torch.zeros(shape) for name, shape in LAYOUT.parameters}
        client: Any = DirectClient.__new__(DirectClient)
        client.bytes_up = client.bytes_down = 0
        client.close = lambda: None
        tensors = SiteTensors(LAYOUT, held(self.parameters), "rebase", 0.5)
        options = AdaptOptions(ways=(Way("fp32", 0),))
        super().__init__("run", "a", tensors, Outbox(folder), Orders(SiteGroup()), client, options)

    def change(self, do: Callable[[], None], event: LearnerEvent, source: Source | None) -> None:
        if self.knows:
            do()
        self.told.append((event, sorted(self.tensors.sent), self.tensors.latest[0], source))

    def tell(self, event: LearnerEvent) -> None:
        self.told.append(event)

    def emit(self, what: str, facts: dict[str, object]) -> None:
        self.events.emit(what, facts)

    def wanted(self, fragment: int, sequence: int) -> str | None:
        return None

    def rejoin(self, why: str) -> None:
        self.told.append(why)

    def give_up(self, why: str) -> None:
        self.told.append(why)

    def has_failed(self) -> bool:
        return False

    def arrive(self, version: int, values: Tensor, lineage: int = 1, epoch: int = 3, sites: int = 0) -> None:
        size, numel = 4 * values.numel(), values.numel()
        told = (0, (), epoch, False, sites)
        header = PullHeader(0, -1, version, True, "fp32", numel, size, (size,), digest(values), *told)
        self.keep_fetched(values, VersionFetched(0, version, ()), lineage, header)


def test_a_version_is_held_when_the_machine_hears_of_it_and_taken_when_it_says_so(tmp_path: Path) -> None:
    held, values = Held(tmp_path), dice("v0", 0)
    held.arrive(4, values)
    ((event, _, latest, source),) = held.told
    assert source == Source(1, 3, digest(values))
    assert event == VersionFetched(0, 4, ())
    assert latest is not None
    assert latest[0] == 4
    held.at_boundary(Retake(0, 4, (), "first version"))
    assert torch.equal(held.tensors.local(0), values)
    held.arrive(5, dice("v1", 0))
    held.at_boundary(Adopt(0, 5, ()))
    assert torch.equal(held.tensors.local(0), dice("v1", 0)), "nothing was trained in between"
    assert [event["version"] for event in held.events.of("retaken") + held.events.of("adopted")] == [4, 5]


def test_how_many_sites_a_version_is_of_comes_with_its_values_and_stays_where_the_next_one_does_not_say(
    tmp_path: Path,
) -> None:
    held = Held(tmp_path)
    for version, sites, wanted in ((4, 3, 3), (5, 0, 3), (6, 2, 2)):
        held.arrive(version, dice("v0", 0), sites=sites)
        assert held.tensors.sites_in[0] == wanted


def test_a_version_that_the_machine_does_not_take_is_not_kept(tmp_path: Path) -> None:
    held = Held(tmp_path)
    held.knows = False
    held.arrive(4, dice("v0", 0), lineage=2, epoch=1)
    ((event, _, latest, source),) = held.told
    assert event == VersionFetched(0, 4, ())
    assert source == Source(2, 1, digest(dice("v0", 0)))
    assert latest is None


def test_an_update_is_measured_at_once_and_known_when_it_is_durable(tmp_path: Path) -> None:
    held = Held(tmp_path)
    held.arrive(0, dice("v0", 0))
    held.at_boundary(Retake(0, 0, (), "first version"))
    held.tensors.write(0, dice("trained", 0))
    held.at_boundary(SEAL, "fp32", at_rest=False)
    held.tensors.write(0, dice("later", 0))
    job = held.sealer.queue.get()
    assert isinstance(job, SealJob)
    assert (job.effect, job.codec) == (SEAL, "fp32")
    made = seal(job, encoders(["fp32"], held.tensors)[0], "run", "a", 1)
    assert made.header.values_digest == digest(dice("v0", 0) - dice("trained", 0))
    held.keep_sealed(made)
    event, sent, _, source = held.told[-1]
    assert source is None
    assert event == Sealed(0, 1, made.header.digest)
    assert sent == [(0, 1)]
    held.order(Release(0, 1))
    assert held.tensors.sent == {}


def test_orders_go_to_who_does_them_and_closing_ends_all(tmp_path: Path) -> None:
    held = Held(tmp_path)
    for effect in (Send(0, 1), Forget(0, 2), Fetch(1, 3)):
        held.order(effect)
    held.arrive(4, dice("v0", 0))
    held.order(StartOver(0))
    assert held.tensors.latest[0] is None
    assert [event["fragment"] for event in held.events.of("started_over")] == [0]
    held.end_threads()
    found = [[each.queue.get(), each.queue.get()] for each in (held.sender, held.sealer, held.fetcher)]
    assert found == [[(0, 1), None], [(0, 2), None], [1, None]]


# --- What a site's agent is told before it starts --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("up_codec", "int5"),
        ("adopt_alpha", 1.5),
        ("measure_from", "above"),
        ("ahead", OuterOptimizerOptions(kind="adamw")),
        ("feedback", 1.5),
        ("feedback", 0.5),
        ("join_timeout_s", 0.0),
        ("lock_step_timeout_s", -1.0),
        ("finish_timeout_s", 0.0),
        ("meter_every_s", 0.0),
    ],
)
def test_an_option_that_cannot_work_is_refused_with_its_value(field: str, value: object) -> None:
    said = value.kind if isinstance(value, OuterOptimizerOptions) else value
    with pytest.raises(ValueError, match=repr(said).replace(".", r"\.")):
        AgentOptions(folder="x", **{field: value})  # type: ignore[arg-type]
