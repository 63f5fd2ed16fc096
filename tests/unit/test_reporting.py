"""Reports: reading run folders, formatting, and rendering to HTML, Markdown and JSON."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from regauge.commands import report
from regauge.config import FORMAT
from regauge.evaluation.report.charts import Curve, chart_curves
from regauge.evaluation.report.drawing import MAX_POINTS, draw
from regauge.evaluation.report.page import build_report
from regauge.evaluation.report.render import render_html, render_json, render_markdown
from regauge.evaluation.report.run_section import build_charts
from regauge.run_folders import formatting
from regauge.run_folders.evaluation_table import build_table
from regauge.run_folders.run_folder import RunFolder, find_run_folders, read_run_folder
from regauge.run_folders.series import downsample, merge_attempts, smooth, summarize_attempts
from regauge.system.errors import DataError, SettingsError

EVALUATION = {
    "title": "Held-out pairs",
    "rows": [
        {"name": "untrained", "loss": 5.0, "mrr": 0.09, "recall@10": 0.16},
        {"name": "trained", "loss": 1.5, "mrr": 0.586, "recall@10": 0.787},
        {"name": "BM25", "mrr": 0.646, "recall@10": 0.769},
    ],
    "notes": ["BM25 over words."],
}
SECONDS = {"init": 5.0, "data_wait": 10.0, "step": 80.0, "lost": 5.0}


def write(folder: Path, name: str, content: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps({"format": FORMAT, **content})
    (folder / name).write_text(text)


def metric_lines(attempt: int, steps: range, **values: float) -> str:
    metrics = values or {"train/loss": 2.0}
    lines = [{"attempt": attempt, "step": step, "seconds": step / 10, **metrics} for step in steps]
    return "".join(json.dumps(line) + "\n" for line in lines)


def write_run(folder: Path, **ledger: Any) -> Path:
    """Write the folder of a finished run with two attempts."""
    end = json.dumps({"attempt": 2, "step": 30, "summary": {"stop_reason": "finished"}}) + "\n"
    curve = "".join(metric_lines(2, range(s, s + 1), **{"heldout/loss": 9 / s}) for s in (20, 30))
    first, second = metric_lines(1, range(1, 21)), metric_lines(2, range(11, 31))
    write(folder, "metrics.jsonl", first + second + curve + end)
    state = {"attempt": 2, "step": 30, "seconds": SECONDS, "tokens": 9_000_000, **ledger}
    write(folder, "ledger.jsonl", json.dumps(state) + "\n")
    write(folder, "run.json", {"task": {"kind": "mlm"}, "run": {"verb": "train", "id": "a"}})
    write(folder, "environment.json", {"python": "3.12.1", "packages": {"torch": "2.13"}})
    return folder


# Reading run folders


def test_the_last_attempt_counts_for_repeated_steps() -> None:
    lines = [
        *({"attempt": 1, "step": step, "a": 1.0} for step in (10, 20, 30, 40)),
        {"attempt": 1, "step": 40, "b": 1.0},
        *({"attempt": 2, "step": step, "a": 2.0} for step in (30, 35)),
    ]
    attempts = summarize_attempts(lines, {})
    assert [
        (attempt.number, attempt.first_step, attempt.last_step, attempt.rerun_from_step)
        for attempt in attempts
    ] == [(1, 10, 40, 30), (2, 30, 35, None)]
    assert merge_attempts(lines, attempts) == {"a": ((10, 1.0), (20, 1.0), (30, 2.0), (35, 2.0))}


def test_a_value_at_the_resume_step_is_kept_if_only_the_first_attempt_measured_it() -> None:
    lines = [
        {"attempt": 1, "step": 20, "heldout/loss": 1.0},
        {"attempt": 2, "step": 20, "train/loss": 2.0},
    ]
    assert merge_attempts(lines, summarize_attempts(lines, {}))["heldout/loss"] == ((20, 1.0),)


def test_the_steps_of_a_mean_are_logged_or_inferred_within_an_attempt() -> None:
    lines = [
        {"attempt": 1, "step": 10, "train/loss": 1.0},
        {"attempt": 1, "step": 15, "heldout/loss": 1.0},
        {"attempt": 1, "step": 20, "train/loss": 1.0},
        {"attempt": 2, "step": 30, "train/loss": 1.0},
        {"attempt": 2, "step": 40, "train/loss": 1.0},
        {"attempt": 3, "step": 50, "train/loss": 1.0, "train/averaged_steps": 3},
    ]
    series = merge_attempts(lines, summarize_attempts(lines, {}))
    assert series["train/averaged_steps"] == ((10, 10.0), (20, 10.0), (40, 10.0), (50, 3.0))


def test_nan_and_infinities_are_in_a_series() -> None:
    lines = [{"attempt": 1, "step": 1, "a": math.nan, "b": -math.inf, "c": "text"}]
    series = merge_attempts(lines, summarize_attempts(lines, {}))
    assert math.isnan(series["a"][0][1])
    assert series["b"] == ((1, -math.inf),)
    assert "c" not in series


def test_smoothing_is_exact_for_a_constant_and_skips_nan() -> None:
    assert smooth(((1, 3.0), (2, 3.0))) == ((1, 3.0), (2, pytest.approx(3.0)))
    assert smooth(((1, 3.0), (2, math.nan), (3, 3.0)))[-1] == (3, pytest.approx(3.0))


def test_downsampling_keeps_every_spike() -> None:
    series = tuple((step, 100.0 if step == 5_003 else 1.0) for step in range(10_000))
    points = downsample(series, MAX_POINTS)
    assert len(points) <= MAX_POINTS
    assert (5_003, 100.0) in points
    assert list(points) == sorted(points)


def test_a_killed_run_is_read_up_to_its_truncated_line(tmp_path: Path) -> None:
    write(tmp_path, "metrics.jsonl", metric_lines(1, range(1, 8)) + '{"attempt": 1, "st')
    write(tmp_path, "run.json", '{"task": ')
    write(tmp_path, "ledger.jsonl", '{"attempt": 1, "step": 7, "seconds": {"step": 1}}\n{"at')
    run = read_run_folder(tmp_path)
    assert (run.step, run.outcome) == (7, None)
    assert run.ledger["seconds"] == {"step": 1}
    assert len(run.warnings) == 3
    content = build_report((run,))
    assert content.summary[-1].endswith("not finished, last logged step 7.")
    assert "truncated line" in render_html(content)


@pytest.mark.parametrize(
    ("number", "consequence"),
    [(1, "attempt 2 resumed from step 10"), (2, "check that device with `regauge doctor`")],
)
def test_a_failure_has_its_consequence(tmp_path: Path, number: int, consequence: str) -> None:
    folder = write_run(tmp_path / "run")
    failure = {"attempt": number, "step": 17, "kind": "device", "problem": "device 3 is bad"}
    write(folder / "failures", "attempt.json", {**failure, "evidence": {"exit_code": -9}})
    content = build_report((read_run_folder(folder),))
    line = f"attempt {number} ended after step 17: device 3 is bad; {consequence}"
    [section] = content.run_sections[0].failures
    assert section.sentence.startswith(line)
    for text in (render_html(content), render_markdown(content)):
        assert line in text
        assert "exit_code" in text


def test_a_run_without_a_checkpoint_resumes_from_step_0(tmp_path: Path) -> None:
    write(tmp_path, "metrics.jsonl", metric_lines(1, range(3)) + metric_lines(2, range(9)))
    write(tmp_path / "failures", "attempt.json", {"attempt": 1, "step": 2, "kind": "process"})
    [section] = build_report((read_run_folder(tmp_path),)).run_sections[0].failures
    assert section.consequence == "attempt 2 resumed from step 0"


def test_a_finished_run_that_is_started_again_has_no_end(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert read_run_folder(folder).outcome == "finished"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(metric_lines(3, range(31, 33)))
    assert read_run_folder(folder).outcome is None


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (99, r"was written by a later Regauge \(format 99\); install"),
        (1, r"was written by an earlier Regauge \(format 1\); repeat the run"),
    ],
)
def test_another_format_is_refused(tmp_path: Path, version: int, message: str) -> None:
    write(tmp_path, "evaluation.json", EVALUATION | {"format": version})
    with pytest.raises(DataError, match=message):
        read_run_folder(tmp_path)


def test_a_pipeline_is_reported_in_the_order_of_its_stages(tmp_path: Path) -> None:
    for name in ("10-evaluate", "2-train"):
        write(tmp_path / name, "run.json", {})
    write(tmp_path / "1-prepare", "inputs.json", {})
    write(tmp_path / "11-report", "done.json", {})
    names = [path.name for path in find_run_folders(tmp_path)]
    assert names == ["1-prepare", "2-train", "10-evaluate"]
    assert read_run_folder(tmp_path / "10-evaluate").name == "evaluate"


@pytest.mark.parametrize("name", ["", "missing"])
def test_a_folder_without_a_run_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="name"):
        find_run_folders(tmp_path / name)


# Content


def test_the_best_value_is_the_largest_or_the_smallest_loss() -> None:
    table = build_table(EVALUATION)
    assert table.metrics == ("mrr", "recall@10", "loss"), "metrics that most rows have come first"
    assert table.best_rows() == [
        ("mrr", "BM25", 0.646),
        ("recall@10", "trained", 0.787),
        ("loss", "trained", 1.5),
    ]
    assert table.leader_sentences()[1] == (
        "recall@10: trained leads with 0.787, 0.018 ahead of BM25 (0.769)."
    )


def test_a_metric_with_equal_values_has_no_best_value() -> None:
    rows = [{"name": "a", "pairs": 1000, "x": math.nan}, {"name": "b", "pairs": 1000, "x": 1.0}]
    table = build_table({"rows": rows})
    assert table.best_value("pairs") is None
    assert table.best_value("x") is None


def test_figures_are_computed_from_the_ledger(tmp_path: Path) -> None:
    section = build_report(
        (read_run_folder(write_run(tmp_path, usd=0.9, mfu=0.25, padding_fraction=0.1)),)
    ).run_sections[0]
    values = {figure.label: figure.value for figure in section.figures}
    assert values["real tokens"] == "9,000,000"
    assert values["real tokens/s in training"] == "100k"
    assert values["real tokens/s overall"] == "90.0k"
    assert (values["MFU"], values["padding"]) == ("25.0%", "10.0%")
    assert values["cost per million tokens"] == "$0.1000"
    assert [(part.name, part.fraction) for part in section.time_breakdown] == [
        ("init", 0.05),
        ("data wait", 0.1),
        ("step", 0.8),
        ("lost", 0.05),
    ]


def test_an_unknown_value_is_never_zero(tmp_path: Path) -> None:
    content = build_report((read_run_folder(write_run(tmp_path, usd=None, mfu=None)),))
    values = {figure.label: figure.value for figure in content.run_sections[0].figures}
    for label in ("MFU", "cost", "cost per million tokens", "padding"):
        assert values[label] == "unknown"
    assert content.figures[-1].value == "unknown"


def test_the_total_cost_is_unknown_if_the_cost_of_a_run_is(tmp_path: Path) -> None:
    runs = (
        read_run_folder(write_run(tmp_path / "a", usd=1.0)),
        read_run_folder(write_run(tmp_path / "b", usd=None)),
    )
    assert build_report(runs).figures[-1].value == "unknown"
    assert build_report((runs[0], runs[0])).figures[-1].value == "$2.00"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (8.14, "8.1 s"),
        (59.97, "1 min 00 s"),
        (252.4, "4 min 12 s"),
        (3599.9, "1 h 00 min"),
        (11_100, "3 h 05 min"),
        (None, "unknown"),
    ],
)
def test_durations_are_formatted(seconds: float | None, text: str) -> None:
    assert formatting.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(812, "812"), (12_345, "12.3k"), (999_960, "1.00M"), (4_560_000, "4.56M")]
)
def test_counts_are_formatted(value: float, text: str) -> None:
    assert formatting.count(value) == text


# Rendering


class Page(HTMLParser):
    """The ids, references and tags of an HTML page; open tags must be closed in order."""

    VOID = ("meta", "link", "br", "img", "input", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        attributes = dict(attrs)
        self.ids += [attributes["id"] or ""] if "id" in attributes else []
        self.references += [value or "" for name, value in attrs if name in ("href", "src")]
        self.references += (attributes.get("aria-labelledby") or "").split()
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def runs(tmp_path: Path) -> tuple[RunFolder, ...]:
    write(tmp_path / "3-evaluate", "evaluation.json", EVALUATION)
    first, second = write_run(tmp_path / "1-warm-up"), write_run(tmp_path / "2-pairs")
    write(second / "failures", "1.json", {"problem": "<script>alert(1)</script>"})
    return tuple(read_run_folder(folder) for folder in (first, second, tmp_path / "3-evaluate"))


def test_the_page_is_one_file_with_valid_markup(runs: tuple[RunFolder, ...]) -> None:
    text = render_html(build_report(runs))
    parsed = Page(text)
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids)), "ids are unique across charts"
    assert "script" not in parsed.tags, "text of runs is escaped"
    for reference in parsed.references:
        target = reference.removeprefix("#")
        assert reference.startswith("data:") or target in parsed.ids, reference
    assert not re.search(r"url\((?!#)", text)
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)


def test_the_page_begins_with_the_results(runs: tuple[RunFolder, ...]) -> None:
    text = render_html(build_report(runs))
    order = ("BM25 leads", 'id="results"', "Training curves", "Time breakdown", "Settings of")
    positions = [text.index(part) for part in order]
    assert positions == sorted(positions)


def test_the_page_is_deterministic(runs: tuple[RunFolder, ...]) -> None:
    assert render_html(build_report(runs)) == render_html(build_report(runs))


def test_charts_are_readable_without_colour_and_have_a_description(tmp_path: Path) -> None:
    run = read_run_folder(write_run(tmp_path))
    (loss,) = build_charts(run)
    picture = draw(loss, "a", run.name)
    assert "<title" in picture
    assert "heldout: from 0.450 to 0.300 between steps 20 and 30" in loss.text
    assert loss.text in picture
    assert "stroke-dasharray" in picture
    assert not re.search(r"#0\d0\d0\d", picture), "every colour comes from the page"
    assert "<metadata" not in picture


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    write(tmp_path, "run.json", {"task": {"kind": "mlm"}})
    text = render_html(build_report((read_run_folder(tmp_path),)))
    assert "not finished, no step logged" in text
    assert "No saved model was evaluated" in text


def test_markdown_and_json_have_the_same_content(runs: tuple[RunFolder, ...]) -> None:
    content = build_report(runs)
    text = render_markdown(content)
    assert "| trained | 0.586 | **0.787** | **1.500** |" in text
    assert re.search(r"\| step \| 80\.0 \| 80\.0% \|", text)
    document = json.loads(render_json(content))
    assert document["format"] == FORMAT
    assert document["run_sections"][0]["run"]["series"]["heldout/loss"] == [[20, 0.45], [30, 0.3]]


# The verb


@pytest.mark.parametrize("form", ["html", "md", "json"])
def test_the_verb_reports_on_a_folder(tmp_path: Path, form: str) -> None:
    folder = write_run(tmp_path / "run")
    settings = report.load(folder, (f"report.format={form}",))
    assert report.plan(settings)["report"] == str(folder / f"report.{form}")
    assert not (folder / f"report.{form}").exists(), "a plan writes nothing"
    answer = report.run(settings)
    assert Path(answer["report"]).read_text()
    assert [path.name for path in folder.glob(".*")] == []
    (folder / f"report.{form}").unlink()
    report.main(folder, form=form)
    assert (folder / f"report.{form}").exists()


def test_the_verb_reports_on_the_runs_of_a_run_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f'[output]\nfolder = "{tmp_path}/out"\n[report]\nruns = ["{folder}"]\ntitle = "A <b> title"'
    )
    answer = report.run(report.load(run_file, ()))
    assert "<h1>A &lt;b&gt; title</h1>" in Path(answer["report"]).read_text()


def test_a_plan_refuses_missing_runs_as_the_run_does(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    settings = report.load(folder, (f'report.runs=["{folder}", "{tmp_path}/later"]',))
    for command in (report.plan, report.run):
        with pytest.raises(SettingsError, match="no folder"):
            command(settings)


def test_an_unwritable_folder_is_reported_in_one_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    overrides = (f'output.folder="{tmp_path}/file"', f'report.runs=["{folder}"]')
    with pytest.raises(SettingsError, match=r"cannot be written.*set another output\.folder"):
        report.run(report.load(folder, overrides))


@pytest.mark.parametrize(
    ("labels", "rows"),
    [
        (("mean", "raw", "held-out"), 1),
        (tuple(f"held-out loss of {name}" for name in ("search", "words", "topics", "old")), 2),
        (("x" * 40, "y" * 40, "z" * 40), 3),
    ],
)
def test_a_legend_has_as_many_columns_as_fit(labels: tuple[str, ...], rows: int) -> None:
    series = [(step, 1.0 / step) for step in range(1, 9)]
    lines = [Curve(label, series, "mean") for label in labels]
    (chart,) = chart_curves("loss", lines)
    picture = draw(chart, "key", "a run")
    heights = [
        height
        for label in labels
        for height in re.findall(rf' y="([\d.]+)"[^>]*>{label}<', picture)
    ]
    assert len(heights) == len(labels)
    assert len(set(heights)) == rows
