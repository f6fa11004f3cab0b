from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco.cli.site import check_identity
from diloco.config.compose import read
from diloco.config.errors import ConfigError
from diloco.deploy.docker import STATE, USER
from diloco.deploy.kubernetes import OWN, SETTINGS, SHOWN, call, files, prepared
from tests.deploy.rendered import LABEL, composed, put, read_by, understood

RUN = ["run.name=first", "cluster=one", "cluster.sites.fra.nproc=8"]


def manifests(tmp_path: Path, *settings: str) -> dict[str, list[dict[str, Any]]]:
    """By process, its manifests, which lie in ``tmp_path`` as well."""
    found: dict[str, list[dict[str, Any]]] = {}
    for process in prepared(deepcopy(composed(*RUN, *settings))):
        ((name, text),) = put(tmp_path, files(process)).items()
        assert call(process) == ["kubectl", "apply", "--filename", name]
        found[process.name] = list(yaml.safe_load_all(text))
    return found


def only(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (one,) = [each for each in found if each["kind"] == kind]
    return one


def pod_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any]
    (pod,) = [each["spec"]["template"]["spec"] for each in found if each["kind"] in ("Job", "StatefulSet")]
    return pod


def settings_of(found: list[dict[str, Any]], folder: Path) -> None:
    """Puts the files of a process's ConfigMap into ``folder``."""
    for name, text in only(found, "ConfigMap")["data"].items():
        (folder / name).write_text(text)


def test_each_container_starts_its_process(tmp_path: Path) -> None:
    found = manifests(tmp_path)
    for process in prepared(composed(*RUN)):
        settings_of(found[process.name], tmp_path)
        (container,) = pod_of(found[process.name])["containers"]
        folder, _, name = container["command"][-1].rpartition("/")
        assert folder == SETTINGS
        assert understood([*container["command"][:-1], name], tmp_path) == process.config


VALIDATE = """import sys, kubernetes_validate, yaml
for name in sys.argv[1:]:
    for told in yaml.safe_load_all(open(name)):
        for version in "1.29", "1.37":
            kubernetes_validate.validate(told, version, strict=True)
            print(told["kind"])
"""


def test_the_schemas_of_kubernetes_know_every_field(tmp_path: Path) -> None:
    more = ["cluster.sites.fra.nodes=2", "site.device=cuda", "cluster.sites.osl.accelerator=MI300X"]
    found = manifests(tmp_path, *more, "launch.storage_class=fast")
    kinds = [each["kind"] for every in found.values() for each in every]
    assert sorted(read_by(VALIDATE, tmp_path, [f"{name}.yaml" for name in found]).split()) == sorted(2 * kinds)
    (tmp_path / "wrong.yaml").write_text((tmp_path / "fra.yaml").read_text().replace("backoffLimit", "backofLimit"))
    with pytest.raises(AssertionError, match="'backofLimit' was unexpected"):
        read_by(VALIDATE, tmp_path, ["wrong.yaml"])


def test_the_syncer_keeps_its_disk_and_its_name(tmp_path: Path) -> None:
    found = manifests(tmp_path, "launch.namespace=training", "launch.storage_class=fast", "launch.disk_gib=7")["syncer"]
    assert [each["kind"] for each in found] == ["ConfigMap", "Service", "StatefulSet", "PodDisruptionBudget"]
    assert {each["metadata"]["name"] for each in found} == {"first-syncer"}
    assert {each["metadata"]["namespace"] for each in found} == {"training"}
    service, stateful = only(found, "Service")["spec"], only(found, "StatefulSet")["spec"]
    assert service["clusterIP"] == "None"
    labels = stateful["template"]["metadata"]["labels"]
    assert labels == service["selector"] == stateful["selector"]["matchLabels"]
    assert only(found, "PodDisruptionBudget")["spec"] == {"minAvailable": 1, "selector": {"matchLabels": labels}}
    assert (stateful["serviceName"], stateful["replicas"]) == ("first-syncer", 1)
    (claim,) = stateful["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "state"
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["spec"]["resources"]["requests"]["storage"] == "7Gi"
    (container,) = pod_of(found)["containers"]
    assert {"name": "state", "mountPath": STATE} in container["volumeMounts"]
    assert container["workingDir"] == STATE
    assert container["ports"] == [{"name": "grpc", "containerPort": 7077}]


def test_a_site_is_a_job_that_is_tried_again_where_that_can_be_of_use(tmp_path: Path) -> None:
    found = manifests(tmp_path, "site.device=cuda", "launch.restarts=5")["fra"]
    assert [each["kind"] for each in found] == ["ConfigMap", "PersistentVolumeClaim", "Job"]
    job = found[-1]["spec"]
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (1, 1, 5)
    assert "completionMode" not in job
    decided = {
        code: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {"values": ["DisruptionTarget"]})["values"]
    }
    assert decided == {2: "FailJob", 4: "FailJob", 75: "Ignore", "DisruptionTarget": "Ignore"}
    pod = pod_of(found)
    assert pod["restartPolicy"] == "Never", "a policy of failures needs it"
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert {"name": "state", "persistentVolumeClaim": {"claimName": "first-fra"}} in pod["volumes"]
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]


def test_a_site_of_several_machines_is_an_indexed_job_whose_pods_find_the_first(tmp_path: Path) -> None:
    found = manifests(tmp_path, "cluster.sites.fra.nodes=3", "launch.restarts=5", "site.device=cuda")["fra"]
    job = found[-1]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"], job["backoffLimit"]) == (3, 3, "Indexed", 15)
    service, pod = only(found, "Service"), pod_of(found)
    assert pod["subdomain"] == service["metadata"]["name"] == "first-fra"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= job["template"]["metadata"]["labels"].items()
    assert service["spec"]["publishNotReadyAddresses"], "the machines meet before any of them is ready"
    assert only(found, "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]
    assert "Its 3 machines share one volume: launch.storage_class" in (tmp_path / "fra.yaml").read_text()
    (container,) = pod_of(found)["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8, "of each of them"
    (rank,) = container["env"]
    field = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert rank == {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": field}}}
    *command, setting = container["command"]
    assert setting == "site.node_rank=$(NODE_RANK)"
    settings_of(found, tmp_path)
    for node_rank in range(3):
        config = read(tmp_path / "fra.config.yaml", [setting.replace("$(NODE_RANK)", str(node_rank))])
        check_identity(config)
        assert (config.site.nodes, config.site.rendezvous) == (3, "first-fra-0.first-fra:29500")
    assert command == ["diloco", "site", "--config", f"{SETTINGS}/fra.config.yaml"]
    assert container["ports"] == [{"name": "rendezvous", "containerPort": 29500}]


def test_pods_get_the_accelerators_and_the_image_of_their_vendor(tmp_path: Path) -> None:
    found = manifests(tmp_path, "site.device=cuda", "cluster.sites.fra.accelerator=MI300X")
    got = {}
    for name, each in found.items():
        (container,) = pod_of(each)["containers"]
        got[name] = (container["image"].partition(":")[2], container.get("imagePullPolicy"))
        got[name] += (*sorted(container["resources"]["limits"]),)
    assert got == {
        "syncer": ("latest-cpu", "Always", "memory"),
        "site-a": ("latest", None, "memory", "nvidia.com/gpu"),
        "fra": ("latest-rocm", "Always", "amd.com/gpu", "memory"),
    }
    assert pod_of(found["fra"])["initContainers"][0]["image"] == "diloco:latest-rocm"


def test_secrets_are_named_and_never_written_and_probes_ask_what_the_kubelet_may_ask(tmp_path: Path) -> None:
    for name, found in manifests(tmp_path).items():
        pod = pod_of(found)
        assert {"name": "shown", "secret": {"secretName": f"first-{name}"}} in pod["volumes"]
        (keys,) = pod["initContainers"]
        assert keys["command"] == ["sh", "-c", f"install -m 0600 {SHOWN}/* {OWN}/"]
        text = (tmp_path / f"{name}.yaml").read_text()
        assert f"kubectl --namespace default create secret generic first-{name} --from-file=certs/ca.pem" in text
        assert "PRIVATE KEY" not in text
    config = composed(*RUN)
    syncer, site = prepared(config)[0].config, prepared(config)[1].config
    assert syncer.cluster.syncer.require_client_cert
    assert syncer.cluster.syncer.tls_key == f"{OWN}/syncer.key"
    assert (site.site.tls_key, site.site.tls_ca) == (f"{OWN}/site.key", f"{OWN}/ca.pem")
    assert site.site.syncer == "first-syncer.default.svc:7077"
    assert syncer.cluster.syncer.listen == "0.0.0.0:7077"
    assert config.cluster.syncer.listen == "127.0.0.1:7077", "what was given is left as it was"
    plain = manifests(tmp_path, "launch.secrets=false", "cluster.syncer.insecure_non_loopback=true")
    assert "initContainers" not in pod_of(plain["fra"])
    for found, kind in ((manifests(tmp_path), "tcpSocket"), (plain, "grpc")):
        (container,) = pod_of(found["syncer"])["containers"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe][kind] == {"port": 7077}


def test_every_pod_is_without_privileges_and_every_name_fits(tmp_path: Path) -> None:
    for found in manifests(tmp_path, "launch.leave_s=300").values():
        pod = pod_of(found)
        assert pod["terminationGracePeriodSeconds"] == 300
        context = pod["securityContext"]
        assert (context["runAsNonRoot"], context["runAsUser"], context["fsGroup"]) == (True, USER, USER)
        for container in [*pod["containers"], *pod["initContainers"]]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= {volume["name"] for volume in pod["volumes"]} | {"state"}
        assert pod["automountServiceAccountToken"] is False
        text = yaml.safe_dump([{**each, "data": None} for each in found])
        called = re.findall(r"\b(?:name|claimName|secretName|serviceName|namespace): (.+)", text)
        labelled = [name for name in called if "." not in name]
        assert len(labelled) > 9
        assert all(LABEL.fullmatch(name) for name in labelled), labelled


def test_sites_may_be_told_of_a_syncer_elsewhere_and_of_several(tmp_path: Path) -> None:
    found = prepared(composed(*RUN, "site.syncer=syncer.example.org:443"))
    assert found[1].config.site.syncer == "syncer.example.org:443"
    two = ["outer.num_fragments=4", "outer.num_syncers=2"]
    found = prepared(composed(*RUN, *two))
    assert [each.name for each in found] == ["syncer", "syncer-1", "site-a", "fra"]
    assert found[2].config.site.syncer == "first-syncer.default.svc:7077/first-syncer-1.default.svc:7077"
    assert manifests(tmp_path, *two).keys() == {"syncer", "syncer-1", "site-a", "fra"}
    for setting, words in (
        ("cluster.syncer.listen=127.0.0.1:0", r"cluster\.syncer\.listen is '127\.0\.0\.1:0': give a fixed port"),
        ("launch.secrets=false", r"listen is '0\.0\.0\.0:7077': not a loopback address, and there is no TLS"),
    ):
        with pytest.raises(ConfigError, match=words):
            prepared(composed(*RUN, setting))
