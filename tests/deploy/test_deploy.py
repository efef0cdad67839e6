"""What runs on a cluster agrees with the code: names, ports, versions, bounds, and the operator's rules that can be checked offline."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from vescale_ray.config import RunConfig, load_config

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line and not line.startswith("#"))


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "rayjob.yaml").read_text()))


@pytest.fixture(scope="module")
def job(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return next(one for one in documents if one["kind"] == "RayJob")


@pytest.fixture(scope="module")
def config(documents: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """The run that the manifest's ConfigMap holds, read as the entrypoint will read it."""
    text = next(one for one in documents if one["kind"] == "ConfigMap")["data"]["run.yaml"]
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_text(text)
    return load_config(path)


def pods(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_the_files_come_with_the_package() -> None:
    names = {entry.name for entry in files("vescale_ray.deploy").iterdir()}
    assert {"rayjob.yaml", "prometheus.yml", "alerts.yml", "Dockerfile"} <= names


def test_the_entrypoint_reads_the_file_that_the_manifest_mounts(job: dict[str, Any], documents: list[dict[str, Any]]) -> None:
    program, command, path = job["spec"]["entrypoint"].split()
    assert (program, command) == ("vescale-ray", "train")
    head = pods(job)[0]
    mounts = {mount["name"]: mount["mountPath"] for mount in head["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in head["volumes"]}
    config_map = next(one for one in documents if one["kind"] == "ConfigMap")
    assert volumes["config"]["configMap"]["name"] == config_map["metadata"]["name"]
    assert f"{mounts['config']}/{next(iter(config_map['data']))}" == path


def test_the_entrypoints_program_is_one_that_the_package_installs() -> None:
    assert 'vescale-ray = "vescale_ray.cli:main"' in (ROOT / "pyproject.toml").read_text()


def test_the_runs_folder_and_text_lie_on_the_volume_that_every_pod_mounts(job: dict[str, Any], config: RunConfig) -> None:
    for pod in pods(job):
        shared = next(mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "runs")
        assert config.run.dir.startswith(f"{shared}/") and config.data.corpus.startswith(f"{shared}/")


def test_every_mount_has_a_volume_and_every_volume_is_mounted(job: dict[str, Any]) -> None:
    for pod in pods(job):
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_metrics_port_is_the_same_in_the_run_the_pod_and_prometheus(job: dict[str, Any], config: RunConfig) -> None:
    ports = {port["name"]: port["containerPort"] for port in pods(job)[0]["containers"][0]["ports"]}
    assert ports["vescale-metrics"] == config.metrics.port
    assert config.metrics.host == "0.0.0.0", "another pod could not scrape it"
    assert all(len(name) <= 15 for name in ports), "Kubernetes refuses longer names"
    prometheus = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    scraped = {one["job_name"]: one for one in prometheus["scrape_configs"]}["vescale-ray"]
    assert scraped["metrics_path"] == "/metrics"
    assert scraped["static_configs"][0]["targets"] == [f"127.0.0.1:{config.metrics.port}"]
    example = load_config(ROOT / "vescale_ray" / "configs" / "cluster.yaml")
    assert example.metrics == config.metrics


def test_the_bounds_of_the_run_are_those_of_the_worker_group(job: dict[str, Any], config: RunConfig) -> None:
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    per_pod = int(limits["nvidia.com/gpu"]) // int(config.ray.gpus_per_worker)
    assert (group["minReplicas"] * per_pod, group["replicas"] * per_pod, group["maxReplicas"] * per_pod) == (
        config.elastic.min_workers,
        config.elastic.workers,
        config.max_workers,
    )
    assert config.ray.cpus_per_worker * per_pod <= int(limits["cpu"])


def test_the_example_configuration_is_the_same_run(config: RunConfig) -> None:
    example = load_config(ROOT / "vescale_ray" / "configs" / "cluster.yaml")
    assert (example.model, example.run.name, example.elastic.max_workers) == (config.model, config.run.name, config.elastic.max_workers)


def test_versions_are_those_of_the_constraints(job: dict[str, Any]) -> None:
    import vescale_ray

    assert job["spec"]["rayClusterSpec"]["rayVersion"] == PINS["ray"]
    images = {container["image"] for pod in pods(job) for container in pod["containers"]}
    assert images == {f"registry.example.com/vescale-ray:{vescale_ray.__version__}"}


def test_no_pod_runs_as_root_or_may_become_it(job: dict[str, Any]) -> None:
    for pod in pods(job):
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] >= 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_pods_have_whole_fixed_resources(job: dict[str, Any]) -> None:
    for pod in pods(job):
        for container in pod["containers"]:
            assert container["resources"]["requests"] == container["resources"]["limits"]
            assert container["resources"]["limits"]["cpu"].isdigit()


def test_the_grace_of_a_pod_is_longer_than_rays_drain(job: dict[str, Any]) -> None:
    for pod in pods(job):
        env = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
        assert pod["terminationGracePeriodSeconds"] >= int(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) + 20
        assert "lifecycle" not in pod["containers"][0], "a preStop hook with `ray stop` would cut the drain short"
        assert all(isinstance(value, str) for value in env.values()), "Kubernetes wants text"


def test_the_operators_rules_hold(job: dict[str, Any]) -> None:
    """From KubeRay's validation.go: what its CRD does not catch (research/deploy.md 1.2)."""
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert len(job["metadata"]["name"]) <= 47 and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    assert not ("deletionStrategy" in spec and spec.get("shutdownAfterJobFinishes"))
    assert spec["ttlSecondsAfterFinished"] > 0 and spec["shutdownAfterJobFinishes"] is True
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert group["template"]["spec"].get("restartPolicy", "Never") == "Never", "needed by autoscaler v2"
    for group in cluster["workerGroupSpecs"]:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert yaml.safe_load(spec["runtimeEnvYAML"]).keys() == {"env_vars"}, "nothing is installed at run time"
    assert int(yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > 3
    known = {"apiVersion", "kind", "metadata", "spec"}
    assert set(job) == known and job["apiVersion"] == "ray.io/v1"
    assert set(spec) <= {
        "entrypoint",
        "submissionMode",
        "backoffLimit",
        "shutdownAfterJobFinishes",
        "ttlSecondsAfterFinished",
        "runtimeEnvYAML",
        "rayClusterSpec",
    }
    assert set(cluster) <= {
        "rayVersion",
        "enableInTreeAutoscaling",
        "autoscalerOptions",
        "authOptions",
        "headGroupSpec",
        "workerGroupSpecs",
    }


def test_rays_own_autoscaler_sees_the_nodes_that_are_meant(job: dict[str, Any]) -> None:
    module = pytest.importorskip("ray.autoscaler._private.kuberay.autoscaling_config")
    derive = getattr(module, "_derive_autoscaling_config_from_ray_cr", None)
    if derive is None:
        pytest.skip("a private function of Ray's, gone in this version")
    cluster = {"metadata": {"name": "x", "namespace": "default"}, "spec": job["spec"]["rayClusterSpec"]}
    types = derive(cluster)["available_node_types"]
    head = next(value for name, value in types.items() if "head" in name)
    worker = next(value for name, value in types.items() if "gpu" in name)
    assert head["resources"]["CPU"] == 0
    assert (worker["resources"]["CPU"], worker["resources"]["GPU"]) == (8, 1)
    assert (worker["min_workers"], worker["max_workers"]) == (4, 16)


# ------------------------------------------------------------------------------------------------------------------ image


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def test_the_image_starts_from_a_pinned_python_that_the_package_supports() -> None:
    bases = [rest for word, rest in instructions() if word == "FROM"]
    assert len(bases) == 1
    match = re.fullmatch(r"python:3\.(1[123])\.\d+-slim-bookworm", bases[0])
    assert match, "an exact version, not a moving tag"


def test_the_image_runs_as_the_user_of_the_pods(job: dict[str, Any]) -> None:
    user = [rest for word, rest in instructions() if word == "USER"][-1]
    assert user == "1000:1000" == f"{pods(job)[0]['securityContext']['runAsUser']}:{pods(job)[0]['securityContext']['runAsGroup']}"


def test_the_image_installs_the_pinned_versions_and_copies_only_files_that_exist() -> None:
    installs = [rest for word, rest in instructions() if word == "RUN" and "pip install" in rest]
    assert len(installs) == 1 and "-c constraints.txt" in installs[0] and "--no-cache-dir" in installs[0]
    copied = [source for word, rest in instructions() if word == "COPY" for source in rest.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied), copied
    assert {"controller", "workers", "checkpoint", "deploy", "vescale_ray"} <= set(copied)


def test_prometheus_reads_rays_own_list_of_nodes() -> None:
    prometheus = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert set(prometheus) == {"global", "rule_files", "scrape_configs"}
    assert all((DEPLOY / file).is_file() for file in prometheus["rule_files"])
    ray = {one["job_name"]: one for one in prometheus["scrape_configs"]}["ray"]
    assert ray["file_sd_configs"][0]["files"] == ["/tmp/ray/prom_metrics_service_discovery.json"]
