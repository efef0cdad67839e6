"""Every row of the fault tables has a test that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packaging import fault_index


def test_every_row_of_the_fault_tables_has_a_test() -> None:
    rows, shown = fault_index.rows(), fault_index.tests()
    assert len(rows) > 60
    assert not rows.keys() - shown.keys(), "rows that no test shows"
    assert not shown.keys() - rows.keys(), "marks of rows that are not there"


def test_the_index_of_tests_by_fault_is_up_to_date() -> None:
    made = "python -m tests.packaging.fault_index > docs/reference/generated/fault-tests.md"
    assert fault_index.PAGE.read_text(encoding="utf-8") == fault_index.render(), f"run: {made}"


def test_duplicate_fault_row_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.md").write_text("| W1 | a worker dies | all |\n| W1 | a node dies | all |\n")
    monkeypatch.setattr(fault_index, "ROOT", tmp_path)
    monkeypatch.setattr(fault_index, "TABLES", ("a.md",))
    with pytest.raises(ValueError, match="two rows are called W1"):
        fault_index.rows()


def test_marks_are_found_among_other_decorators(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text('@pytest.mark.slow\n@pytest.mark.fault("W1", "W2")\ndef test_it(): ...\n\ndef test_other(): ...\n')
    assert list(fault_index.marked_in(path)) == [("W1", "test_it"), ("W2", "test_it")]
