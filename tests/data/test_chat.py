"""Fine-tuning data: the tokens that count are those written by hand, for templates of several kinds; wrong data is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.data.chats import (
    CHATML,
    LAST_END,
    LATE_SYSTEM,
    MARKED,
    REASONING,
    TWO_ENDS,
    Parts,
    expected,
    said,
    stored,
    write_folder,
    write_rows,
)
from tests.data.sources import dataset, keys, write_jsonl
from vescale_ray.controller.driver.data_warnings import endless
from vescale_ray.data.block_dataset import BlockDataset
from vescale_ray.data.dataset_loading import load_dataset
from vescale_ray.errors import BadInput

pytest.importorskip("transformers")

TALK = said("system: be brief", "user: a question", "assistant: the answer", "user: is it so", "assistant: yes\n it is")
S, E = "<|im_start|>", "<|im_end|>"
TALK_PARTS: Parts = [
    (f"{S}system\nbe brief{E}\n{S}user\na question{E}\n{S}assistant\n", False),
    (f"the answer{E}", True),
    (f"\n{S}user\nis it so{E}\n{S}assistant\n", False),
    (f"yes\n it is{E}", True),
    ("\n", False),
]


def opened(tmp_path: Path, rows: list[Any], template: str | None = CHATML, **changes: Any) -> tuple[BlockDataset, Any]:
    tokenizer = write_folder(tmp_path / "model", template)
    corpus = write_rows(tmp_path / "rows.jsonl", rows)
    given = {"format": "chat", "tokenizer": str(tmp_path / "model" / "tokenizer.json"), "vocab": None, **changes}
    return dataset(corpus, **given), tokenizer


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_answers_and_ends_of_their_turns_count(tmp_path: Path, template: str) -> None:
    made, tokenizer = opened(tmp_path, [{"messages": TALK}, {"messages": TALK[1:3]}], template)
    second = [(f"{S}user\na question{E}\n{S}assistant\n", False), (f"the answer{E}", True), ("\n", False)]
    assert stored(made) == expected(tokenizer, TALK_PARTS + second)


def test_a_window_gives_ignored_targets(tmp_path: Path) -> None:
    made, tokenizer = opened(tmp_path, [{"messages": TALK}] * 3, seq_len=16)
    tokens, counts = expected(tokenizer, TALK_PARTS * 3)
    inputs, targets = made.batch(range(made.num_samples))
    assert made.num_samples == (len(tokens) - 1) // 16 and inputs.dtype == targets.dtype == torch.int64
    assert inputs.flatten().tolist() == tokens[: inputs.numel()]
    wanted = [token if counted else -100 for token, counted in zip(tokens, counts, strict=True)]
    assert targets.flatten().tolist() == wanted[1 : targets.numel() + 1]


def test_a_template_may_hide_earlier_reasoning(tmp_path: Path) -> None:
    talk = [{**one, "reasoning_content": "hm"} if one["role"] == "assistant" else one for one in TALK]
    made, tokenizer = opened(tmp_path, [{"messages": talk}], REASONING)
    shown = [(f"<think>hm</think>{text}" if text.startswith("yes") else text, counts) for text, counts in TALK_PARTS]
    assert stored(made) == expected(tokenizer, shown)


@pytest.mark.parametrize("content", ["yes", "n", "er>"])
def test_the_last_turn_may_end_in_another_way(tmp_path: Path, content: str) -> None:
    talk = said("user: a", f"assistant: {content}", "user: b", f"assistant: {content}")
    made, tokenizer = opened(tmp_path, [{"messages": talk}] * 3, TWO_ENDS)
    parts: Parts = [("[a]", False), (f"<answer>{content}{E}", True), ("[b]", False), (f"<answer>{content}<|end|>", True)]
    assert stored(made) == expected(tokenizer, parts * 3)


def test_a_conversation_may_have_an_end_of_its_own(tmp_path: Path) -> None:
    made, tokenizer = opened(tmp_path, [{"messages": TALK}, {"messages": TALK[:-1]}], LAST_END)
    user = (f"\n{S}user\nis it so{E}\n<|begin|>", False)
    assert stored(made) == expected(tokenizer, [*TALK_PARTS[:-1], ("\n<|begin|>", True), *TALK_PARTS[:2], user])


def test_conversations_with_tools_have_their_template(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{{ tools | length }} tools" + MARKED}]
    tokenizer = write_folder(tmp_path / "model", None, chat_template=templates)
    rows = [{"messages": TALK}, {"messages": TALK, "tools": [{"type": "function", "function": {"name": "f"}}]}]
    made = dataset(write_rows(tmp_path / "a.jsonl", rows), format="chat", tokenizer=str(tmp_path / "model" / "tokenizer.json"), vocab=None)
    assert stored(made) == expected(tokenizer, [*TALK_PARTS, ("1 tools", False), *TALK_PARTS])


def test_a_message_with_calls_counts_without_a_text(tmp_path: Path) -> None:
    template = CHATML.replace("m.content", "(m.content or m.tool_calls[0].function.name)").replace("'assistant']", "'assistant', 'tool']")
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    talk = [*said("user: a"), call, *said("tool: b", "assistant: c")]
    made, tokenizer = opened(tmp_path, [{"messages": talk}], template)
    parts: Parts = [(f"{S}user\na{E}\n{S}assistant\n", False), (f"look{E}", True)]
    parts += [(f"\n{S}tool\nb{E}\n{S}assistant\n", False), (f"c{E}", True), ("\n", False)]
    assert stored(made) == expected(tokenizer, parts)


def test_a_completion_counts_with_its_end(tmp_path: Path) -> None:
    rows = [{"prompt": "a question: ", "completion": "yes"}, {"prompt": "is it", "completion": f" so{E}"}]
    made, tokenizer = opened(tmp_path, rows, None)
    parts = [("<|begin|>a question: ", False), (f"yes{E}", True), ("<|begin|>is it", False), (f" so{E}", True)]
    assert stored(made) == expected(tokenizer, parts)


def test_prompts_of_messages_and_weight_zero_do_not_count(tmp_path: Path) -> None:
    silent = [*TALK[:2], {**TALK[2], "weight": 0}, *TALK[3:]]
    parts = [(text, counts and not text.startswith("the")) for text, counts in TALK_PARTS]
    for template in (CHATML, MARKED):
        made, tokenizer = opened(tmp_path, [{"messages": silent}, {"prompt": TALK[:4], "completion": TALK[4:]}], template)
        tokens, counts = stored(made)
        assert (tokens, counts) == expected(tokenizer, parts * 2)


def test_parquet_gives_the_tokens_of_jsonl(tmp_path: Path) -> None:
    rows = [{"messages": TALK}, {"messages": TALK[:2]}, {"messages": TALK[1:3]}]
    made, _ = opened(tmp_path, rows)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    other = dataset(str(path), format="chat", tokenizer=str(tmp_path / "model" / "tokenizer.json"), vocab=None)
    assert stored(other) == stored(made)
    assert other.describe()["rows_without_answer"] == 1


def test_messages_may_be_json_and_null_in_both_formats(tmp_path: Path) -> None:
    made, _ = opened(tmp_path, [{"messages": TALK}] * 3)
    rows = [{"messages": json.dumps(TALK)}, {"messages": None}, {"messages": json.dumps(TALK)}, {"messages": json.dumps(TALK)}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    write_rows(tmp_path / "json.jsonl", rows)
    for path in (tmp_path / "rows.parquet", tmp_path / "json.jsonl"):
        other = dataset(str(path), format="chat", tokenizer=str(tmp_path / "model" / "tokenizer.json"), vocab=None)
        assert stored(other) == stored(made)
        assert other.describe()["rows_without_answer"] == 1


CALLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ SHOWN }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def calling(arguments: Any, tool: dict[str, Any] | None = None) -> dict[str, Any]:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": arguments}}]}
    return {"messages": [*said("user: a"), call], **({"tools": [tool]} if tool else {})}


def test_fields_of_other_rows_of_parquet_are_not_rendered(tmp_path: Path) -> None:
    rows = [calling({"city": "a"}, {"name": "look", "of": {"city": "text"}}), calling({"n": 1}, {"name": "look", "of": {"n": "number"}})]
    made, _ = opened(tmp_path, rows, CALLS.replace("SHOWN", "c.function.arguments | tojson"))
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    other = dataset(str(path), format="chat", tokenizer=str(tmp_path / "model" / "tokenizer.json"), vocab=None)
    assert stored(other) == stored(made)


@pytest.mark.parametrize("arguments", [{"city": "half \ud83d"}, '{"city": "half \\ud83d"}'], ids=["mapping", "JSON"])
def test_half_a_character_in_arguments_is_named(tmp_path: Path, arguments: Any) -> None:
    rows, template = [{"messages": TALK}, calling(arguments)], CALLS.replace("SHOWN", "c.function.arguments | tojson")
    words = r"(line|row) 2: '\\ud83d' alone is not a character; remove it"
    with pytest.raises(BadInput, match=words):
        opened(tmp_path, rows, template)
    pq.write_table(pa.table({"messages": [json.dumps(row["messages"]) for row in rows]}), tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=words.replace("2", "1")):
        dataset(str(tmp_path / "a.parquet"), format="chat", tokenizer=str(tmp_path / "model" / "tokenizer.json"), vocab=None)


@pytest.mark.parametrize("arguments", [{"city": "a"}, '{"city": "a"}', "{}"])
@pytest.mark.parametrize("shown", ["c.function.arguments | tojson", "c.function.arguments + ''", "c.function.arguments.items() | list"])
def test_arguments_of_calls_are_rendered_as_openai_writes_them(tmp_path: Path, arguments: Any, shown: str) -> None:
    if isinstance(arguments, dict) and "+" in shown:
        pytest.skip("this template wants a text")
    made, tokenizer = opened(tmp_path, [calling(arguments)], CALLS.replace("SHOWN", shown))
    if "items" in shown:
        text = "[]" if arguments == "{}" else "[('city', 'a')]"
    else:
        text = "{}" if arguments == "{}" else '{"city": "a"}'
    assert stored(made) == expected(tokenizer, [(f"{S}user\na{E}\n{S}assistant\n", False), (f"{text}{E}", True), ("\n", False)])


@pytest.mark.parametrize(
    ("template", "ended"),
    [
        (CHATML, 4),
        (CHATML.replace(f"'{E}\n'", f"'{E}' }}}}{{{{ '\n'"), 4),
        (MARKED, 4),
        (MARKED.replace(f"{E}{{% endgeneration %}}", f"{{% endgeneration %}}{E}"), 0),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}", 0),
    ],
    ids=["chatml", "split", "marked", "marked without its end", "no ends"],
)
def test_answers_without_an_end_are_told(tmp_path: Path, template: str, ended: int) -> None:
    made, _ = opened(tmp_path, [{"messages": TALK}] * 2, template)
    warnings = list(endless(made))
    assert made.describe()["answers_with_end"] == ended and len(warnings) == (ended == 0)
    assert all("data.corpus: no answer ends with a special token" in one for one in warnings)


def test_parts_of_text_are_a_text(tmp_path: Path) -> None:
    parts = [{**one, "content": [{"type": "text", "text": text} for text in (one["content"][:2], one["content"][2:])]} for one in TALK]
    made, tokenizer = opened(tmp_path, [{"messages": parts}], "{% set m = '' %}" + CHATML.replace("+ m.content", "+ (m.content | string)"))
    assert stored(made) == expected(tokenizer, TALK_PARTS)


def test_the_first_message_may_be_an_answer_within_its_header(tmp_path: Path) -> None:
    rows = [{"prompt": [], "completion": said("assistant: a")}, {"messages": said("assistant: n", "user: a", "assistant: start")}]
    made, tokenizer = opened(tmp_path, rows)
    parts: Parts = [(f"{S}assistant\n", False), (f"a{E}", True), (f"\n{S}assistant\n", False), (f"n{E}", True)]
    parts += [(f"\n{S}user\na{E}\n{S}assistant\n", False), (f"start{E}", True), ("\n", False)]
    assert stored(made) == expected(tokenizer, parts)


def test_a_completion_goes_on_where_its_prompt_ends(tmp_path: Path) -> None:
    from tokenizers import pre_tokenizers, processors

    tokenizer = write_folder(tmp_path / "model")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # puts a space before a text that stands alone
    special = [("<|begin|>", 2), ("<|im_end|>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A <|im_end|>", special_tokens=special)
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    rows = [{"prompt": "is it (", "completion": "yes"}, {"prompt": "is it", "completion": " so"}]
    corpus = write_rows(tmp_path / "rows.jsonl", rows)
    tokens, counts = stored(dataset(corpus, format="chat", tokenizer=str(tmp_path / "model" / "tokenizer.json"), vocab=None))
    assert tokenizer.decode(tokens, skip_special_tokens=False) == f"<|begin|> is it (yes{E}<|begin|> is it so{E}"
    answers = [token for token, counted in zip(tokens, counts, strict=True) if counted]
    assert tokenizer.decode(answers, skip_special_tokens=False) == f"yes{E} so{E}"


def test_rows_without_an_answer_are_counted_and_left_out(tmp_path: Path) -> None:
    empty = [{"prompt": "a", "completion": " "}, {"messages": said("user: a", "assistant: ")}, {"messages": TALK[:2]}]
    made, tokenizer = opened(tmp_path, [empty[0], {"messages": TALK}, *empty[1:]])
    assert stored(made) == expected(tokenizer, TALK_PARTS)
    told = made.describe()
    assert (told["documents"], told["rows_without_answer"], told["answer_tokens"]) == (4, 3, sum(stored(made)[1]))
    assert told["answers_with_end"] == 2


def test_templates_see_one_date_and_are_part_of_the_identity(tmp_path: Path) -> None:
    dated = "{{ strftime_now('%Y-%m-%d') }}" + CHATML + " "
    made, tokenizer = opened(tmp_path, [{"messages": TALK}], dated)
    assert stored(made) == expected(tokenizer, [("2024-07-26", False), *TALK_PARTS, (" ", False)])
    other, _ = opened(tmp_path, [{"messages": TALK}], dated + " ")
    assert {key for key, value in made.identity().items() if other.identity()[key] != value} >= {"data.format"}


def test_chat_and_text_mix(tmp_path: Path) -> None:
    _, tokenizer = opened(tmp_path, [{"messages": TALK}] * 4)
    text = write_jsonl(tmp_path / "text.jsonl", ["the answer is yes"] * 20)
    sources = [{"corpus": str(tmp_path / "rows.jsonl"), "format": "chat", "weight": 0.5}, {"corpus": str(text), "weight": 0.5}]
    made = load_dataset(keys(None, mixture=sources, tokenizer=str(tmp_path / "model" / "tokenizer.json"), vocab=None), least=64)
    _, targets = made.batch(made.order(3).ids(0, 8))
    masked = [(row == -100).any().item() for row in targets]
    assert made.masked and made.bytes_per_token is None and 2 <= sum(masked) <= 4
    assert len(tokenizer.decode(targets[masked.index(False)].tolist())) > 0


REFUSED: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "no tokenizer": ([{"messages": TALK}], {"tokenizer": None}, "data.format = chat: there is no tokenizer; set data.tokenizer"),
    "no template": (
        [{"messages": TALK}],
        {"template": None},
        "rows.jsonl: row 1: has messages, but the folder of data.tokenizer has no chat",
    ),
    "no fields": (
        [{"messages": TALK}, {"text": "a"}],
        {},
        "rows.jsonl: line 2: has neither messages nor prompt and completion; it has text",
    ),
    "mixed fields": ([{"prompt": "a", "completion": TALK}], {}, "line 1: prompt is a str and completion a list; give two texts, or two"),
    "no role": ([{"messages": [{"from": "gpt", "value": "a"}]}], {}, "line 1: message 0 has no role; it has from, value"),
    "a mapping": (
        [{"messages": {"user": "a"}}],
        {},
        "line 1: messages is a dict, not a list; give a list of messages with role and content",
    ),
    "Alpaca": (
        [{"instruction": "a", "output": "b"}],
        {},
        "it has instruction, output; rename its fields to prompt and completion, or give",
    ),
    "no content": ([{"messages": [*TALK, {"role": "user"}]}], {}, "line 1: message 5 has no content"),
    "content of numbers": (
        [{"messages": [*TALK, {"role": "user", "content": 7}]}],
        {},
        "line 1: message 5: its content is 7; give a text, or a list of parts",
    ),
    "a date of its own": (
        [{"messages": TALK}],
        {"template": "{{ strftime_now(form) }}" + CHATML},
        "chat template chooses the form of the date",
    ),
    "half a character": ([{"prompt": "a", "completion": "\ud83d"}], {}, r"line 1: '\\ud83d' alone is not a character; remove it"),
    "a strange role": (
        [{"messages": [*said("judge: a"), *TALK]}],
        {},
        "row 1: the chat template refuses the messages .*unknown role judge",
    ),
    "no answer": ([{"messages": TALK[:2]}, {"prompt": "a", "completion": ""}], {}, "no row has an answer to learn; give rows with"),
    "a changing template": ([{"messages": TALK}], {"template": LATE_SYSTEM}, "message 2 can't be found .* {% generation %}"),
    "a picture": (
        [{"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, *TALK[2:3]]}],
        {},
        "line 1: message 0 has a part that is not text, but 'image'; only text is learned, so leave the row out",
    ),
    "half a weight": ([{"messages": [TALK[1], {**TALK[2], "weight": 0.5}]}], {}, "message 1: its weight is 0.5; give 0, or 1 to learn it"),
    "tools in words": (
        [{"messages": TALK, "tools": "look"}],
        {},
        "line 1: tools is 'look', not a list of functions; give one, or its JSON",
    ),
    "another format": ([], {"corpus": "a.arrow"}, "data.format = chat: .*a.arrow is arrow by its suffix; give rows as JSONL or Parquet"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_rows_are_refused_in_one_line(tmp_path: Path, what: str) -> None:
    rows, changes, message = REFUSED[what]
    if "corpus" in changes:
        (tmp_path / "a.arrow").write_text("a")
        write_folder(tmp_path / "model")
        changed = keys(str(tmp_path / "a.arrow"), format="chat", tokenizer=str(tmp_path / "model/tokenizer.json"), vocab=None)
        with pytest.raises(BadInput, match=message):
            load_dataset(changed)
        return
    with pytest.raises(BadInput, match=message) as refused:
        opened(tmp_path, rows, **changes)
    assert "\n" not in str(refused.value)
