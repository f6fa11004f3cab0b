"""A site says what it holds, and not what it was told."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from diloco.codec.base import Buffers, NonFiniteError, digest
from diloco.codec.merging import RANGE_VALUES
from diloco.codec.registry import make_codec, values_of
from diloco.learner.seal import Encoded, Encoder
from diloco.learner.tensors import HOST, IDLE_SHARE, Carried, Echo, Place, SealInputs, SiteTensors, place_of
from diloco.outer.fragments import plan_layout
from diloco.outer.pseudo_gradient import pseudo_gradient
from diloco.wire.messages import short_digest
from tests.learner.participant import Elsewhere, held
from tests.syncer.building import dice

TOLD = digest(dice("x", 0))


class Clock:
    def __init__(self) -> None:
        self.now_s, self.passes_s = 100.0, 0.0

    def __call__(self) -> float:
        self.now_s += self.passes_s
        return self.now_s


def echo_of(bases: Sequence[Tensor | None], told: str = TOLD, clock: Clock | None = None) -> tuple[Echo, SiteTensors]:
    layout = plan_layout([(f"p{index}", (4,)) for index in range(len(bases))], len(bases))
    tensors = SiteTensors(layout, held({name: torch.zeros(shape) for name, shape in layout.parameters}), "rebase", 0.5)
    tensors.base, tensors.told_base = list(bases), [told] * len(bases)
    tensors.base_versions = [10 + index for index in range(len(bases))]
    return Echo(tensors, threading.Condition(), clock or Clock()), tensors


def test_fragments_take_turns_and_a_digest_stands_for_the_very_tensor_it_was_made_of() -> None:
    echo, tensors = echo_of([dice("x", 0), dice("y", 1)])
    first, second = short_digest(digest(dice("x", 0))), short_digest(digest(dice("y", 1)))
    assert echo.digests() == (0, 0)
    assert echo.compute() == (0, 10, first)
    assert echo.digests() == (first, 0)
    assert echo.compute() == (1, 11, second)
    assert echo.digests() == (first, second)
    tensors.base[0] = dice("x", 0)
    assert echo.digests() == (0, second), "another tensor lies there now"
    assert echo.compute() == (0, 10, first)


def test_one_flipped_bit_shows() -> None:
    values = dice("x", 0)
    values.numpy().view("uint32")[3] ^= 1
    echo, _ = echo_of([values])
    echo.compute()
    assert echo.digests() != (short_digest(digest(dice("x", 0))),)


def test_a_site_that_has_no_base_yet_says_nothing() -> None:
    echo, _ = echo_of([None])
    assert echo.compute() is None
    assert echo.digests() == (0,)


def test_it_is_in_the_form_of_what_was_told_and_nothing_is_said_where_nothing_was() -> None:
    values = dice("x", 0)
    echo, _ = echo_of([values], "0" * 64)
    echo.compute()
    assert echo.digests() == (short_digest(digest(values, like="0" * 64)),)
    echo, _ = echo_of([values], "")
    assert echo.compute() == (0, 10, 0)


def test_hashing_takes_a_bounded_share_of_the_time() -> None:
    clock = Clock()
    echo, _ = echo_of([dice("x", 0)], clock=clock)
    clock.passes_s = 2.0
    assert echo.compute() is not None
    clock.passes_s = 0.0
    clock.now_s += IDLE_SHARE * 2.0 - 0.1
    assert echo.compute() is None
    clock.now_s += 0.2
    assert echo.compute() is not None


# --- The same update wherever it is encoded --------------------------------------------------------------------------

ON_THE_DEVICE = ("int4", "int8:16", "int4:32+zstd1", "e3m0", "int2", "sign", "topk:256x16")
CODECS = ("fp32", "bf16", "bf16+zstd1", *ON_THE_DEVICE)


def inputs(num_sent: int, scale: float = 1e-3, seed: int = 0) -> SealInputs:
    random = torch.Generator().manual_seed(seed)
    base, step, *sent = torch.randn(2 + num_sent, 333, generator=random).unbind()
    return SealInputs(base, [base - step * scale], [each * scale / 10 for each in sent])


def assert_equal(one: Encoded, other: Encoded) -> None:
    assert bytes(one.payload) == bytes(other.payload)
    assert one.digest == other.digest == digest(values_of(other.sent).cpu())
    assert torch.equal(values_of(one.sent).cpu(), values_of(other.sent).cpu())
    assert one.norm == pytest.approx(other.norm, rel=1e-5)


@pytest.mark.parametrize("codec", CODECS)
def test_an_update_is_the_same_here_and_there(codec: str, interpreter: None) -> None:
    here, there = Encoder(make_codec(codec), Place(HOST)), Encoder(make_codec(codec), Elsewhere())
    assert str(here) == "host"
    assert str(there) == ("cpu, Triton" if codec in ON_THE_DEVICE else str(there))
    for num_sent in (0, 2, 3):
        assert_equal(there.encode(inputs(num_sent)), here.encode(inputs(num_sent)))


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int4"])
def test_what_one_update_was_outlives_the_next(codec: str, interpreter: None) -> None:
    """The buffers are used again."""
    there = Encoder(make_codec(codec), Elsewhere())
    first = there.encode(inputs(0))
    kept = Encoded(bytes(first.payload), values_of(first.sent).clone(), first.norm, first.digest)
    there.encode(inputs(1, seed=5))
    assert_equal(first, kept)


@pytest.mark.parametrize("codec", CODECS)
def test_a_fragment_of_many_ranges_is_encoded_as_by_the_definition(codec: str) -> None:
    numel, random = 2 * RANGE_VALUES + 777, torch.Generator().manual_seed(3)
    base, local, sent = (torch.randn(numel, generator=random) for _ in range(3))
    measured = pseudo_gradient(base, local, [sent])
    found = Encoder(make_codec(codec), Place(HOST), Buffers(2)).encode(SealInputs(base, [local], [sent]))
    assert bytes(found.payload) == make_codec(codec).encode(measured)
    assert torch.equal(values_of(found.sent), make_codec(codec).decode(found.payload, numel))
    assert found.digest == digest(values_of(found.sent))
    assert found.norm == pytest.approx(float(values_of(found.sent).double().norm()))


def test_it_says_why_it_does_not_encode_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(Encoder(make_codec("bf16+zstd1"), Elsewhere())) == "host, values from cpu: bf16 has no kernel there"
    monkeypatch.setattr("diloco.learner.seal.find_spec", lambda name: None)
    without = Encoder(make_codec("int4"), Elsewhere())
    assert "Triton is not installed" in str(without)
    assert_equal(without.encode(inputs(1)), Encoder(make_codec("int4"), Place(HOST)).encode(inputs(1)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which interprets, warns of what is refused
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int4"])
def test_what_is_not_finite_is_refused_there_too(codec: str, interpreter: None) -> None:
    there, ruined = Encoder(make_codec(codec), Elsewhere()), inputs(0)
    ruined.local[7] = torch.nan
    with pytest.raises(NonFiniteError):
        there.encode(ruined)
    assert_equal(there.encode(inputs(0)), Encoder(make_codec(codec), Place(HOST)).encode(inputs(0)))


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CODECS)
def test_on_the_accelerator(codec: str, kernel_device: torch.device) -> None:
    place = Place(kernel_device)
    made = inputs(2)
    there = SealInputs(
        made.reference.to(kernel_device),
        [made.local.to(kernel_device)],
        [values_of(each).to(kernel_device) for each in made.in_flight],
    )
    assert_equal(Encoder(make_codec(codec), place).encode(there), Encoder(make_codec(codec), Place(HOST)).encode(made))


@pytest.mark.parametrize("codec", ["bf16", "int4", "sign", "topk:256x4"])
def test_what_is_fed_back_is_the_same_here_and_there(codec: str, interpreter: None) -> None:
    residual = torch.randn(333, generator=torch.Generator().manual_seed(9)) * 1e-3
    both = [Encoder(make_codec(codec), place) for place in (Place(HOST), Elsewhere())]
    assert (str(both[1]) == "cpu, Triton") == (codec != "bf16")
    fresh = inputs(1).pseudo_gradient()
    for carried in (residual, None):
        made = [inputs(1) for _ in both]  # An encoder uses them up.
        for each in made:
            each.carried = Carried(carried, 0.9)
        here, there = (encoder.encode(each) for encoder, each in zip(both, made, strict=True))
        assert here.payload == there.payload
        assert torch.equal(values_of(here.sent), values_of(there.sent))
        to_send = fresh if carried is None else fresh + carried * 0.9
        assert here.payload == make_codec(codec).encode(to_send)
        for encoded in (here, there):
            assert encoded.fed is not None
            assert torch.equal(encoded.fed.fresh, fresh)
            assert torch.equal(encoded.fed.term, fresh - values_of(here.sent))
            assert torch.equal(encoded.fed.residual, to_send - values_of(here.sent))
    assert both[0].encode(inputs(1)).fed is None


# --- What is elsewhere is copied there once, and goes when it goes here ----------------------------------------------


def test_on_the_host_nothing_is_copied() -> None:
    here = torch.ones(3)
    assert Place(HOST).of(here) is here


def test_elsewhere_there_is_one_copy_for_as_long_as_the_original_is_held() -> None:
    place, here = Elsewhere(), torch.arange(5.0)
    there = place.of(here)
    assert there is not here
    assert torch.equal(there, here)
    assert place.of(here) is there
    assert place.of(torch.arange(5.0)) is not there, "equal is not the same"
    gone = weakref.ref(there)
    del there, here
    gc.collect()
    assert gone() is None


def test_a_model_on_one_accelerator_is_there_and_any_other_here() -> None:
    assert place_of([torch.ones(1), torch.ones(2)]).is_host
    assert place_of([torch.ones(1), torch.ones(1, device="meta")]).is_host
    assert place_of([]).is_host


def test_a_thread_of_a_rank_works_on_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    Place(HOST).begin_thread()
    assert used == []
    Place(torch.device("cuda", 3)).begin_thread()
    assert used == [torch.device("cuda", 3)]


@pytest.mark.gpu
def test_training_does_not_wait_for_what_is_beside_it() -> None:
    """Training's stream has long work; a thread beside it sees what was given before, and ends by itself."""
    device = torch.device("cuda", torch.cuda.current_device())
    place = Place(device)
    assert place_of([torch.ones(1, device=device)]).device == device
    here = torch.arange(2.0**22)
    values = torch.zeros(2**22, device=device)
    for _ in range(50):
        values += 1
    found = []

    def beside() -> None:
        there = place.of(here)
        told = place.pinned(2**22, torch.float32)
        with place.beside():
            told.copy_(values + there, non_blocking=True)
        found.append(told)

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert torch.equal(found[0], here + 50)
    assert found[0].is_pinned()
