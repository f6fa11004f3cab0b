"""``diloco.join`` with a real syncer over gRPC: what comes from where, and what is refused in which words."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from itertools import repeat
from pathlib import Path

import pytest
import torch
from torch import nn

import diloco
from tests.integrations.serving import cold_model, serving, small_model
from tests.loopback.cluster import free_port


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def test_the_five_lines_of_the_reference_are_a_site(place: Path) -> None:
    """The text of the docstring itself, with the names that it leaves to its reader."""
    text = inspect.getdoc(diloco.join) or ""
    example = textwrap.dedent(text.split("::\n\n", 1)[1].split("\n\n")[0])
    assert "diloco.join(model, optimizer," in example
    assert len(example.strip().splitlines()) == 5
    model = cold_model()
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
    there = {"diloco": diloco, "model": model, "optimizer": sgd(model), "loss_of": nn.functional.mse_loss}
    with serving(place, "run.tokens=200000") as served:
        there["data"] = repeat((inputs, inputs.sum(1, keepdim=True).sin()))
        exec(example.replace("host:7077", served.address), there)
    outer = there["outer"]
    assert isinstance(outer, diloco.Outer)
    assert outer.why == "the run is finished"
    ledger = outer.ledger
    assert ledger["processed"] == ledger["merged"] == 4096 * outer.steps >= 200_000
    assert all(torch.isfinite(each).all() for each in model.parameters()), "it had only NaN before it joined"
    assert (place / "runs/mine/sites/fra/events.jsonl").is_file()


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    ask = "import sys, diloco; print(sorted({'torch', 'grpc', 'hydra', 'omegaconf'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout == "[]\n"
    with pytest.raises(AttributeError, match=r"has no attribute 'joint'"):
        _ = diloco.joint  # type: ignore[attr-defined]


def test_the_rules_are_the_syncers(place: Path) -> None:
    rules = ["outer.inner_steps=7", "outer.num_fragments=2", "outer.adopt=overwrite", "codec.up=int8:128"]
    model, seen = cold_model(), []
    with serving(place, *rules, "outer.discards_max=9") as served:
        outer = diloco.join(
            model, sgd(model), syncer=served.address, site="fra", tokens_per_step=1, log=lambda *told: seen.append(told)
        )
        with outer:
            assert outer.run == "mine"
    config = outer._config
    assert (config.outer.inner_steps, config.outer.num_fragments, config.outer.discards_max) == (7, 2, 9)
    assert (config.outer.adopt, config.codec.up) == ("overwrite", "int8:128")
    assert [dict(fields)["versions"] for what, fields in seen if what == "joined"] == [[0, 0]]


def test_the_addresses_are_as_many_as_the_run_has_syncers(place: Path) -> None:
    model = cold_model()
    words = r"syncer is '127.+': one address, since outer.num_syncers=1"
    with serving(place, "outer.num_fragments=2") as served, pytest.raises(ValueError, match=words):
        diloco.join(model, sgd(model), syncer=f"{served.address}/127.0.0.1:1", site="fra")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"site": "a b"}, r"^site is 'a b': letters, digits"),
        ({"syncer": ""}, "^syncer is '': host:port"),
        ({"syncer": "nowhere"}, "^syncer is 'nowhere': host:port wanted"),
        ({"tokens_per_step": 0}, "^tokens_per_step is 0: a whole number from 1 on"),
        ({"tokens_per_step": 1.5}, "^tokens_per_step is 1.5: a whole number"),
        ({"overlap_step": 3}, "^overlap_step is no argument of join: did you mean overlap_steps?"),
        ({"nproc": 3}, "^nproc is no argument of join"),
        ({"adapt": "often"}, "^adapt is 'often': true or false"),
        ({"data_channels": 9}, "^data_channels is 9: "),
        ({"join_timeout_s": 0.0}, "^join_timeout_s is 0.0: positive"),
        ({"token_file": "/nowhere"}, "^token_file is '/nowhere': No such file"),
        ({"overlap_steps": 99}, "^overlap_steps is 99: from 0 to less than outer.inner_steps=5"),
        ({"finish_timeout_s": -1.0}, "^finish_timeout_s is -1.0: positive"),
        ({"model": "gpt"}, "^model is 'gpt': a torch.nn.Module"),
        ({"model": [small_model(), nn.Tanh(), small_model()]}, "^model has parts that both have a parameter 0.bias"),
        ({"model": [nn.Tanh()]}, "^model has no parameters"),
        ({"model": nn.Tanh()}, "^model has no parameters"),
        ({"optimizer": "adam"}, "^optimizer is 'adam': a torch.optim.Optimizer, or several"),
        ({"optimizer": []}, r"^optimizer is \[\]: a torch.optim.Optimizer"),
        ({"optimizer": sgd(small_model())}, "^optimizer trains none of the model's parameters"),
    ],
)
def test_an_argument_that_cannot_be_is_named(place: Path, arguments: dict[str, object], words: str) -> None:
    model = cold_model()
    with serving(place) as served:
        whole = {"model": model, "optimizer": sgd(model), "syncer": served.address, "site": "fra", **arguments}
        with pytest.raises(ValueError, match=words):
            diloco.join(**whole)  # type: ignore[arg-type]


def test_who_does_not_answer_is_named() -> None:
    model, nobody = cold_model(), f"127.0.0.1:{free_port()}"
    with pytest.raises(diloco.JoinFailed, match=r"^site fra cannot reach the syncer at 127.0.0.1:") as failed:
        diloco.join(model, sgd(model), syncer=nobody, site="fra", join_timeout_s=0.3)
    assert failed.value.kind == "unreachable"
    assert "tried for 0.3 s (join_timeout_s); a run that is over has no syncer" in str(failed.value)


def test_another_model_or_run_is_refused_in_words(place: Path) -> None:
    model = nn.Linear(3, 3)
    with serving(place) as served:
        whole = {"syncer": served.address, "site": "fra", "tokens_per_step": 1}
        joined = diloco.join(model, sgd(model), **whole)  # type: ignore[arg-type]
        with pytest.raises(diloco.JoinFailed, match=r"parameter 0.bias is there and not here") as failed, joined:
            raise AssertionError("it was taken in")
        assert failed.value.kind == "mismatch"
        assert str(failed.value).startswith(f"the syncer at {served.address} does not take site fra in: ")
        with pytest.raises(diloco.JoinFailed, match=r"run is 'other' at the site and 'mine' at the syncer") as failed:
            diloco.join(model, sgd(model), run="other", **whole)  # type: ignore[arg-type]
        assert failed.value.kind == "mismatch"


def test_the_parts_of_a_model_are_the_model(place: Path) -> None:
    model = cold_model()
    parts = [nn.ModuleDict({name: each}) for name, each in model.named_children()]
    with serving(place) as served:
        given = {"syncer": served.address, "site": "fra", "tokens_per_step": 1}
        with diloco.join(parts, sgd(model), **given):  # type: ignore[arg-type]
            assert all(torch.isfinite(each).all() for each in model.parameters())
        lost = diloco.join(parts[:2], sgd(model), **given)  # type: ignore[arg-type]
        with pytest.raises(diloco.JoinFailed, match=r"parameter 2.bias is there and not here"), lost:
            raise AssertionError("it was taken in")


def test_a_site_that_was_put_out_is_refused(place: Path) -> None:
    model = cold_model()
    with serving(place) as served:
        with diloco.join(model, sgd(model), syncer=served.address, site="fra", tokens_per_step=1):
            pass
        served.syncer.api.evict("fra")
        again = diloco.join(model, sgd(model), syncer=served.address, site="fra", tokens_per_step=1)
        with pytest.raises(diloco.JoinFailed, match=r"does not take site fra in: ") as failed, again:
            raise AssertionError("it was taken in")
    assert failed.value.kind == "refused"


def test_ranks_that_know_nothing_of_each_other_are_not_one_site_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = cold_model()
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 4, and torch.distributed is not initialised"):
        diloco.join(model, sgd(model), syncer="127.0.0.1:1", site="fra")


def test_a_site_shows_its_token_from_the_first_question_on(place: Path) -> None:
    for name, text in (
        ("tokens", '{"sites": {"fra": "the-secret-of-fra-alone"}, "admin": "the-secret-of-the-admin"}'),
        ("mine", "the-secret-of-fra-alone"),
    ):
        (place / name).write_text(text)
        (place / name).chmod(0o600)
    model = cold_model()
    with serving(place, f"cluster.syncer.tokens_file={place / 'tokens'}") as served:
        with pytest.raises(diloco.JoinFailed, match=r"does not take site fra in: .*token") as failed:
            diloco.join(model, sgd(model), syncer=served.address, site="fra")
        assert failed.value.kind == "refused"
        mine = str(place / "mine")
        with diloco.join(
            model, sgd(model), syncer=served.address, site="fra", tokens_per_step=1, token_file=mine
        ) as outer:
            assert outer.steps == 0


LEASED = {"data": "essays", "samples": 40, "samples_per_step": 2}


@pytest.mark.parametrize(
    ("leased", "arguments", "words"),
    [
        ("true", {}, r"data.leased is true at the syncer: give data, samples and samples_per_step, and read"),
        ("false", LEASED, r"data is 'essays', and the syncer leases none \(data.leased\)"),
    ],
)
def test_leased_data_wants_a_name_and_nothing_else_does(
    place: Path, leased: str, arguments: dict[str, object], words: str
) -> None:
    model = cold_model()
    with (
        serving(place, f"data.leased={leased}") as served,
        pytest.raises(diloco.JoinFailed, match=words) as failed,
    ):
        diloco.join(model, sgd(model), syncer=served.address, site="fra", **arguments)  # type: ignore[arg-type]
    assert failed.value.kind == "mismatch"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": None}, "^samples is 40, and data is None: give all three"),
        ({"data": None, "samples": None}, "^samples_per_step is 2, and data is None"),
        ({"samples": None}, "^samples is None: a whole number from 1 on, where data is given"),
        ({"samples_per_step": 0}, "^samples_per_step is 0: a whole number"),
        ({"samples_per_step": 10**7}, "two steps of this site draw .* units, more than"),
    ],
)
def test_data_that_cannot_be_is_named(place: Path, changes: dict[str, object], words: str) -> None:
    model = cold_model()
    with serving(place, "data.leased=true") as served, pytest.raises(ValueError, match=words):
        diloco.join(model, sgd(model), syncer=served.address, site="fra", **{**LEASED, **changes})  # type: ignore[arg-type]


def test_other_data_than_the_runs_are_refused(place: Path) -> None:
    first, second = cold_model(), cold_model()
    with serving(place, "data.leased=true", "data.unit_sequences=4") as served:
        whole = {"syncer": served.address, "tokens_per_step": 1, **LEASED}
        there = diloco.join(first, sgd(first), site="fra", **whole)  # type: ignore[arg-type]
        with there:
            here = diloco.join(second, sgd(second), site="iad", **{**whole, "samples": 41})  # type: ignore[arg-type]
            with pytest.raises(diloco.JoinFailed, match=r"the run leases units of one text") as failed, here:
                raise AssertionError("it was taken in")
    assert failed.value.kind == "mismatch"
