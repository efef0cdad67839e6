"""Chat templates, a folder with a tokenizer and one of them, rows, and their tokens with marks, from texts written by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from vescale_ray.data.block_dataset import BlockDataset

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin|>"]
CHATML = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role ' + m.role) }}"
    "{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
)
REASONING = (  # shows the reasoning of the last turn only
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}{{ '<think>' + "
    "(m.reasoning_content or '') + '</think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TWO_ENDS = (  # ends the last turn in another way, after a header
    "{% for m in messages %}{% if m.role == 'assistant' %}<answer>{{ m.content }}{{ '<|end|>' if loop.last else '<|im_end|>' }}"
    "{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
)
LAST_END = (  # ends a conversation, as Phi's, unless it goes on
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt else '<|begin|>' }}"
)
LATE_SYSTEM = (  # shows the system's message in the last turn of the user
    "{% set system = messages[0].content %}{% for m in messages[1:] %}{% if m.role == 'user' %}[INST]"
    "{% if loop.last or loop.index0 == messages | length - 3 %}{{ system }}{% endif %}{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
Parts = list[tuple[str, bool]]


def write_folder(folder: Path, template: str | None = CHATML, **config: Any) -> Any:
    """Write a byte-level tokenizer whose first token is ``<|begin|>``, and a template. Returns the tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["the answer is yes", "user assistant system", "a question"], trainer)
    made.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 2)])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", **config}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return made


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def said(*turns: str) -> list[dict[str, Any]]:
    """Messages from ``role: content``."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]


def expected(tokenizer: Any, parts: Parts) -> tuple[list[int], list[bool]]:
    """Tokens of a text in parts, and whether each one counts."""
    pieces = [(tokenizer.encode(text, add_special_tokens=False).ids, counts) for text, counts in parts]
    return [i for ids, _ in pieces for i in ids], [counts for ids, counts in pieces for _ in ids]


def stored(made: BlockDataset) -> tuple[list[int], list[bool]]:
    """All tokens of a data set, and whether each one counts."""
    values = np.concatenate([made._read(block) for block in range(len(made._blocks))])
    return np.where(values < 0, ~values, values).tolist(), (values >= 0).tolist()
