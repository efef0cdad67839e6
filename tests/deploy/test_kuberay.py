"""The options and the run's configuration change the manifests as intended, and Ray reads the result as intended."""

from __future__ import annotations

import importlib.util
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import vescale_ray
from tests.deploy.manifests import CONFIG, ROOT, RUNS, VARIANTS, Documents, cluster_of, env_of, made, pods_of, spec_of, the
from vescale_ray.config import read_config
from vescale_ray.controller.http.exposition import families
from vescale_ray.controller.state.snapshot import Snapshot
from vescale_ray.k8s import Options, RenderError, documents
from vescale_ray.k8s.render import quoted

ray = importlib.util.find_spec("ray")  # only its sources are read, because importing its dashboard takes seconds
assert ray is not None and ray.origin is not None
RAY = Path(ray.origin).parent
CPU = ["train.device=cpu", "ray.gpus_per_worker=0"]


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith(("job", "cluster"))])
def test_overlays_can_be_combined(name: str) -> None:
    kind, _, chosen = name.partition(" ")
    bundle = VARIANTS[name]()
    ray, cluster = the(bundle, "RayJob" if kind == "job" else "RayCluster"), cluster_of(bundle)
    assert ("kueue.x-k8s.io/queue-name" in ray["metadata"]["labels"]) == ("suspend" in ray["spec"]) == ("kueue" in chosen)
    assert ("gcsFaultToleranceOptions" in cluster) == ("gcs-ft" in chosen)
    assert [group["groupName"] for group in cluster["workerGroupSpecs"]] == ["workers", "spot"][: 1 + ("spot" in chosen)]


def test_rays_autoscaler_reads_the_intended_node_groups() -> None:
    module = pytest.importorskip("ray.autoscaler._private.kuberay.autoscaling_config")
    derive = getattr(module, "_derive_autoscaling_config_from_ray_cr", None)
    if derive is None:
        pytest.skip("a private function of Ray's, gone in this version")

    def types(*overlays: str) -> dict[str, Any]:
        config = derive({"metadata": {"name": "x", "namespace": "y"}, "spec": cluster_of(made("job", (), *overlays))})
        assert config["idle_timeout_minutes"] == 5
        return config["available_node_types"]

    plain, spot = types(), types("spot")
    assert plain["headgroup"]["resources"] == {"CPU": 0, "memory": 16 * 2**30}
    assert plain["workers"]["resources"] == {"CPU": 6, "GPU": 1, "memory": 64 * 2**30}
    assert (plain["workers"]["min_workers"], plain["workers"]["max_workers"]) == (4, 16)
    assert [(spot[name]["min_workers"], spot[name]["max_workers"]) for name in ("workers", "spot")] == [(4, 4), (0, 12)]
    assert spot["spot"]["priority"] > spot["workers"].get("priority", 0)


def test_the_autoscalers_token_lies_where_ray_looks_for_it() -> None:
    provider = pytest.importorskip("ray.autoscaler._private.kuberay.node_provider")
    (mount,) = cluster_of(made("job"))["autoscalerOptions"]["volumeMounts"]
    assert provider.IN_CLUSTER_TOKEN_PATH == f"{mount['mountPath']}/token"
    assert provider.IN_CLUSTER_CA_CERT_PATH == f"{mount['mountPath']}/ca.crt"


def test_the_metrics_ports_and_parameters_are_rays() -> None:
    cluster, bundle = cluster_of(made("job")), made("job")
    ports = {one["name"]: one["containerPort"] for one in pods_of(bundle)["head"]["containers"][0]["ports"]}
    assert f'"AUTOSCALER_METRIC_PORT", {ports["as-metrics"]})' in (RAY / "autoscaler/_private/constants.py").read_text()
    assert f'"DASHBOARD_METRIC_PORT", {ports["dash-metrics"]})' in (RAY / "dashboard/consts.py").read_text()
    params = {name for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]) for name in group["rayStartParams"]}
    start = (RAY / "scripts" / "scripts.py").read_text()
    assert len(params) == 3 and all(f'"--{name}"' in start for name in params)


def test_ray_reads_the_variables_that_are_set_for_it() -> None:
    """Ray would silently ignore a renamed variable, and a drain would last only as long as Ray's default."""
    bundle = made("job", (), prometheus="http://p:9090", grafana="http://g:3000")
    names = {name for role in ("head", "workers") for name in env_of(bundle, role)}
    names |= yaml.safe_load(spec_of(bundle)["runtimeEnvYAML"])["env_vars"].keys()
    places = ("_private/ray_constants.py", "dashboard/modules/job/job_supervisor.py", "dashboard/modules/metrics/metrics_head.py")
    read = "".join((RAY / place).read_text() for place in places)
    ours = {name for name in names if name.startswith("RAY_")}
    assert len(ours) == 5 and all(f'"{name}"' in read for name in ours)


def test_ray_version_and_image_tag_match_pins_and_package() -> None:
    assert f"\nray=={cluster_of(made('job'))['rayVersion']}\n" in (ROOT / "constraints.txt").read_text()
    image = pods_of(made("job"))["head"]["containers"][0]["image"]
    assert image == f"registry.example.com/vescale-ray:{vescale_ray.__version__}"


@pytest.mark.parametrize("corpus", ["/mnt/shared/text", "/mnt/shared/ é 'x': {}#", "/mnt/shared/a\n\n b\x85\x1c"])
def test_manifest_holds_the_given_run(corpus: str) -> None:
    run = CONFIG.model_copy(update={"data": CONFIG.data.model_copy(update={"corpus": corpus})})
    text = the(documents(run, Options(), "job"), "ConfigMap")["data"]["run.yaml"]
    assert read_config(text, "run.yaml") == run


def test_pod_label_of_a_series_names_the_ranks_pod() -> None:
    """The operator labels each series with its target. If a run's series has the same label, honorLabels keeps the run's."""
    who = {"worker": "w0", "node": "n", "pod": "p", "device": "cuda:0"}
    ours = {key for family in families(Snapshot("r", "RUNNING", workers={0: who})) for sample in family.samples for key in sample.labels}
    assert ours & {"namespace", "pod", "container", "endpoint", "instance", "job"} == {"pod"}
    ends = [end for one in made("monitor") if one["kind"] == "PodMonitor" for end in one["spec"]["podMetricsEndpoints"]]
    assert [end["port"] for end in ends if "honorLabels" in end] == ["vescale-metrics"] and len(ends) == 5


@settings(max_examples=40)
@given(
    each=st.sampled_from([0.25, 0.3, 0.5, 0.9, 1, 2]),
    gpus=st.integers(1, 8),
    bounds=st.lists(st.integers(1, 40), min_size=3, max_size=3).map(sorted),
    spares=st.integers(0, 3),
    spot=st.booleans(),
)
def test_pod_counts_are_the_fewest_that_hold_the_workers(each: float, gpus: int, bounds: list[int], spares: int, spot: bool) -> None:
    assume(gpus >= each)
    fewest, first, most = bounds
    counts = {"workers": first, "min_workers": fewest, "max_workers": most, "spares": spares}
    run = CONFIG.model_copy(
        update={
            "elastic": CONFIG.elastic.model_copy(update=counts),
            "train": CONFIG.train.model_copy(update={"slots": 40}),
            "ray": CONFIG.ray.model_copy(update={"gpus_per_worker": each}),
        }
    )
    room = math.floor(Fraction(gpus) / Fraction(str(each)))
    least, wanted, limit = (-(-n // room) for n in (fewest, first + spares, most + spares))
    options = Options(gpus=gpus, overlays=frozenset({"spot"} if spot else ()))
    if spot and least == limit:
        with pytest.raises(RenderError, match="none may be pre-empted"):
            documents(run, options, "job")
        return
    groups = cluster_of(documents(run, options, "job"))["workerGroupSpecs"]
    sums = [sum(group[key] for group in groups) for key in ("minReplicas", "replicas", "maxReplicas")]
    assert sums == [least, wanted, limit]
    limits = groups[0]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == str(gpus) and int(limits["cpu"]) >= room * CONFIG.ray.cpus_per_worker


def test_a_run_without_gpus_gets_none_and_no_spare_cpu() -> None:
    """A pod of 3 CPUs would take three workers of one CPU, and the other pods would be idle."""
    pod = pods_of(bundle := made("job", [*CPU, "ray.cpus_per_worker=1"]))["workers"]
    assert pod["containers"][0]["resources"]["limits"].keys() == {"cpu", "memory", "ephemeral-storage"}
    assert pod["containers"][0]["resources"]["limits"]["cpu"] == "1" and "tolerations" not in pod
    assert not [name for name in env_of(bundle, "workers") if name.startswith(("NCCL", "TORCH_NCCL"))]
    group = cluster_of(made("job", [*CPU, "ray.cpus_per_worker=0.5"]))["workerGroupSpecs"][0]
    assert [group[key] for key in ("minReplicas", "replicas", "maxReplicas")] == [2, 4, 8], "a CPU holds two of them"


@pytest.mark.parametrize(("drain", "stop"), [(25, "100"), (300, "300")])
def test_the_drain_sets_the_grace_and_the_time_to_stop(drain: int, stop: str) -> None:
    bundle = made("job", (), drain_s=drain)
    for role in ("head", "workers"):
        assert env_of(bundle, role)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == str(drain)
        assert pods_of(bundle)[role]["terminationGracePeriodSeconds"] == drain + 20
    env = yaml.safe_load(spec_of(bundle)["runtimeEnvYAML"])["env_vars"]
    assert env == {"RAY_JOB_STOP_WAIT_TIME_S": stop}, "no provider's notice makes it shorter"


@pytest.mark.parametrize(("deadline", "pending"), [(600, None), (1801, 1800)])
def test_pending_deadline_is_omitted_below_a_short_job_deadline(deadline: int, pending: int | None) -> None:
    spec = spec_of(made("job", (), deadline_s=deadline))
    assert (spec["activeDeadlineSeconds"], spec.get("preRunningDeadlineSeconds")) == (deadline, pending)


def test_existing_accounts_and_classes_replace_new_ones() -> None:
    bundle = made("job", (), service_account="storage", priority_class="urgent")
    assert {(pods_of(bundle)[role]["serviceAccountName"], pods_of(bundle)[role]["priorityClassName"]) for role in ("head", "workers")} == {
        ("storage", "urgent")
    }
    kinds = {one["kind"] for one in (*bundle, *made("setup", (), priority_class="urgent"))}
    assert not kinds & {"ServiceAccount", "PriorityClass"}


def test_secrets_reach_only_the_pods_that_need_them() -> None:
    bundle = made("job", (), "spot", pull_secret="registry", env_secret="s3-keys")
    assert pods_of(bundle).keys() == {"head", "workers", "spot", "submitter"}
    for role, pod in pods_of(bundle).items():
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert pod["containers"][0].get("envFrom") == (None if role == "submitter" else [{"secretRef": {"name": "s3-keys"}}])
    assert str(bundle).count("s3-keys") == 3 and not [one for one in bundle if one["kind"] == "Secret"]
    assert "envFrom" not in str(made("job")) and "imagePullSecrets" not in str(made("job"))


def test_network_policy_opens_only_the_egress_ports_in_use() -> None:
    def ports(bundle: Documents, name: str) -> set[int]:
        rules = the(bundle, "NetworkPolicy", name)["spec"]["egress"]
        return {port["port"] for rule in rules for port in rule.get("ports", ())}

    assert ports(made("job"), "-run") == {53} and ports(made("job"), "-head") == {443, 6443}
    assert ports(made("job", ["checkpoint.dir=s3://bucket/x?endpoint=http://minio.store:9000"]), "-run") == {53, 9000}
    assert ports(made("job", ["checkpoint.dir=hdfs://namenode:8020/x"]), "-run") == {53, 8020}, "that of the address itself"
    assert ports(made("job", (), "gcs-ft", prometheus="http://prometheus.monitoring:9090"), "-head") == {443, 6443, 6380, 9090}


def test_only_spot_workers_go_to_nodes_that_may_vanish() -> None:
    pods = pods_of(made("job", (), "spot"))
    assert pods["spot"]["nodeSelector"] == {"karpenter.sh/capacity-type": "spot"}
    for role in ("workers", "head"):
        (term,) = pods[role]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert term["matchExpressions"] == [{"key": "karpenter.sh/capacity-type", "operator": "NotIn", "values": ["spot"]}]


def test_words_that_yaml_readers_disagree_on_are_quoted() -> None:
    """YAML 1.1 reads on, 0x10 and 1:30 as other types than text; YAML 1.2 and Go's readers do so with 1e3 and 0o7."""
    for word in ("on", "NO", "y", "1e3", "0o7", "0x10", "1:30", "null", "~", "", "1_000", "=", ".5", "a,b", "a}b"):
        assert quoted(word) == f'"{word}"'
    assert quoted("v1") == "v1" and quoted("/mnt/a:b") == "/mnt/a:b"


@settings(max_examples=100)
@given(st.text(max_size=12) | st.text(alphabet="a1eE.:#-'\"\\ \n\t|>&*!%@`{}[],?~=_", max_size=10))
def test_quoted_text_reads_back_as_yaml_key_and_value(text: str) -> None:
    assert yaml.safe_load(f"a: [{{b: {quoted(text)}, {quoted(text)}: c}}]") == {"a": [{"b": text} | {text: "c"}]}
