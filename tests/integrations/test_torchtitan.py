"""torchtitan's Trainer as a site.  What is slow here, or a hunt, runs torchtitan itself, in an environment of its own.

It needs no GPU.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

import diloco.titan
from diloco.config.schema import SiteSection
from diloco.integrations.join import OTHERWISE
from diloco.integrations.torchtitan import RANK_0, Kept, Site, check_waits, site_of, tokens_per_step
from diloco.syncer.snapshots import full_parameters
from tests.integrations.serving import PATIENT, balanced, serving_file
from tests.runs.processes import ROOT

OWN = {"syncer", "site", "run", "folder", "version0"}
TOKENS = 64
"""Of a step: four sequences of sixteen."""
BOUND_S = 300.0


class Trained:
    """What a trainer of torchtitan's looks like from outside."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        steps: int = 3
        _owner: ClassVar[Any] = None

    def __init__(self, config: Config) -> None:
        self.config = config

    def should_continue_training(self) -> bool:
        return True


Trained.Config._owner = Trained


def test_a_config_keeps_what_it_says_and_has_a_section_of_ours() -> None:
    made = site_of(Trained.Config(steps=7))
    assert (made.steps, made.diloco) == (7, Site())
    assert isinstance(made, Trained.Config)
    with pytest.raises(ValueError, match="config is 7: the Config of a torchtitan Trainer"):
        site_of(7)


def test_the_section_has_the_settings_of_a_site_and_their_defaults() -> None:
    usual = {each.name: each.default for each in dataclasses.fields(SiteSection)}
    ours = {name: value for name, value in asdict(Site()).items() if name not in OWN}
    assert ours == {name: usual[name] for name in ours}
    trains = {"parallel", "tensor_ranks", "shard_ranks", "rank_restarts", "peak_tflops", "memory_folder"}
    assert ours.keys() == usual.keys() - OTHERWISE - trains, "torchtitan has its own of those, or none"


def test_a_step_is_worth_what_all_ranks_read() -> None:
    dims = SimpleNamespace(dp_replicate=2, dp_shard=4)
    training = SimpleNamespace(global_batch_size=-1, local_batch_size=3, seq_len=10)
    assert tokens_per_step(training, dims) == 2 * 4 * 3 * 10
    training.global_batch_size = 48
    assert tokens_per_step(training, dims) == 480


def test_no_rank_is_kept_waiting_longer_than_torchtitan_has_it_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = SimpleNamespace(init_timeout_seconds=300, train_timeout_seconds=100)
    check_waits(Site(finish_timeout_s=100.0), comm)  # One process waits for no other.
    monkeypatch.setattr("diloco.integrations.torchtitan.PresentGroup", lambda: SimpleNamespace(world=2))
    check_waits(Site(), comm)
    with pytest.raises(
        ValueError, match=r"^diloco\.finish_timeout_s is 100.0: less than comm.train_timeout_seconds=100,"
    ):
        check_waits(Site(finish_timeout_s=100.0), comm)
    with pytest.raises(ValueError, match=r"^diloco\.join_timeout_s is 301.0: less than comm.init_timeout_seconds=300,"):
        check_waits(Site(join_timeout_s=301.0), comm)


def test_rank_0_alone_keeps_the_sites_state() -> None:
    taken: list[Any] = []
    state = {"tensors": {"base": torch.ones(3)}, "steps": 5}
    outer: Any = SimpleNamespace(state_dict=lambda: state, load_state_dict=taken.append)
    assert Kept(outer, False).state_dict() == {}
    Kept(outer, False).load_state_dict({})
    written = Kept(outer, True).state_dict()
    assert torch.load(io.BytesIO(written[RANK_0]), weights_only=True)["steps"] == 5
    Kept(outer, True).load_state_dict(written)
    assert taken[0]["tensors"]["base"].tolist() == [1, 1, 1]


def test_a_config_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there.py").write_text(
        "from tests.integrations.test_torchtitan import Trained\nmine = Trained.Config\n"
    )
    (tmp_path / "wanting.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    there = ModuleType("torchtitan")
    there.__spec__, there.__path__ = ModuleSpec("torchtitan", None, is_package=True), []
    monkeypatch.setitem(sys.modules, "torchtitan", there)
    assert getattr(diloco.titan, "there.mine")().steps == 3
    assert diloco.titan.Site is Site
    with pytest.raises(AttributeError, match=r"has no attribute 'llama3_8b': a config is MODULE\.CONFIG"):
        _ = diloco.titan.llama3_8b
    with pytest.raises(AttributeError, match="there is no module nowhere: one that torchtitan's --module takes"):
        getattr(diloco.titan, "nowhere.mine")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        getattr(diloco.titan, "wanting.mine")
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(ImportError, match=r"needs torchtitan: pip install 'diloco\[titan\]'"):
        getattr(diloco.titan, "llama3.llama3_8b")


# --- torchtitan itself ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Titan:
    """torchtitan's environment, and the first version of its model."""

    python: Path
    version0: Path

    def job(self, folder: Path, ranks: int, *arguments: str, fails_at: int = 1 << 30) -> tuple[int, str]:
        """A job of so many ranks from start to end: its exit code and what it said."""
        config = ["--module", "diloco.titan", "--config", "tests.integrations.titan_on_cpu.small"]
        program = ["-m", "tests.integrations.titan_on_cpu", str(folder), *config, *arguments]
        torchrun = [str(self.python), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TITAN_FAILS_AT": str(fails_at)}
        said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "timeout": BOUND_S}
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | own
        done = subprocess.run([*torchrun, *program], cwd=folder, env=environment, text=True, **said)  # type: ignore[call-overload]
        return done.returncode, done.stdout


@pytest.fixture(scope="module")
def titan(tmp_path_factory: pytest.TempPathFactory) -> Titan:
    there = ".venv-peers/torchtitan"
    made = ["make", f"{there}/.ready", f"PYTHON={sys.executable}"]
    subprocess.run(made, cwd=ROOT, check=True, timeout=BOUND_S, capture_output=True)
    folder = tmp_path_factory.mktemp("version0")
    titan = Titan(ROOT / there / "bin/python", folder / "v0.safetensors")
    code, said = titan.job(folder, 1, "--diloco.version0", str(titan.version0))
    assert code == 0, said
    assert f"diloco: version 0 is in {titan.version0}: diloco syncer model.kind=file" in said
    return titan


@pytest.fixture
def address(titan: Titan, tmp_path: Path) -> Iterator[str]:
    with serving_file(tmp_path, titan.version0, "run.tokens=2000", PATIENT) as served:
        yield served.address


def told(folder: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"rank-{rank}.json").read_text())
    return found


@pytest.mark.hunt
def test_a_job_that_fails_leaves_with_a_word_and_goes_on_from_its_checkpoint(
    titan: Titan, address: str, tmp_path: Path
) -> None:
    site = ["--diloco.syncer", address, "--diloco.site", "fra", "--checkpoint.enable", "--checkpoint.interval", "4"]
    code, said = titan.job(tmp_path, 1, *site, fails_at=13)
    assert code != 0
    assert "the text's disk is gone" in said
    assert "diloco: site fra left run mine while it trained, its tokens: " in said
    code, said = titan.job(tmp_path, 1, *site)
    assert code == 0, said
    found = told(tmp_path)
    assert found["why"] == "the run is finished"
    assert found["step"] == found["steps"] >= 2000 // TOKENS, "torchtitan's steps and the site's, over both jobs"
    assert balanced(found["ledger"])
    assert found["ledger"]["merged"] >= 2000
    assert found["lr"] == {"lr/AdamW": 0.003}


@pytest.mark.hunt
@pytest.mark.parametrize(
    "degree",
    [
        pytest.param("data_parallel_shard_degree", id="fsdp"),
        pytest.param("tensor_parallel_degree", id="tp"),
    ],
)
def test_ranks_hold_the_model_as_torchtitan_cuts_it(titan: Titan, address: str, tmp_path: Path, degree: str) -> None:
    cut = [f"--parallelism.{degree}", "2", "--parallelism.spmd_backend", "partial_dtensor"]
    code, said = titan.job(tmp_path, 2, "--diloco.syncer", address, "--diloco.site", "fra", *cut)
    assert code == 0, said
    first, second = told(tmp_path, 0), told(tmp_path, 1)
    assert first["sums"] == second["sums"], "every rank has its part of the same version"
    assert sorted(first["sums"]) == sorted(load_file(titan.version0))
    assert first["steps"] == second["steps"] == first["step"]
    ledger = first["ledger"]
    worth = TOKENS * (2 if degree.startswith("data") else 1)
    assert ledger["processed"] == ledger["merged"] == worth * first["steps"] >= 2000


@pytest.mark.hunt
def test_two_pipelines_make_the_outer_steps_of_two_processes(titan: Titan, tmp_path: Path) -> None:
    """Twenty of them, in lock-step; a process reads the sequences one by one, as the stages get them.

    The rates rise slowly: at a high one Adam makes a difference of 1e-8 in the first steps one of 1 % after fifty.
    """
    one_by_one = ["--training.local_batch_size", "1", "--training.global_batch_size", "4"]
    slowly = ["--lr_scheduler.warmup_steps", "400"]
    losses: dict[str, list[list[float]]] = {}
    for kind, ranks in (("pipelines", 2), ("processes", 1)):
        cut = ["--parallelism.pipeline_parallel_degree", "2"] if ranks == 2 else one_by_one
        rules = ("outer=diloco", "outer.quorum=2", "outer.inner_steps=5", f"run.tokens={20 * 5 * 2 * TOKENS}", PATIENT)
        with serving_file(tmp_path / kind, titan.version0, *rules) as served, ThreadPoolExecutor() as both:
            jobs = []
            for index, site in enumerate(("fra", "iad")):
                own = ["--diloco.site", site, "--dataloader.index", str(index), "--dataloader.num_sites", "2"]
                (folder := tmp_path / kind / site).mkdir()
                jobs.append(
                    both.submit(titan.job, folder, ranks, "--diloco.syncer", served.address, *own, *cut, *slowly)
                )
            for job in jobs:
                code, said = job.result()
                assert code == 0, said
            holdings = served.syncer.holdings.values
            final = full_parameters(served.syncer.plan.layout, [each.published for each in holdings])
        assert [each.version for each in holdings] == [20] * len(holdings)
        held = {name: float(each.double().square().sum()) for name, each in final.items()}
        losses[kind] = []
        for site in ("fra", "iad"):
            stages = [told(tmp_path / kind / site, rank) for rank in range(ranks)]
            sums = [each["sums"] for each in stages]
            assert {name: each for stage in sums for name, each in stage.items()} == pytest.approx(held, rel=1e-4)
            assert sum(map(len, sums)) == len(held), "no stage holds what another one does"
            losses[kind].append(stages[-1]["losses"])
    for piped, whole in zip(losses["pipelines"], losses["processes"], strict=True):
        assert len(piped) >= 100
        assert piped[:100] == pytest.approx(whole[:100], rel=0.01)
        assert sum(piped[80:100]) < 0.8 * sum(piped[:20]), "they learn"
