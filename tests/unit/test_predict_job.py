"""A folder of answers: whose it is, what of it is finished, and when nothing is left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from regauge import config, jsonl
from regauge.artifacts.artifact import Artifact
from regauge.artifacts.manifest import Compiled, Manifest, Origin, Program, Rung, Target
from regauge.backends.eager import Eager
from regauge.data.sources import Piece
from regauge.errors import DataError, SettingsError
from regauge.prediction.job import Job, Place, facts_of, paths, place_of, sums, write_result
from regauge.prediction.settings import Predicting
from regauge.prediction.shard_queue import Shard

FACTS = {"artifact": "a", "predict": {"rows": 10, "invariant": True}, "texts": ("text",)}


def settings(folder: Path, **tables: Any) -> Predicting:
    base = {
        "artifact": str(folder / "artifact"),
        "source": {"kind": "jsonl", "files": ("texts.jsonl",)},
        "output": {"folder": str(folder / "out")},
    }
    return config.build(Predicting, config.merge(base, tables))


def piece(number: int) -> Piece:
    return Piece(f"piece {number}", 100 + number, 100, f"stamp {number}", (f"{number}.jsonl",))


def job(folder: Path, pieces: int = 1, index: int = 0, count: int = 1) -> Job:
    return Job(settings(folder), tuple(map(piece, range(pieces))), Place(index, count))


def begun(folder: Path, pieces: int = 1, index: int = 0, count: int = 1) -> Job:
    made = job(folder, pieces, index, count)
    made.begin(FACTS)
    return made


def commit(made: Job, number: int, part: int = 0, *, last: bool = False, **more: Any) -> Path:
    """Write a shard's file and its line, as the job's owner; return the file."""
    made.own.mkdir(parents=True, exist_ok=True)
    file = made.folder / "shards" / f"{Shard(number, part).name}.parquet"
    file.write_bytes(b"answers")
    line = {
        "piece": number,
        "part": part,
        "last": last,
        "rows": 10,
        "quarantined": 1,
        "skipped": 2,
        "truncated": 3,
        "tokens": 60,
        "slots": 80,
        "bytes": {file.name: 7},
        "sha256": {file.name: "…"},
        "seconds": {"read": 0.5, "compute": 2.0, "write": 0.0},
    }
    made.commit({**line, **more})
    return file


def test_a_folder_is_taken_and_taken_again(tmp_path: Path) -> None:
    made = begun(tmp_path)
    document = json.loads((made.folder / "job.json").read_text())
    assert document["format"] == 1
    assert document["predict"] == {"rows": 10, "invariant": True}
    assert {path.name for path in made.folder.iterdir()} == {
        "job.json",
        "shards",
        "quarantine",
        "jobs",
    }
    before = (made.folder / "job.json").read_bytes()
    begun(tmp_path)
    assert (made.folder / "job.json").read_bytes() == before
    assert made.own.is_dir()
    assert not list(made.own.iterdir())


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({**FACTS, "artifact": "b"}, "artifact is 'a' there and 'b' here"),
        (
            {**FACTS, "predict": {"rows": 9, "invariant": False}},
            "predict.invariant is True there and False here",
        ),
        ({**FACTS, "texts": ("text", "more")}, "texts is ['text'] there and ['text', 'more'] here"),
        ({**FACTS, "zone": 1}, "zone is None there and 1 here"),
        ({"predict": FACTS["predict"], "texts": ("text",)}, "artifact is 'a' there and None here"),
    ],
)
def test_a_folder_with_other_answers_is_refused_by_the_first_difference(
    tmp_path: Path, facts: dict[str, Any], told: str
) -> None:
    made = begun(tmp_path)
    before = (made.folder / "job.json").read_bytes()
    for other in (made, job(tmp_path, 1, 1, 2)):
        with pytest.raises(DataError) as caught:
            other.begin(facts)
        assert str(caught.value) == (
            f"{made.folder} has other answers: {told};"
            " name another output.folder, or delete that one"
        )
    assert caught.value.exit_code == 64
    assert (made.folder / "job.json").read_bytes() == before


def test_a_folder_with_anything_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    made = job(tmp_path)
    made.folder.mkdir()
    (made.folder / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match=r"out holds something else; name another output\.folder"):
        made.begin(FACTS)
    assert [path.name for path in made.folder.iterdir()] == ["thesis.txt"]
    (made.folder / "thesis.txt").unlink()
    made.begin(FACTS)
    assert (made.folder / "job.json").is_file()


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    made = job(tmp_path)
    made.folder.write_text("answers")
    with pytest.raises(DataError, match="out holds something else"):
        made.begin(FACTS)
    assert made.folder.read_text() == "answers"


def test_a_document_that_cannot_be_read_is_no_empty_folder(tmp_path: Path) -> None:
    made = begun(tmp_path)
    (made.folder / "job.json").write_text('{"format": 1, "art')
    with pytest.raises(DataError, match=r"job\.json cannot be read"):
        made.begin(FACTS)


def test_two_jobs_that_begin_at_once_agree_on_who_was_first(tmp_path: Path) -> None:
    """The second finds no document when it looks, and one when it writes its own."""
    first, second = job(tmp_path, 2, 0, 2), job(tmp_path, 2, 1, 2)
    for room in ("shards", "quarantine"):
        (second.folder / room).mkdir(parents=True)
    first.begin(FACTS)
    before = (first.folder / "job.json").read_bytes()
    second._put({"format": 1, "artifact": "b"})
    assert (first.folder / "job.json").read_bytes() == before
    assert not list(second.own.iterdir())


def test_a_shard_is_finished_once_its_line_and_its_files_are_there(tmp_path: Path) -> None:
    made = begun(tmp_path, 2)
    assert made.finished() == {}
    commit(made, 0, 0)
    commit(made, 0, 1, last=True)
    commit(made, 1, 0, last=True, rows=4)
    found = made.finished()
    assert list(found) == [Shard(0, 0), Shard(0, 1), Shard(1, 0)]
    assert [found[shard]["last"] for shard in found] == [False, True, True]
    assert found[Shard(1, 0)]["rows"] == 4


def test_what_is_gone_or_cut_or_torn_is_not_finished(tmp_path: Path) -> None:
    made = begun(tmp_path)
    files = [commit(made, 0, part) for part in range(6)]
    files[0].unlink()
    files[1].write_bytes(b"answer")
    files[2].write_bytes(b"answers and more")
    files[3].unlink()
    files[3].mkdir()
    ledger = made.own / "ledger.jsonl"
    text = ledger.read_text()
    ledger.write_text(text + text.splitlines()[0][:40])
    assert list(made.finished()) == [Shard(0, 4), Shard(0, 5)]
    commit(made, 0, 6)
    assert list(made.finished()) == [Shard(0, 4), Shard(0, 5), Shard(0, 6)]
    assert len(ledger.read_text().splitlines()) == 8


def test_a_shard_of_two_files_needs_both(tmp_path: Path) -> None:
    made = begun(tmp_path)
    beside = made.folder / "shards" / "000000-00000.npy"
    beside.write_bytes(b"array")
    commit(made, 0, bytes={"000000-00000.parquet": 7, beside.name: 5})
    assert list(made.finished()) == [Shard(0, 0)]
    beside.unlink()
    assert made.finished() == {}


def test_a_line_without_files_finishes_nothing(tmp_path: Path) -> None:
    made = begun(tmp_path)
    commit(made, 0, bytes={})
    assert made.finished() == {}


def test_a_shard_that_was_made_again_has_its_last_line(tmp_path: Path) -> None:
    made = begun(tmp_path)
    commit(made, 0, rows=1)
    commit(made, 0, rows=2)
    assert made.finished()[Shard(0, 0)]["rows"] == 2


def test_the_ledgers_of_all_jobs_are_read_together(tmp_path: Path) -> None:
    jobs = [begun(tmp_path, 5, index, 3) for index in range(3)]
    assert [each.share for each in jobs] == [(0, 3), (1, 4), (2,)]
    assert len({each.own for each in jobs}) == 3
    for each in jobs:
        for number in each.share:
            commit(each, number, last=True)
    assert all(sorted(each.finished()) == [Shard(n, 0) for n in range(5)] for each in jobs)
    assert [len(jsonl.whole(each.own / "ledger.jsonl")) for each in jobs] == [2, 2, 1]


def spent(made: Job, seconds: float, usd: float | None) -> None:
    """Write what a job has cost, as its command does when it begins and when it ends."""
    made.own.mkdir(parents=True, exist_ok=True)
    document = {"nodes": 1, "processes": 1, "machine_seconds": seconds, "usd": usd}
    jsonl.append(made.own / "attempts.jsonl", {**document, "machine_seconds": 0.0, "began": 1.0})
    jsonl.append(made.own / "attempts.jsonl", {**document, "ended": 2.0})


def test_the_sums_are_written_once_nothing_is_left_of_any_job(tmp_path: Path) -> None:
    first, second = (begun(tmp_path, 2, index, 2) for index in range(2))
    result = first.folder / "result.json"
    assert write_result(first) is None
    commit(first, 0, 0)
    commit(first, 0, 2, last=True)
    assert write_result(first) is None
    commit(second, 1, 0, last=True)
    assert write_result(second) is None
    assert not result.exists()
    gap = commit(first, 0, 1)
    spent(first, 30.0, 0.75)
    spent(second, 12.5, 0.25)
    found = write_result(first)
    assert found == json.loads(result.read_text())
    assert found == {
        "format": 1,
        "rows": 40,
        "quarantined": 4,
        "skipped": 8,
        "truncated": 12,
        "tokens": 240,
        "slots": 320,
        "shards": 4,
        "useful_token_share": 0.75,
        "rows_per_second": {"read": 20.0, "compute": 5.0, "write": None},
        "machine_seconds": 42.5,
        "usd": 1.0,
        "usd_per_million": 25_000.0,
    }
    gap.unlink()
    result.unlink()
    assert write_result(first) is None
    assert not result.exists()


def test_a_piece_to_whose_end_nobody_came_is_not_finished(tmp_path: Path) -> None:
    made = begun(tmp_path)
    commit(made, 0, 0)
    commit(made, 0, 1)
    assert write_result(made) is None
    commit(made, 0, 2, last=True)
    assert write_result(made) is not None


def test_dollars_are_unknown_where_those_of_one_job_are(tmp_path: Path) -> None:
    first, second = (begun(tmp_path, 2, index, 2) for index in range(2))
    for each in (first, second):
        commit(each, each.place.index, last=True)
    spent(first, 30.0, 0.75)
    spent(second, 10.0, None)
    found = write_result(second)
    assert found is not None
    told = {name: found[name] for name in ("machine_seconds", "usd", "usd_per_million")}
    assert told == {"machine_seconds": 40.0, "usd": None, "usd_per_million": None}


def test_of_nothing_there_are_no_rates() -> None:
    found = sums({})
    assert found["useful_token_share"] is None
    assert found["rows_per_second"] == {"read": None, "compute": None, "write": None}
    assert (found["rows"], found["shards"]) == (0, 0)


def test_files_of_answers_come_in_the_order_of_the_records(tmp_path: Path) -> None:
    made = begun(tmp_path, 12)
    for number, part in ((10, 0), (2, 1), (2, 0), (0, 0)):
        commit(made, number, part)
    found = [path.name for path in paths(made.folder, made.finished())]
    assert found == [
        "000000-00000.parquet",
        "000002-00000.parquet",
        "000002-00001.parquet",
        "000010-00000.parquet",
    ]
    assert all(path.is_file() for path in paths(made.folder, made.finished()))


SLURM = {
    "SLURM_ARRAY_TASK_ID": "12",
    "SLURM_ARRAY_TASK_MIN": "10",
    "SLURM_ARRAY_TASK_MAX": "13",
    "SLURM_ARRAY_TASK_COUNT": "4",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2"}


@pytest.mark.parametrize(
    ("asked", "environment", "place"),
    [
        ({}, {}, Place(0, 1)),
        ({"index": 1, "count": 3}, {}, Place(1, 3)),
        ({"count": 3}, {}, Place(0, 3)),
        ({"index": "auto", "count": "auto"}, {}, Place(0, 1)),
        ({}, SLURM, Place(2, 4)),
        ({}, {**SLURM, "SLURM_ARRAY_TASK_ID": "10"}, Place(0, 4)),
        ({}, {**SLURM, "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_ID": "3"}, Place(3, 4)),
        ({"count": 8}, SLURM, Place(2, 8)),
        ({"index": 0}, SLURM, Place(0, 4)),
        ({"index": 3, "count": 5}, SLURM, Place(3, 5)),
        ({"count": 3}, KUBERNETES, Place(2, 3)),
        ({"index": 0, "count": 3}, KUBERNETES, Place(0, 3)),
        ({}, KUBERNETES, Place(0, 1)),
    ],
)
def test_which_job_it_is_the_settings_say_or_who_has_started_it(
    tmp_path: Path, asked: dict[str, Any], environment: Mapping[str, str], place: Place
) -> None:
    assert place_of(settings(tmp_path, predict=asked), environment) == place


@pytest.mark.parametrize(
    ("asked", "environment", "told"),
    [
        ({"index": 3, "count": 3}, {}, "predict.index = 3 is none of 3 jobs, 0 to the last"),
        ({"index": 1}, {}, "predict.index = 1 is none of 1 jobs"),
        ({"count": 2}, KUBERNETES, "predict.index = 2 is none of 2 jobs"),
        ({"count": 2}, SLURM, "predict.index = 2 is none of 2 jobs"),
    ],
)
def test_a_job_that_is_none_of_so_many_is_refused(
    tmp_path: Path, asked: dict[str, Any], environment: Mapping[str, str], told: str
) -> None:
    with pytest.raises(SettingsError, match=told) as caught:
        place_of(settings(tmp_path, predict=asked), environment)
    assert "set predict.count to how many there are" in str(caught.value)


def artifact(folder: Path) -> Artifact:
    """Return an artifact of which there is the manifest alone."""
    manifest = Manifest(
        format=1,
        program=Program(answers="vectors", width=2, inputs=()),
        compiled=Compiled(precision="fp32", backend=Eager(), versions={}),
        target=Target(accelerator="cpu", chip="a chip", threads=1),
        shapes=(Rung(length=8, rows=(1,)),),
        origin=Origin(path="run", sha256="…"),
        files={},
    )
    (folder / "artifact").mkdir(exist_ok=True)
    (folder / "artifact" / "manifest.json").write_text(json.dumps(config.dump(manifest)))
    return Artifact(folder / "artifact", manifest)


def facts(folder: Path, kept: dict[str, str] | None = None, **tables: Any) -> dict[str, Any]:
    asked = settings(folder, **tables)
    found = facts_of(asked, artifact(folder), (piece(0), piece(1)), kept or {})
    found_again: dict[str, Any] = json.loads(json.dumps(found))
    return found_again


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"predict": {"rows": 7}}, "rows"),
        ({"predict": {"prompt": "query"}}, "prompt"),
        ({"predict": {"texts": ("title",)}}, "texts"),
        ({"predict": {"invariant": False}}, "invariant"),
        ({"output": {"dtype": "int8"}}, "output"),
        ({"output": {"format": "npy"}}, "output"),
        ({"source": {"kind": "jsonl", "files": ("other.jsonl",)}}, "source"),
    ],
)
def test_what_decides_the_answers_is_a_fact(
    tmp_path: Path, tables: dict[str, Any], key: str
) -> None:
    usual, other = facts(tmp_path), facts(tmp_path, **tables)
    assert usual[key] != other[key]
    changed = {name for name in usual if usual[name] != other[name]}
    assert changed == {key, *({"machine"} if key == "invariant" else ())}


@pytest.mark.parametrize(
    "tables",
    [
        {"execution": {"workers": 3, "executor": "inline", "attempts": 1}},
        {"predict": {"index": 1, "count": 2, "max_usd": 3.0}},
        {"execution": {"price": {"usd_per_hour": 2.0, "market": "own"}}},
    ],
)
def test_who_computes_it_and_what_it_may_cost_are_none(
    tmp_path: Path, tables: dict[str, Any]
) -> None:
    assert facts(tmp_path, **tables) == facts(tmp_path)


def test_pieces_artifact_and_kept_fields_are_facts(tmp_path: Path) -> None:
    usual = facts(tmp_path, {"id": "integer"})
    assert usual["pieces"] == {"piece 0": [100, "stamp 0"], "piece 1": [101, "stamp 1"]}
    assert usual["kept"] == {"id": "integer"}
    assert usual["machine"]["name"]
    assert facts(tmp_path, predict={"invariant": False})["machine"] == {}
    other = artifact(tmp_path)
    manifest = other.folder / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    changed = facts_of(settings(tmp_path), other, (piece(0), piece(1)), {"id": "integer"})
    assert changed["artifact"] != usual["artifact"]
    pieces = (piece(0)._replace(stamp="changed"), piece(1))
    grown = facts_of(settings(tmp_path), other, pieces, {})
    assert grown["pieces"] != changed["pieces"]


@pytest.mark.parametrize(("pieces", "count"), [(4, 2), (7, 3), (2, 5), (0, 2)])
def test_every_piece_is_of_one_share(tmp_path: Path, pieces: int, count: int) -> None:
    shares = [job(tmp_path, pieces, index, count).share for index in range(count)]
    assert sorted(number for share in shares for number in share) == list(range(pieces))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
