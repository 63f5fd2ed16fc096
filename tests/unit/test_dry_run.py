"""The dry run of training: row lengths, finished folders, and no downloads."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed import datasets
from distributed.runs import settings
from regauge.cli import main
from regauge.commands import pipeline, train
from regauge.commands._parts.train_plan import check_before_start
from regauge.data.settings import UNNAMED, RowLayout
from regauge.data.unprepared import describe_datasets, expected_fields, find_rows, map_by_folder
from regauge.models.flops import FLOPS_FORMULA
from regauge.system import hub
from regauge.system.errors import DataError, SettingsError, find_refusal
from regauge.training import dry_run, run, run_record
from regauge.training.optimizer_defaults import resolve_optimizer

MODEL = """\
[model]
architecture = "bert"
[model.config]
vocab_size = 300
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 2
intermediate_size = 64
max_position_embeddings = 256
"""
RUN = f"""\
output.folder = "{{folder}}/out"
data.path = "{{folder}}/data"
batch = {{{{ rows = 8, microbatch_rows = 4 }}}}
stop.steps = 2
{MODEL}
"""
MLM = '[task]\nkind = "mlm"\n'
CONTRASTIVE = '[task]\nkind = "contrastive"\nquery = "query"\ndocument = "document"\n'
RANK = '[task]\nkind = "rank"\nquery = ["query"]\ndocument = ["document"]\nlabel = "label"\n'
CLASSIFY = '[task]\nkind = "classify"\ntext_fields = ["query", "document"]\n'
PACKED = '[rows]\nlayout = "packed"\nlength = 64\n'
FIELDS = (
    '[rows]\nlayout = "fields"\nfields = { query = 20, document = 100 }\nintegers = ["label"]\n'
)
GROUPS = """\
[rows]
layout = "groups"
group_by = "id"
shared = ["query"]
fields = { query = 20, document = 100 }
integers = ["label"]
"""
SEVERAL = """\
[rows.text]
layout = "packed"
length = 48
[rows.pairs]
layout = "fields"
fields = { query = 20, document = 100 }
"""
SOURCE = '[source]\nkind = "jsonl"\nfiles = ["none.jsonl"]\n'
PlanFile = Callable[..., dict[str, Any]]


@pytest.fixture
def plan_file(tmp_path: Path) -> PlanFile:
    """Return a function that plans a run file with the given tables."""

    def plan(*tables: str, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
        run_file = tmp_path / "run.toml"
        run_file.write_text(RUN.format(folder=tmp_path) + "".join(tables))
        return train.main(run_file, *overrides, dry_run=True)

    return plan


def test_the_secrets_of_notifications_are_read(plan_file: PlanFile) -> None:
    webhook = 'url_variable = "NO_SUCH_URL"'
    answer = plan_file(MLM, PACKED, f"[monitoring.notifications.webhook]\n{webhook}\n")
    assert "the variable NO_SUCH_URL is not set; set NO_SUCH_URL" in answer["error"]
    assert answer["code"] == SettingsError.exit_code


@pytest.mark.parametrize(
    ("task", "rows", "length"),
    [
        (MLM, PACKED, 64),
        (MLM, SOURCE, 128),
        (MLM + "next_sentence = true\n", PACKED.replace("packed", "sentence-pairs"), 64),
        (CONTRASTIVE, FIELDS, 104),
        (CLASSIFY, FIELDS, 120),
        (RANK, GROUPS, 104),
    ],
    ids=["packed", "default", "halves", "fields", "two fields", "groups"],
)
def test_row_length_follows_from_the_rows_table(
    plan_file: PlanFile, task: str, rows: str, length: int
) -> None:
    """Text lengths are rounded up to multiples of eight, as in prepared data."""
    answer = plan_file(task, rows)
    assert answer["data"].endswith("is not prepared yet")
    assert answer["row_length"] == length
    assert answer["row_length_source"] == "[rows] of the run file"
    assert answer["flops_formula"] == f"{FLOPS_FORMULA}; S = {length}"
    if task == RANK:
        return
    longest = plan_file(task)
    attention = 12 * 2 * 32
    difference = longest["flops_per_token"] - answer["flops_per_token"]
    assert difference == attention * (256 - length)


def test_without_a_rows_table_the_maximum_length_is_assumed(
    plan_file: PlanFile, tmp_path: Path
) -> None:
    answer = plan_file(MLM)
    assert answer["row_length"] == 256
    source = f"assumed: the maximum of the model, no [rows] table is for {tmp_path}/data"
    assert answer["row_length_source"] == source


@pytest.mark.parametrize("rows", ["", FIELDS])
def test_a_module_that_needs_fields_cannot_be_counted_without_them(
    plan_file: PlanFile, rows: str
) -> None:
    answer = plan_file(RANK, rows)
    assert answer["parameters"].startswith("unknown: its inputs are the fields of the prepared")


@pytest.mark.parametrize(
    ("task", "rows"), [(RANK, GROUPS.replace("label", "grade")), (CONTRASTIVE, FIELDS)]
)
def test_an_unknown_field_is_refused(plan_file: PlanFile, task: str, rows: str) -> None:
    rows = rows.replace("query", "question")
    with pytest.raises(SettingsError, match=r"the dataset has no field '(label|query)'"):
        plan_file(task.replace('query = ["query"]', 'query = ["question"]'), rows)


def test_a_rows_table_of_another_layout_is_ignored(plan_file: PlanFile) -> None:
    assert plan_file(MLM, FIELDS)["row_length_source"].startswith("assumed")


@pytest.mark.parametrize(
    ("task", "name", "length"), [(MLM, "text", 48), (CONTRASTIVE, "pairs", 104)]
)
def test_the_command_line_selects_one_of_several_datasets(
    plan_file: PlanFile, tmp_path: Path, task: str, name: str, length: int
) -> None:
    overrides = (f"data.path={tmp_path}/data/{name}",)
    assert plan_file(task, SEVERAL, overrides=overrides)["row_length"] == length


def test_the_command_line_overrides_the_rows_table(plan_file: PlanFile, tmp_path: Path) -> None:
    overrides = ("rows.length=96", f"data.path={tmp_path}/other")
    assert plan_file(MLM, PACKED, overrides=overrides)["row_length"] == 96


def test_each_task_has_the_row_length_of_its_dataset(plan_file: PlanFile, tmp_path: Path) -> None:
    tasks = f"""
[[task]]
name = "language"
kind = "mlm"
data.path = "{tmp_path}/data/text"
[[task]]
name = "search"
kind = "contrastive"
query = "query"
document = "document"
data.path = "{tmp_path}/data/pairs"
"""
    answer = plan_file(SEVERAL, tasks)
    assert (answer["row_length_language"], answer["row_length_search"]) == (48, 104)


def test_prepared_data_override_the_rows_table(plan_file: PlanFile, tmp_path: Path) -> None:
    datasets.write_packed(tmp_path / "data")
    answer = plan_file(MLM, PACKED)
    assert answer["row_length"] == 32
    assert answer["row_length_source"] == "the prepared data"


def test_an_invalid_rows_table_is_refused(plan_file: PlanFile) -> None:
    with pytest.raises(SettingsError, match="did you mean 'length'"):
        plan_file(MLM, PACKED.replace("length", "lenght"))


def test_in_a_pipeline_the_rows_table_of_the_prepare_stage_counts(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "a text"}\n')
    stages = f"""
source = {{ kind = "jsonl", files = ["{tmp_path}/texts.jsonl"] }}
output.folder = "{tmp_path}/out"
batch = {{ rows = 8, microbatch_rows = 4 }}
stop.steps = 2
rows.length = 200
task.kind = "mlm"
data.path = "{tmp_path}/elsewhere"
{MODEL}
[[stage]]
verb = "prepare"
name = "short"
rows.length = 32
[[stage]]
verb = "train"
name = "a"
data.path = "@short"
[[stage]]
verb = "train"
name = "b"
"""
    run_file = tmp_path / "pipeline.toml"
    run_file.write_text(stages)
    answer = pipeline.main(run_file, dry_run=True)
    plans = {stage["name"]: stage["plan"] for stage in answer["stages"]}
    assert [plans[name]["row_length"] for name in "ab"] == [32, 200]


def test_datasets_are_described_by_their_folder() -> None:
    tables = {"data": {"path": "out//texts/"}, "rows": {"length": 64}}
    rows = find_rows(describe_datasets(tables), "out/texts")
    assert rows is not None
    assert rows.length == 64
    several = map_by_folder("out/texts", {"a": RowLayout(length=8), UNNAMED: RowLayout(length=16)})
    assert {path: rows.length for path, rows in several.items()} == {
        "out/texts/a": 8,
        "out/texts": 16,
    }
    for nothing in ({}, {"data": {"path": "x"}}, {"rows": {}}, {"data": {}, "rows": {}}):
        assert not describe_datasets(nothing)


def test_expected_fields_have_one_text_of_maximum_length() -> None:
    fields = expected_fields(RowLayout(length=8))
    assert fields["tokens"].lengths == {"train": (0,) * 8 + (1,)}
    assert fields["segments"].lengths == {}


def test_a_refusal_contains_problem_and_remedy() -> None:
    def fail() -> None:
        raise DataError("it is there", "name another")

    assert find_refusal(fail) == {"error": "it is there; name another", "code": 64}
    assert find_refusal(lambda: None) == {}


def test_a_dry_run_shows_that_the_folder_of_another_run_would_be_refused(
    tmp_path: Path,
) -> None:
    done = settings(tmp_path / "run", datasets.write_packed(tmp_path / "data"))
    folder = tmp_path / "run"
    manifests, nothing = dry_run.check_run_offline(done)
    assert nothing == {}
    resolved, _ = resolve_optimizer(done)
    run_record.write_records(folder, resolved, manifests[0].fingerprint, "id", "")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert "error" not in dry_run.plan_run(done)
    other = done.model_copy(update={"seed": 8})
    answer = dry_run.plan_run(other)
    assert answer["steps"] == 12
    assert answer["error"].startswith(f"{folder} belongs to another run: seed is 7, not 8")
    with pytest.raises(SettingsError, match="belongs to another run"):
        dry_run.check_run(other)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_dry_run_downloads_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def download(name: str, *, local_files_only: bool, **_: Any) -> str:
        calls.append(local_files_only)
        raise OSError(name)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    hub._download.cache_clear()
    model = {"path": "team/model", "architecture": None, "config": {}}
    run_settings = settings(tmp_path / "run", datasets.write_packed(tmp_path / "data"), model=model)
    answer = train.plan(run_settings)
    assert answer["parameters"].startswith("unknown: there is no folder 'team/model'")
    assert set(calls) == {True}
    with pytest.raises(SettingsError, match="the hub failed: "):
        dry_run.check_run(run_settings)
    assert False in calls
    hub._download.cache_clear()


def test_a_changed_shard_is_refused_before_training(tmp_path: Path) -> None:
    data = datasets.write_pairs(tmp_path / "data")
    run = settings(tmp_path / "run", data, "contrastive")
    check_before_start(run)
    (shard,) = data.glob("train-*.arrow")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"train-.* differs from the hash in its manifest; run"):
        check_before_start(run)
    check_before_start(
        settings(tmp_path / "run", data, "contrastive", data={"verify_shards": False})
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("execution.precision=fp16",), "accelerator 'cpu' does not train in fp16 here"),
        (("strategy=single", "execution.processes=2"), "strategy 'single' cannot be used: "),
        pytest.param(
            ("accelerator=gaudi", "execution.precision=bf16"),
            "accelerator 'gaudi' is not usable",
            marks=pytest.mark.full,
        ),
    ],
)
@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_dry_run_reports_what_the_run_refuses(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    message: str,
    *,
    is_prepared: bool,
) -> None:
    """The plan is printed, the exit code is that of the run, and nothing is written."""
    if is_prepared:
        datasets.write_packed(tmp_path / "data")
    run_file = tmp_path / "run.toml"
    run_file.write_text('accelerator = "cpu"\n' + RUN.format(folder=tmp_path) + MLM)
    arguments = ["train", str(run_file), *overrides]
    assert main([*arguments, "--dry-run", "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["code"] == 2
    assert message in answer["error"]
    assert answer["task"] == "mlm"
    if is_prepared:
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("batch.rows=4096", "stop.steps=2"), r"batch\.rows is 4096, and the dataset has \d+ tr"),
        (("optimizer.schedule.warmup_steps=10", "stop.steps=10"), "does not reach its peak"),
        (("optimizer.schedule.warmup_steps=9", "stop.steps=10"), ""),
    ],
)
def test_a_run_that_can_learn_little_is_named(
    plan_file: PlanFile,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    overrides: tuple[str, ...],
    message: str,
) -> None:
    datasets.write_packed(tmp_path / "data")
    plan_file(MLM, PACKED, overrides=overrides)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == bool(message)
    assert all(re.search(message, warning) for warning in warnings)


@pytest.mark.parametrize(("loss", "pearson"), [(1.5, math.nan), (math.inf, 0.1)])
def test_a_loss_that_is_not_finite_is_named(
    caplog: pytest.LogCaptureFixture, loss: float, pearson: float
) -> None:
    run._warn_about_metrics({"heldout/loss": loss, "heldout/pearson": pearson})
    assert ("heldout/loss of the final model is not finite" in caplog.text) == math.isinf(loss)
