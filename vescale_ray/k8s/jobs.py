"""What KubeRay's operator refuses of a RayJob, and what would leave a job without its checkpoint, its retry or its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from vescale_ray.k8s.starts import setting_problems
from vescale_ray.k8s.values import is_secret

Tree = Mapping[str, Any]
LEAST_STOP_S = 30
"""For a checkpoint of a run that is small; Ray's own are 3."""
LEAST_START_S = 60
"""For pods to find nodes, and nodes to fetch the image."""
LONGEST_KEPT_S = 86_400
"""For a cluster without a job: a day to look at it."""
_ORDER = ("DeleteWorkers", "DeleteCluster", "DeleteSelf")


def job_problems(spec: Tree) -> Iterator[str]:
    """One sentence for each rule that a RayJob's spec breaks; its cluster is looked at elsewhere."""
    mode, selector, cluster = spec.get("submissionMode", "K8sJobMode"), spec.get("clusterSelector"), spec.get("rayClusterSpec")
    shutdown, rules = spec.get("shutdownAfterJobFinishes", False), (spec.get("deletionStrategy") or {}).get("deletionRules")
    if spec.get("suspend") and not shutdown:
        yield "suspend: true needs shutdownAfterJobFinishes: true"
    if spec.get("ttlSecondsAfterFinished", 0) > 0 and not shutdown:
        yield "ttlSecondsAfterFinished needs shutdownAfterJobFinishes: true"
    if rules is not None and shutdown:
        yield "deletionRules and shutdownAfterJobFinishes exclude each other"
    if rules is not None:
        yield from _deletion(rules, autoscaling=bool(cluster and cluster.get("enableInTreeAutoscaling")), selects=bool(selector))
    if not cluster and not selector:
        yield "a RayJob needs rayClusterSpec or clusterSelector"
    if selector and not selector.get("ray.io/cluster"):
        yield "clusterSelector has no ray.io/cluster: the operator takes the cluster's name from it"
    if not selector:
        yield from _ends(spec, mode)
    if selector and spec.get("suspend"):
        yield "clusterSelector excludes suspend"
    if selector and spec.get("backoffLimit", 0) > 0:
        yield "clusterSelector excludes backoffLimit"
    if selector and mode == "SidecarMode":
        yield "clusterSelector excludes SidecarMode"
    if mode == "InteractiveMode" and spec.get("backoffLimit", 0) > 0:
        yield "InteractiveMode excludes backoffLimit"
    if mode == "SidecarMode":
        for field in ("submitterPodTemplate", "submitterConfig"):
            if field in spec:
                yield f"SidecarMode excludes {field}"
        if cluster and cluster["headGroupSpec"]["template"]["spec"].get("restartPolicy", "Never") != "Never":
            yield "SidecarMode needs restartPolicy: Never on the head"
    if mode != "InteractiveMode" and not str(spec.get("entrypoint", "")).strip():
        yield "a RayJob that submits needs an entrypoint"
    if mode == "K8sJobMode" and not (spec.get("submitterConfig") or {}).get("backoffLimit", 2):
        yield "submitterConfig.backoffLimit is 0: a submitter that is evicted would end a job that is well"
    if mode == "K8sJobMode":
        yield from _submitter(spec.get("submitterPodTemplate"))
    yield from _runtime_env(spec.get("runtimeEnvYAML", ""))


def _submitter(template: Tree | None) -> Iterator[str]:
    if template is None:
        yield "submitterPodTemplate is missing: the operator's own has neither the labels nor the rights that reach the head"
    elif template["spec"].get("restartPolicy") not in ("Never", "OnFailure"):
        yield "submitterPodTemplate: a pod of a Job needs restartPolicy: Never or OnFailure"


def _ends(spec: Tree, mode: str) -> Iterator[str]:
    """A cluster of the job's own: what becomes of it, and of a job that has lost its head."""
    if not spec.get("shutdownAfterJobFinishes"):
        rules = (spec.get("deletionStrategy") or {}).get("deletionRules") or ()
        ended = [rule["condition"] for rule in rules if rule["policy"] in ("DeleteCluster", "DeleteSelf")]
        kept = "its pods would stay, and cost"
        for key, state, when in (("jobStatus", "SUCCEEDED", "succeeded"), ("jobDeploymentStatus", "Failed", "failed")):
            times = [one.get("ttlSeconds", 0) for one in ended if one.get(key) == state]
            if not times:
                yield f"nothing deletes the cluster of a job that has {when} ({key} {state}): {kept}"
            elif min(times) > LONGEST_KEPT_S:
                yield f"the cluster of a job that has {when} ({key} {state}) is deleted after {min(times)} s: {kept}, for more than a day"
    elif spec.get("ttlSecondsAfterFinished", 0) > LONGEST_KEPT_S:
        yield f"ttlSecondsAfterFinished {spec['ttlSecondsAfterFinished']}: its pods would stay, and cost, for more than a day"
    if mode != "InteractiveMode" and not spec.get("backoffLimit"):
        yield "backoffLimit is 0: a run whose head is lost would not be taken up again"
    start, whole = spec.get("preRunningDeadlineSeconds"), spec.get("activeDeadlineSeconds")
    if start is not None and start < LEAST_START_S:
        yield f"preRunningDeadlineSeconds is {start}: less than {LEAST_START_S} s are too few for pods to start"
    if whole is not None and whole < LEAST_START_S:
        yield f"activeDeadlineSeconds is {whole}: less than {LEAST_START_S} s are too few for pods to start; give more (--deadline-s)"
    if start is not None and whole is not None and whole <= start:
        yield f"activeDeadlineSeconds {whole} is over before the preRunningDeadlineSeconds of {start} are"


def _deletion(rules: Sequence[Tree], autoscaling: bool, selects: bool) -> Iterator[str]:
    ttl: dict[str, dict[str, int]] = {}
    if not rules:
        yield "deletionRules is empty: leave deletionStrategy out"
    for index, rule in enumerate(rules):
        policy, when = rule["policy"], rule["condition"]
        states = [f"{key} {when[key]}" for key in ("jobStatus", "jobDeploymentStatus") if key in when]
        if len(states) != 1:
            yield f"deletionRules[{index}]: a condition names either jobStatus or jobDeploymentStatus"
            continue
        if policy == "DeleteWorkers" and (autoscaling or selects):
            yield f"deletionRules[{index}]: DeleteWorkers excludes {'autoscaling' if autoscaling else 'clusterSelector'}"
        if policy == "DeleteCluster" and selects:
            yield f"deletionRules[{index}]: DeleteCluster excludes clusterSelector"
        known = ttl.setdefault(states[0], {})
        if policy in known:
            yield f"deletionRules[{index}]: {policy} for {states[0]} is there twice"
        known[policy] = when.get("ttlSeconds", 0)
    for state, known in ttl.items():
        times = [(known[policy], policy) for policy in _ORDER if policy in known]
        for (earlier, first), (later, second) in zip(times, times[1:], strict=False):
            if later < earlier:
                yield f"deletionRules: {second} after {later} s for {state} comes before {first} after {earlier} s"


def _runtime_env(text: str) -> Iterator[str]:
    try:
        env = yaml.safe_load(text) or {}
    except yaml.YAMLError:
        yield "runtimeEnvYAML is not valid YAML"
        return
    if not isinstance(env, dict):
        yield "runtimeEnvYAML holds no mapping"
        return
    for key in sorted(set(map(str, env)) - {"env_vars", "config"}):
        yield f"runtimeEnvYAML has {key}: nothing is fetched or installed at run time; put it into the image"
    variables = env.get("env_vars") or {}
    if not isinstance(variables, dict):
        yield "runtimeEnvYAML.env_vars holds no mapping"
        return
    if "RAY_ADDRESS" in variables:
        yield "runtimeEnvYAML.env_vars.RAY_ADDRESS: Ray sets it, to the cluster that the job is in"
    if variables.get("RAY_AUTH_MODE", "token") != "token":
        yield f"runtimeEnvYAML.env_vars.RAY_AUTH_MODE {variables['RAY_AUTH_MODE']} undoes authOptions: leave it out"
    if not all(isinstance(value, str) for value in variables.values()):
        yield "runtimeEnvYAML.env_vars: values must be texts, numbers in quotes"
    yield from setting_problems("runtimeEnvYAML.env_vars", {str(name): str(value) for name, value in variables.items()})
    for name in filter(is_secret, map(str, variables)):
        yield f"runtimeEnvYAML.env_vars.{name} is a secret in plain text: take it from a Secret (--env-secret)"
    wait = str(variables.get("RAY_JOB_STOP_WAIT_TIME_S", ""))
    if not wait.isdigit() or int(wait) < LEAST_STOP_S:
        yield f"runtimeEnvYAML.env_vars.RAY_JOB_STOP_WAIT_TIME_S: in less than {LEAST_STOP_S} s a job that is stopped makes no checkpoint"
