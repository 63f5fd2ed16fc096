"""`plan --serve`, `plan --predict` and `plan --to-target` with a real artifact and real metrics."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from architecture.tree import ROOT
from end_to_end.predicting import EAGER, export_run, train_model
from regauge import cli
from regauge.machines import catalog
from unit.plans import read_plan

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = str(ROOT / "runs" / "llama2-7b.toml")
TARGET = 'stop.target={metric="heldout/loss", at_most=2.2}'


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small artifact of this machine, next to its dataset."""
    folder = tmp_path_factory.mktemp("plan")
    options = (*EAGER, "parity.metrics=false", "buckets.lengths=[8,32]", "parity.stored_rows=0")
    return export_run(train_model(folder), folder / "artifact", *options)


def test_batch_inference_is_planned_from_the_measured_times(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = read_plan(capsys, str(artifact), "--predict", "500000000", "--on", "c7i.4xlarge")
    times = json.loads((artifact / "bucket_times.json").read_text())
    assert answer["measured_on"] == f"{times['chip']}, {times['threads']} threads"
    longest = max(item["length"] for item in times["times"])
    per_row = min(
        item["milliseconds"] / item["rows"] for item in times["times"] if item["length"] == longest
    )
    (option,) = answer["options"]
    replicas = max(16 // times["threads"], 1)
    hours = 500_000_000 * per_row / 1000 / 3600 / replicas / 0.9
    assert option["replicas"] == replicas
    assert option["hours"] == pytest.approx(hours, rel=0.01)
    assert option["usd"] == pytest.approx(hours * 0.714, rel=0.01)
    assert option["hours_p10"] < option["hours"] < option["hours_p90"]


def test_a_server_is_planned_for_a_rate(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (str(artifact), "--on", "c7i.4xlarge", "--slo-ms", "2000")
    small, large = (
        read_plan(capsys, *arguments, "--serve", rate)["options"][0] for rate in ("1", "1000000")
    )
    assert small["machines"] == "1 x c7i.4xlarge"
    assert large["rows_per_second_p10"] >= 1_000_000
    assert large["latency_ms"] <= 2000
    times = json.loads((artifact / "bucket_times.json").read_text())
    longest = max(item["length"] for item in times["times"])
    (milliseconds,) = (
        item["milliseconds"]
        for item in times["times"]
        if (item["length"], item["rows"]) == (longest, large["batch_rows"])
    )
    machines = int(large["machines"].split(" x ")[0])
    rate = 1000 * large["batch_rows"] / milliseconds * large["replicas"] * machines
    assert large["rows_per_second"] == pytest.approx(0.7 * rate, rel=0.01), "70 % of the time"


def test_the_price_of_the_user_is_paid(
    artifact: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "STALE_DAYS", 0)
    arguments = (str(artifact), "--predict", "500000000", "--on", "c7i.4xlarge")
    listed = read_plan(capsys, *arguments)
    assert "c7i.4xlarge of " in listed["warnings"][0]
    usd = listed["options"][0]["usd"]
    reduced = read_plan(capsys, *arguments, "execution.price.discounts={c7i = 0.25}")
    assert reduced["options"][0]["usd"] == pytest.approx(0.75 * usd, rel=1e-3)
    assert reduced["warnings"] == listed["warnings"]
    paid = read_plan(capsys, *arguments, "execution.price.usd_per_hour=1.428")
    assert paid["options"][0]["usd"] == pytest.approx(2 * usd, rel=1e-3)
    assert not paid["warnings"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--serve", "5", "--predict", "5"), "contradict each other"),
        (("--serve", "-1"), "--serve -1 is not positive"),
        (("--predict", "5", "--slo-ms", "5"), "--slo-ms has no effect on --predict"),
        (("--predict", "5", "--deadline", "1h"), "--deadline has no effect"),
        (("--predict", "5", "--stage", "a"), "--stage has no effect on the plan of an artifact"),
        (("--predict", "5", "batch.rows=5"), "'batch' has no effect on the plan of an artifact"),
        (("--predict", "5", "execution.price.discunts={p5 = 0.1}"), "did you mean 'discounts'"),
        (
            ("--predict", "5", "--on", "c7i.xlarge", "execution.price.region=eu-west-1"),
            "no price in eu-west-1 for c7i.xlarge",
        ),
        (("--serve", "5", "--slo-ms", "0.000001", "--on", "c7i.xlarge"), "no machine type answers"),
    ],
)
def test_contradicting_options_are_refused(
    artifact: Path,
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["plan", str(artifact), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_an_artifact_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(tmp_path), "--predict", "5"]) == 2
    assert "no artifact at" in capsys.readouterr().err


def write_metrics(folder: Path) -> str:
    """Write the evaluations of a run whose loss is 2 + 8 / sqrt(step)."""
    lines = [
        {"attempt": 1, "step": step, "seconds": 1.0, "heldout/loss": 2 + 8 * step**-0.5}
        for step in range(50, 1001, 50)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def test_the_time_to_a_target_has_the_uncertainty_of_the_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_metrics(tmp_path)
    arguments = (LLAMA, "--compare", "p5.48xlarge,p4de.24xlarge", "batch.rows=512", TARGET)
    answer = read_plan(capsys, *arguments, "--to-target", folder)
    assert answer["steps"]["p50"] == pytest.approx((8 / 0.2) ** 2, rel=0.2)
    steps = round(answer["steps"]["p50"])
    fixed = read_plan(capsys, *arguments[:-1], f"stop.steps={steps}")
    by_name = {item["machines"]: item for item in fixed["options"]}
    for option in answer["options"]:
        known = by_name[option["machines"]]
        assert option["hours"] == pytest.approx(known["hours"], rel=0.01)
        ratio = known["hours_p90"] / known["hours_p10"]
        assert option["hours_p90"] / option["hours_p10"] > ratio


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "has no stop.target"),
        ((TARGET, "--deadline", "1m"), "no option reaches the target within"),
        (('stop.target={metric="heldout/loss", at_most=0.5}',), "lower the target"),
        (('stop.target={metric="heldout/acc", at_least=0.5}',), "its metrics: heldout/loss"),
    ],
)
def test_a_target_that_cannot_be_reached_is_refused(
    tmp_path: Path,
    overrides: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_metrics(tmp_path)
    arguments = ("plan", LLAMA, "--on", "p5.48xlarge", "--to-target", folder)
    assert cli.main([*arguments, "batch.rows=512", *overrides]) == 2
    assert message in capsys.readouterr().err
