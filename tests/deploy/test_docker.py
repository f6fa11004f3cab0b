from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from diloco.cli.main import main
from diloco.config.errors import ConfigError
from diloco.config.schema import RunConfig
from diloco.deploy import docker, rendering, skypilot
from diloco.deploy.docker import CPU_BASE, CUDA_BASE, STATE, USER
from diloco.deploy.rendering import processes
from tests.deploy.rendered import INDEX, SOURCE, composed, configured, put, understood

KNOWN = frozenset({"FROM", "ARG", "RUN", "COPY", "WORKDIR", "ENV", "USER", "VOLUME", "ENTRYPOINT", "CMD"})
CPU_TORCH, ROCM_TORCH = (f"https://wheels.example.org/whl/{build}" for build in ("cpu", "rocm7.2"))


def named(*settings: str) -> RunConfig:
    return composed("run.name=first", *settings)


def files(config: RunConfig) -> dict[str, str]:
    return docker.prepared(config)[0]


def instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]
    assert {name for name, _ in found} <= KNOWN
    assert all(rest for _, rest in found)
    return found


@pytest.mark.parametrize(
    ("settings", "name", "base", "package", "index"),
    [
        ([], "Dockerfile", CPU_BASE, ".", CPU_TORCH),
        (["site.device=cuda"], "Dockerfile", CUDA_BASE, ".[gpu]", ""),
        (["site.device=cuda"], "Dockerfile.cpu", CPU_BASE, ".", CPU_TORCH),
        (["launch.gpus=8"], "Dockerfile", CUDA_BASE, ".[gpu]", ""),
        (["site.device=cuda", "launch.accelerator=MI300X"], "Dockerfile.rocm", CPU_BASE, ".", ROCM_TORCH),
        (["launch.base=debian:13"], "Dockerfile", "debian:13", ".", CPU_TORCH),
    ],
)
def test_an_image_has_the_torch_of_its_processes_and_runs_them_without_privileges(
    settings: list[str], name: str, base: str, package: str, index: str
) -> None:
    texts = files(named(INDEX, *settings))
    assert f"{name}.dockerignore" in texts
    found = instructions(texts[name])
    assert ("ARG", f"PIP_EXTRA_INDEX_URL={index}" if index else "PIP_EXTRA_INDEX_URL") in found
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
    first, *taken = files(named())["Dockerfile.dockerignore"].split()
    assert first == "*"
    kept = [line.removeprefix("!") for line in taken if line.startswith("!")]
    assert all((SOURCE / name).exists() for name in kept)
    assert {"diloco", "configs", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"} == set(kept)
    mixed = named(INDEX, "launch.image=here/diloco:1", "site.device=cuda", "cluster.sites.site-b.accelerator=MI300X")
    assert docker.prepared(mixed)[1] == [
        ["docker", "build", "--tag", f"here/diloco:1{tag}", "--file", f"Dockerfile{name}", str(SOURCE)]
        for tag, name in (("", ""), ("-cpu", ".cpu"), ("-rocm", ".rocm"))
    ]
    process = processes(configured())[1]
    assert all(str(SOURCE) not in text for text in skypilot.files(process).values()), "another machine has another path"
    call = skypilot.call(process)
    assert call[call.index("--workdir") + 1] == str(SOURCE)


def test_a_wheel_or_a_requirement_needs_no_source_tree(tmp_path: Path) -> None:
    wheel = tmp_path / "diloco-1.2-py3-none-any.whl"
    wheel.write_bytes(b"PK")
    config = named(f"launch.package={wheel}", "site.device=cuda")
    texts = files(config)
    assert installed_by(texts["Dockerfile"]) == "./diloco-1.2-py3-none-any.whl[gpu]"
    assert texts["Dockerfile.dockerignore"].split() == ["*", "!constraints.txt", "!*.whl"]
    assert {call[-1] for call in docker.prepared(config)[1]} == {"."}, "the folder of the files"
    assert main(["launch", "docker", "--dry-run", "--to", str(tmp_path / "to"), f"launch.package={wheel}"]) == 0
    assert (tmp_path / "to" / wheel.name).read_bytes() == b"PK", "beside the Dockerfile"
    assert {"torch", "grpcio"} <= {line.partition("==")[0] for line in texts["constraints.txt"].splitlines()}
    assert "+" not in texts["constraints.txt"], "a build for one kind of machine"
    process = processes(configured(f"launch.package={wheel}"))[1]
    task = yaml.safe_load(skypilot.files(process)[f"{process.name}.sky.yaml"])
    assert "workdir" not in task
    mounts = {f"~/diloco-package/{name}": name for name in (wheel.name, "constraints.txt")}
    assert mounts.items() <= task["file_mounts"].items()
    assert "cd ~/diloco-package\n" in task["setup"]
    assert "--workdir" not in skypilot.call(process)
    for device, installed in (("cpu", "diloco==1.2"), ("cuda", "diloco[gpu]==1.2")):
        texts = files(named("launch.package='diloco==1.2'", f"site.device={device}"))
        assert installed_by(texts["Dockerfile"]) == installed, "the extra of the sites"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["launch.package=/none.whl"], r"launch\.package is '/none\.whl': there is no such file"),
        (["launch.package='x && y'"], r"launch\.package is .*: it has characters that this"),
        (["launch.base='x && y'"], r"launch\.base is"),
        (["site.device=cuda", "launch.accelerator=MI300X"], r"launch\.torch_index is empty: an accelerator .* with MI"),
        (["cluster.syncer.listen=0.0.0.0:443"], r"listen is '0\.0\.0\.0:443': not a loopback address, and there is no"),
        ([], r"launch\.package is null.*give its wheel"),
    ],
)
def test_what_cannot_be_installed_or_reached_is_said(
    settings: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not settings:
        monkeypatch.setattr(rendering, "__file__", str(tmp_path / "site-packages/diloco/deploy/rendering.py"))
    with pytest.raises(ConfigError, match=words):
        files(named(*settings))


# --- The processes of a run on one machine ---------------------------------------------------------------------------


MIXED = [INDEX, "site.device=cuda", "cluster.sites.site-b.accelerator=MI300X", "cluster.sites.site-c.nodes=2"]


def test_a_service_starts_its_process_with_its_settings_and_its_disk(tmp_path: Path) -> None:
    config = named(*MIXED)
    texts = put(tmp_path, docker.prepared(config)[0])
    told = yaml.safe_load(texts["compose.yaml"])
    assert "# Not here, because they are several machines: site-c\n" in texts["compose.yaml"]
    assert list(told["services"]) == ["syncer", "site-a", "site-b"] == list(told["volumes"])
    for name, service in told["services"].items():
        process = understood(["diloco", *service["command"][:-1], Path(service["command"][-1]).name], tmp_path)
        assert process.site.syncer == "syncer:7077", "the name of the service"
        assert service["volumes"] == [f"./{name}.config.yaml:{service['command'][-1]}:ro", f"{name}:{STATE}"]
        assert (service["restart"], service["stop_grace_period"]) == ("on-failure:10", "120s")
        assert "ports" not in service, "only its own network is without TLS"
    assert [service["image"].partition(":")[2] for service in told["services"].values()] == [
        *("latest-cpu", "latest", "latest-rocm")
    ]
    nvidia, amd = told["services"]["site-a"], told["services"]["site-b"]
    assert nvidia["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    ]
    assert amd["devices"] == ["/dev/kfd", "/dev/dri"]
    assert "deploy" not in amd


def test_a_token_goes_over_the_containers_own_network_and_a_syncer_elsewhere_is_not_started_here() -> None:
    texts = files(named("site.token_file=tok", "cluster.syncer.tokens_file=tokens.json"))
    assert texts[".env"] == "COMPOSE_PROJECT_NAME=first\n"
    assert yaml.safe_load(texts["site-a.config.yaml"])["site"]["insecure_non_loopback"] is True
    texts = files(named("site.syncer=syncer.example.org:7077", "site.token_file=tok", "site.tls_ca=system"))
    assert "syncer" not in yaml.safe_load(texts["compose.yaml"])["services"]
    told = yaml.safe_load(texts["site-a.config.yaml"])["site"]
    assert (told["syncer"], told["insecure_non_loopback"]) == ("syncer.example.org:7077", False)
    secured = ["cluster.syncer.tls_cert=certs/syncer.pem", "cluster.syncer.tls_key=certs/syncer.key"]
    secured += ["cluster.syncer.tls_ca=certs/ca.pem", "cluster.syncer.require_client_cert=true"]
    texts = files(named("cluster.syncer.listen=0.0.0.0:443", *secured))
    syncer = yaml.safe_load(texts["compose.yaml"])["services"]["syncer"]
    assert syncer["ports"] == ["443:443"], "processes elsewhere are to reach it"
    assert f"./certs/syncer.key:{STATE}/certs/syncer.key:ro" in syncer["volumes"]


COMPOSE = next(
    (
        words
        for words in (["docker", "compose"], ["docker-compose"])
        if shutil.which(words[0])
        and subprocess.run([*words, "version"], capture_output=True, check=False).returncode == 0
    ),
    [],
)


@pytest.mark.skipif(not COMPOSE, reason="Docker Compose is not installed here (Debian: apt-get install docker-compose)")
def test_the_tool_itself_reads_the_compose_file(tmp_path: Path) -> None:
    texts = put(tmp_path, docker.prepared(named(*MIXED))[0])
    done = subprocess.run([*COMPOSE, "config"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found, written = (yaml.safe_load(text)["services"] for text in (done.stdout, texts["compose.yaml"]))
    assert found.keys() == written.keys()
    for name, service in written.items():
        assert (found[name]["image"], found[name]["command"]) == (service["image"], service["command"])
        assert str(tmp_path / f"{name}.config.yaml") in str(found[name]["volumes"])


# --- What images and machines install --------------------------------------------------------------------------------


def installed_by(dockerfile: str) -> str:
    (line,) = [line for line in dockerfile.splitlines() if "pip install" in line]
    return line.split()[-1].strip('"')
