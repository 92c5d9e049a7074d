"""What every overlay must promise, as functions over rendered documents. Each returns the violations it finds."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from compiler_service.config import CompilerSettings
from runtime_service.config import RuntimeSettings

HEADROOM_S = 10
"""Seconds between the end of the drain and the kill: time to say goodbye."""


def workloads(documents: list[dict]) -> Iterator[tuple[str, dict]]:
    for document in documents:
        if document["kind"] in ("Deployment", "StatefulSet"):
            yield document["metadata"]["name"], document


def containers(documents: list[dict]) -> Iterator[tuple[str, dict, dict]]:
    for name, document in workloads(documents):
        pod = document["spec"]["template"]["spec"]
        for container in pod["containers"]:
            yield f"{name}/{container['name']}", pod, container


def probes(documents: list[dict]) -> list[str]:
    return [
        f"{where} has no {probe}"
        for where, _, container in containers(documents)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
        if probe not in container
    ]


def probe_services(documents: list[dict]) -> list[str]:
    """Our services answer liveness and readiness by name; the overall name would hide which one failed."""
    wanted = {"startupProbe": "liveness", "livenessProbe": "liveness", "readinessProbe": "readiness"}
    found = []
    for where, _, container in containers(documents):
        if not where.startswith(("quire-compiler", "quire-runtime")):
            continue
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        for probe, service in wanted.items():
            grpc = container.get(probe, {}).get("grpc", {})
            if (grpc.get("port"), grpc.get("service")) != (ports.get("health"), service):
                found.append(f"{where} {probe} must ask grpc service {service} on the health port, asks {grpc}")
    return found


def security(documents: list[dict]) -> list[str]:
    found = []
    for where, pod, container in containers(documents):
        pod_context, context = pod.get("securityContext", {}), container.get("securityContext", {})
        facts = {
            "runAsNonRoot": pod_context.get("runAsNonRoot") is True,
            "seccompProfile": pod_context.get("seccompProfile", {}).get("type") == "RuntimeDefault",
            "allowPrivilegeEscalation": context.get("allowPrivilegeEscalation") is False,
            "readOnlyRootFilesystem": context.get("readOnlyRootFilesystem") is True,
            "capabilities": context.get("capabilities", {}).get("drop") == ["ALL"],
            "automountServiceAccountToken": pod.get("automountServiceAccountToken") is False,
        }
        found += [f"{where} breaks {fact}" for fact, holds in facts.items() if not holds]
    return found


def resources(documents: list[dict]) -> list[str]:
    found = []
    for where, _, container in containers(documents):
        given = container.get("resources", {})
        for kind, names in {"requests": ("cpu", "memory", "ephemeral-storage"), "limits": ("memory", "ephemeral-storage")}.items():
            found += [f"{where} has no {kind}.{name}" for name in names if name not in given.get(kind, {})]
    return found


def environment(container: dict) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in container.get("env", [])}


def drain_arithmetic(documents: list[dict]) -> list[str]:
    """preStop + drain + headroom <= grace, or streams are cut by SIGKILL (BR-163)."""
    found = []
    for where, pod, container in containers(documents):
        drain = next((float(v) for k, v in environment(container).items() if k.endswith("_DRAIN_S")), None)
        if where.startswith("quire-redis"):
            continue
        pre_stop = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds")
        grace = pod.get("terminationGracePeriodSeconds", 30)
        if drain is None or pre_stop is None:
            found.append(f"{where} needs a preStop sleep and a DRAIN_S")
        elif pre_stop + drain + HEADROOM_S > grace:
            found.append(f"{where}: preStop {pre_stop} + drain {drain} + {HEADROOM_S} > grace {grace}")
    return found


def writable_paths(documents: list[dict]) -> list[str]:
    """With a read-only root, every path the images write must be a mount that is not read-only (BR-171)."""
    found = []
    for where, pod, container in containers(documents):
        wanted = ("/data",) if where.startswith("quire-redis") else ("/data", "/cache", "/tmp")
        mounts = {m["mountPath"]: m for m in container.get("volumeMounts", [])}
        found += [f"{where} has no writable {path}" for path in wanted if path not in mounts or mounts[path].get("readOnly")]
        volumes = {v["name"] for v in pod.get("volumes", [])}
        if not where.startswith("quire-redis"):
            found += [f"{where} mounts {m['name']}, which is no volume" for m in mounts.values() if m["name"] not in volumes]
    return found


def no_surge_on_gpus(documents: list[dict]) -> list[str]:
    """A surged pod could wait for ever for the GPU that the old pod holds (BR-170)."""
    found = []
    for name, document in workloads(documents):
        pod = document["spec"]["template"]["spec"]
        uses_gpu = any("nvidia.com/gpu" in c.get("resources", {}).get("limits", {}) for c in pod["containers"])
        strategy = document["spec"].get("strategy", {})
        surges = strategy.get("type") != "Recreate" and strategy.get("rollingUpdate", {}).get("maxSurge") != 0
        if uses_gpu and surges:
            found.append(f"{name} uses GPUs and may surge")
        if uses_gpu and "affinity" not in pod:
            found.append(f"{name} uses GPUs and says nothing about which")
    return found


def disruption_budgets(documents: list[dict]) -> list[str]:
    covered = {
        d["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"] for d in documents if d["kind"] == "PodDisruptionBudget"
    }
    return [
        f"{name} has no PodDisruptionBudget"
        for name, d in workloads(documents)
        if d["kind"] == "Deployment" and name not in covered
    ]


def network(documents: list[dict]) -> list[str]:
    """Default deny both ways for every pod of ours."""
    deny = [
        d
        for d in documents
        if d["kind"] == "NetworkPolicy"
        and set(d["spec"]["policyTypes"]) == {"Ingress", "Egress"}
        and not d["spec"].get("ingress")
        and not d["spec"].get("egress")
    ]
    if not deny:
        return ["no policy denies by default"]
    selector = deny[0]["spec"]["podSelector"].get("matchLabels", {})
    return [
        f"{name}'s pods escape the default deny"
        for name, d in workloads(documents)
        if not selector.items() <= d["spec"]["template"]["metadata"]["labels"].items()
    ]


def selectors(documents: list[dict]) -> list[str]:
    """Every Service and workload selects pods that exist."""
    pods = [d["spec"]["template"]["metadata"]["labels"] for _, d in workloads(documents)]
    found = []
    for document in documents:
        if document["kind"] == "Service" and not any(document["spec"]["selector"].items() <= p.items() for p in pods):
            found.append(f"Service {document['metadata']['name']} selects nothing")
    for name, document in workloads(documents):
        if not document["spec"]["selector"]["matchLabels"].items() <= document["spec"]["template"]["metadata"]["labels"].items():
            found.append(f"{name} does not select its own pods")
    return found


def encryption(documents: list[dict]) -> list[str]:
    """A pod listens beyond its own loopback only with TLS and tokens, and its Service says so to gateways."""
    found = [
        f"Service {d['metadata']['name']} promises plaintext"
        for d in documents
        if d["kind"] == "Service" and any(port.get("appProtocol") == "kubernetes.io/h2c" for port in d["spec"]["ports"])
    ]
    for where, _, container in containers(documents):
        values = environment(container)
        prefix = next((k.removesuffix("_DRAIN_S") for k in values if k.endswith("_DRAIN_S")), None)
        if prefix is None:
            continue
        if values.get(f"{prefix}_ALLOW_PLAINTEXT") == "true":
            found.append(f"{where} serves plaintext")
        found += [f"{where} has no {prefix}_{n}" for n in ("TLS_CERTIFICATE", "TLS_KEY", "TOKENS") if f"{prefix}_{n}" not in values]
    return found


def settings(documents: list[dict]) -> list[str]:
    """Every variable of ours is a setting its service reads (another would be ignored without a word), with a value it accepts."""
    found = []
    for where, _, container in containers(documents):
        for prefix, model in (("QUIRE_COMPILER_", CompilerSettings), ("QUIRE_RUNTIME_", RuntimeSettings)):
            values = {k.removeprefix(prefix).lower(): v for k, v in environment(container).items() if k.startswith(prefix)}
            unread = sorted(values.keys() - model.model_fields.keys())
            found += [f"{where} sets {prefix}{name.upper()}, which nothing reads" for name in unread]
            try:
                model(**values)
            except ValidationError as error:
                found += [f"{where}: {fault['loc']} {fault['msg']}" for fault in error.errors()]
    return found


def cache_fits(documents: list[dict]) -> list[str]:
    """What is kept of a bucket must not fill the volume it is kept on: the pod would be evicted."""
    found = []
    for where, pod, container in containers(documents):
        values = {k.rpartition("QUIRE_")[2].partition("_")[2]: v for k, v in environment(container).items()}
        if not values.get("STORE", "").startswith("s3://"):
            continue
        data = next(v for v in pod["volumes"] if v["name"] == "data")
        limit = int(data["emptyDir"]["sizeLimit"].removesuffix("Gi")) << 30
        if int(values.get("STORE_CACHE_BYTES", limit)) > 0.75 * limit:
            found.append(f"{where} may keep {values.get('STORE_CACHE_BYTES', 'any number of')} bytes in a volume of {limit}")
    return found


def ephemeral_storage_fits(documents: list[dict]) -> list[str]:
    """A pod's emptyDirs count against its containers' limit of ephemeral storage: one that fills them as it may is not evicted."""
    found = []
    for where, pod, container in containers(documents):
        limit = gibibytes(container.get("resources", {}).get("limits", {}).get("ephemeral-storage", "0Gi"))
        volumes = sum(gibibytes(v["emptyDir"]["sizeLimit"]) for v in pod.get("volumes", []) if "emptyDir" in v)
        if volumes > limit:
            found.append(f"{where} may fill {volumes} GiB of emptyDirs, and is evicted at {limit}")
    return found


def gibibytes(quantity: str) -> float:
    for suffix, share in (("Gi", 1), ("Mi", 1 / 1024)):
        if quantity.endswith(suffix):
            return float(quantity.removesuffix(suffix)) * share
    raise ValueError(f"sizes are written in Gi or Mi; got {quantity}")


def scaling(documents: list[dict]) -> list[str]:
    """What an autoscaler counts is counted by nobody else."""
    targets = {d["spec"]["scaleTargetRef"]["name"] for d in documents if d["kind"] == "HorizontalPodAutoscaler"}
    return [f"{name} says replicas too" for name, d in workloads(documents) if name in targets and "replicas" in d["spec"]]


def availability(documents: list[dict]) -> list[str]:
    """A rollout or an eviction leaves one serving."""
    at_least = {
        d["spec"]["scaleTargetRef"]["name"]: d["spec"]["minReplicas"] for d in documents if d["kind"] == "HorizontalPodAutoscaler"
    }
    return [
        f"{name} may have only one pod"
        for name, d in workloads(documents)
        if d["kind"] == "Deployment" and at_least.get(name, d["spec"].get("replicas", 1)) < 2
    ]


EVERYWHERE = (
    probes,
    probe_services,
    security,
    resources,
    drain_arithmetic,
    writable_paths,
    no_surge_on_gpus,
    disruption_budgets,
    selectors,
    settings,
    cache_fits,
    ephemeral_storage_fits,
    scaling,
)
PRODUCTION = (network, encryption, availability)
