"""``vescale-ray k8s render`` prints manifests that can be applied. If it refuses an input, it says so in one sentence."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path

import click
import pytest
import yaml

from vescale_ray.cli import main
from vescale_ray.cli.kubernetes_commands import k8s
from vescale_ray.k8s import KINDS, OVERLAYS, Options

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = str(Path(inspect.getfile(main)).parent.parent / "configs" / "cluster.yaml")


def said(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["k8s", "render", *args])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_defaults_are_the_committed_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, CLUSTER) == (0, (ROOT / "deploy" / "kuberay" / "rayjob.yaml").read_text(), "")


def test_overrides_reach_the_run_in_the_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, CLUSTER, "train.steps=7", "--name", "x7", "--kind", "cluster")
    documents = {one["kind"]: one for one in yaml.safe_load_all(out)}
    assert code == 0 and documents["RayCluster"]["metadata"]["name"] == "x7"
    assert yaml.safe_load(documents["ConfigMap"]["data"]["run.yaml"])["train"]["steps"] == 7


@pytest.mark.parametrize("kind", KINDS)
def test_json_list_holds_the_documents_of_the_yaml(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = said(capsys, CLUSTER, "--kind", kind)
    code, out, _ = said(capsys, CLUSTER, "--kind", kind, "--json")
    one = json.loads(out)
    assert code == 0 and (one["apiVersion"], one["kind"]) == ("v1", "List")
    assert one["items"] == list(yaml.safe_load_all(text))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["none.yaml"], "none.yaml: no such file"),
        (["train.steps=5"], "give the run's YAML file first"),
        ([CLUSTER, "trian.steps=5"], "did you mean train.steps?"),
        ([CLUSTER, "--kind", "pod"], "'pod' is not one of"),
        ([CLUSTER, "--overlay", "spott"], "--overlay spott: give one of spot, kueue, gcs-ft"),
        ([CLUSTER, "--overlay", "kueue"], "give the local queue as --queue NAME"),
        ([CLUSTER, "--queue", "q"], "add --overlay kueue"),
        ([CLUSTER, "--overlay", "gcs-ft"], "give the Redis that keeps Ray's state"),
        ([CLUSTER, "--redis", "r:1"], "add --overlay gcs-ft"),
        ([CLUSTER, "--kind", "setup", "--overlay", "spot"], "overlays change a job or a cluster"),
        ([CLUSTER, "--overlay", "spot", "elastic.min_workers=16", "elastic.workers=16"], "none may be pre-empted"),
        ([CLUSTER, "--name", "a" * 48], "has 48 characters: a RayJob takes 47 at most; give a shorter one with --name"),
        ([CLUSTER, "--name", "Big_Run"], "give lower-case letters"),
        ([CLUSTER, "--kind", "cluster", "--name", "a" * 51], "the operator cuts it to 50"),
        ([CLUSTER, "--image", "train"], "has no fixed tag"),
        ([CLUSTER, "--memory", "64G"], "--memory 64G: give a whole size with its unit"),
        ([CLUSTER, "--shm", "64Gi"], "--shm 64Gi is not less than --memory 64Gi"),
        ([CLUSTER, "--gpus", "0"], "--gpus 0 is less than ray.gpus_per_worker = 1"),
        ([CLUSTER, "--gpus", "8", "--cpus", "16"], "--cpus 16 is less than 8 workers of ray.cpus_per_worker = 4 need"),
        ([CLUSTER, "--gpus", "1", "ray.gpus_per_worker=0", "train.device=cpu"], "no worker would use them"),
        ([CLUSTER, "--drain-s", "0"], "0 is not in the range"),
        ([CLUSTER, "--spot-label", "spot"], "--spot-label spot: write KEY=VALUE"),
        ([CLUSTER, "--spot-label", "a b=c"], "--spot-label a b=c: write KEY=VALUE"),
        ([CLUSTER, "--spot-label", "karpenter.sh/capacity-typ=spot"], "did you mean karpenter.sh/capacity-type?"),
        ([CLUSTER, "--service-account", "a" * 51], "the operator cuts it to 50"),
        ([CLUSTER, "--runbooks", "https://x/é"], "in ASCII and without a #"),
        ([CLUSTER, "--namespace", "Team A"], "--namespace Team A: give lower-case letters"),
        ([CLUSTER, "--claim", "My_Claim"], "--claim My_Claim: give lower-case letters"),
        ([CLUSTER, "--overlay", "kueue", "--queue", "my queue"], "--queue my queue: give the name of a local queue"),
        ([CLUSTER, "--overlay", "kueue", "--queue", "Team_A"], "--queue Team_A: give the name of a local queue: lower-case letters"),
        ([CLUSTER, "--overlay", "gcs-ft", "--redis", "redis"], "--redis redis: give HOST:PORT"),
        ([CLUSTER, "--grafana", "grafana:3000"], "--grafana grafana:3000: give a URL"),
        ([CLUSTER, "--image", "a b:1"], "holds a blank"),
        ([CLUSTER, "metrics.port=80"], "only root could listen there"),
        ([CLUSTER, "--mount", "shared"], "--mount shared: give an absolute folder"),
        ([CLUSTER, "--mount", "/data"], "run.dir = /mnt/shared/runs is not on the volume that all pods share"),
        ([CLUSTER, "checkpoint.dir=/scratch/ck"], "checkpoint.dir = /scratch/ck is not on the volume"),
        ([CLUSTER, "metrics.port=0"], "set metrics.port=9464"),
        ([CLUSTER, "metrics.port=8265"], "metrics.port = 8265: Ray's own processes on the head may take it"),
        ([CLUSTER, "metrics.host=127.0.0.1"], "set metrics.host=0.0.0.0"),
        ([CLUSTER, "ray.address=ray://head:10001"], "set ray.address=auto"),
        ([CLUSTER, "metrics.host=10.0.0.1"], "pods get their addresses later"),
        ([CLUSTER, "metrics.port=52365"], "Ray's own processes on the head may take it"),
        ([CLUSTER, "metrics.port=10002"], "Ray's own processes on the head may take it"),
        ([CLUSTER, "--mount", "/mnt/a:b"], "--mount /mnt/a:b: give an absolute folder of its own, without ':'"),
        ([CLUSTER, "--mount", "/mnt/../tmp"], "--mount /mnt/../tmp: give an absolute folder of its own"),
        ([CLUSTER, "--mount", "/etc/vescale-ray/"], "--mount /etc/vescale-ray/: give an absolute folder of its own"),
        ([CLUSTER, "--mount", "/etc/vescale-ray/in"], "--mount /etc/vescale-ray/in: give an absolute folder of its own"),
        ([CLUSTER, "--mount", "/usr/local"], "--mount /usr/local: give an absolute folder of its own"),
        ([CLUSTER, "--mount", "/proc"], "--mount /proc: give an absolute folder of its own"),
        ([CLUSTER, "--image", "registry.example.com/Vescale:1"], "registry.example.com/Vescale:1 is not an image's name: give"),
        ([CLUSTER, "--image", "é:1"], "é:1 is not an image's name: give"),
        ([CLUSTER, "--shm", "1Mi"], "--shm 1Mi: Ray's object store gets half of it, and starts with no less than 75 MiB; give 150Mi"),
        ([CLUSTER, "--prometheus", "http://u:pw@p:9090"], "--prometheus: a manifest is no place for a password"),
        ([CLUSTER, "run.dir=/mnt/shared/../scratch"], "run.dir = /mnt/shared/../scratch is not on the volume"),
        ([CLUSTER, "run.dir=/mnt/shared2"], "run.dir = /mnt/shared2 is not on the volume"),
        ([CLUSTER, "run.dir=runs"], "run.dir = runs is not on the volume"),
        ([CLUSTER, "run.dir=file:///mnt/shared/runs"], "run.dir = file:///mnt/shared/runs: is read as a file or folder"),
        ([CLUSTER, "checkpoint.dir=file:///scratch/ck"], "checkpoint.dir = file:///scratch/ck is not on the volume"),
        ([CLUSTER, "data.corpus=file:///tmp/text"], "data.corpus = file:///tmp/text is not on the volume that all pods share"),
        ([CLUSTER, "data.eval={w: {corpus: /tmp/w}}"], "data.eval.w.corpus = /tmp/w is not on the volume that all pods share"),
        ([CLUSTER, "checkpoint.dir=s3://b/p?endpoint=http://minio:99999"], "the endpoint's port is invalid"),
        ([CLUSTER, "checkpoint.dir=s3://bkt/p?endpoint_url=http://minio:9000"], "option 'endpoint_url' is not possible: known are"),
        ([CLUSTER, "checkpoint.dir=s3://bucket/p?endpoint=minio:9000"], "give http://host:port or https://host:port"),
        ([CLUSTER, "checkpoint.dir=s3:///p"], "is not of the form s3://bucket/prefix"),
        ([CLUSTER, "checkpoint.dir=s3://b/p"], "is not of the form s3://bucket/prefix"),
        ([CLUSTER, "checkpoint.dir=s4://bucket/p"], "s4:// is unknown to fsspec"),
        ([CLUSTER, "checkpoint.dir=local:///scratch/ck"], "checkpoint.dir = local:///scratch/ck is not on the volume"),
        ([CLUSTER, "--overlay", "gcs-ft", "--redis", "redis:99999"], "--redis redis:99999: its port is invalid"),
        ([CLUSTER, "--prometheus", "http://p:0"], "--prometheus http://p:0: its port is invalid"),
        ([CLUSTER, "--name", ""], "--name is empty"),
        ([CLUSTER, "--memory", "9999999999Ti"], "--memory 9999999999Ti: give a size from 1Gi to 64Ti"),
        ([CLUSTER, "--head-memory", "16Ki"], "--head-memory 16Ki: give a size from 1Gi"),
        ([CLUSTER, "--scratch", "1Ki"], "--scratch 1Ki: give a size from 256Mi"),
        ([CLUSTER, "--kind", "setup", "--volume-size", "99999999Ti"], "--volume-size 99999999Ti: give a size from 1Gi to"),
        ([CLUSTER, "--head-cpus", "100000"], "--head-cpus 100000: no node has more than 4096"),
        ([CLUSTER, "--cpus", "100000"], "a worker pod would have 100000 CPUs, and no node has more than 4096: lower --cpus"),
        ([CLUSTER, "--gpus", "999999"], "a worker pod would have 999999 GPUs, and no node has more than 128: lower --gpus"),
        ([CLUSTER, "ray.cpus_per_worker=100000"], "a worker pod would have 100002 CPUs"),
        ([CLUSTER, "--drain-s", "99999999999"], "give at most 86400"),
        ([CLUSTER, "train.slots=1000000", "elastic.max_workers=null"], "makes 1,000,000 pods, and a cluster takes 150,000 at most"),
        ([CLUSTER, "ray.cpus_per_worker=0", "ray.gpus_per_worker=0", "train.device=cpu"], "on the head as well; set ray.cpus_per_worker=1"),
        ([CLUSTER, "--overlay", "gcs-ft", "--redis", "redis://:hush@r:1"], "--redis: a manifest is no place for a password"),
        ([CLUSTER, "--runbooks", "https://me:hush@wiki/r.md"], "--runbooks: a manifest is no place for a password"),
        ([CLUSTER, "--grafana", "http://me:hu/sh@g:3000"], "--grafana: a manifest is no place for a password"),
        ([CLUSTER, "--pull-secret", "My Secret"], "--pull-secret My Secret: give lower-case letters"),
        ([CLUSTER, "--env-secret", "Keys"], "--env-secret Keys: give lower-case letters"),
        ([CLUSTER, "--namespace", "kube-system"], "--namespace kube-system: names that begin with kube- are Kubernetes' own"),
        ([CLUSTER, "--deadline-s", "50"], "--deadline-s 50: less than 60 s are too few"),
        ([CLUSTER, "checkpoint.resume=never"], "would begin with its first step; set it to auto"),
        ([CLUSTER, "train.device=cpu"], "which they would not use: set ray.gpus_per_worker=0"),
    ],
)
def test_render_refuses_broken_rules_in_one_sentence(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, *args)
    assert (code, out) == (2, "")
    assert words in err and err.startswith("vescale-ray: ") and err.count("\n") == 1 and "hush" not in err


def test_every_option_has_a_flag_with_the_same_default_and_a_use() -> None:
    command = k8s.commands["render"]
    flags = {param.name: param for param in command.params if isinstance(param, click.Option)}
    beside = {"kind", "as_json"}  # parameters of the command, not options of the manifests
    assert flags.keys() - beside == {field.name for field in fields(Options)}
    given = command.make_context("render", ["run.yaml"]).params
    defaults = {field.name: field.default for field in fields(Options) if field.name != "overlays"}
    assert {name: given[name] for name in defaults} == defaults and given["overlays"] == ()
    assert set(str(flags["overlays"].metavar).split("|")) == set(OVERLAYS)
    kinds = flags["kind"].type
    assert isinstance(kinds, click.Choice) and tuple(kinds.choices) == KINDS


def test_the_example_in_the_help_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["k8s", "render", "--help"]) == 0
    example = capsys.readouterr().out.partition("Example: vescale-ray k8s render run.yaml ")[2].partition("|")[0].split()
    code, out, _ = said(capsys, CLUSTER, *example)
    assert code == 0 and example[1] in out and "groupName: spot" in out
