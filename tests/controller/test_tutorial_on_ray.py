"""The commands of docs/tutorials/fine-tune.md, run in order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "fine-tune.md"
pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_command_of_the_fine_tuning_tutorial_works(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    files = re.findall(r"Save this as `([\w.]+)`.*?```\w+\n(.*?)```", text, re.DOTALL)
    assert [name for name, _ in files] == ["prepare.py", "tune.yaml", "ask.py"]
    for name, content in files:
        (tmp_path / name).write_text(content, encoding="utf-8")
    commands = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    assert 5 <= len(commands) <= 10
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    said = []
    for command in commands:
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        said.append(done.stdout)
    answers = [text for command, text in zip(commands, said, strict=True) if "ask.py" in command]
    assert all(answer.startswith("The number after 41 is") for answer in answers)
    assert "The number after" in answers[0].partition(".")[2] or re.search(r"is\s+\d+\.", answers[0]), answers
