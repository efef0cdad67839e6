"""The run's configuration: accepted values, refused values, and the messages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from tests.packaging.config_reference import reference
from vescale_ray.config import ConfigError, RunConfig, load_config, parse_config, sections
from vescale_ray.planner.request import choose

ROOT = Path(__file__).resolve().parents[2]


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_key_has_a_default_and_the_file_may_be_empty(tmp_path: Path) -> None:
    empty = tmp_path / "run.yaml"
    empty.write_text("# nothing\n")
    assert load_config(empty) == load_config(None) == RunConfig()


def test_a_file_may_give_only_some_keys_and_an_empty_section(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train:\n  steps: 7\nelastic:\n")
    with pytest.raises(ConfigError, match="elastic"):
        parse_config({"elastic": 3})
    assert load_config(path).train.steps == 7


def test_overrides_beat_the_file_and_the_last_override_wins(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train: {steps: 7, lr: 0.5}\n")
    config = load_config(path, ["train.steps=8", "train.steps=9"])
    assert (config.train.steps, config.train.lr) == (9, 0.5)


def test_an_override_may_hold_a_whole_section() -> None:
    config = load_config(None, ["train={steps: 9, slots: 5}", "train.steps=4"])
    assert (config.train.steps, config.train.slots) == (4, 5)


def test_an_override_may_set_one_key_inside_another() -> None:
    config = load_config(None, ["metrics.wandb={project: p, entity: team}", "metrics.wandb.project=7", "metrics.wandb.mode=online"])
    assert config.metrics.wandb is not None
    assert config.metrics.wandb.model_dump() == {"project": "7", "mode": "online", "entity": "team", "name": None}
    assert load_config(None, ["metrics.wandb={project: p}", "metrics.wandb=null"]).metrics.wandb is None


@pytest.mark.parametrize("text", ["1e-3", "0.001", "1.0e-3", "'1e-3'"])
def test_scientific_notation_is_read_as_a_number(text: str) -> None:
    assert load_config(None, [f"train.lr={text}"]).train.lr == 0.001


def test_text_keys_keep_values_that_yaml_would_convert() -> None:
    given = load_config(None, ["run.name=2026", "metrics.host=::", "data.corpus=1.50", "checkpoint.dir=on", "run.dir='a b'"])
    assert (given.run.name, given.metrics.host, given.data.corpus, given.checkpoint.dir) == ("2026", "::", "1.50", "on")
    assert load_config(None, ["ray.address=[::1]:6379"]).ray.address == "[::1]:6379"
    assert given.run.dir == "a b" and load_config(None, ["checkpoint.dir=null"]).checkpoint.dir is None


def test_corpus_is_a_path_or_a_list_of_paths() -> None:
    assert load_config(None, ["data.corpus=*.parquet"]).data.corpus == "*.parquet"
    assert load_config(None, ["data.corpus=[a.bin, 's3://b/[0-9].bin']"]).data.corpus == ["a.bin", "s3://b/[0-9].bin"]
    assert load_config(None, ["data.end_token=50256"]).data.end_token == "50256"
    for wrong in ("[]", "[a, '']", "[true]", "[[a]]"):
        assert refusal(f"data.corpus={wrong}").endswith("give a path, or a list of paths in brackets")
    assert parse_config(RunConfig().model_dump(mode="json")) == RunConfig()
    assert refusal("data.corpus=[a, 's3://AKIA:hush@b/x']").startswith("data.corpus: credentials do not belong in a URL")


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:hush-hush@bucket/p",
        "s3://hush-hush@bucket/p",
        "s3://AKIA:hush/hush+hush@bucket/p",
        "s3://AKIA:12345/hush@bucket/p",
        "s3://bucket/p?endpoint=http://me:1234567/hush@minio:9000",
        "simplecache::s3://AKIA:hush-hush@bucket/p",
        "s3://bucket/p?secret_key=hush-hush",
        "s3://bucket/p?endpoint=http://me:hush-hush@minio:9000",
        "gs://bucket/p?token=hush-hush",
        "s3://bucket/p?pwd=hush-hush",
        "s3://bucket/p?authorization=hush-hush",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_shown(url: str) -> None:
    """A run writes its URLs to its folder, to a rendered ConfigMap and to the job's log. The refusal must not show credentials either."""
    said = refusal(f"checkpoint.dir={url}")
    assert said.startswith("checkpoint.dir: credentials do not belong in a URL") and "hush" not in said


@pytest.mark.parametrize(
    "given", ["run.dir=s3://AKIA:hush@b/x", "data.corpus=https://me:hush@host/x", "ray.address=ray://me:hush@head:10001"]
)
def test_credentials_in_other_addresses_are_refused_and_hidden(given: str) -> None:
    said = refusal(given)
    assert said.startswith(f"{given.partition('=')[0]}: credentials do not belong in a URL") and "hush" not in said


@pytest.mark.parametrize(
    "url",
    [
        "s3://b/p?endpoint=http://minio:9000/a@b&region=x",
        "s3://b/p?endpoint=http://[::1]/a@b",
        "s3://b/p?endpoint=http://[::1]:9000/a@b",
        "hdfs://namenode:8020/a@b",
        "abfs://c@a.dfs.core.windows.net/p",
        "a@b:c/?key=1",
        "s3://[x",
        "simplecache::s3://b/p?endpoint=http://[::1]:9000",
    ],
)
def test_urls_without_credentials_are_accepted(url: str) -> None:
    assert load_config(None, [f"checkpoint.dir={url}"]).checkpoint.dir == url


def test_null_max_workers_follows_from_slots() -> None:
    config = load_config(None, ["elastic.max_workers=null", "train.slots=5", "elastic.workers=5"])
    assert config.max_workers == 5


def test_resolved_yaml_reads_back_as_an_equal_configuration(tmp_path: Path) -> None:
    config = load_config(
        None, ["train.lr=3e-4", "run.name=x1", "elastic.max_workers=4", "model.units=[layers.*, head]", "train.betas=[0.8, 0.9]"]
    )
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    assert load_config(path) == config
    assert set(yaml.safe_load(config.to_yaml())) == {name for name, _ in sections()}


def test_a_configuration_can_not_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().train.steps = 3  # type: ignore[misc]


def test_derived_sizes_and_folders_follow_from_other_keys() -> None:
    config = load_config(None, ["train.slots=6", "train.slot_batch=4", "data.seq_len=128", "run.dir=~/x", "run.name=a"])
    assert config.global_batch == 24
    assert config.tokens_per_step == 3072
    assert config.run_folder == Path.home() / "x" / "a"
    assert config.checkpoint_root == str(config.run_folder / "checkpoints")
    assert load_config(None, ["checkpoint.dir=/c"]).checkpoint_root == "/c"
    assert load_config(None, ["checkpoint.dir=s3://b/c?region=x"]).checkpoint_root == "s3://b/c?region=x"


SIZES = [
    f"{name}.{key}"
    for name, section in sections()
    for key, field in section.model_fields.items()
    if int in (field.annotation, *get_args(field.annotation)) and "seed" not in key
]


def test_list_of_sizes_holds_the_known_keys() -> None:
    assert {"train.steps", "train.slots", "model.dim", "data.seq_len", "elastic.workers", "checkpoint.keep_last"} <= set(SIZES)


def test_checkpoint_every_takes_a_number_of_steps_or_auto() -> None:
    assert load_config(None, ["checkpoint.every=7"]).checkpoint.every == 7
    config = load_config(None, ["checkpoint.every=auto", "checkpoint.keep_best=2"])
    assert config.checkpoint.every == "auto" and parse_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("key", SIZES)
def test_no_size_may_be_negative_a_fraction_a_word_or_a_boolean(key: str) -> None:
    for value, words in {
        "-1": "give at least",
        "1.5": "give a whole number",
        "many": "give a whole number",
        "true": "boolean",
        "[1]": "number",
    }.items():
        message = refusal(f"{key}={value}")
        assert message.startswith(f"{key} = ") and words in message, message


@pytest.mark.parametrize(
    "key",
    [
        "train.steps",
        "train.slots",
        "train.slot_batch",
        "data.seq_len",
        "model.dim",
        "model.layers",
        "model.heads",
        "model.kv_heads",
        "model.ffn",
        "elastic.workers",
        "elastic.min_workers",
        "elastic.max_workers",
        "checkpoint.keep_last",
    ],
)
def test_zero_is_refused_where_something_must_be_there(key: str) -> None:
    assert refusal(f"{key}=0") == f"{key} = 0: give at least 1"


@pytest.mark.parametrize("key", ["train.lr", "train.eps", "elastic.collective_timeout_s", "metrics.interval_s", "model.rope_theta"])
@pytest.mark.parametrize("value", ["0", "-1", ".nan", ".inf", "fast"])
def test_rates_and_times_must_be_positive_and_finite(key: str, value: str) -> None:
    assert refusal(f"{key}={value}").startswith(f"{key} = ")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["elastic.workers=7"], "elastic.workers = 7 is more than train.slots = 6"),
        (["elastic.max_workers=7"], "elastic.max_workers = 7 is more than train.slots = 6"),
        (["elastic.max_workers=2"], "elastic.workers = 3 is more than elastic.max_workers = 2"),
        (["elastic.standby=7"], "elastic.standby = 7 is more than train.slots = 6: no node loses so many workers; lower elastic.standby"),
        (["elastic.standby=4", "elastic.max_workers=3"], "elastic.standby = 4 is more than elastic.max_workers = 3"),
        (["elastic.standby=-1"], "elastic.standby = -1: give at least 0"),
        (
            ["train.activation_checkpointing=true"],
            "train.activation_checkpointing = true: give one of none, full or selective",
        ),
        (["train.compile=blocks"], "train.compile = blocks: give true or false"),
        (
            ["elastic.deterministic=true", "train.optimizer_options={fused: true}"],
            "elastic.deterministic = true with train.optimizer_options.fused = true: its kernel rounds the last elements of a shard",
        ),
        (
            ["elastic.deterministic=true", "train.optimizer=muon", "train.optimizer_options={normuon: 0.0}"],
            "elastic.deterministic = true with train.optimizer_options.normuon = 0.0: its norm is a sum over the workers' parts",
        ),
        (["elastic.min_workers=4"], "elastic.min_workers = 4 is more than elastic.workers = 3"),
        (["model.heads=3"], "model.heads = 3 does not divide model.dim = 128"),
        (["model.dim=12", "model.heads=4"], "rotation needs an even number"),
        (["model.kv_heads=3"], "model.kv_heads = 3 does not divide model.heads = 4"),
        (["model.units=[]"], "model.units = []"),
        (["train.device=cuda"], "ray.gpus_per_worker=1"),
        (["ray.gpus_per_worker=1.5"], "ray.gpus_per_worker = 1.5: above 1 Ray takes whole GPUs only"),
        (["checkpoint.dir=memory://x"], "checkpoint.dir = memory://x: each process has its own memory"),
        (["train.betas=[0.9]"], "train.betas = [0.9]: give as many entries as the default has"),
        (["train.betas=[0.9, 1.0]"], "train.betas.1 = 1.0: give less than 1"),
        (["train.betas=[0.9, 0.9, 0.9]"], "give a list of at most 2"),
        (["train.completions={every: 5, prompts: []}"], "train.completions.prompts = []: give a list of 1 or more"),
        (["train.optimizer=adam"], "train.optimizer = adam: give one of adamw, adamw8bit, muon, shampoo, soap or sgd"),
        (["run.name=a/b"], "run.name = a/b"),
        (["run.name=.."], "run.name = .."),
        (["run.dir=''"], "run.dir = '': must not be empty"),
        (["model.factory=abc"], "pkg.mod:fn"),
        (["checkpoint.every=often"], "checkpoint.every = often: give a whole number, or auto"),
        (["checkpoint.every=-1"], "checkpoint.every = -1: give at least 0, or auto"),
        (["checkpoint.auto_min_s=10", "checkpoint.auto_max_s=5"], "checkpoint.auto_min_s = 10 is more than checkpoint.auto_max_s = 5"),
        (["train.schedule=step"], "train.schedule = step: give one of cosine, linear, constant or wsd"),
        (["train.quantize=fp4"], "train.quantize = fp4: give fp8, a tile as fp8 32x32, scales as fp8 32x32 power_of_two, or null"),
        (["train.quantize=fp8 0x4"], "train.quantize = fp8 0x4: give fp8"),
        (["train.quantize_keep=['*.up']"], "train.quantize_keep is set, but train.quantize is null: set train.quantize to fp8"),
        (["train.reduce_dtype=fp8", "elastic.deterministic=true"], "train.reduce_dtype = fp8 with elastic.deterministic = true: "),
        (["train.quantize_products=true"], "train.quantize_products is true, but train.quantize is null: set train.quantize to fp8"),
        (["train.decay_steps=5"], "train.decay_steps = 5 with train.schedule = cosine: only wsd has a final decay"),
        (
            ["train.schedule=wsd", "train.steps=100", "train.decay_steps=81"],
            "train.warmup_steps = 20 and train.decay_steps = 81 are more than train.steps = 100",
        ),
        (["train.early_stop=3"], "train.early_stop = 3: give keys and values in braces"),
        (["train.early_stop={min_delta: 0.1}", "train.eval_every=5"], "train.early_stop.patience must be given"),
        (["train.early_stop={patience: 0}", "train.eval_every=5"], "train.early_stop.patience = 0: give at least 1"),
        (["train.early_stop={patience: 2, min_delta: -1}", "train.eval_every=5"], "train.early_stop.min_delta = -1: give at least 0"),
        (["train.early_stop={patience: 2}"], "train.early_stop with train.eval_every = 0: there is no heldout_loss to go by"),
        (["checkpoint.keep_best=1", "checkpoint.keep_metric=heldout_loss", "data.heldout=0"], "checkpoint.keep_best with data.heldout = 0"),
        (["train.early_stop={patience: 2}", "train.eval_every=5", "data.heldout=0"], "train.early_stop with data.heldout = 0"),
        (["train.early_stop={patience: 2, metric: wiki_loss}"], "train.early_stop.metric = wiki_loss: give one of heldout_loss"),
        (["train.profile=5"], "train.profile = 5: give keys and values in braces"),
        (["train.profile.steps=2"], "train.profile.step must be given"),
        (["train.profile={step: 0}"], "train.profile.step = 0: give at least 1"),
        (["train.profile={step: 5, ranks: [-1]}"], "train.profile.ranks.0 = -1: give at least 0"),
        (["train.profile={step: 5, ranks: []}"], "train.profile.ranks = []: give at least one rank"),
        (["train.profile={step: 5, ranks: [0, 6]}"], "train.profile.ranks = [0, 6]: there are at most 6 workers"),
        (["train.profile={step: 199}"], "train.profile = {step: 199, steps: 3} ends after train.steps = 200"),
        (["checkpoint.keep_mode=low"], "checkpoint.keep_mode = low: give one of min or max"),
        (["metrics.tensorboard=logs"], "metrics.tensorboard = logs: give true or false"),
        (["metrics.wandb=p"], "metrics.wandb = p: give keys and values in braces"),
        (["metrics.wandb=true"], "metrics.wandb = true: give keys and values in braces, with project, mode, entity, name"),
        (["metrics.wandb={mode: online}"], "metrics.wandb.project must be given"),
        (["metrics.wandb.projct=p"], "unknown key metrics.wandb.projct: did you mean metrics.wandb.project?"),
        (["metrics.wandb={project: p, mode: disabled}"], "metrics.wandb.mode = disabled: give one of offline or online"),
        (["metrics.port.x=1"], "unknown key metrics.port.x"),
        (["metrics.port=65536"], "metrics.port = 65536: give at most 65535"),
        (["data.heldout=0.95"], "data.heldout = 0.95: give at most 0.9"),
        (["train.steps=-1", "train.lr=-1"], "train.steps = -1: give at least 1; train.lr = -1: give more than 0"),
        (["train.steps"], "write section.key=value"),
        (["=3"], "write section.key=value"),
        (["train.lr=["], "not valid YAML"),
        (["train.steps=!!python/object:os.system x"], "not valid YAML"),
        (["train={steps: 1, steps: 2}"], "key 'steps' is given twice"),
    ],
)
def test_unfit_values_are_refused_in_one_line_that_names_them(overrides: list[str], words: str) -> None:
    assert words in refusal(*overrides)


def test_model_factory_skips_the_llama_rules() -> None:
    assert load_config(None, ["model.factory=pkg.mod:make", "model.heads=3"]).model.factory == "pkg.mod:make"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"train: [1, 2]\n", "train is a section"),
        (b"- 1\n", "holds a list"),
        (b"train: {steps: 3\n", "line 2: not valid YAML"),
        (b"train:\n  steps: 1\n  steps: 2\n", "line 3: not valid YAML: key 'steps' is given twice"),
        (b"\xff\xfe\x00", "is not text"),
        (b"train: " + b"{x: " * 3000, "nested too deeply to be read; give sections of keys and values"),
        (rb'run: {dir: "a\0b"}', r"run.dir = 'a\x00b': it has a character that no path can have; leave it out"),
        (rb'data: {corpus: "a\ud800b"}', "data.corpus = a\ud800b: give a text"),
    ],
)
def test_malformed_file_is_refused_with_its_path_and_line(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    if b"[" not in content and b'"' not in content:
        assert str(path) in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; give the path"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"is a folder; .*config\.yaml"):
        load_config(tmp_path)


CONFIGS = sorted((ROOT / "vescale_ray" / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configurations_that_come_with_the_package_are_valid(path: Path) -> None:
    load_config(path)
    assert len(CONFIGS) == 7


PLANNED = [(p.stem, found[1]) for p in CONFIGS if (found := re.search(r"plan --model (\S+) --devices", p.read_text(encoding="utf-8")))]


@pytest.mark.parametrize(("name", "model"), PLANNED)
def test_the_least_number_of_workers_has_the_memory(name: str, model: str) -> None:
    """The plans for the fewest GPUs of the job file, and for those it starts with, fit in 80 GB."""
    text = (ROOT / "vescale_ray" / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    config = load_config(ROOT / "vescale_ray" / "configs" / f"{name}.yaml")
    fewest = config.elastic.min_workers
    assert f"--devices {fewest}" in text and config.train.param_dtype == "bfloat16"
    tokens = config.train.slot_batch * config.data.seq_len
    for workers in (fewest, config.elastic.workers):
        groups = (config.grid(workers).shards,)
        assert choose(model, workers, hardware="h100", optimizer=config.train.optimizer, groups=groups, tokens=tokens).best is not None


def test_every_key_is_documented() -> None:
    for name, section in sections():
        for key, field in section.model_fields.items():
            assert field.description, f"{name}.{key}"


def test_reference_page_matches_the_code() -> None:
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    assert page == reference(), "run: python -m tests.packaging.config_reference > docs/reference/configuration.md"
