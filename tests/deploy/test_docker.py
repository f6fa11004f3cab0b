from __future__ import annotations

import json
import shlex

import pytest

from diloco.config.errors import ConfigError
from diloco.deploy.docker import CPU_BASE, CUDA_BASE, USER, call, files
from tests.deploy.rendered import SOURCE, composed

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
