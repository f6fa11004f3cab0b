"""Kubernetes: a StatefulSet for each syncer and a Job for each site, with their volumes and settings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from diloco.config.errors import ExitCode
from diloco.deploy.docker import SETTINGS, STATE, USER
from diloco.deploy.rendering import RENDEZVOUS_PORT, Process, documents, label, networked, processes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diloco.config.schema import RunConfig

SHOWN = "/run/secrets/diloco"
"""Where the Secret is mounted: its files belong to root, and change when the Secret does."""
OWN = "/run/diloco"
"""Where a pod copies them at its start, for its process alone: a key that others can read is refused."""
ENDED_FOR_GOOD = (int(ExitCode.USAGE), int(ExitCode.MISMATCH))
"""Exit codes that the same command would return again."""
SYNCER_FILES = ("ca.pem", "syncer.pem", "syncer.key", "revoked.json")


def prepared(config: RunConfig) -> list[Process]:
    """Return the processes that pods are made of, with the settings that only pods need."""
    secured = _secured(config) if config.launch.secrets else config
    found = []
    for process in processes(networked(secured, lambda name: _service(config, name))):
        if process.nodes > 1:  # They meet at the pod of machine 0, by the name that the Job gives it.
            rendezvous = f"{process.label}-0.{process.label}:{RENDEZVOUS_PORT}"
            own = replace(process.config, site=replace(process.config.site, rendezvous=rendezvous))
            process = replace(process, config=own)
        found.append(process)
    return found


def files(process: Process) -> dict[str, str]:
    """Return all manifests of one process, in one file, by its name."""
    return {f"{process.name}.yaml": _syncer(process) if process.verb == "syncer" else _site(process)}


def call(process: Process) -> list[str]:
    """Return the command that creates the process's objects."""
    return ["kubectl", "apply", "--filename", f"{process.name}.yaml"]


def _service(config: RunConfig, name: str) -> str:
    return f"{label(f'{config.run.name}-{name}')}.{config.launch.namespace}.svc"


def _secured(config: RunConfig) -> RunConfig:
    """Let both ends show certificates, from the folder into which the Secrets' files are copied."""
    syncer = replace(
        config.cluster.syncer,
        tls_cert=f"{OWN}/syncer.pem",
        tls_key=f"{OWN}/syncer.key",
        tls_ca=f"{OWN}/ca.pem",
        revoked_file=f"{SHOWN}/revoked.json",
        require_client_cert=True,
        insecure_non_loopback=False,
    )
    site = replace(
        config.site,
        tls_cert=f"{OWN}/site.pem",
        tls_key=f"{OWN}/site.key",
        tls_ca=f"{OWN}/ca.pem",
        insecure_non_loopback=False,
    )
    return replace(config, site=site, cluster=replace(config.cluster, syncer=syncer))


def _syncer(process: Process) -> str:
    config, name = process.config, process.label
    port = int(config.cluster.syncer.listen.rpartition(":")[2])
    probe: dict[str, Any] = (
        {"tcpSocket": {"port": port}} if config.cluster.syncer.tls_cert else {"grpc": {"port": port}}
    )
    container = _container(process) | {
        "ports": [{"name": "grpc", "containerPort": port}],
        # A start reads the disk and replays the journal: that may take minutes, and must not be cut short.
        "startupProbe": probe | {"periodSeconds": 5, "failureThreshold": 360},
        "readinessProbe": probe | {"periodSeconds": 5, "timeoutSeconds": 5},
        "livenessProbe": probe | {"periodSeconds": 20, "timeoutSeconds": 10, "failureThreshold": 6},
    }
    chosen = {"matchLabels": _labels(process)}
    service = {"clusterIP": "None", "selector": _labels(process), "ports": [{"name": "grpc", "port": port}]}
    stateful = {
        "serviceName": name,
        "replicas": 1,
        "selector": chosen,
        "template": {"metadata": {"labels": _labels(process)}, "spec": _pod(process, container, "Always")},
        "volumeClaimTemplates": [{"metadata": {"name": "state"}, "spec": _claim(process)}],
    }
    told = [
        _object("v1", "ConfigMap", process, data=process.file()),
        _object("v1", "Service", process, spec=service),
        _object("apps/v1", "StatefulSet", process, spec=stateful),
        _object("policy/v1", "PodDisruptionBudget", process, spec={"minAvailable": 1, "selector": chosen}),
    ]
    lines = [
        _head(process),
        "Delete it when the run has ended: Kubernetes restarts it again and again, to no effect.",
    ]
    if config.cluster.syncer.tls_cert:
        lines.append("Probes check only that the port is open, because the kubelet has no client certificate.")
    return documents(*told, head="\n".join(lines))


def _site(process: Process) -> str:
    container = _container(process)
    if process.gpus:
        vendor = "amd" if process.build == "rocm" else "nvidia"
        container["resources"]["limits"][f"{vendor}.com/gpu"] = process.gpus
    pod = _pod(process, container, "Never")
    pod["volumes"] += [
        {"name": "state", "persistentVolumeClaim": {"claimName": process.label}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    container["volumeMounts"].append({"name": "shared-memory", "mountPath": "/dev/shm"})
    rules: list[dict[str, Any]] = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": list(ENDED_FOR_GOOD)}},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [int(ExitCode.DRAINED)]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    nodes = process.nodes
    told = [
        _object("v1", "ConfigMap", process, data=process.file()),
        _object("v1", "PersistentVolumeClaim", process, spec=_claim(process)),
    ]
    if nodes > 1:
        # The pod of index 0 has a name in this Service, and keeps it when it is started again.
        port = {"name": "rendezvous", "port": RENDEZVOUS_PORT}
        service = {"clusterIP": "None", "selector": _labels(process), "ports": [port], "publishNotReadyAddresses": True}
        told.append(_object("v1", "Service", process, spec=service))
        pod["subdomain"] = process.label
        rank = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
        container["env"] = [{"name": "NODE_RANK", "valueFrom": rank}]
        container["command"] = [*container["command"], "site.node_rank=$(NODE_RANK)"]
        container["ports"] = [{"name": "rendezvous", "containerPort": RENDEZVOUS_PORT}]
    job = {
        "parallelism": nodes,
        "completions": nodes,
        **({"completionMode": "Indexed"} if nodes > 1 else {}),
        "backoffLimit": process.config.launch.restarts * nodes,
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": _labels(process)}, "spec": pod},
    }
    return documents(*told, _object("batch/v1", "Job", process, spec=job), head=_head(process))


def _head(process: Process) -> str:
    lines = [f"{process.what} of run {process.config.run.name}: kubectl apply --filename {process.name}.yaml"]
    if process.nodes > 1:
        lines.append(f"Its {process.nodes} machines share one volume: launch.storage_class must allow ReadWriteMany.")
    if process.config.launch.secrets:
        name, space = process.label, process.config.launch.namespace
        lines.append("Its certificate, from the folder in which `diloco certs` made it:")
        files = [f"--from-file=certs/{file}" for file in SYNCER_FILES]
        if process.verb == "site":
            files = ["--from-file=certs/ca.pem"]
            files += [f"--from-file=site{end}=certs/sites/{process.name}{end}" for end in (".pem", ".key")]
        else:
            lines.append(f"  diloco certs issue certs --syncer --host {_service(process.config, process.name)}")
        lines.append(f"  kubectl --namespace {space} create secret generic {name} {' '.join(files)}")
    return "\n".join(lines)


def _container(process: Process) -> dict[str, Any]:
    resources = {"cpu": str(process.cpus), "memory": f"{process.memory_gib}Gi"}
    mounts: list[dict[str, Any]] = [
        {"name": "settings", "mountPath": SETTINGS, "readOnly": True},
        {"name": "state", "mountPath": STATE},
    ]
    if process.config.launch.secrets:
        mounts += [{"name": "own", "mountPath": OWN}, {"name": "shown", "mountPath": SHOWN, "readOnly": True}]
    return {
        "name": "diloco",
        "image": process.image,
        # Kubernetes pulls an image anew at each start where its tag is "latest", and not where that is "latest-cpu".
        **({"imagePullPolicy": "Always"} if ":latest-" in process.image else {}),
        "command": process.command(f"{SETTINGS}/{process.settings}"),
        "workingDir": STATE,
        "resources": {"requests": dict(resources), "limits": {"memory": resources["memory"]}},
        "securityContext": _narrow(),
        "volumeMounts": mounts,
    }


def _narrow() -> dict[str, Any]:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _pod(process: Process, container: dict[str, Any], again: str) -> dict[str, Any]:
    """Return what the pods of syncers and sites have in common."""
    launch = process.config.launch
    pod: dict[str, Any] = {
        "restartPolicy": again,
        "terminationGracePeriodSeconds": launch.leave_s,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "settings", "configMap": {"name": process.label}}],
    }
    if launch.secrets:
        pod["volumes"] += [
            {"name": "shown", "secret": {"secretName": process.label}},
            {"name": "own", "emptyDir": {"medium": "Memory"}},
        ]
        pod["initContainers"] = [
            {
                "name": "keys",
                "image": process.image,
                "command": ["sh", "-c", f"install -m 0600 {SHOWN}/* {OWN}/"],
                "securityContext": _narrow(),
                "volumeMounts": [
                    {"name": "shown", "mountPath": SHOWN, "readOnly": True},
                    {"name": "own", "mountPath": OWN},
                ],
            }
        ]
    return pod


def _claim(process: Process) -> dict[str, Any]:
    launch = process.config.launch
    claim: dict[str, Any] = {
        "accessModes": ["ReadWriteMany" if process.nodes > 1 else "ReadWriteOnce"],
        "resources": {"requests": {"storage": f"{launch.disk_gib}Gi"}},
    }
    return claim | ({"storageClassName": launch.storage_class} if launch.storage_class else {})


def _labels(process: Process) -> dict[str, str]:
    return {"app.kubernetes.io/name": "diloco", "app.kubernetes.io/instance": process.label}


def _object(version: str, kind: str, process: Process, **body: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {"name": process.label, "namespace": process.config.launch.namespace, "labels": _labels(process)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}
