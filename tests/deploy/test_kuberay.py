"""The options and the run's configuration change the manifests as they should, and Ray reads them as intended."""

from __future__ import annotations

import importlib.util
import math
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import vescale_ray
from tests.deploy.manifests import (
    CONFIG,
    KUBERAY,
    ROOT,
    RUNS,
    VARIANTS,
    Documents,
    cluster_of,
    committed,
    head_of,
    spec_of,
    the,
    worker_of,
)
from vescale_ray.config import RunConfig, load_config, read_config
from vescale_ray.controller.exposition import families
from vescale_ray.controller.snapshot import Snapshot
from vescale_ray.k8s import ManifestError, Options, documents
from vescale_ray.k8s.render import quoted

PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line and not line.startswith("#"))


@pytest.fixture(scope="module")
def loaded() -> dict[str, Documents]:
    return {path.name: committed(path.name) for path in sorted(KUBERAY.iterdir())}


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return CONFIG


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith(("job", "cluster"))])
def test_overlays_can_be_combined(name: str) -> None:
    kind, _, chosen = name.partition(" ")
    bundle = VARIANTS[name]()
    ray, cluster = the(bundle, "RayJob" if kind == "job" else "RayCluster"), cluster_of(bundle)
    assert ("kueue.x-k8s.io/queue-name" in ray["metadata"]["labels"]) == ("suspend" in ray["spec"]) == ("kueue" in chosen)
    assert ("gcsFaultToleranceOptions" in cluster) == ("gcs-ft" in chosen)
    assert [group["groupName"] for group in cluster["workerGroupSpecs"]] == ["workers", "spot"][: 1 + ("spot" in chosen)]


def test_rays_own_autoscaler_sees_the_nodes_that_are_meant(loaded: dict[str, Documents]) -> None:
    module = pytest.importorskip("ray.autoscaler._private.kuberay.autoscaling_config")
    derive = getattr(module, "_derive_autoscaling_config_from_ray_cr", None)
    if derive is None:
        pytest.skip("a private function of Ray's, gone in this version")

    def types(name: str) -> dict[str, Any]:
        cluster = {"metadata": {"name": "x", "namespace": "y"}, "spec": cluster_of(loaded[name])}
        config = derive(cluster)
        assert config["idle_timeout_minutes"] == 5
        return config["available_node_types"]

    plain = types("rayjob.yaml")
    assert plain["headgroup"]["resources"] == {"CPU": 0, "memory": 16 * 2**30}
    assert plain["workers"]["resources"] == {"CPU": 6, "GPU": 1, "memory": 64 * 2**30}
    assert (plain["workers"]["min_workers"], plain["workers"]["max_workers"]) == (4, 16)
    spot = types("rayjob-spot.yaml")
    assert [(spot[name]["min_workers"], spot[name]["max_workers"]) for name in ("workers", "spot")] == [(4, 4), (0, 12)]
    assert spot["spot"]["priority"] > spot["workers"].get("priority", 0)


def test_the_autoscalers_token_lies_where_ray_looks_for_it(loaded: dict[str, Documents]) -> None:
    provider = pytest.importorskip("ray.autoscaler._private.kuberay.node_provider")
    (mount,) = cluster_of(loaded["rayjob.yaml"])["autoscalerOptions"]["volumeMounts"]
    assert {Path(provider.IN_CLUSTER_TOKEN_PATH), Path(provider.IN_CLUSTER_CA_CERT_PATH)} == {
        Path(mount["mountPath"], name) for name in ("token", "ca.crt")
    }


def test_the_metrics_ports_and_parameters_are_rays(loaded: dict[str, Documents]) -> None:
    ray = importlib.util.find_spec("ray")  # its sources are read: importing its dashboard takes seconds
    assert ray is not None and ray.origin is not None
    folder = Path(ray.origin).parent
    ports = {one["name"]: one["containerPort"] for one in head_of(loaded["rayjob.yaml"])["containers"][0]["ports"]}
    autoscaler, dashboard = (folder / name for name in ("autoscaler/_private/constants.py", "dashboard/consts.py"))
    assert f'"AUTOSCALER_METRIC_PORT", {ports["as-metrics"]})' in autoscaler.read_text()
    assert f'"DASHBOARD_METRIC_PORT", {ports["dash-metrics"]})' in dashboard.read_text()
    cluster, start = cluster_of(loaded["rayjob.yaml"]), (folder / "scripts" / "scripts.py").read_text()
    params = {name for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]) for name in group["rayStartParams"]}
    assert len(params) == 3 and all(f'"--{name}"' in start for name in params)


def test_the_variables_that_are_set_for_ray_are_ones_that_it_reads(config: RunConfig) -> None:
    """A renamed one would be ignored in silence, and a drain be as short as Ray's own."""
    ray = importlib.util.find_spec("ray")
    assert ray is not None and ray.origin is not None
    made = documents(config, Options(prometheus="http://p:9090", grafana="http://g:3000"), "job")
    names = {one["name"] for pod in (head_of(made), worker_of(made)) for one in pod["containers"][0]["env"]}
    names |= yaml.safe_load(spec_of(made)["runtimeEnvYAML"])["env_vars"].keys()
    places = ("_private/ray_constants.py", "dashboard/modules/job/job_supervisor.py", "dashboard/modules/metrics/metrics_head.py")
    read = "".join((Path(ray.origin).parent / place).read_text() for place in places)
    ours = {name for name in names if name.startswith("RAY_")}
    assert len(ours) == 5 and all(f'"{name}"' in read for name in ours)


def test_versions_are_those_of_the_constraints(loaded: dict[str, Documents]) -> None:
    assert cluster_of(loaded["rayjob.yaml"])["rayVersion"] == PINS["ray"]
    assert head_of(loaded["rayjob.yaml"])["containers"][0]["image"] == f"registry.example.com/vescale-ray:{vescale_ray.__version__}"


@pytest.mark.parametrize("corpus", ["/mnt/shared/text", "/mnt/shared/ é 'x': {}#", "/mnt/shared/a\n\n b\x85\x1c"])
def test_the_run_in_the_manifest_is_the_one_that_was_given(corpus: str) -> None:
    run = CONFIG.model_copy(update={"data": CONFIG.data.model_copy(update={"corpus": corpus})})
    text = the(documents(run, Options(), "job"), "ConfigMap")["data"]["run.yaml"]
    assert read_config(text, "run.yaml") == run


def test_the_pod_that_a_rank_is_in_is_not_taken_for_the_one_that_is_scraped(loaded: dict[str, Documents]) -> None:
    """The operator gives each series the labels of its target; where a run's series has one of them itself, that counts."""
    who = {"worker": "w0", "node": "n", "pod": "p", "device": "cuda:0"}
    ours = {key for family in families(Snapshot("r", "RUNNING", workers={0: who})) for sample in family.samples for key in sample.labels}
    assert ours & {"namespace", "pod", "container", "endpoint", "instance", "job"} == {"pod"}
    for document in loaded["monitor.yaml"]:
        for endpoint in document["spec"].get("podMetricsEndpoints", ()) if document["kind"] == "PodMonitor" else ():
            assert endpoint.get("honorLabels", False) == (endpoint["port"] == "vescale-metrics"), endpoint


def test_no_password_is_in_any_manifest(loaded: dict[str, Documents]) -> None:
    assert not [one for docs in loaded.values() for one in docs if one["kind"] == "Secret"]
    options = the(loaded["raycluster-gcs-ft.yaml"], "RayCluster")["spec"]["gcsFaultToleranceOptions"]
    assert options["redisPassword"] == {"valueFrom": {"secretKeyRef": {"name": "llama-110m-redis", "key": "password"}}}


# ----------------------------------------------------------------------------------------------------------------- options


def test_pods_hold_as_many_workers_as_their_gpus(config: RunConfig) -> None:
    """16, 8 and 4 workers of a GPU each, in pods of 8: 2, 1 and 1 of them."""
    group = cluster_of(documents(config, Options(gpus=8), "job"))["workerGroupSpecs"][0]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (1, 1, 2)
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "8" and int(limits["cpu"]) >= 8 * config.ray.cpus_per_worker


@settings(max_examples=40)
@given(
    each=st.sampled_from([0.25, 0.3, 0.5, 0.9, 1, 2]),
    gpus=st.integers(1, 8),
    bounds=st.lists(st.integers(1, 40), min_size=3, max_size=3).map(sorted),
    spares=st.integers(0, 3),
    spot=st.booleans(),
)
def test_pods_are_as_few_as_hold_the_workers(each: float, gpus: int, bounds: list[int], spares: int, spot: bool, config: RunConfig) -> None:
    assume(gpus >= each)
    fewest, first, most = bounds
    counts = {"workers": first, "min_workers": fewest, "max_workers": most, "spares": spares}
    run = config.model_copy(
        update={
            "elastic": config.elastic.model_copy(update=counts),
            "train": config.train.model_copy(update={"slots": 40}),
            "ray": config.ray.model_copy(update={"gpus_per_worker": each}),
        }
    )
    room = math.floor(Fraction(gpus) / Fraction(str(each)))
    least, wanted, limit = (-(-n // room) for n in (fewest, first + spares, most + spares))
    options = Options(gpus=gpus, overlays=frozenset({"spot"} if spot else ()))
    if spot and least == limit:
        with pytest.raises(ManifestError, match="none may be pre-empted"):
            documents(run, options, "job")
        return
    groups = cluster_of(documents(run, options, "job"))["workerGroupSpecs"]
    sums = [sum(group[key] for group in groups) for key in ("minReplicas", "replicas", "maxReplicas")]
    assert sums == [least, wanted, limit]


def test_a_run_without_gpus_gets_none_and_no_room_to_spare() -> None:
    """A pod of 3 CPUs would take three workers of one CPU, and the pods that were counted for would stand idle."""
    changes = ["train.device=cpu", "ray.gpus_per_worker=0", "ray.cpus_per_worker=1"]
    config = load_config(ROOT / "vescale_ray" / "configs" / "cluster.yaml", changes)
    pod = worker_of(documents(config, Options(), "job"))
    assert pod["containers"][0]["resources"]["limits"].keys() == {"cpu", "memory", "ephemeral-storage"}
    assert pod["containers"][0]["resources"]["limits"]["cpu"] == "1" and "tolerations" not in pod
    assert not [one["name"] for one in pod["containers"][0]["env"] if one["name"].startswith(("NCCL", "TORCH_NCCL"))]
    halves = load_config(ROOT / "vescale_ray" / "configs" / "cluster.yaml", [*changes[:2], "ray.cpus_per_worker=0.5"])
    group = cluster_of(documents(halves, Options(), "job"))["workerGroupSpecs"][0]
    assert [group[key] for key in ("minReplicas", "replicas", "maxReplicas")] == [2, 4, 8], "a CPU holds two of them"


def test_the_drain_sets_the_grace_and_the_time_to_stop(config: RunConfig) -> None:
    made = documents(config, Options(drain_s=25), "job")
    for pod in (head_of(made), worker_of(made)):
        env = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
        assert env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "25" and pod["terminationGracePeriodSeconds"] == 45
    for drain, stop in ((25, "100"), (300, "300")):
        env = yaml.safe_load(spec_of(documents(config, Options(drain_s=drain), "job"))["runtimeEnvYAML"])["env_vars"]
        assert env == {"RAY_JOB_STOP_WAIT_TIME_S": stop}, "no provider's notice makes it shorter"


def test_a_short_deadline_has_no_longer_one_beside_it(config: RunConfig) -> None:
    for deadline, pending in ((600, None), (1801, 1800)):
        spec = spec_of(documents(config, Options(deadline_s=deadline), "job"))
        assert (spec["activeDeadlineSeconds"], spec.get("preRunningDeadlineSeconds")) == (deadline, pending)


def test_existing_accounts_and_classes_take_the_place_of_those_that_are_made(config: RunConfig) -> None:
    made = documents(config, Options(service_account="storage", priority_class="urgent"), "job")
    assert not [one for one in made if one["kind"] == "ServiceAccount"]
    for pod in (head_of(made), worker_of(made)):
        assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("storage", "urgent")
    assert not [one for one in documents(config, Options(priority_class="urgent"), "setup") if one["kind"] == "PriorityClass"]


def test_every_pod_has_the_credentials_of_a_private_registry_and_none_is_in_the_manifest(config: RunConfig) -> None:
    options = Options(pull_secret="registry", overlays=frozenset({"spot"}))
    made = documents(config, options, "job")
    job = the(made, "RayJob")["spec"]
    groups = cluster_of(made)["workerGroupSpecs"]
    templates = [job["submitterPodTemplate"], cluster_of(made)["headGroupSpec"]["template"], *(group["template"] for group in groups)]
    assert len(templates) == 4
    for template in templates:
        assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert not [one for one in made if one["kind"] == "Secret"]


def test_keys_of_a_store_are_variables_of_what_trains_and_stand_in_no_manifest(config: RunConfig) -> None:
    options = Options(env_secret="s3-keys", overlays=frozenset({"spot"}))
    made = documents(config, options, "job")
    cluster = cluster_of(made)
    pods = [cluster["headGroupSpec"]["template"]["spec"], *(group["template"]["spec"] for group in cluster["workerGroupSpecs"])]
    assert len(pods) == 3
    for pod in pods:
        assert [c.get("envFrom") for c in pod["containers"]] == [[{"secretRef": {"name": "s3-keys"}}]]
    assert str(made).count("s3-keys") == 3, "neither the autoscaler nor the submitter needs them"
    assert "envFrom" not in str(documents(config, Options(), "job"))


def test_only_what_the_run_needs_is_let_out(config: RunConfig) -> None:
    def ports(made: Documents, name: str) -> set[int]:
        rules = the(made, "NetworkPolicy", name)["spec"]["egress"]
        return {port["port"] for rule in rules for port in rule.get("ports", ())}

    assert ports(documents(config, Options(), "job"), "-run") == {53}
    at = load_config(ROOT / "vescale_ray" / "configs" / "cluster.yaml", ["checkpoint.dir=s3://bucket/x?endpoint=http://minio.store:9000"])
    assert ports(documents(at, Options(), "job"), "-run") == {53, 9000}
    at = load_config(ROOT / "vescale_ray" / "configs" / "cluster.yaml", ["checkpoint.dir=hdfs://namenode:8020/x"])
    assert ports(documents(at, Options(), "job"), "-run") == {53, 8020}, "that of the address itself"
    options = Options(overlays=frozenset({"gcs-ft"}), redis="redis://redis.db:6380", prometheus="http://prometheus.monitoring:9090")
    assert ports(documents(config, options, "job"), "-head") == {443, 6443, 6380, 9090}


def test_spot_workers_and_no_other_pod_go_to_nodes_that_may_vanish(loaded: dict[str, Documents]) -> None:
    groups = {one["groupName"]: one["template"]["spec"] for one in cluster_of(loaded["rayjob-spot.yaml"])["workerGroupSpecs"]}
    assert groups["spot"]["nodeSelector"] == {"karpenter.sh/capacity-type": "spot"}
    for pod in (groups["workers"], head_of(loaded["rayjob-spot.yaml"])):
        (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert term["matchExpressions"] == [{"key": "karpenter.sh/capacity-type", "operator": "NotIn", "values": ["spot"]}]


def test_words_that_yaml_readers_disagree_on_are_quoted() -> None:
    """YAML 1.1 reads on, 0x10 and 1:30 as other things than text, YAML 1.2 and Go's readers 1e3 and 0o7."""
    for word in ("on", "NO", "y", "1e3", "0o7", "0x10", "1:30", "null", "~", "", "1_000", "=", ".5", "a,b", "a}b"):
        assert quoted(word) == f'"{word}"'
    assert quoted("v1") == "v1" and quoted("/mnt/a:b") == "/mnt/a:b"


@settings(max_examples=100)
@given(st.text(max_size=12) | st.text(alphabet="a1eE.:#-'\"\\ \n\t|>&*!%@`{}[],?~=_", max_size=10))
def test_any_text_reads_back_wherever_it_stands(text: str) -> None:
    assert yaml.safe_load(f"a: [{{b: {quoted(text)}, {quoted(text)}: c}}]") == {"a": [{"b": text} | {text: "c"}]}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, whose YAML reader is asked, is not installed")
def test_kubectl_reads_the_same_as_we_do(loaded: dict[str, Documents], tmp_path: Path) -> None:
    names = ["setup.yaml", "rayjob-spot.yaml", "monitor.yaml"]
    for name in names:
        (tmp_path / name).write_text((KUBERAY / name).read_text())
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({"resources": names}))
    done = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

    def by_name(documents: Documents) -> dict[tuple[str, str], Any]:
        return {(one["kind"], one["metadata"]["name"]): one for one in documents}

    assert by_name(list(yaml.safe_load_all(done.stdout))) == by_name([one for name in names for one in loaded[name]])
