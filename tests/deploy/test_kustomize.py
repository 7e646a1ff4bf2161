"""The Kubernetes manifests are valid and match the code, Compose and the alerts."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine_worker import remote_follower
from engine_worker.settings import WorkerSettings
from gateway.auth.access import OPEN_ROUTES
from gateway.batches.driver.settings import DriverSettings
from gateway.settings import GatewaySettings
from shared.redis_keys import RedisKeys
from shared.settings import load_settings, options
from tests.deploy.kustomizations import KUSTOMIZE, kustomized, with_components

ROOT = Path(__file__).parents[2]
Objects = list[dict[str, Any]]
OVERLAYS = ("cpu", "gpu", "files", "keda", "monitoring", "tensor-parallel", "leader-worker-set")
COMBINATIONS = (
    "gpu keda", "gpu monitoring", "gpu tensor-parallel keda", "gpu tensor-parallel monitoring", "keda monitoring",
    "files gpu keda monitoring", "files gpu model-hub redis-auth", "redis-auth keda", "gpu gateway-hpa ingress",
    "gpu httproute", "files gpu model-hub keda monitoring", "files gpu model-hub keda monitoring redis-auth",
    "files gpu model-hub keda monitoring gateway-hpa ingress redis-auth", "files gpu kernel-cache redis-external",
    "gpu keda scale-from-zero", "files gpu keda monitoring redis-ha",
)  # fmt: skip
PROGRAMS = ("base/gateway.yaml", "base/engine-worker.yaml", "base/redis.yaml", "components/files/batches.yaml")
NAME = "app.kubernetes.io/name"  # pod label
# Kubernetes has no schema of these kinds. The Node package of LeaderWorkerSet does not exist.
TYPED_KINDS = {"ScaledObject", "PodMonitor", "PrometheusRule", "HTTPRoute"}
CUSTOM_KINDS = TYPED_KINDS | {"LeaderWorkerSet"}
NODE_PACKAGES = Path(sys.prefix) / "clients"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Objects]:
    """Return the objects of each overlay and combination."""
    overlays = {name: kustomized(KUSTOMIZE / "overlays" / name) for name in OVERLAYS}
    combined = {names: with_components(tmp_path_factory.mktemp("built"), *names.split()) for names in COMBINATIONS}
    return overlays | combined


@pytest.fixture(params=(*OVERLAYS, *COMBINATIONS))
def objects(request: pytest.FixtureRequest, built: dict[str, Objects]) -> Objects:
    return built[request.param]


def test_kubernetes_objects_are_valid(built: dict[str, Objects], tmp_path: Path) -> None:
    found = distinct(built)
    known = [item for item in found if item["kind"] not in CUSTOM_KINDS]
    known += [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": f"template-{number}"}, "template": template}
        for number, template in enumerate(templates_of_groups(found))
    ]
    (tmp_path / "built.yaml").write_text(yaml.safe_dump_all(known))
    validate = str(Path(sys.executable).with_name("kubernetes-validate"))
    done = subprocess.run([validate, "--strict", tmp_path / "built.yaml"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("passed") + done.stdout.count("passed") == len(known)


def test_custom_objects_are_valid(built: dict[str, Objects]) -> None:
    assert problems_of([item for item in distinct(built) if item["kind"] in TYPED_KINDS]) == []


def distinct(built: dict[str, Objects]) -> Objects:
    """Return the objects of all overlays once: most overlays have the same ones."""
    return [json.loads(text) for text in sorted({json.dumps(item) for objects in built.values() for item in objects})]


def test_misspelled_and_missing_fields_of_custom_objects_are_found() -> None:
    (scaled,) = documents("components/keda/scaled-object.yaml")
    scaled["spec"]["minReplicaCuont"] = 1
    del scaled["spec"]["triggers"]
    unknown, missing = problems_of([scaled])
    assert "minReplicaCuont" in unknown and "triggers" in missing


def problems_of(objects: Objects) -> list[str]:
    """Return what is wrong with objects of TYPED_KINDS."""
    node = shutil.which("node")
    if node is None or not (NODE_PACKAGES / "node_modules").exists():
        pytest.skip("Node is not installed")
    command = [node, str(Path(__file__).with_name("custom_objects.mjs")), str(NODE_PACKAGES)]
    done = subprocess.run(command, input=json.dumps(objects), capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def test_kustomize_references_resolve(objects: Objects) -> None:
    config_maps = {item["metadata"]["name"] for item in objects if item["kind"] == "ConfigMap"}
    for container in containers(objects):
        assert {source["configMapRef"]["name"] for source in container.get("envFrom", [])} <= config_maps
    for item in objects:
        if item["kind"] == "ScaledObject":
            targets = {other["metadata"]["name"] for other in objects if other["kind"] == "Deployment"}
            assert item["spec"]["scaleTargetRef"]["name"] in targets


def test_updates_and_drains_stop_one_worker_at_a_time(objects: Objects) -> None:
    budgets = {
        item["spec"]["selector"]["matchLabels"][NAME]: item["spec"]
        for item in objects
        if item["kind"] == "PodDisruptionBudget"
    }
    assert budgets["pagestream-engine-worker"]["maxUnavailable"] == 1
    for item in objects:
        if item["kind"] == "LeaderWorkerSet":
            assert budgets["pagestream-follower"]["maxUnavailable"] == 1
            update = item["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
            assert (item["spec"]["replicas"], update) == (2, {"maxUnavailable": 1, "maxSurge": 0})
        elif item["metadata"]["name"] == "pagestream-engine-worker" and "nvidia.com/gpu" in str(item):
            # A surge would need more GPUs than the pool has.
            assert item["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_component_files_gives_gateway_and_driver_one_volume(tmp_path: Path, overlay: str) -> None:
    objects = with_components(tmp_path, "files", *(["gpu"] if overlay == "gpu" else []))
    (claim,) = [item for item in objects if item["kind"] == "PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    pods = {
        item["metadata"]["name"]: item["spec"]["template"]["spec"] for item in objects if item["kind"] == "Deployment"
    }
    shared = []
    for name in ("pagestream-gateway", "pagestream-batches"):
        (container,) = pods[name]["containers"]
        env = {entry["name"]: entry.get("value") for entry in container["env"]}
        claims = sorted(
            volume["persistentVolumeClaim"]["claimName"]
            for volume in pods[name]["volumes"]
            if "persistentVolumeClaim" in volume
        )
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        shared.append((env["PAGESTREAM_FILES_DIR"], claims, mounts, container["image"], pods[name]["securityContext"]))
    assert shared[0] == shared[1]
    assert "pagestream-files" in shared[0][1]


def test_group_has_one_gpu_per_rank(objects: Objects) -> None:
    for container in containers(objects):
        env = {entry["name"]: entry.get("value") for entry in container.get("env", [])}
        gpus = container["resources"]["limits"].get("nvidia.com/gpu")
        assert gpus is None or int(env.get("PAGESTREAM_TENSOR_PARALLEL_SIZE", 1)) == gpus


def test_multi_host_ranks_use_the_leader_address() -> None:
    objects = documents("overlays/leader-worker-set/groups.yaml")
    assert objects[0]["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    leader, follower = containers(objects)
    env_values = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "g-0.g.ns", "LWS_WORKER_INDEX": "1"}
    arguments = {}
    for container in (leader, follower):
        assert container["command"][:2] == ["python", "-m"]
        filled = [
            re.sub(r"\$\((\w+)\)", lambda found: env_values[found[1]], argument) for argument in container["args"]
        ]
        arguments[container["command"][2]] = filled
    assert arguments.keys() == {"engine_worker", "engine_worker.remote_follower"}
    argv = ["--model", "/m", "--served-model-name", "m", *arguments["engine_worker"]]
    execution = load_settings(WorkerSettings, argv, {}, prog="worker").settings.execution
    options_ = remote_follower._parser().parse_args(arguments["engine_worker.remote_follower"])
    assert execution.tensor_parallel_size == options_.tensor_parallel_size == 2
    assert execution.rendezvous_endpoint == options_.rendezvous_endpoint == "g-0.g.ns:29500"
    assert options_.rank == 1


def documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUSTOMIZE / path).read_text()))


def containers(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    templates = [item["spec"]["template"] for item in objects if item["kind"] in ("Deployment", "StatefulSet")]
    templates += templates_of_groups(objects)
    return [container for template in templates for container in template["spec"]["containers"]]


def templates_of_groups(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the templates of the leader and of the workers of each LeaderWorkerSet."""
    groups = [item["spec"]["leaderWorkerTemplate"] for item in objects if item["kind"] == "LeaderWorkerSet"]
    return [group[name] for group in groups for name in ("leaderTemplate", "workerTemplate")]


@pytest.mark.parametrize(
    ("path", "settings"),
    [("base/gateway.yaml", GatewaySettings), ("base/engine-worker.yaml", WorkerSettings),
     ("components/files/batches.yaml", DriverSettings),
     ("components/gpu/engine-worker.yaml", WorkerSettings),
     ("components/tensor-parallel/engine-worker.yaml", WorkerSettings),
     ("overlays/leader-worker-set/groups.yaml", WorkerSettings)],
)  # fmt: skip
def test_manifest_options_exist(path: str, settings: type) -> None:
    known = {f"PAGESTREAM_{field.name.upper()}" for field in options(settings)}
    for container in containers(documents(path)):
        named = {entry["name"] for entry in container.get("env", []) if entry["name"].startswith("PAGESTREAM_")}
        assert named <= known


def test_common_options_exist_in_both_programs() -> None:
    (kustomization,) = documents("base/kustomization.yaml")
    named = {entry.partition("=")[0] for entry in kustomization["configMapGenerator"][0]["literals"]}
    for settings in (GatewaySettings, WorkerSettings):
        assert named <= {f"PAGESTREAM_{field.name.upper()}" for field in options(settings)}


def test_probes_use_open_routes_and_pods_are_hardened() -> None:
    for path in PROGRAMS:
        for container in containers(documents(path)):
            probes = [container[kind] for kind in container if kind.endswith("Probe")]
            assert probes
            assert {probe["httpGet"]["path"] for probe in probes if "httpGet" in probe} <= OPEN_ROUTES
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


def test_pods_have_redis_accounts() -> None:
    lines = (KUSTOMIZE / "base" / "users.acl").read_text().splitlines()
    users = {line.split()[1] for line in lines}
    for path, user in (
        ("base/gateway.yaml", "gateway"),
        ("base/engine-worker.yaml", "worker"),
        ("components/files/batches.yaml", "gateway"),
    ):
        (container,) = containers(documents(path))
        env = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert env["PAGESTREAM_REDIS_URL"] == f"redis://{user}@pagestream-redis:6379/0"
        assert user in users
    (redis,) = containers(documents("base/redis.yaml"))
    assert redis["args"][redis["args"].index("--aclfile") + 1] == "/etc/pagestream/users.acl"


def test_pods_have_no_root_and_no_cluster_token() -> None:
    for path in PROGRAMS:
        for item in documents(path):
            if item["kind"] in ("Deployment", "StatefulSet"):
                spec = item["spec"]["template"]["spec"]
                assert spec["automountServiceAccountToken"] is False
                assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
                assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_network_policies_guard_ports_without_keys(objects: Objects) -> None:
    """The store and the workers have policies; a selected pod denies all traffic that no policy allows."""
    guarded: dict[str, list[Any]] = {}
    for item in objects:
        if item["kind"] == "NetworkPolicy":
            assert item["spec"].get("policyTypes", ["Ingress"]) == ["Ingress"]
            name = item["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/name"]
            guarded.setdefault(name, []).extend(item["spec"].get("ingress") or [])
    pods = {item["metadata"]["name"] for item in objects if item["kind"] in ("Deployment", "StatefulSet")}
    pods |= {template["metadata"]["labels"][NAME] for template in templates_of_groups(objects)}
    unguarded = pods - guarded.keys()
    assert unguarded == {"pagestream-gateway"}  # it checks API keys
    for rules in guarded.values():
        for rule in rules:
            assert rule["ports"] and rule["from"]
            assert all(peer.get("podSelector") or peer.get("namespaceSelector") for peer in rule["from"])
    of_worker = guarded["pagestream-engine-worker"]
    scrapers = [item for item in objects if item["kind"] == "PodMonitor"]
    expected: list[list[dict[str, Any]]] = [[{"port": "metrics"}]] if scrapers else []
    if templates_of_groups(objects):
        (ranks,) = of_worker
        assert ranks["from"] == [{"podSelector": {"matchLabels": {NAME: "pagestream-follower"}}}]
        expected = [[{"port": 1024, "endPort": 65535}]]
    assert [rule["ports"] for rule in of_worker] == expected
    # Followers accept no requests and do not connect to the store.
    assert "pagestream-follower" not in str(guarded.get("pagestream-redis"))


def test_drain_fits_in_the_grace_period() -> None:
    for path, settings in (("base/gateway.yaml", GatewaySettings), ("base/engine-worker.yaml", WorkerSettings)):
        (drain,) = list[Any](field.default for field in options(settings) if field.name == "drain_seconds")
        (workload,) = [item for item in documents(path) if item["kind"] == "Deployment"]
        assert workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= drain + 20


def test_deployed_alert_rules_are_the_tested_ones() -> None:
    (rule,) = documents("components/monitoring/prometheus-rule.yaml")
    assert rule["spec"] == yaml.safe_load((ROOT / "monitoring" / "prometheus" / "alerts.yml").read_text())


def test_queues_that_keda_reads_are_those_of_the_served_model(objects: Objects) -> None:
    (settings,) = [item["data"] for item in objects if "PAGESTREAM_SERVED_MODEL_NAME" in item.get("data", {})]
    for item in objects:
        if item["kind"] == "ScaledObject":
            streams = {trigger["metadata"]["stream"] for trigger in item["spec"]["triggers"]}
            assert streams == set(RedisKeys(settings["PAGESTREAM_SERVED_MODEL_NAME"]).queues)


def test_model_of_the_hub_is_where_the_programs_look_for_it(tmp_path: Path) -> None:
    objects = with_components(tmp_path, "files", "gpu", "model-hub")
    (settings,) = [item["data"] for item in objects if "PAGESTREAM_MODEL" in item.get("data", {})]
    (job,) = [item["spec"]["template"]["spec"] for item in objects if item["kind"] == "Job"]
    (container,) = job["containers"]
    assert "mv .download model" in container["args"][0]
    assert settings["PAGESTREAM_MODEL"] == container["workingDir"] + "/model"
    claims = {item["metadata"]["name"] for item in objects if item["kind"] == "PersistentVolumeClaim"}
    for pod in [job, *(item["spec"]["template"]["spec"] for item in objects if item["kind"] == "Deployment")]:
        claimed = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"]
                   if "persistentVolumeClaim" in volume}  # fmt: skip
        assert claimed["model"] == "pagestream-model" and set(claimed.values()) <= claims
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts["model"] == container["workingDir"]


def test_kernels_are_kept_on_a_claim(tmp_path: Path) -> None:
    objects = with_components(tmp_path, "gpu", "kernel-cache")
    claims = {item["metadata"]["name"] for item in objects if item["kind"] == "PersistentVolumeClaim"}
    (worker,) = [
        item["spec"]["template"]["spec"]
        for item in objects
        if item["kind"] == "Deployment" and item["metadata"]["name"] == "pagestream-engine-worker"
    ]
    (cache,) = [volume for volume in worker["volumes"] if volume["name"] == "cache"]
    assert cache == {"name": "cache", "persistentVolumeClaim": {"claimName": "pagestream-kernel-cache"}}
    assert "pagestream-kernel-cache" in claims


@pytest.mark.parametrize("component", ["redis-auth", "redis-external"])
def test_store_urls_come_from_a_secret(tmp_path: Path, component: str) -> None:
    objects = with_components(tmp_path, "files", component)
    assert any(item["kind"] == "StatefulSet" for item in objects) == (component == "redis-auth")
    keys = {
        "pagestream-gateway": "gateway-url",
        "pagestream-batches": "gateway-url",
        "pagestream-engine-worker": "worker-url",
    }
    for item in objects:
        if item["kind"] == "Deployment":
            env = {entry["name"]: entry for entry in item["spec"]["template"]["spec"]["containers"][0]["env"]}
            source = {"secretKeyRef": {"name": "pagestream-store", "key": keys[item["metadata"]["name"]]}}
            assert env["PAGESTREAM_REDIS_URL"] == {"name": "PAGESTREAM_REDIS_URL", "valueFrom": source}
        elif item["kind"] == "StatefulSet":
            (users,) = [volume for volume in item["spec"]["template"]["spec"]["volumes"] if volume["name"] == "users"]
            assert users["secret"]["secretName"] == "pagestream-store"
