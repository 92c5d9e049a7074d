"""Every overlay renders, validates strictly and keeps the rules; and each rule notices when its promise is taken away."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.manifests import rules

ROOT = Path(__file__).parents[2]
OVERLAYS = sorted(p.name for p in (ROOT / "deploy/overlays").iterdir())
BIN = Path(sys.executable).parent
WITHOUT_SCHEMA = {"PodMonitor"}  # a custom resource of the Prometheus operator; checked by hand below


@pytest.fixture(scope="session")
def rendered(tmp_path_factory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("overlays")
    for name in OVERLAYS:
        command = [BIN / "kubectl", "kustomize", ROOT / "deploy/overlays" / name]
        (directory / f"{name}.yaml").write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    return {name: directory / f"{name}.yaml" for name in OVERLAYS}


@pytest.fixture(scope="session")
def documents(rendered) -> dict[str, list[dict]]:
    return {name: list(yaml.safe_load_all(path.read_text())) for name, path in rendered.items()}


def test_there_is_a_development_and_a_production_overlay():
    assert OVERLAYS == ["dev", "prod"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_strictly_valid(rendered, documents, overlay):
    run = subprocess.run([BIN / "kubernetes-validate", "--strict", rendered[overlay]], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    passed = (run.stdout + run.stderr).count("passed for resource")
    assert passed == sum(d["kind"] not in WITHOUT_SCHEMA for d in documents[overlay])


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("rule", rules.EVERYWHERE, ids=lambda r: r.__name__)
def test_rules_hold(documents, overlay, rule):
    assert rule(documents[overlay]) == []


@pytest.mark.parametrize("rule", rules.PRODUCTION, ids=lambda r: r.__name__)
def test_production_rules_hold(documents, rule):
    assert rule(documents["prod"]) == []


def test_development_says_that_it_is_plaintext(documents):
    assert any("serves plaintext" in v for v in rules.encryption(documents["dev"]))


def test_the_model_loader_is_valid_and_restricted():
    """It must run in the namespaces of the overlays, whose pods are held to the restricted standard."""
    path = ROOT / "deploy/tools/model_loader.yaml"
    run = subprocess.run([BIN / "kubernetes-validate", "--strict", path], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    pod = yaml.safe_load(path.read_text())
    as_deployment = {"kind": "Deployment", "metadata": pod["metadata"], "spec": {"template": {"spec": pod["spec"]}}}
    assert rules.security([as_deployment]) == []
    assert rules.resources([as_deployment]) == []


def test_monitors_scrape_ports_that_exist(documents):
    monitor = next(d for d in documents["prod"] if d["kind"] == "PodMonitor")
    ports = {p["name"] for _, _, c in rules.containers(documents["prod"]) for p in c["ports"]}
    assert {e["port"] for e in monitor["spec"]["podMetricsEndpoints"]} <= ports


def pod_of(name: str) -> Callable[[list[dict]], dict]:
    return lambda documents: dict(rules.workloads(documents))[name]["spec"]["template"]["spec"]


def container_of(name: str) -> Callable[[list[dict]], dict]:
    return lambda documents: pod_of(name)(documents)["containers"][0]


def removing(find: Callable[[list[dict]], dict], *path: str) -> Callable[[list[dict]], None]:
    def mutate(documents: list[dict]) -> None:
        target = find(documents)
        for key in path[:-1]:
            target = target[key]
        del target[path[-1]]

    return mutate


def setting(find: Callable[[list[dict]], dict], key: str, value: object) -> Callable[[list[dict]], None]:
    return lambda documents: find(documents).__setitem__(key, value)


def without_kind(kind: str) -> Callable[[list[dict]], None]:
    def mutate(documents: list[dict]) -> None:
        documents[:] = [d for d in documents if d["kind"] != kind]

    return mutate


def with_environment(name: str, variable: str, value: str) -> Callable[[list[dict]], None]:
    def mutate(documents: list[dict]) -> None:
        for entry in container_of(name)(documents)["env"]:
            if entry["name"] == variable:
                entry["value"] = value

    return mutate


def without_environment(name: str, variable: str) -> Callable[[list[dict]], None]:
    def mutate(documents: list[dict]) -> None:
        container = container_of(name)(documents)
        container["env"] = [e for e in container["env"] if e["name"] != variable]

    return mutate


RUNTIME, COMPILER = "quire-runtime", "quire-compiler"
MUTATIONS = {
    **{
        f"{name} without {probe}": (rules.probes, removing(container_of(name), probe))
        for name in (RUNTIME, COMPILER, "quire-redis")
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    },
    "liveness that asks readiness": (
        rules.probe_services,
        lambda d: container_of(RUNTIME)(d)["livenessProbe"]["grpc"].update(service="readiness"),
    ),
    "probe on the TLS port": (
        rules.probe_services,
        lambda d: container_of(RUNTIME)(d)["readinessProbe"]["grpc"].update(port=50062),
    ),
    **{
        f"container without {field}": (rules.security, removing(container_of(RUNTIME), "securityContext", field))
        for field in ("allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities")
    },
    **{
        f"pod without {field}": (rules.security, removing(pod_of(COMPILER), "securityContext", field))
        for field in ("runAsNonRoot", "seccompProfile")
    },
    "pod with a service account token": (rules.security, setting(pod_of(RUNTIME), "automountServiceAccountToken", True)),
    "no memory limit": (rules.resources, removing(container_of(RUNTIME), "resources", "limits", "memory")),
    "no requests": (rules.resources, removing(container_of(COMPILER), "resources", "requests")),
    "short grace": (rules.drain_arithmetic, setting(pod_of(RUNTIME), "terminationGracePeriodSeconds", 130)),
    "default grace": (rules.drain_arithmetic, removing(pod_of(COMPILER), "terminationGracePeriodSeconds")),
    "long drain": (rules.drain_arithmetic, with_environment(RUNTIME, "QUIRE_RUNTIME_DRAIN_S", "170")),
    "no drain": (rules.drain_arithmetic, without_environment(RUNTIME, "QUIRE_RUNTIME_DRAIN_S")),
    "no preStop": (rules.drain_arithmetic, removing(container_of(RUNTIME), "lifecycle")),
    "no writable cache": (
        rules.writable_paths,
        lambda d: container_of(RUNTIME)(d).update(
            volumeMounts=[m for m in container_of(RUNTIME)(d)["volumeMounts"] if m["mountPath"] != "/cache"]
        ),
    ),
    "a mount without a volume": (
        rules.writable_paths,
        lambda d: pod_of(RUNTIME)(d).update(volumes=[v for v in pod_of(RUNTIME)(d)["volumes"] if v["name"] != "tmp"]),
    ),
    "GPU pods that surge": (
        rules.no_surge_on_gpus,
        lambda d: dict(rules.workloads(d))[RUNTIME]["spec"]["strategy"]["rollingUpdate"].update(maxSurge=1),
    ),
    "GPU pods without affinity": (rules.no_surge_on_gpus, removing(pod_of(RUNTIME), "affinity")),
    "no disruption budget": (rules.disruption_budgets, without_kind("PodDisruptionBudget")),
    "no network policies": (rules.network, without_kind("NetworkPolicy")),
    "pods outside the deny": (
        rules.network,
        lambda d: dict(rules.workloads(d))[RUNTIME]["spec"]["template"]["metadata"]["labels"].pop("app.kubernetes.io/part-of"),
    ),
    "a service that selects nothing": (
        rules.selectors,
        lambda d: next(s for s in d if s["kind"] == "Service")["spec"]["selector"].update({"app.kubernetes.io/name": "other"}),
    ),
    "a value no service accepts": (
        rules.settings,
        with_environment(COMPILER, "QUIRE_COMPILER_REDIS_URL", "quire-redis:6379"),
    ),
    "a cache of any size": (rules.cache_fits, without_environment(RUNTIME, "QUIRE_RUNTIME_STORE_CACHE_BYTES")),
    "a cache as large as its volume": (
        rules.cache_fits,
        with_environment(COMPILER, "QUIRE_COMPILER_STORE_CACHE_BYTES", str(50 << 30)),
    ),
    "volumes beyond the pod's limit": (
        rules.ephemeral_storage_fits,
        lambda d: container_of(RUNTIME)(d)["resources"]["limits"].update({"ephemeral-storage": "16Gi"}),
    ),
    "replicas beside an autoscaler": (rules.scaling, lambda d: dict(rules.workloads(d))[RUNTIME]["spec"].update(replicas=1)),
    "one compiler": (rules.availability, lambda d: dict(rules.workloads(d))[COMPILER]["spec"].update(replicas=1)),
    "one runtime at times": (
        rules.availability,
        lambda d: next(h for h in d if h["kind"] == "HorizontalPodAutoscaler")["spec"].update(minReplicas=1),
    ),
    "a service that promises plaintext": (
        rules.encryption,
        lambda d: next(s for s in d if s["kind"] == "Service")["spec"]["ports"][0].update(appProtocol="kubernetes.io/h2c"),
    ),
    "plaintext": (rules.encryption, without_environment(RUNTIME, "QUIRE_RUNTIME_TLS_CERTIFICATE")),
    "a variable that is misspelt": (
        rules.settings,
        lambda d: container_of(RUNTIME)(d)["env"].append({"name": "QUIRE_RUNTIME_METRIC_ADDRESS", "value": "0.0.0.0:1"}),
    ),
    "no tokens": (rules.encryption, without_environment(COMPILER, "QUIRE_COMPILER_TOKENS")),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_rule_notices(documents, name):
    rule, mutate = MUTATIONS[name]
    mutated = copy.deepcopy(documents["prod"])
    mutate(mutated)
    assert rule(mutated) != []
