from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from regauge.errors import DataError, SettingsError
from regauge.reporting.drawing import POINTS, Line, Place, curves
from regauge.reporting.page import tell
from regauge.reporting.render import document, markdown, page
from regauge.reporting.run_charts import charts
from regauge.results import formatting
from regauge.results.evaluation_table import table
from regauge.results.run_folder import Run, discover, read
from regauge.results.series import attempts, merged, smoothed, thinned
from regauge.verbs import report

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
    text = content if isinstance(content, str) else json.dumps({"format": 1, **content})
    (folder / name).write_text(text)


def metric_lines(attempt: int, steps: range, **values: float) -> str:
    given = values or {"train/loss": 2.0}
    lines = [{"attempt": attempt, "step": step, "seconds": step / 10, **given} for step in steps]
    return "".join(json.dumps(line) + "\n" for line in lines)


def trained(folder: Path, **ledger: Any) -> Path:
    """Write the folder of a run with two attempts that ended."""
    end = json.dumps({"attempt": 2, "step": 30, "summary": {"reason": "finished"}}) + "\n"
    curve = "".join(metric_lines(2, range(s, s + 1), **{"heldout/loss": 9 / s}) for s in (20, 30))
    first, second = metric_lines(1, range(1, 21)), metric_lines(2, range(11, 31))
    write(folder, "metrics.jsonl", first + second + curve + end)
    state = {"attempt": 2, "step": 30, "seconds": SECONDS, "tokens": 9_000_000, **ledger}
    write(folder, "ledger.jsonl", json.dumps(state) + "\n")
    write(folder, "run.json", {"task": {"kind": "mlm"}, "run": {"verb": "train", "id": "a"}})
    write(folder, "environment.json", {"python": "3.12.1", "packages": {"torch": "2.13"}})
    return folder


# Reading


def test_last_attempt_counts_where_steps_were_run_again() -> None:
    lines = [
        *({"attempt": 1, "step": step, "a": 1.0} for step in (10, 20, 30, 40)),
        {"attempt": 1, "step": 40, "b": 1.0},
        *({"attempt": 2, "step": step, "a": 2.0} for step in (30, 35)),
    ]
    found = attempts(lines, {})
    assert [(one.number, one.first, one.last, one.again) for one in found] == [
        (1, 10, 40, 30),
        (2, 30, 35, None),
    ]
    assert merged(lines, found) == {"a": ((10, 1.0), (20, 1.0), (30, 2.0), (35, 2.0))}


def test_value_that_only_the_first_attempt_measured_at_the_resumed_step_stays() -> None:
    lines = [
        {"attempt": 1, "step": 20, "heldout/loss": 1.0},
        {"attempt": 2, "step": 20, "train/loss": 2.0},
    ]
    assert merged(lines, attempts(lines, {}))["heldout/loss"] == ((20, 1.0),)


def test_infinities_written_as_text_are_read_as_numbers() -> None:
    lines = [{"attempt": 1, "step": 1, "a": "NaN", "b": "-Infinity", "c": "text"}]
    series = merged(lines, attempts(lines, {}))
    assert math.isnan(series["a"][0][1])
    assert series["b"] == ((1, -math.inf),)
    assert "c" not in series


def test_smoothing_is_exact_on_a_constant_and_survives_nan() -> None:
    assert smoothed(((1, 3.0), (2, 3.0))) == ((1, 3.0), (2, pytest.approx(3.0)))
    assert smoothed(((1, 3.0), (2, math.nan), (3, 3.0)))[-1] == (3, pytest.approx(3.0))


def test_thinning_keeps_every_spike() -> None:
    series = tuple((step, 100.0 if step == 5_003 else 1.0) for step in range(10_000))
    thin = thinned(series, POINTS)
    assert len(thin) <= POINTS
    assert (5_003, 100.0) in thin
    assert list(thin) == sorted(thin)


def test_killed_run_is_read_up_to_its_torn_line(tmp_path: Path) -> None:
    write(tmp_path, "metrics.jsonl", metric_lines(1, range(1, 8)) + '{"attempt": 1, "st')
    write(tmp_path, "run.json", '{"task": ')
    write(tmp_path, "ledger.jsonl", '{"attempt": 1, "step": 7, "seconds": {"step": 1}}\n{"at')
    run = read(tmp_path)
    assert (run.step, run.end) == (7, None)
    assert run.ledger["seconds"] == {"step": 1}
    assert len(run.remarks) == 3
    story = tell((run,))
    assert story.verdict[-1].endswith("not finished: last seen at step 7.")
    assert "torn line" in page(story)


@pytest.mark.parametrize(
    ("number", "followed"),
    [(1, "attempt 2 went on from step 10"), (2, "look at that device with `regauge doctor`")],
)
def test_a_failure_says_what_followed_it(tmp_path: Path, number: int, followed: str) -> None:
    folder = trained(tmp_path / "run")
    failure = {"attempt": number, "step": 17, "kind": "device", "problem": "device 3 is bad"}
    write(folder / "failures", "attempt.json", {**failure, "evidence": {"exit_code": -9}})
    story = tell((read(folder),))
    line = f"attempt {number} ended after step 17: device 3 is bad; {followed}"
    [ending] = story.chapters[0].endings
    assert ending.sentence.startswith(line)
    for text in (page(story), markdown(story)):
        assert line in text
        assert "exit_code" in text


def test_a_run_that_began_again_went_on_from_its_beginning(tmp_path: Path) -> None:
    write(tmp_path, "metrics.jsonl", metric_lines(1, range(3)) + metric_lines(2, range(9)))
    write(tmp_path / "failures", "attempt.json", {"attempt": 1, "step": 2, "kind": "process"})
    [ending] = tell((read(tmp_path),)).chapters[0].endings
    assert ending.then == "attempt 2 went on from step 0"


def test_run_that_ended_and_was_started_again_goes_on(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run")
    assert read(folder).end == "finished"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(metric_lines(3, range(31, 33)))
    assert read(folder).end is None


def test_later_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "evaluation.json", EVALUATION | {"format": 2})
    with pytest.raises(DataError, match=r"later Regauge; update"):
        read(tmp_path)


def test_folder_of_a_pipeline_is_told_in_the_order_of_its_stages(tmp_path: Path) -> None:
    for name in ("10-evaluate", "2-train"):
        write(tmp_path / name, "run.json", {})
    write(tmp_path / "1-prepare", "inputs.json", {})
    write(tmp_path / "11-report", "done.json", {})
    found = [path.name for path in discover(tmp_path)]
    assert found == ["1-prepare", "2-train", "10-evaluate"]
    assert read(tmp_path / "10-evaluate").name == "evaluate"


@pytest.mark.parametrize("name", ["", "missing"])
def test_folder_without_a_run_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="name"):
        discover(tmp_path / name)


# Telling


def test_best_of_each_metric_is_the_largest_or_the_smallest_loss() -> None:
    found = table(EVALUATION)
    assert found.metrics == ("mrr", "recall@10", "loss"), "what most rows have comes first"
    assert found.bests() == [
        ("mrr", "BM25", 0.646),
        ("recall@10", "trained", 0.787),
        ("loss", "trained", 1.5),
    ]
    assert found.sentences()[1] == (
        "recall@10: trained leads with 0.787, 0.018 ahead of BM25 (0.769)."
    )


def test_metric_in_which_rows_do_not_differ_has_no_best() -> None:
    rows = [{"name": "a", "pairs": 1000, "x": math.nan}, {"name": "b", "pairs": 1000, "x": 1.0}]
    found = table({"rows": rows})
    assert found.best("pairs") is None
    assert found.best("x") is None


def test_figures_follow_from_the_ledger(tmp_path: Path) -> None:
    chapter = tell((read(trained(tmp_path, usd=0.9, mfu=0.25, padding_share=0.1)),)).chapters[0]
    values = {figure.label: figure.value for figure in chapter.figures}
    assert values["real tokens"] == "9,000,000"
    assert values["real tokens/s in training"] == "100k"
    assert values["real tokens/s over all"] == "90.0k"
    assert (values["MFU"], values["padding"]) == ("25.0%", "10.0%")
    assert values["dollars per million tokens"] == "$0.1000"
    assert [(part.name, part.share) for part in chapter.parts] == [
        ("init", 0.05),
        ("data wait", 0.1),
        ("step", 0.8),
        ("lost", 0.05),
    ]


def test_what_is_not_known_is_unknown_and_never_zero(tmp_path: Path) -> None:
    story = tell((read(trained(tmp_path, usd=None, mfu=None)),))
    values = {figure.label: figure.value for figure in story.chapters[0].figures}
    for label in ("MFU", "dollars", "dollars per million tokens", "padding"):
        assert values[label] == "unknown"
    assert story.figures[-1].value == "unknown"


def test_dollars_of_all_runs_are_unknown_when_those_of_one_are(tmp_path: Path) -> None:
    runs = (read(trained(tmp_path / "a", usd=1.0)), read(trained(tmp_path / "b", usd=None)))
    assert tell(runs).figures[-1].value == "unknown"
    assert tell((runs[0], runs[0])).figures[-1].value == "$2.00"


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
def test_durations_read_well(seconds: float | None, text: str) -> None:
    assert formatting.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(812, "812"), (12_345, "12.3k"), (999_960, "1.00M"), (4_560_000, "4.56M")]
)
def test_counts_read_well(value: float, text: str) -> None:
    assert formatting.count(value) == text


# Showing


class Page(HTMLParser):
    """The ids, references and resources of a page, and whether its tags are balanced."""

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
        given = dict(attrs)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.references += [value or "" for name, value in attrs if name in ("href", "src")]
        self.references += (given.get("aria-labelledby") or "").split()
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Run, ...]:
    write(tmp_path / "3-evaluate", "evaluation.json", EVALUATION)
    first, second = trained(tmp_path / "1-warm-up"), trained(tmp_path / "2-pairs")
    write(second / "failures", "1.json", {"problem": "<script>alert(1)</script>"})
    return tuple(read(folder) for folder in (first, second, tmp_path / "3-evaluate"))


def test_page_is_one_file_with_sound_markup(runs: tuple[Run, ...]) -> None:
    text = page(tell(runs))
    parsed = Page(text)
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids)), "ids are told apart between charts"
    assert "script" not in parsed.tags, "what runs wrote is text"
    for reference in parsed.references:
        place = reference.removeprefix("#")
        assert reference.startswith("data:") or place in parsed.ids, reference
    assert not re.search(r"url\((?!#)", text)
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)


def test_page_says_the_result_before_all_else(runs: tuple[Run, ...]) -> None:
    text = page(tell(runs))
    order = ("BM25 leads", 'id="results"', "Curves", "Where the time went", "Settings of")
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_page_is_the_same_for_the_same_runs(runs: tuple[Run, ...]) -> None:
    assert page(tell(runs)) == page(tell(runs))


def test_charts_need_no_colour_and_tell_what_they_show(tmp_path: Path) -> None:
    run = read(trained(tmp_path))
    (loss,) = charts(run, "a")
    assert "<title" in loss.svg
    assert "heldout: from 0.450 to 0.300 between steps 20 and 30" in loss.text
    assert loss.text in loss.svg
    assert "stroke-dasharray" in loss.svg
    assert not re.search(r"#0\d0\d0\d", loss.svg), "every colour is the page's"
    assert "<metadata" not in loss.svg


def test_empty_run_has_a_page_too(tmp_path: Path) -> None:
    write(tmp_path, "run.json", {"task": {"kind": "mlm"}})
    text = page(tell((read(tmp_path),)))
    assert "not finished: no step yet" in text
    assert "None of these runs holds an evaluation yet" in text


def test_markdown_and_json_say_the_same(runs: tuple[Run, ...]) -> None:
    story = tell(runs)
    text = markdown(story)
    assert "| trained | 0.586 | **0.787** | **1.500** |" in text
    assert re.search(r"\| step \| 80\.0 \| 80\.0% \|", text)
    told = json.loads(document(story))
    assert told["format"] == 1
    assert told["chapters"][0]["run"]["series"]["heldout/loss"] == [[20, 0.45], [30, 0.3]]


# The verb


@pytest.mark.parametrize("form", ["html", "md", "json"])
def test_verb_reports_on_a_folder(tmp_path: Path, form: str) -> None:
    folder = trained(tmp_path / "run")
    settings = report.load(folder, (f"report.format={form}",))
    assert report.plan(settings)["report"] == str(folder / f"report.{form}")
    assert not (folder / f"report.{form}").exists(), "a plan writes nothing"
    answer = report.run(settings)
    assert Path(answer["report"]).read_text()
    assert [path.name for path in folder.glob(".*")] == []
    (folder / f"report.{form}").unlink()
    report.main(folder, form=form)
    assert (folder / f"report.{form}").exists()


def test_verb_reports_on_the_runs_of_a_run_file(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run")
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f'[output]\nfolder = "{tmp_path}/out"\n[report]\nruns = ["{folder}"]\ntitle = "A <b> title"'
    )
    answer = report.run(report.load(run_file, ()))
    assert "<h1>A &lt;b&gt; title</h1>" in Path(answer["report"]).read_text()


def test_stage_of_a_pipeline_reports_on_its_siblings(tmp_path: Path) -> None:
    trained(tmp_path / "1-train")
    run_file = tmp_path / "run.toml"
    run_file.write_text(f'[output]\nfolder = "{tmp_path}/2-report"\n')
    answer = report.run(report.load(run_file, ()))
    assert answer["report"] == str(tmp_path / "2-report" / "report.html")


def test_plan_names_runs_that_are_not_there_yet(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run")
    settings = report.load(folder, (f'report.runs=["{folder}", "{tmp_path}/later"]',))
    assert report.plan(settings)["not_there_yet"] == [f"{tmp_path}/later"]
    with pytest.raises(SettingsError, match="no folder"):
        report.run(settings)


def test_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run")
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
def test_a_legend_has_as_many_columns_as_have_room(labels: tuple[str, ...], rows: int) -> None:
    series = [(step, 1.0 / step) for step in range(1, 9)]
    lines = [Line(label, series, "mean") for label in labels]
    (chart,) = curves("loss", lines, Place("key", "a run"))
    heights = [
        height
        for label in labels
        for height in re.findall(rf' y="([\d.]+)"[^>]*>{label}<', chart.svg)
    ]
    assert len(heights) == len(labels)
    assert len(set(heights)) == rows
