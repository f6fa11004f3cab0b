from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from diloco.cli.main import main
from diloco.config.errors import ConfigError
from diloco.deploy import docker, rendering, skypilot
from diloco.deploy.docker import CPU_BASE, CUDA_BASE, USER, call, files
from diloco.deploy.rendering import processes
from tests.deploy.rendered import SOURCE, composed, configured

KNOWN = frozenset({"FROM", "ARG", "RUN", "COPY", "WORKDIR", "ENV", "USER", "VOLUME", "ENTRYPOINT", "CMD"})


def instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]
    assert {name for name, _ in found} <= KNOWN
    assert all(rest for _, rest in found)
    return found


@pytest.mark.parametrize(
    ("settings", "base", "package"),
    [
        ([], CPU_BASE, "."),
        (["site.device=cuda"], CUDA_BASE, ".[gpu]"),
        (["launch.gpus=8"], CUDA_BASE, ".[gpu]"),
        (["launch.base=debian:13"], "debian:13", "."),
    ],
)
def test_the_image_runs_the_program_as_nobody(settings: list[str], base: str, package: str) -> None:
    dockerfile, left_out = files(composed(*settings))
    assert (dockerfile.name, left_out.name) == ("Dockerfile", "Dockerfile.dockerignore")
    found = instructions(dockerfile.text)
    assert [rest.partition(" ")[0] for name, rest in found if name == "FROM"] == [base, base]
    last_stage = found[max(index for index, (name, _) in enumerate(found) if name == "FROM") :]
    kept = dict(last_stage)
    assert json.loads(kept["ENTRYPOINT"]) == ["diloco"]
    assert kept["USER"] == f"{USER}:{USER}"
    assert kept["WORKDIR"] == kept["VOLUME"]
    order = [name for name, _ in last_stage]
    assert order.index("USER") > max(index for index, name in enumerate(order) if name == "RUN"), "nothing needs root"
    (installed,) = [rest for name, rest in found if "pip install" in rest]
    words = shlex.split(installed)
    assert words[words.index("--constraint") + 1] == "constraints.txt"
    assert words[-1] == package


def test_the_tool_is_called_with_the_source_and_nothing_else_goes_in() -> None:
    _, left_out = files(composed())
    first, *taken = left_out.text.split()
    assert first == "*"
    named = [line.removeprefix("!") for line in taken if line.startswith("!")]
    assert all((SOURCE / name).exists() for name in named)
    assert {"diloco", "configs", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"} == set(named)
    words = call(composed("launch.image=here/diloco:1"))
    assert words[:5] == ["docker", "build", "--tag", "here/diloco:1", "--file"]
    assert words[-1] == str(SOURCE)
    with pytest.raises(ConfigError, match=r"launch\.base is"):
        files(composed("launch.base='x && y'"))


# --- What images and machines install --------------------------------------------------------------------------------


@pytest.fixture
def wheel(tmp_path: Path) -> str:
    path = tmp_path / "diloco-1.2-py3-none-any.whl"
    path.write_bytes(b"PK")
    return str(path)


def installed_by(dockerfile: str) -> str:
    (line,) = [line for line in dockerfile.splitlines() if "pip install" in line]
    return line.split()[-1].strip('"')


def test_an_image_of_a_wheel_needs_no_source_tree(wheel: str, tmp_path: Path) -> None:
    config = composed(f"launch.package={wheel}", "site.device=cuda")
    dockerfile, left_out, constraints = docker.files(config)
    assert installed_by(dockerfile.text) == "./diloco-1.2-py3-none-any.whl[gpu]"
    assert left_out.text.split() == ["*", "!constraints.txt", "!*.whl"]
    assert docker.call(config)[-1] == ".", "the folder of the files"
    assert main(["launch", "docker", "--dry-run", "--to", str(tmp_path / "to"), f"launch.package={wheel}"]) == 0
    assert (tmp_path / "to" / Path(wheel).name).read_bytes() == Path(wheel).read_bytes(), "beside the Dockerfile"
    assert {"torch", "grpcio"} <= {line.partition("==")[0] for line in constraints.text.splitlines()}
    assert "+" not in constraints.text, "a build for one kind of machine"


def test_a_machine_gets_the_wheel_beside_its_settings(wheel: str) -> None:
    process = processes(configured(f"launch.package={wheel}"))[1]
    task = yaml.safe_load(skypilot.files(process)[1].text)
    assert "workdir" not in task
    assert task["file_mounts"]["~/diloco-package/diloco-1.2-py3-none-any.whl"] == "diloco-1.2-py3-none-any.whl"
    assert task["file_mounts"]["~/diloco-package/constraints.txt"] == "constraints.txt"
    assert "cd ~/diloco-package\n" in task["setup"]
    assert "--workdir" not in skypilot.call(process)


def test_the_source_tree_is_named_in_the_call_alone() -> None:
    process = processes(configured())[1]
    assert all(str(SOURCE) not in file.text for file in skypilot.files(process)), "another machine has another path"
    call = skypilot.call(process)
    assert call[call.index("--workdir") + 1] == str(SOURCE)
    assert docker.call(composed())[-1] == str(SOURCE)


@pytest.mark.parametrize(
    ("package", "device", "pip"),
    [("diloco==1.2", "cpu", "diloco==1.2"), ("diloco==1.2", "cuda", "diloco[gpu]==1.2")],
)
def test_a_requirement_gets_the_extra_of_the_sites(package: str, device: str, pip: str) -> None:
    dockerfile = docker.files(composed(f"launch.package='{package}'", f"site.device={device}"))[0]
    assert installed_by(dockerfile.text) == pip


def test_what_cannot_be_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"launch\.package is '/none\.whl': there is no such file"):
        docker.files(composed("launch.package=/none.whl"))
    with pytest.raises(ConfigError, match=r"launch\.package is .*: it has characters that this"):
        docker.files(composed("launch.package='x && y'"))
    monkeypatch.setattr(rendering, "__file__", str(tmp_path / "site-packages/diloco/deploy/rendering.py"))
    with pytest.raises(ConfigError, match=r"launch\.package is null.*give its wheel"):
        docker.files(composed())
