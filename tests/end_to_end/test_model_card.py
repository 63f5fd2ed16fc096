"""Model cards: their metadata is valid on the Hub, and their code runs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from distributed import datasets
from distributed.runs import settings
from regauge.cli import main
from regauge.system import processes
from regauge.training.model_card import README, is_card, render_card, write_card
from regauge.training.run import attempt

LIBRARIES = {
    "mlm": ("transformers", "fill-mask"),
    "clm": ("transformers", "text-generation"),
    "contrastive": ("sentence-transformers", "sentence-similarity"),
    "classify": ("transformers", "text-classification"),
    "rank": ("regauge", None),
}
DATA = {
    "mlm": datasets.write_packed,
    "clm": datasets.write_packed,
    "contrastive": datasets.write_pairs,
    "classify": datasets.write_pairs,
    "rank": datasets.write_groups,
}


def train(root: Path, task: str) -> Path:
    data = DATA[task](root / "data")
    price = {"usd_per_hour": 36.0, "market": "spot", "as_of": "2026-11-01"}
    changes = {"stop": {"steps": 8}, "execution": {"price": price}}
    attempt(settings(root / "run", data, task, **changes), processes.World())
    return root / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("card"), "contrastive")


def read_code(card: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    return str(code)


@pytest.mark.parametrize("task", ["mlm", "clm", "contrastive", "classify", "rank"])
def test_the_metadata_is_valid_and_the_code_runs(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = train(tmp_path, task) / "model"
    card = ModelCard.load(model / README)
    assert (card.data.library_name, card.data.pipeline_tag) == LIBRARIES[task]
    assert {"regauge", task} <= set(card.data.tags)
    results = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert "heldout/loss" in results
    assert "heldout/items" not in results
    monkeypatch.chdir(model)
    with processes.restore_environment():
        exec(read_code(card.text), {})  # noqa: S102 - the code of the card
    assert capsys.readouterr().out.strip()


def test_a_card_has_data_cost_and_lineage(run: Path) -> None:
    text = (run / "model" / README).read_text(encoding="utf-8")
    assert f"| `{run.parent / 'data'}` | dataset |" in text
    assert "| split `train` | 40 rows, " in text
    assert "| hardware | `cpu`, 1 process, 1 machine |" in text
    assert "| price of a machine | 36 USD per hour (run file, spot, 2026-11-01) |" in text
    assert re.search(r"\| dollars \| \$\d", text)
    assert re.search(r"\| version of torch \| \d", text)
    assert "Held-out rows, at step 8." in text


def test_the_same_run_gives_the_same_bytes(run: Path) -> None:
    text = (run / "model" / README).read_text(encoding="utf-8")
    assert render_card(run, run / "model") == text


def test_an_edited_readme_is_kept(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(run / "model", folder)
    card = (folder / README).read_text(encoding="utf-8")
    assert is_card(card)
    write_card(run, folder)
    assert not caplog.messages
    edited = card.replace("## Use", "## How to use it")
    (folder / README).write_text(edited, encoding="utf-8")
    write_card(run, folder)
    assert (folder / README).read_text(encoding="utf-8") == edited
    assert "was not written by Regauge and is kept" in caplog.text


@pytest.mark.parametrize("weight_format", ["hf", "sentence-transformers"])
def test_an_exported_folder_has_the_card_of_its_step(
    run: Path, tmp_path: Path, weight_format: str
) -> None:
    export = ["export", str(run), "--format", weight_format, "--to"]
    assert main([*export, str(tmp_path / "final")]) == 0
    final = (run / "model" / README).read_bytes()
    assert (tmp_path / "final" / README).read_bytes() == final
    assert main([*export, str(tmp_path / "early"), "export.step=4"]) == 0
    early = ModelCard.load(tmp_path / "early" / README)
    assert "| steps | 4 |" in early.text
    assert "There is no evaluation at step 4." in early.text
    assert not early.data.eval_results
