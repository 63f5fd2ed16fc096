"""The verb `plan`: numbers of a run file, refused input, and its start without torch and numpy."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from architecture.tree import ROOT
from distributed import datasets
from regauge import cli, commands
from regauge.machines import catalog
from regauge.planner.search.training_plans import OTHER_TABLES
from regauge.training.settings import TrainSettings
from unit.plans import list_heavy_imports, read_plan

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_user_files")
LLAMA = str(ROOT / "runs" / "llama2-7b.toml")
BERT = str(ROOT / "runs" / "bert-large.toml")
RANK_WITHOUT_TEXTS = "task={kind = 'rank', query = [], document = [], numeric_features = ['x']}"
RUN = """
[data]
path = "{data}"
[task]
kind = "mlm"
[model]
architecture = "bert"
[model.config]
vocab_size = 30522
hidden_size = 1024
num_hidden_layers = 24
num_attention_heads = 16
intermediate_size = 4096
[strategy]
kind = "{strategy}"
[batch]
rows = 2048
microbatch_rows = {micro}
[execution]
precision = "bf16"
[stop]
{stop}
[output]
folder = "out"
"""


def write_run(
    folder: Path, *, strategy: str = "ddp", micro: int = 16, stop: str = "steps = 1000"
) -> str:
    """Write a run file of BERT large and return its path."""
    path = folder / "run.toml"
    text = RUN.format(data=folder / "data", strategy=strategy, micro=micro, stop=stop)
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_plan_has_memory_time_and_cost_that_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = read_plan(capsys, write_run(tmp_path), "--on", "p4d.24xlarge:2")
    total = sum(part["gb"] for part in answer["memory"])
    assert total == pytest.approx(answer["memory_gb"]["p50"], rel=0.01)
    step = sum(part["milliseconds"] for part in answer["step"]) / 1000
    assert step == pytest.approx(answer["step_seconds"]["p50"], rel=0.01)
    hours = 1000 * answer["step_seconds"]["p50"] / 3600 / answer["goodput"]
    assert answer["hours"]["p50"] == pytest.approx(hours, rel=0.01)
    price = catalog.load_instances()["p4d.24xlarge"].usd_per_hour or 0
    assert answer["usd"]["p50"] == pytest.approx(hours * 2 * price, rel=0.01)
    for name in ("memory_gb", "step_seconds", "tokens_per_second", "hours", "usd"):
        interval = answer[name]
        assert interval["p10"] < interval["p50"] < interval["p90"], name
    assert answer["settings"]["accumulation"] == 2048 / 16 / 16
    assert [row["machines"] for row in answer["scaling"]] == [1, 2]
    assert answer["scaling"][0]["efficiency"] == 1


def test_the_discount_of_the_run_file_is_the_price_that_is_paid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = write_run(tmp_path)
    listed = read_plan(capsys, run_file, "--on", "p4d.24xlarge")
    paid = read_plan(
        capsys, run_file, "--on", "p4d.24xlarge", "execution.price.discounts={p4d = 0.5}"
    )
    assert paid["usd"]["p50"] == pytest.approx(listed["usd"]["p50"] / 2, rel=1e-3)


def test_the_time_follows_from_the_prepared_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = write_run(tmp_path, stop="epochs = 2")
    compiled = ("task=classify", "execution.compile=blocks")
    arguments = (run_file, "--on", "p4d.24xlarge", *compiled)
    unprepared = read_plan(capsys, *arguments)
    assert unprepared["steps"] is None
    assert "not prepared" in unprepared["notes"][0]
    datasets.write_lengths(tmp_path / "data", {"text": ([60] * 125 + [512] * 3) * 160})
    prepared = read_plan(capsys, *arguments)
    assert prepared["steps"] == 2 * (20_480 // 2048)
    assert prepared["batch_shapes"] == ["16 x 64", "16 x 512"]
    # A batch has 48 long rows on average, which fill their last microbatch of 16 by half.
    real, computed = 2000 * 60 + 48 * 512, 2000 * 64 + 48 * 512 + 8 * (512 - 64)
    assert prepared["real_token_fraction"] == pytest.approx(real / computed, abs=0.01)
    ratio = unprepared["step_seconds"]["p50"] / prepared["step_seconds"]["p50"]
    assert ratio > 3, "row counts alone would plan several times the real time"


def test_a_ranking_run_is_planned_with_its_candidates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row has a query and 16 candidates; two encoders have twice the parameters."""
    arguments = (write_run(tmp_path, micro=2), "--on", "p4d.24xlarge")
    encoder = read_plan(capsys, *arguments)["parameters"]
    shared = read_plan(capsys, *arguments, "task=rank")
    both = "task={kind = 'rank', encoders = 'separate'}"
    separate = read_plan(capsys, *arguments, both, code=69)  # undecided
    assert shared["batch_shapes"] == [f"{2 * 17} x 512"]
    assert 0 < shared["parameters"] - encoder < 0.05 * encoder
    assert separate["parameters"] - shared["parameters"] == pytest.approx(encoder, rel=0.01)
    assert separate["step_seconds"]["p50"] == pytest.approx(shared["step_seconds"]["p50"], rel=0.05)


def test_a_run_that_does_not_fit_names_the_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = write_run(tmp_path, micro=2048)
    answer = read_plan(capsys, run_file, "--on", "g5.xlarge", code=76)
    assert answer["fits"] == "does not fit"
    assert "batch.microbatch_rows=" in answer["change"]
    overrides = [
        text for text in answer["change"].split() if "=" in text and not text.startswith("(")
    ]
    again = read_plan(capsys, run_file, "--on", "g5.xlarge", *overrides)
    assert again["fits"] == "fits"


def test_a_run_that_misses_its_deadline_is_planned_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (write_run(tmp_path), "--on", "p4d.24xlarge", "--deadline")
    answer = read_plan(capsys, *arguments, "1m", code=2)
    assert f"{answer['hours']['p90']:.3g} h (p90)" in answer["error"]
    assert "error" not in read_plan(capsys, *arguments, "90d")


def test_explain_has_the_formulas_and_the_measured_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = read_plan(capsys, write_run(tmp_path), "--on", "p4d.24xlarge", "--explain")
    lines = "\n".join(answer["formulas"])
    for name in ("weights = 2 B", "activations = 24 layers", "matmul = ", "exposed = max(0"):
        assert name in lines
    assert all(row["source"] for row in answer["nearest"])
    assert cli.main(["plan", write_run(tmp_path), "--on", "p4d.24xlarge"]) == 0
    text = capsys.readouterr().out
    assert "step, s" in text
    assert "p90" in text


def test_a_comparison_is_ranked_by_dollars_with_ties(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = read_plan(
        capsys, write_run(tmp_path), "--compare", "p4d.24xlarge,g5.48xlarge,p5.48xlarge:2"
    )
    options = answer["options"]
    assert {item["machines"] for item in options} == {
        "1 x p4d.24xlarge",
        "1 x g5.48xlarge",
        "2 x p5.48xlarge",
    }
    ranks = [item["rank"] for item in options]
    assert ranks == sorted(ranks)
    for first, second in pairwise(options):
        if first["rank"] != second["rank"]:
            assert first["usd"] < second["usd"]


def test_a_stage_of_a_pipeline_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    first = read_plan(capsys, BERT, "--stage", "phase-1", "--on", "dl1.24xlarge:8")
    second = read_plan(capsys, BERT, "--stage", "phase-2", "--on", "dl1.24xlarge:8")
    assert (first["steps"], second["steps"]) == (18768, 4168)
    assert first["parameters"] == second["parameters"]
    assert first["batch_shapes"] == ["16 x 128"]
    assert second["batch_shapes"] == ["4 x 512"]


def test_a_search_counts_the_options_that_it_does_not_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (write_run(tmp_path), "--cheapest", "--max-nodes", "2")
    answer = read_plan(capsys, *arguments)
    everything = read_plan(capsys, *arguments, "--all")
    assert len(answer["options"]) == 10
    assert answer["more_options"] > 0
    assert everything["more_options"] == 0
    assert len(everything["options"]) == 10 + answer["more_options"]
    assert cli.main(["plan", *arguments]) == 0
    assert f"{answer['more_options']} more options: list them with --all" in capsys.readouterr().out


def test_the_price_is_that_of_the_region(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A price of another region does not replace the one of the package, and none is guessed."""
    folder = tmp_path / "region-catalog"
    folder.mkdir()
    text = "instance,as_of,usd_per_hour,source,region\np4d.24xlarge,2026-11-01,33,x,eu-west-1\n"
    (folder / "price_history.csv").write_text(text, encoding="utf-8")
    monkeypatch.setenv("REGAUGE_CATALOG", str(folder))
    arguments = (write_run(tmp_path), "--on", "p4d.24xlarge")
    assert "us-east-1" in read_plan(capsys, *arguments)["price"]
    region = "execution.price.region=eu-west-1"
    assert "33.00 USD per hour" in read_plan(capsys, *arguments, region)["price"]
    other = (write_run(tmp_path), "--on", "p5.48xlarge", region)
    assert read_plan(capsys, *other)["usd"] is None


def test_several_tasks_are_planned_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three of four steps have 128 tokens for each text, and one 512; the step is their mean."""
    path = tmp_path / "run.toml"
    tasks = """
[rows]
fields = { query = 128, document = 128, text = 512 }
[[task]]
name = "pairs"
kind = "contrastive"
weight = 3
[[task]]
name = "texts"
kind = "classify"
batch = { rows = 1024, microbatch_rows = 8 }
"""
    text = RUN.format(data=tmp_path, strategy="ddp", micro=16, stop="steps = 10")
    path.write_text(text.replace('[task]\nkind = "mlm"\n', tasks), encoding="utf-8")
    answer = read_plan(capsys, str(path), "--on", "p4d.24xlarge")
    pairs, texts = answer["tasks"]
    assert (pairs["task"], pairs["share_percent"]) == ("pairs", 75)
    assert (texts["task"], texts["share_percent"]) == ("texts", 25)
    assert answer["batch_shapes"] == ["32 x 128", "8 x 512"]
    mean = 0.75 * pairs["step_seconds"] + 0.25 * texts["step_seconds"]
    assert answer["step_seconds"]["p50"] == pytest.approx(mean, rel=0.1), "corrected by near rows"
    lengths = [note for note in answer["notes"] if note.startswith("every sequence is planned")]
    assert ["128 tokens" in lengths[0], "512 tokens" in lengths[1]] == [True, True]
    assert cli.main(["plan", str(path), "--on", "p4d.24xlarge"]) == 0
    printed = capsys.readouterr().out
    assert "One step of the task pairs" in printed
    assert "Tasks, by the formulas" in printed


@pytest.mark.parametrize(
    ("named", "machines"),
    [
        ("8xA100", {"1 x p4d.24xlarge", "1 x p4de.24xlarge"}),
        ("8 x a100-80gb:2", {"2 x p4de.24xlarge"}),
        ("16xTrainium1:4", {"4 x trn1.32xlarge", "4 x trn1n.32xlarge"}),
        ("Gaudi", {"1 x dl1.24xlarge"}),
        ("8xH100,p4d.24xlarge", {"1 x p5.48xlarge", "1 x p4d.24xlarge"}),
    ],
)
def test_machines_are_found_by_their_chips(
    named: str, machines: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--on", "--compare"):
        answer = read_plan(capsys, write_run(tmp_path), option, named)
        planned = answer.get("options") or [answer]
        assert {item["machines"].partition(" (")[0] for item in planned} == machines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LLAMA, "--on", "p5.48xlarg"), "did you mean 'p5.48xlarge'"),
        ((LLAMA, "--on", "16xA100", "stop.steps=9"), "type with that chip: p4d.24xlarge, p4de.24"),
        ((LLAMA, "--on", "c7i.xlarge"), "has no accelerator"),
        ((LLAMA, "--on", "inf2.48xlarge"), "cannot train"),
        ((LLAMA, "--on", "p5.48xlarge:0"), "write it as p5.48xlarge:16"),
        ((LLAMA, "--on", "p5.48xlarge:16"), "batch.rows = 32 is less than the 128 devices"),
        ((LLAMA,), "write --on"),
        ((LLAMA, "--on", "p5.48xlarge", "--cheapest"), "contradict each other"),
        ((LLAMA, "--on", "p5.48xlarge", "--max-nodes", "3"), "no effect without --cheapest"),
        ((LLAMA, "--compare", "p5.48xlarge", "--all"), "--all has no effect without --cheapest"),
        ((LLAMA, "--on", "p5.48xlarge", "task=rnk"), "no task named 'rnk'; did you mean 'rank'"),
        ((LLAMA, "--on", "p5.48xlarge", "strategy=fsp"), "did you mean 'fsdp'"),
        ((LLAMA, "--cheapest", "--deadline", "soon"), "write it as 7d"),
        ((LLAMA, "--cheapest"), "set stop.steps"),
        (
            (LLAMA, "--cheapest", "stop.steps=9", "execution.price.region=ap-east-7"),
            "no price in ap-east-7; set execution.price.usd_per_hour, or run: regauge catalog",
        ),
        (
            (LLAMA, "--cheapest", "stop.steps=9", "execution.price.region=us-west2"),
            "did you mean 'us-west-2'",
        ),
        ((LLAMA, "--cheapest", "stop.steps=9", "--max-nodes", "0"), "--max-nodes 0"),
        ((LLAMA, "--cheapest", "stop.steps=100000000", "--deadline", "1h"), "the fastest option"),
        (
            (LLAMA, "--compare", "g5.xlarge", "stop.steps=9"),
            "left out 1 x g5.xlarge: the run does not fit",
        ),
        ((LLAMA, "--on", "p5.48xlarge", "--slo-ms", "5"), "--slo-ms needs --serve"),
        ((LLAMA, "--on", "p5.48xlarge", "--stage", "x"), "has no stages"),
        ((BERT, "--on", "p5.48xlarge"), "select one with --stage: phase-1, phase-2"),
        ((BERT, "--stage", "phase-3", "--on", "p5.48xlarge"), "did you mean 'phase-"),
        ((LLAMA, "--on", "p5.48xlarge", "modl.x=1"), "did you mean 'model'"),
        ((LLAMA, "--on", "p5.48xlarge", "model.architecture=lama"), "did you mean 'llama'"),
        (
            (LLAMA, "--on", "p5.48xlarge", "model.architecture=mixtral"),
            "Regauge does not train this way: 'mixtral' is a mixture of experts",
        ),
        (
            (LLAMA, "--on", "p5.48xlarge", RANK_WITHOUT_TEXTS),
            "a task 'rank' without texts has none",
        ),
        (
            (LLAMA, "--cheapest", "stop.steps=9", "model.config.vocab_size=10000000000"),
            "does not fit on any catalog machines",
        ),
    ],
)
def test_refused_input_is_one_line_with_code_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]


def test_the_list_of_other_tables_is_that_of_the_verbs() -> None:
    assert {*commands.table_names()} - {*TrainSettings.model_fields} == OTHER_TABLES


def write_model_folder(folder: Path) -> str:
    """Write a Llama that stores its tied output layer twice, with the same values."""
    config = {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "vocab_size": 8,
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    size = 8 * 4 * 4
    names = ("model.embed_tokens.weight", "lm_head.weight")
    header = {
        name: {
            "dtype": "F32",
            "shape": [8, 4],
            "data_offsets": [index * size, (index + 1) * size],
        }
        for index, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    content = len(text).to_bytes(8, "little") + text + bytes(2 * size)
    (folder / "model.safetensors").write_bytes(content)
    return str(folder)


@pytest.mark.parametrize("form", ["run file", "model folder"])
def test_a_plan_imports_neither_torch_nor_numpy(form: str, tmp_path: Path) -> None:
    arguments = [LLAMA, "--on", "p5.48xlarge", "stop.steps=9", "--json"]
    if form == "model folder":
        arguments.append(f"model={{path = '{write_model_folder(tmp_path / 'model')}'}}")
    assert list_heavy_imports(*arguments) == []
