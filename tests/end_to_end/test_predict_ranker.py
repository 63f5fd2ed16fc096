"""Export of rankers: the artifact has the metrics of its run, and predict its scores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import regauge
from distributed import datasets
from end_to_end.predicting import EAGER, export_run, read_table, train_model
from regauge.cli import main


@pytest.fixture(scope="module", params=["rank", "apart"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_model(tmp_path_factory.mktemp("ranker"), request.param, datasets.write_groups)


def records(count: int) -> list[dict[str, object]]:
    draw = np.random.default_rng(3)
    texts = [" ".join(f"w{word}" for word in draw.integers(5, 40, 6)) for _ in range(2 * count)]
    return [
        {
            "id": index,
            "query": texts[2 * index],
            "document": texts[2 * index + 1],
            **({"price": float(index)} if index % 3 else {}),
            **({"brand": f"b{index % 4}"} if index % 2 else {}),
        }
        for index in range(count)
    ]


def test_an_artifact_has_the_metrics_and_scores_of_its_run(run: Path, tmp_path: Path) -> None:
    artifact = export_run(run, tmp_path / "artifact")
    parity = json.loads((artifact / "parity.json").read_text())
    lines = (run / "metrics.jsonl").read_text().splitlines()
    evaluations = [line for line in map(json.loads, lines) if "heldout/mrr" in line]
    last = evaluations[-1]
    for name in ("ndcg@10", "mrr", "auc"):
        assert parity[f"heldout/{name}"] == pytest.approx(last[f"heldout/{name}"], abs=1e-6), last
    examples = records(40)
    source = tmp_path / "pairs.jsonl"
    source.write_text("\n".join(map(json.dumps, examples)))
    command = ["predict", str(artifact), "--source", str(source), "--to", str(tmp_path / "out")]
    assert main([*command, "execution.executor=inline", "predict.shard_records=7"]) == 0
    table = read_table(tmp_path / "out")
    assert table["id"].to_pylist() == list(range(40))
    columns = [[record[name] for record in examples] for name in ("query", "document")]
    model = regauge.load(artifact)
    fields = model.program.fields
    names = (*fields.numeric_features, *fields.categorical_features)
    values = {name: [record.get(name) for record in examples] for name in names}
    scores = model.predict(*columns, values=values)["score"]
    assert np.array_equal(table["score"].to_numpy(), scores)
    assert len(set(scores.tolist())) > 30


def test_a_record_with_an_invalid_number_is_quarantined(run: Path, tmp_path: Path) -> None:
    artifact = export_run(run, tmp_path / "artifact", *EAGER, "parity.batch_invariance=false")
    bad = [*records(3), {"id": 9, "query": "w5", "document": "w6", "price": "cheap"}]
    source = tmp_path / "pairs.jsonl"
    source.write_text("\n".join(map(json.dumps, bad)))
    command = ["predict", str(artifact), "--source", str(source), "--to", str(tmp_path / "out")]
    more = [
        "execution.executor=inline",
        "predict.batch_invariant=false",
        'output.keep_fields=["id"]',
    ]
    assert main([*command, *more]) == 0
    assert read_table(tmp_path / "out")["id"].to_pylist() == [0, 1, 2]
    [line] = (tmp_path / "out" / "quarantine" / "000000-00000.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "'price' is not a number"
