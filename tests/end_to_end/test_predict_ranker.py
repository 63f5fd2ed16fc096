"""A trained ranker as an artifact: the scores of candidates, as its run has them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import regauge
from distributed import datasets
from end_to_end.predicting import EAGER, exported, table, trained
from regauge.cli import main


@pytest.fixture(scope="module", params=["rank", "apart"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("ranker"), request.param, datasets.groups)


def records(count: int) -> list[dict[str, object]]:
    draw = np.random.default_rng(3)
    said = [" ".join(f"w{word}" for word in draw.integers(5, 40, 6)) for _ in range(2 * count)]
    return [
        {
            "id": place,
            "query": said[2 * place],
            "document": said[2 * place + 1],
            **({"price": float(place)} if place % 3 else {}),
            **({"brand": f"b{place % 4}"} if place % 2 else {}),
        }
        for place in range(count)
    ]


def test_scores_are_those_of_the_run(run: Path, tmp_path: Path) -> None:
    artifact = exported(run, tmp_path / "artifact")
    parity = json.loads((artifact / "parity.json").read_text())
    evaluated = run / "metrics.jsonl"
    every = [json.loads(line) for line in evaluated.read_text().splitlines()]
    last = next(each for each in reversed(every) if "heldout/mrr" in each)
    for name in ("ndcg@10", "mrr", "auc"):
        assert parity[f"heldout/{name}"] == pytest.approx(last[f"heldout/{name}"], abs=1e-6), last
    told = records(40)
    source = tmp_path / "pairs.jsonl"
    source.write_text("\n".join(map(json.dumps, told)))
    command = ["predict", str(artifact), "--source", str(source), "--to", str(tmp_path / "out")]
    assert main([*command, "execution.executor=inline", "predict.rows=7"]) == 0
    found = table(tmp_path / "out")
    assert found["id"].to_pylist() == list(range(40))
    columns = [[each[name] for each in told] for name in ("query", "document")]
    values = {name: [each.get(name) for each in told] for name in ("price", "brand")}
    scores = regauge.load(artifact).answer(*columns, values=values)["score"]
    assert np.array_equal(found["score"].to_numpy(), scores)
    assert len(set(scores.tolist())) > 30


def test_a_number_that_is_none_sets_its_record_aside(run: Path, tmp_path: Path) -> None:
    artifact = exported(run, tmp_path / "artifact", *EAGER, "proof.invariant=false")
    bad = [*records(3), {"id": 9, "query": "w5", "document": "w6", "price": "cheap"}]
    source = tmp_path / "pairs.jsonl"
    source.write_text("\n".join(map(json.dumps, bad)))
    command = ["predict", str(artifact), "--source", str(source), "--to", str(tmp_path / "out")]
    more = ["execution.executor=inline", "predict.invariant=false", 'output.keep=["id"]']
    assert main([*command, *more]) == 0
    assert table(tmp_path / "out")["id"].to_pylist() == [0, 1, 2]
    [line] = (tmp_path / "out" / "quarantine" / "000000-00000.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "'price' is no number"
