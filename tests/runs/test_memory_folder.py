from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from diloco.config.compose import compose
from diloco.config.errors import ConfigError, ExitCode, VerbError
from diloco.config.run_dir import run_dir_of
from diloco.inner.parallel import SiteGroup
from diloco.runs.memory_folder import check_memory_folder, clear_memory, memory_cleared, memory_folder

if TYPE_CHECKING:
    from diloco.config.schema import RunConfig


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Of a site whose memory is a folder like any other."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr("diloco.runs.memory_folder.MOUNTS", mounts(memory, "tmpfs"))
    own = [f"run.dir={tmp_path / 'runs'}", "run.name=x", f"site.memory_folder={memory}"]
    return compose([*own, "inner.memory_checkpoint_every_steps=5"])


def mounts(folder: Path, kind: str) -> Path:
    """The system's list of mounts, in which what ``folder`` lies on is of this ``kind``."""
    device = folder.stat().st_dev
    lines = [
        "21 20 999:999 / /proc rw,relatime shared:5 - proc proc rw",
        f"25 24 {os.major(device)}:{os.minor(device)} / /somewhere rw,nosuid shared:7 master:1 - {kind} some rw",
    ]
    made = folder.parent / f"mounts-{kind}"
    made.write_text("\n".join(lines) + "\n")
    return made


def there(config: RunConfig) -> list[Path]:
    return sorted(Path(config.site.memory_folder).iterdir())


GROUP = SiteGroup(device="cpu")


def made(config: RunConfig, start: int = 0) -> Path:
    """The site's folder in memory at this start of its ranks."""
    folder = memory_folder(config, GROUP, start)
    assert folder is not None
    return folder


def test_only_a_folder_in_memory_will_do(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Path(config.site.memory_folder)
    for found, words in (
        (mounts(memory, "ext4"), r"site.memory_folder is '.*/memory', on ext4: a folder in memory \(tmpfs\)"),
        (tmp_path / "no such list", "on an unknown file system"),
    ):
        monkeypatch.setattr("diloco.runs.memory_folder.MOUNTS", found)
        with pytest.raises(ConfigError, match=words):
            check_memory_folder(config)
    monkeypatch.setattr("diloco.runs.memory_folder.MOUNTS", mounts(memory, "ramfs"))
    check_memory_folder(config)
    monkeypatch.setattr("os.access", lambda path, mode: (path, mode) != (memory, os.W_OK | os.X_OK))
    with pytest.raises(ConfigError, match=r"site.memory_folder is '.*/memory': this user cannot create folders in it"):
        check_memory_folder(config)
    config.site.memory_folder = str(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"site.memory_folder is '.*/none': no such folder"):
        check_memory_folder(config)
    config.inner.memory_checkpoint_every_steps = 0
    check_memory_folder(config)
    assert memory_folder(config, GROUP, 0) is None


def test_a_site_finds_its_own_again_and_removes_what_is_no_more(config: RunConfig) -> None:
    first = made(config)
    assert first.stat().st_mode & 0o777 == 0o700
    assert first.name.startswith("diloco-x-site-a-")
    assert made(config, 1) == made(config) == first
    other = first.parent / "diloco-x-site-b-of-somebody"
    other.mkdir()
    # Who removes the checkpoints on the disk begins anew, and so does who says that nothing is to be resumed.
    (run_dir_of(config).site("site-a").checkpoints / ".memory").unlink()
    second = made(config)
    assert second != first
    assert there(config) == sorted([other, second])
    config.run.resume = "never"
    assert made(config, 1) == second
    third = made(config)
    assert third not in (first, second)
    assert there(config) == sorted([other, third])


def test_somebody_elses_folder_is_refused(config: RunConfig) -> None:
    mine = made(config)
    mine.chmod(0o755)
    words = r"site.memory_folder: .* not a folder that is this user's alone: '.*diloco-x"
    with pytest.raises(ConfigError, match=words):
        made(config, 1)
    mine.rmdir()
    mine.symlink_to("/")
    with pytest.raises(ConfigError, match=words):
        made(config, 1)


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (VerbError(ExitCode.FAILED, "it has ended"), 0),
        (KeyboardInterrupt(), 0),
        (VerbError(ExitCode.UNREACHABLE, "no syncer"), 1),
        (VerbError(ExitCode.MISMATCH, "another run"), 1),
        (VerbError(ExitCode.USAGE, "data: no text, says a rank"), 1),
        (ConfigError("data: no text"), 1),
    ],
)
def test_nothing_is_left_but_where_a_start_was_refused(config: RunConfig, error: BaseException, left: int) -> None:
    made(config)
    with pytest.raises(type(error)), memory_cleared(config):
        raise error
    assert len(there(config)) == left
    with memory_cleared(config):
        assert len(there(config)) == left
    assert there(config) == []


def test_a_machine_that_has_the_sites_folder_elsewhere_leaves_nothing_either(config: RunConfig, tmp_path: Path) -> None:
    """What lies in memory is called after the folder as the first machine sees it."""
    made(config)
    other = Path(config.site.memory_folder) / "diloco-x-site-a-00000000-of-somebody"
    other.mkdir()
    (tmp_path / "elsewhere").symlink_to(tmp_path / "runs")
    config.run.dir = str(tmp_path / "elsewhere")
    clear_memory(config)
    assert there(config) == [other]


def test_what_a_machine_kept_of_a_life_that_others_did_not_have_is_not_taken_up(
    config: RunConfig, tmp_path: Path
) -> None:
    here = Path(config.site.memory_folder)
    first = made(config)
    # The site goes on from the disk on a machine that has nothing of it, and then where it was before.
    elsewhere = tmp_path / "of-another-machine"
    elsewhere.mkdir()
    config.site.memory_folder = str(elsewhere)
    second = made(config)
    config.site.memory_folder = str(here)
    third = made(config)
    assert len({first.name, second.name, third.name}) == 3
    assert there(config) == [third]
