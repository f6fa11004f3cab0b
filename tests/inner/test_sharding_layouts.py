"""What test_sharding looks at by default, of every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.inner.data import CorpusManifest
from tests.inner.spread_program import CASES, RESUMED
from tests.inner.test_sharding import WORLD, compare_alone, compare_resumed, compare_trained, results_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(manifest: CorpusManifest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return results_of("all", manifest, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", list(CASES))
def test_four_ranks_in_any_layout_are_one_process_on_the_same_text(
    name: str, manifest: CorpusManifest, results: Path
) -> None:
    compare_trained(name, manifest, results)


@pytest.mark.parametrize(("name", "world"), [*((name, WORLD) for name in RESUMED), ("fsdp", 2)])
def test_a_checkpoint_is_gone_on_from_in_any_layout_and_by_fewer_ranks(name: str, world: int, results: Path) -> None:
    compare_resumed(name, world, results)


@pytest.mark.parametrize("name", ["fsdp", "hsdp", "tp+fsdp"])
def test_one_process_goes_on_from_what_four_ranks_wrote(name: str, manifest: CorpusManifest, results: Path) -> None:
    compare_alone(name, manifest, results)
