"""The section ``data``: mixtures and evaluation sets, their paths, and one line for each mistake."""

from __future__ import annotations

import pytest

from vescale_ray.config import load_config, read_config
from vescale_ray.config.sections import ConfigError

MIXTURE = "data.mixture=[{corpus: a.parquet, weight: 0.7}, {corpus: [b.bin, c.bin], format: bin, weight: 3e-1}]"
SETS = "data.eval={wiki: {corpus: w.parquet, column: body}, code-2: {corpus: stdlib}}"


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_sources_take_what_they_leave_out_from_the_section() -> None:
    data = load_config(None, [MIXTURE, SETS, "data.column=ids", "data.end_token=7"]).data
    assert data.corpus is None and data.mixture is not None
    assert [source.weight for source in data.mixture] == [0.7, 0.3]
    first, second = map(data.of, data.mixture)
    assert (first.corpus, first.format, first.column, first.end_token) == ("a.parquet", "auto", "ids", "7")
    assert (second.corpus, second.format, second.mixture, second.eval) == (["b.bin", "c.bin"], "bin", None, {})
    assert data.of(data.eval["wiki"]).column == "body"
    assert data.corpora == [
        ("data.mixture.0.corpus", "a.parquet"),
        ("data.mixture.1.corpus", "b.bin"),
        ("data.mixture.1.corpus", "c.bin"),
        ("data.eval.wiki.corpus", "w.parquet"),
        ("data.eval.code-2.corpus", "stdlib"),
    ]


def test_the_resolved_form_reads_back_to_an_equal_value() -> None:
    for overrides in ([], [MIXTURE], [SETS], [MIXTURE, SETS]):
        config = load_config(None, overrides)
        assert read_config(config.to_yaml(), "config.yaml") == config
    resolved = load_config(None, [MIXTURE]).to_yaml()
    assert read_config(resolved, "config.yaml", ["data.mixture=null", "data.corpus=x.txt"]).data.corpus == "x.txt"
    assert load_config(None, [SETS, "data.eval=null"]).data.eval == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("data.mixture=[]", "data.mixture: give a list of sources, for example [{corpus: a.parquet, weight: 0.7}"),
        ("data.mixture={corpus: a}", "data.mixture: give a list of sources"),
        ("data.mixture=[a.parquet]", "data.mixture.0: give keys and values in braces"),
        ("data.mixture=[{corpus: a}, {weight: 1}]", "data.mixture.1.corpus: is missing; give a path"),
        ("data.mixture=[{corpus: [], weight: 1}]", "data.mixture.0.corpus = []: give a path"),
        ("data.mixture=[{corpus: a, weight: -1}]", "data.mixture.0.weight = -1: give at least 0"),
        ("data.mixture=[{corpus: a, weight: .inf}]", "data.mixture.0.weight = inf: give a finite number"),
        ("data.mixture=[{corpus: a, weight: .nan}]", "data.mixture.0.weight = nan: give a finite number"),
        ("data.mixture=[{corpus: a, weight: yes}]", "data.mixture.0.weight = true: give a value of its own type"),
        ("data.mixture=[{corpus: a, weight: 0}, {corpus: b, weight: 0}]", "data.mixture: all weights are 0; give at least one"),
        ("data.mixture=[{corpus: a, weigth: 1}]", "unknown key data.mixture.0.weigth: did you mean weight?"),
        ("data.mixture=[{corpus: a, tokenizer: t}]", "data.mixture.0.tokenizer: all data of a run share this key; set data.tokenizer"),
        ("data.mixture=[{corpus: a, format: zip}]", "data.mixture.0.format = zip: give one of auto, text"),
        ("data.corpus=null", "data.corpus = null: give a path"),
        ("data.eval=[a]", "data.eval: give sets by name, for example {wiki: {corpus: wiki.parquet}}"),
        ("data.eval={wiki: a.txt}", "data.eval.wiki: give keys and values in braces"),
        ("data.eval={wiki: {}}", "data.eval.wiki.corpus: is missing"),
        ("data.eval={wiki: {corpus: a, weight: 1}}", "unknown key data.eval.wiki.weight: give corpus, format, column"),
        ("data.eval={heldout: {corpus: a}}", "data.eval: 'heldout' can't name a set"),
        ("data.eval={a b: {corpus: a}}", "data.eval: 'a b' can't name a set"),
        ("data.eval={1: {corpus: a}}", "data.eval: 1 can't name a set"),
    ],
)
def test_mistakes_are_refused_in_one_line_that_names_the_source(given: str, words: str) -> None:
    assert refusal(given).startswith(words)


def test_a_corpus_beside_a_mixture_is_refused() -> None:
    assert refusal(MIXTURE, "data.corpus=stdlib") == "data.corpus and data.mixture are both given: leave one out, or set it to null"


@pytest.mark.parametrize("given", ["mixture=[{corpus: 's3://AKIA:hush@b/x'}]", "eval={w: {corpus: 's3://AKIA:hush@b/x', weight: 1}}"])
def test_credentials_in_the_path_of_a_source_are_hidden(given: str) -> None:
    assert "hush" not in refusal(f"data.{given}")
    assert refusal("data.eval={w: {corpus: 's3://AKIA:hush@b/x'}}").startswith("data.eval.w.corpus: credentials do not belong in a URL")
