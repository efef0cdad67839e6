"""The committed manifests are those of the code, and hold against Kubernetes' schemas, KubeRay's rules, Ray's parser and each other."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.deploy.kubernetes import core_problems, document_problems, schema_of
from tests.deploy.mistakes import MISTAKES, Mistake
from tests.deploy.operators_mistakes import OPERATORS_MISTAKES
from vescale_ray.config import RunConfig, load_config
from vescale_ray.controller.exposition import families
from vescale_ray.controller.snapshot import Snapshot
from vescale_ray.k8s import ManifestError, Options, documents, pods, render
from vescale_ray.k8s.defaults import FILES, example, rendered
from vescale_ray.k8s.emit import Why, plain, to_yaml
from vescale_ray.k8s.fields import CUSTOM, field_problems
from vescale_ray.k8s.kinds import shape_problems
from vescale_ray.k8s.references import reference_problems
from vescale_ray.k8s.rules import RAYS_SHARE, TOKEN_FOLDER, rule_problems
from vescale_ray.k8s.starts import PARAMETERS

ROOT = Path(__file__).resolve().parents[2]
KUBERAY = ROOT / "deploy" / "kuberay"
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line and not line.startswith("#"))
Documents = list[dict[str, Any]]
REDIS = frozenset({("Secret", "llama-110m-redis")})


def committed(name: str) -> Documents:
    return list(yaml.load_all((KUBERAY / name).read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


@pytest.fixture(scope="module")
def loaded() -> dict[str, Documents]:
    return {path.name: committed(path.name) for path in sorted(KUBERAY.iterdir())}


@pytest.fixture(scope="module")
def whole(loaded: dict[str, Documents]) -> str:
    return json.dumps(loaded["rayjob.yaml"] + loaded["setup.yaml"] + loaded["monitor.yaml"])


@pytest.fixture
def bundle(whole: str) -> Documents:
    """A job with the objects around it, to be spoilt."""
    return list(json.loads(whole))


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(ROOT / "vescale_ray" / "configs" / "cluster.yaml")


def the(bundle: Sequence[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    return next(one for one in bundle if one["kind"] == kind and one["metadata"]["name"].endswith(name))


def spec_of(bundle: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return the(bundle, "RayJob")["spec"]


def cluster_of(bundle: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return spec_of(bundle)["rayClusterSpec"]


def head_of(bundle: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return cluster_of(bundle)["headGroupSpec"]["template"]["spec"]


def worker_of(bundle: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return cluster_of(bundle)["workerGroupSpecs"][0]["template"]["spec"]


# ------------------------------------------------------------------------------------------------------------------- whole


def test_the_committed_manifests_are_those_that_the_code_renders() -> None:
    made = dict(rendered())
    assert {path.name for path in KUBERAY.iterdir()} == made.keys(), "make manifests"
    for name, text in made.items():
        assert (KUBERAY / name).read_text(encoding="utf-8") == text, f"{name}: run `make manifests`"


@pytest.mark.parametrize("name", FILES)
def test_every_committed_document_keeps_to_kubernetes_strict_schemas(name: str, loaded: dict[str, Documents]) -> None:
    for document in loaded[name]:
        assert (schema_of(document) is None) == ((document["apiVersion"], document["kind"]) in CUSTOM)
        if name == "setup.yaml":  # the package's own way, which reads its schemas anew each time, agrees with ours
            assert kubernetes_validate.validate(document, "1.37", strict=True) == "1.37"
        assert not list(document_problems(document))
        assert not list(field_problems(document, core_problems))


@pytest.mark.parametrize("name", [name for name, (kind, _) in FILES.items() if kind in ("job", "cluster")])
def test_every_committed_run_keeps_to_the_operators_rules_and_to_what_it_refers_to(name: str, loaded: dict[str, Documents]) -> None:
    around = loaded[name] + loaded["setup.yaml"] + loaded["monitor.yaml"]
    assert not [problem for one in around for problem in rule_problems(one)]
    assert not list(reference_problems(around, REDIS if "gcs-ft" in name else frozenset()))


def overlays() -> Iterator[tuple[str, ...]]:
    for count in range(4):
        yield from itertools.combinations(("gcs-ft", "kueue", "spot"), count)


@pytest.mark.parametrize("kind", ["job", "cluster"])
@pytest.mark.parametrize("chosen", list(overlays()), ids="+".join)
def test_overlays_can_be_combined(kind: str, chosen: tuple[str, ...], config: RunConfig) -> None:
    given = {"kueue": {"queue": "q"}, "gcs-ft": {"redis": "redis.db:6380"}}
    options = Options(overlays=frozenset(chosen), **{key: value for one in chosen for key, value in given.get(one, {}).items()})  # type: ignore[arg-type]
    made = documents(config, options, kind)
    assert not [problem for one in made for problem in (*document_problems(one), *field_problems(one, core_problems))]
    ray = the(made, "RayJob" if kind == "job" else "RayCluster")
    cluster = ray["spec"].get("rayClusterSpec", ray["spec"])
    assert ("kueue.x-k8s.io/queue-name" in ray["metadata"]["labels"]) == ray["spec"].get("suspend", False) == ("kueue" in chosen)
    assert ("gcsFaultToleranceOptions" in cluster) == ("gcs-ft" in chosen)
    assert [group["groupName"] for group in cluster["workerGroupSpecs"]] == ["workers", "spot"][: 1 + ("spot" in chosen)]
    assert (ray["metadata"].get("annotations") == {"kueue.x-k8s.io/elastic-job": "true"}) == ("kueue" in chosen)
    if kind == "job":
        assert ("deletionStrategy" in ray["spec"]) != ray["spec"].get("shutdownAfterJobFinishes", False)


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


def test_the_autoscalers_token_lies_where_ray_looks_for_it() -> None:
    provider = pytest.importorskip("ray.autoscaler._private.kuberay.node_provider")
    assert Path(provider.IN_CLUSTER_TOKEN_PATH).parent == Path(provider.IN_CLUSTER_CA_CERT_PATH).parent == Path(TOKEN_FOLDER)


def test_the_metrics_ports_are_rays() -> None:
    ray = importlib.util.find_spec("ray")  # its sources are read: importing its dashboard takes seconds
    assert ray is not None and ray.origin is not None
    folder = Path(ray.origin).parent
    autoscaler, dashboard = (folder / name for name in ("autoscaler/_private/constants.py", "dashboard/consts.py"))
    assert f'"AUTOSCALER_METRIC_PORT", {pods.AUTOSCALER_METRICS_PORT})' in autoscaler.read_text()
    assert f'"DASHBOARD_METRIC_PORT", {pods.DASHBOARD_METRICS_PORT})' in dashboard.read_text()


def test_the_parameters_that_a_group_may_have_are_those_of_ray_start() -> None:
    ray = importlib.util.find_spec("ray")
    assert ray is not None and ray.origin is not None
    source = (Path(ray.origin).parent / "scripts" / "scripts.py").read_text()
    assert not [name for name in PARAMETERS if f'"--{name}"' not in source]
    constants = (Path(ray.origin).parent / "_private" / "ray_constants.py").read_text()
    assert re.search(rf'"RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION",\s*{RAYS_SHARE}\b', constants)


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
    import vescale_ray

    assert cluster_of(loaded["rayjob.yaml"])["rayVersion"] == PINS["ray"]
    assert head_of(loaded["rayjob.yaml"])["containers"][0]["image"] == f"registry.example.com/vescale-ray:{vescale_ray.__version__}"


def test_the_run_in_the_manifest_is_the_example(loaded: dict[str, Documents], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(the(loaded["rayjob.yaml"], "ConfigMap")["data"]["run.yaml"])
    assert load_config(tmp_path / "run.yaml") == example()


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
    found = list(reference_problems(made))
    assert sum("Secret registry" in problem for problem in found) == 4, "one that nobody has declared is missing"


def test_keys_of_a_store_are_variables_of_what_trains_and_stand_in_no_manifest(config: RunConfig) -> None:
    options = Options(env_secret="s3-keys", overlays=frozenset({"spot"}))
    made = documents(config, options, "job")
    cluster = cluster_of(made)
    pods = [cluster["headGroupSpec"]["template"]["spec"], *(group["template"]["spec"] for group in cluster["workerGroupSpecs"])]
    assert len(pods) == 3
    for pod in pods:
        assert [c.get("envFrom") for c in pod["containers"]] == [[{"secretRef": {"name": "s3-keys"}}]]
    assert str(made).count("s3-keys") == 3, "neither the autoscaler nor the submitter needs them"
    found = list(reference_problems(made))
    assert sum("Secret s3-keys" in problem for problem in found) == 3, "one that nobody has declared is missing"
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


def test_what_yaml_readers_disagree_on_is_quoted() -> None:
    """YAML 1.1 reads on, 0x10 and 1:30 as other things than text, YAML 1.2 and Go's readers 1e3 and 0o7."""
    words = ["on", "NO", "1e3", "0o7", "0x10", "1:30", "null", "~", "", "- x", "a: b", "a #b", "x\ny\n", "1_000", "=", ".5", "1Gi", "v1"]
    text = to_yaml([{"list": [{"value": word} for word in words]}, {"kept": Why("v", "because\n  as it is")}], "head")
    assert [one["value"] for one in next(iter(yaml.safe_load_all(text)))["list"]] == words
    for word in ("on", "NO", "1e3", "0o7", "0x10", "1:30", "null", "1_000"):
        assert f'"{word}"' in text
    assert "# because\n#   as it is\nkept: v" in text


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


_texts = st.text(max_size=12) | st.text(alphabet="a1eE.:#-'\"\\ \n\t|>&*!%@`{}[],?~=_", max_size=10)
_scalars = st.none() | st.booleans() | st.integers() | _texts | _texts.map(lambda text: text + "\n")
_trees = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(_texts, inner, max_size=7)
        | inner.map(lambda value: value if isinstance(value, Why) else Why(value, "why\n# so"))
    ),
    max_leaves=12,
)


@settings(max_examples=100)
@given(st.dictionaries(_texts, _trees, min_size=1, max_size=4))
def test_whatever_is_written_reads_back(tree: dict[str, Any]) -> None:
    text = to_yaml([tree, {"x": tree}], "of two documents")
    assert list(yaml.safe_load_all(text)) == [plain(tree), {"x": plain(tree)}]  # PyYAML's own reader; the code asks libyaml's


# ---------------------------------------------------------------------------------------------------------------- mistakes


def complaints(catcher: str, bundle: Documents) -> list[str]:
    match catcher:
        case "fields":
            shapes = [problem for one in bundle for problem in shape_problems(one)]
            return shapes or [problem for one in bundle for problem in field_problems(one)]
        case "kubernetes":
            return [problem for one in bundle for problem in (*document_problems(one), *field_problems(one, core_problems))]
        case "rules":
            return [problem for one in bundle for problem in rule_problems(one)]
        case _:
            return list(reference_problems(bundle))


def test_the_manifest_that_mistakes_are_put_into_has_none(bundle: Documents) -> None:
    for catcher in ("fields", "kubernetes", "rules", "references"):
        assert complaints(catcher, bundle) == []


ALL_MISTAKES = [*MISTAKES, *OPERATORS_MISTAKES]


@pytest.mark.parametrize("mistake", ALL_MISTAKES, ids=[f"{one.catcher}: {one.what}" for one in ALL_MISTAKES])
def test_a_mistake_is_caught(mistake: Mistake, bundle: Documents) -> None:
    mistake.spoil(bundle)
    found = complaints(mistake.catcher, bundle)
    assert any(mistake.words in problem for problem in found), found
    for problem in found if mistake.catcher != "kubernetes" else []:
        assert "\n" not in problem and not problem.endswith("."), "one sentence, as the command line shows it"


@pytest.mark.parametrize("kind", ["job", "cluster"])
def test_nothing_is_rendered_that_breaks_a_rule(kind: str, config: RunConfig) -> None:
    with pytest.raises(ManifestError, match="characters"):
        render(config, Options(name="a" * 54), kind)
    with pytest.raises(ManifestError, match="no fixed tag"):
        render(config, Options(image="train:latest"), kind)


def test_the_longest_name_that_kuberay_takes_is_taken(config: RunConfig) -> None:
    assert the(documents(config, Options(name="a" * 47), "job"), "RayJob")["metadata"]["name"] == "a" * 47
