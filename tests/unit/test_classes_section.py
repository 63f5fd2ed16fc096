"""The quality of each class in a report: tables, and the confusion matrix as a picture."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from regauge.config import FORMAT
from regauge.evaluation.report.page import (
    MAX_DRAWN_CLASSES,
    MAX_ROWS,
    build_classes_sections,
    build_report,
)
from regauge.evaluation.report.render import render_html, render_json, render_markdown
from regauge.run_folders.run_folder import RunFolder, read_run_folder

NAMES = ("sport", "a|b <i>", "finance")
MATRIX = [[5, 1, 0], [0, 0, 0], [2, 0, 7]]


def describe_class(name: str, support: int = 6) -> dict[str, Any]:
    return {"name": name, "precision": 0.5, "recall": 0.25, "f1": 1 / 3, "support": support}


def write_evaluation(folder: Path, report: dict[str, Any]) -> RunFolder:
    rows = [{"name": "trained", "accuracy": 0.8}]
    document = {"format": FORMAT, "rows": rows, "classes": {"trained": report}}
    folder.mkdir()
    (folder / "evaluation.json").write_text(json.dumps(document))
    return read_run_folder(folder)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    classes = [describe_class(name) for name in NAMES]
    report = {"classes": classes, "confusion_matrix": MATRIX}
    return write_evaluation(tmp_path / "evaluation", report)


def test_the_page_has_the_metrics_and_the_matrix(run: RunFolder) -> None:
    page = render_html(build_report((run,)))
    assert "Classes: evaluation, trained" in page
    row = '<th scope="row">sport</th><td class="figure">0.500</td><td class="figure">0.250</td>'
    assert row in page
    assert "a|b &lt;i&gt;" in page
    assert "<i></th>" not in page
    (picture,) = re.findall(
        r'<svg[^>]*aria-labelledby="classes-0-confusion-matrix.*?</svg>', page, re.DOTALL
    )
    assert "12 of 15 are correct. 2 of finance are predicted as sport." in picture
    counts = re.findall(r">(\d+)</text>", picture)
    assert counts == [str(count) for cells in MATRIX for count in cells]
    assert {"predicted", "actual"} <= set(re.findall(r">(\w+)</text>", picture))


def test_markdown_and_json_have_the_numbers(run: RunFolder) -> None:
    report = build_report((run,))
    text = render_markdown(report)
    assert "| class | precision | recall | F1 | support |" in text
    assert "| sport | 0.500 | 0.250 | 0.333 | 6 |" in text
    assert r"| a\|b <i> | 0 | 0 | 0 |" in text
    (section,) = json.loads(render_json(report))["class_sections"]
    assert section["matrix"] == MATRIX


def test_many_classes_are_shortened(tmp_path: Path) -> None:
    count = MAX_ROWS + 5
    classes = [describe_class(f"c{index}", support=index) for index in range(count)]
    matrix = [[int(row == column) for column in range(count)] for row in range(count)]
    report = {"classes": classes, "confusion_matrix": matrix}
    assert count > MAX_DRAWN_CLASSES
    run = write_evaluation(tmp_path / "many", report)
    (section,) = build_classes_sections([run])
    assert [row["class"] for row in section.rows] == [f"c{count - 1 - n}" for n in range(MAX_ROWS)]
    assert section.note == f"The {MAX_ROWS} most frequent of {count} classes."
    assert not section.matrix
    assert section.note in render_html(build_report((run,)))


def test_the_classes_of_a_training_run_are_in_its_report(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    report = {"classes": [describe_class("sport")]}
    document = {"format": FORMAT, "step": 3, "classes": {"heldout": report}}
    (tmp_path / "classes.json").write_text(json.dumps(document))
    (section,) = build_classes_sections([read_run_folder(tmp_path)])
    assert section.title.endswith(", heldout, step 3")
    assert render_markdown(build_report((read_run_folder(tmp_path),))).count("| sport |") == 1


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    document = {"format": FORMAT, "classes": {"heldout": {"classes": [{"name": 3}]}}}
    (tmp_path / "classes.json").write_text(json.dumps(document))
    run = read_run_folder(tmp_path)
    assert not run.class_reports
    assert "classes.json is damaged" in run.warnings[0]
