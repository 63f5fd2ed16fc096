"""The output folder of a job: its facts, its finished shards, and its totals."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from regauge import config
from regauge.config import FORMAT
from regauge.data.sources import Piece
from regauge.inference.backends.eager import EagerBackend
from regauge.inference.export.artifact import Artifact
from regauge.inference.export.manifest import (
    ArtifactManifest,
    Bucket,
    Compilation,
    ProgramEntry,
    TargetMachine,
    WeightsOrigin,
)
from regauge.inference.predict.job import (
    JobSlot,
    PredictJob,
    collect_facts,
    list_output_paths,
    resolve_slot,
    sum_shards,
    write_result,
)
from regauge.inference.predict.settings import PredictSettings
from regauge.inference.predict.shard_queue import ShardId
from regauge.system import jsonl
from regauge.system.errors import DataError, SettingsError

FACTS = {
    "artifact": "a",
    "predict": {"shard_records": 10, "batch_invariant": True},
    "text_fields": ("text",),
}


def settings(folder: Path, **tables: Any) -> PredictSettings:
    base = {
        "artifact": str(folder / "artifact"),
        "source": {"kind": "jsonl", "files": ("texts.jsonl",)},
        "output": {"folder": str(folder / "out")},
    }
    return config.build(PredictSettings, config.merge(base, tables))


def piece(number: int) -> Piece:
    return Piece(f"piece {number}", 100 + number, 100, f"stamp {number}", (f"{number}.jsonl",))


def build_job(folder: Path, pieces: int = 1, index: int = 0, count: int = 1) -> PredictJob:
    return PredictJob(settings(folder), tuple(map(piece, range(pieces))), JobSlot(index, count))


def claim_job(folder: Path, pieces: int = 1, index: int = 0, count: int = 1) -> PredictJob:
    job = build_job(folder, pieces, index, count)
    job.claim_folder(FACTS)
    return job


def commit(job: PredictJob, number: int, part: int = 0, *, last: bool = False, **more: Any) -> Path:
    """Write the file and the ledger line of a shard; return the file."""
    job.job_folder.mkdir(parents=True, exist_ok=True)
    file = job.folder / "shards" / f"{ShardId(number, part).name}.parquet"
    file.write_bytes(b"answers")
    line = {
        "piece": number,
        "part": part,
        "is_last": last,
        "rows": 10,
        "quarantined": 1,
        "skipped": 2,
        "truncated": 3,
        "tokens": 60,
        "computed_tokens": 80,
        "bytes": {file.name: 7},
        "sha256": {file.name: "…"},
        "seconds": {"read": 0.5, "compute": 2.0, "write": 0.0},
    }
    job.commit_shard({**line, **more})
    return file


def test_a_folder_can_be_claimed_twice_by_the_same_job(tmp_path: Path) -> None:
    job = claim_job(tmp_path)
    document = json.loads((job.folder / "job.json").read_text())
    assert document["format"] == FORMAT
    assert document["predict"] == {"shard_records": 10, "batch_invariant": True}
    names = {path.name for path in job.folder.iterdir()}
    assert names == {"job.json", "shards", "quarantine", "jobs"}
    before = (job.folder / "job.json").read_bytes()
    claim_job(tmp_path)
    assert (job.folder / "job.json").read_bytes() == before
    assert job.job_folder.is_dir()
    assert not list(job.job_folder.iterdir())


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({**FACTS, "artifact": "b"}, "artifact is 'a', not 'b'"),
        (
            {**FACTS, "predict": {"shard_records": 9, "batch_invariant": False}},
            "predict.batch_invariant is True, not False",
        ),
        (
            {**FACTS, "text_fields": ("text", "more")},
            "text_fields is ['text'], not ['text', 'more']",
        ),
        ({**FACTS, "zone": 1}, "zone is unset, not 1"),
        (
            {"predict": FACTS["predict"], "text_fields": ("text",)},
            "artifact is 'a', not unset",
        ),
    ],
)
def test_the_output_folder_of_another_job_is_refused_with_the_first_difference(
    tmp_path: Path, facts: dict[str, Any], message: str
) -> None:
    job = claim_job(tmp_path)
    before = (job.folder / "job.json").read_bytes()
    for other in (job, build_job(tmp_path, 1, 1, 2)):
        with pytest.raises(DataError) as caught:
            other.claim_folder(facts)
        assert str(caught.value) == (
            f"{job.folder} has the output of another job: {message};"
            " name another output.folder, or delete that one"
        )
    assert caught.value.exit_code == 64
    assert (job.folder / "job.json").read_bytes() == before


def test_a_folder_with_other_files_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    job = build_job(tmp_path)
    job.folder.mkdir()
    (job.folder / "thesis.txt").write_text("years of work")
    with pytest.raises(
        DataError, match=r"out is not an output folder of predict; name another output\.folder"
    ):
        job.claim_folder(FACTS)
    assert [path.name for path in job.folder.iterdir()] == ["thesis.txt"]
    (job.folder / "thesis.txt").unlink()
    job.claim_folder(FACTS)
    assert (job.folder / "job.json").is_file()


def test_a_file_with_the_name_of_the_folder_is_refused(tmp_path: Path) -> None:
    job = build_job(tmp_path)
    job.folder.write_text("answers")
    with pytest.raises(DataError, match="out is not an output folder of predict"):
        job.claim_folder(FACTS)
    assert job.folder.read_text() == "answers"


def test_a_folder_with_a_damaged_job_file_is_refused(tmp_path: Path) -> None:
    job = claim_job(tmp_path)
    (job.folder / "job.json").write_text('{"format": 1, "art')
    with pytest.raises(DataError, match=r"job\.json cannot be read"):
        job.claim_folder(FACTS)


def test_the_first_of_two_concurrent_jobs_writes_the_job_file(tmp_path: Path) -> None:
    """The second job sees no `job.json` at first; the file exists when it writes."""
    first, second = build_job(tmp_path, 2, 0, 2), build_job(tmp_path, 2, 1, 2)
    for name in ("shards", "quarantine"):
        (second.folder / name).mkdir(parents=True)
    first.claim_folder(FACTS)
    before = (first.folder / "job.json").read_bytes()
    second.write_shared("job.json", {"format": FORMAT, "artifact": "b"})
    assert (first.folder / "job.json").read_bytes() == before
    assert not list(second.job_folder.iterdir())


def test_a_shard_with_its_line_and_files_is_finished(tmp_path: Path) -> None:
    job = claim_job(tmp_path, 2)
    assert job.read_finished_shards() == {}
    commit(job, 0, 0)
    commit(job, 0, 1, last=True)
    commit(job, 1, 0, last=True, rows=4)
    lines = job.read_finished_shards()
    assert list(lines) == [ShardId(0, 0), ShardId(0, 1), ShardId(1, 0)]
    assert [line["is_last"] for line in lines.values()] == [False, True, True]
    assert lines[ShardId(1, 0)]["rows"] == 4


def test_a_shard_with_a_missing_or_truncated_file_or_line_is_not_finished(tmp_path: Path) -> None:
    job = claim_job(tmp_path)
    files = [commit(job, 0, part) for part in range(6)]
    files[0].unlink()
    files[1].write_bytes(b"answer")
    files[2].write_bytes(b"answers and more")
    files[3].unlink()
    files[3].mkdir()
    ledger = job.job_folder / "ledger.jsonl"
    text = ledger.read_text()
    ledger.write_text(text + text.splitlines()[0][:40])
    assert list(job.read_finished_shards()) == [ShardId(0, 4), ShardId(0, 5)]
    commit(job, 0, 6)
    assert list(job.read_finished_shards()) == [ShardId(0, 4), ShardId(0, 5), ShardId(0, 6)]
    assert len(ledger.read_text().splitlines()) == 8


def test_a_shard_with_two_files_needs_both(tmp_path: Path) -> None:
    job = claim_job(tmp_path)
    array = job.folder / "shards" / "000000-00000.npy"
    array.write_bytes(b"array")
    commit(job, 0, bytes={"000000-00000.parquet": 7, array.name: 5})
    assert list(job.read_finished_shards()) == [ShardId(0, 0)]
    array.unlink()
    assert job.read_finished_shards() == {}


def test_a_line_without_files_is_ignored(tmp_path: Path) -> None:
    job = claim_job(tmp_path)
    commit(job, 0, bytes={})
    assert job.read_finished_shards() == {}


def test_the_last_line_of_a_repeated_shard_counts(tmp_path: Path) -> None:
    job = claim_job(tmp_path)
    commit(job, 0, rows=1)
    commit(job, 0, rows=2)
    assert job.read_finished_shards()[ShardId(0, 0)]["rows"] == 2


def test_the_ledgers_of_all_jobs_are_read_together(tmp_path: Path) -> None:
    jobs = [claim_job(tmp_path, 5, index, 3) for index in range(3)]
    assert [job.piece_numbers for job in jobs] == [(0, 3), (1, 4), (2,)]
    assert len({job.job_folder for job in jobs}) == 3
    for job in jobs:
        for number in job.piece_numbers:
            commit(job, number, last=True)
    assert all(
        sorted(job.read_finished_shards()) == [ShardId(n, 0) for n in range(5)] for job in jobs
    )
    assert [len(jsonl.read_lines(job.job_folder / "ledger.jsonl")) for job in jobs] == [2, 2, 1]


def write_cost(job: PredictJob, seconds: float, usd: float | None) -> None:
    """Write the cost of a job, as its command does at its start and at its end."""
    job.job_folder.mkdir(parents=True, exist_ok=True)
    document = {"nodes": 1, "processes": 1, "machine_seconds": seconds, "usd": usd}
    jsonl.append_line(
        job.job_folder / "attempts.jsonl", {**document, "machine_seconds": 0.0, "started_at": 1.0}
    )
    jsonl.append_line(job.job_folder / "attempts.jsonl", {**document, "ended_at": 2.0})


def test_the_totals_are_written_after_the_last_shard_of_all_jobs(tmp_path: Path) -> None:
    first, second = (claim_job(tmp_path, 2, index, 2) for index in range(2))
    result_file = first.folder / "result.json"
    assert write_result(first) is None
    commit(first, 0, 0)
    commit(first, 0, 2, last=True)
    assert write_result(first) is None
    commit(second, 1, 0, last=True)
    assert write_result(second) is None
    assert not result_file.exists()
    gap = commit(first, 0, 1)
    write_cost(first, 30.0, 0.75)
    write_cost(second, 12.5, 0.25)
    result = write_result(first)
    assert result == json.loads(result_file.read_text())
    assert result == {
        "format": FORMAT,
        "rows": 40,
        "quarantined": 4,
        "skipped": 8,
        "truncated": 12,
        "dropped_fields": {},
        "missing_fields": {},
        "tokens": 240,
        "computed_tokens": 320,
        "shards": 4,
        "useful_token_fraction": 0.75,
        "rows_per_second": {"read": 20.0, "compute": 5.0, "write": None},
        "machine_seconds": 42.5,
        "usd": 1.0,
        "usd_per_million_rows": 25_000.0,
    }
    gap.unlink()
    result_file.unlink()
    assert write_result(first) is None
    assert not result_file.exists()


def test_a_piece_without_a_last_shard_is_not_finished(tmp_path: Path) -> None:
    job = claim_job(tmp_path)
    commit(job, 0, 0)
    commit(job, 0, 1)
    assert write_result(job) is None
    commit(job, 0, 2, last=True)
    assert write_result(job) is not None


def test_the_total_cost_is_unknown_if_the_cost_of_one_job_is(tmp_path: Path) -> None:
    first, second = (claim_job(tmp_path, 2, index, 2) for index in range(2))
    for job in (first, second):
        commit(job, job.slot.index, last=True)
    write_cost(first, 30.0, 0.75)
    write_cost(second, 10.0, None)
    result = write_result(second)
    assert result is not None
    costs = {name: result[name] for name in ("machine_seconds", "usd", "usd_per_million_rows")}
    assert costs == {"machine_seconds": 40.0, "usd": None, "usd_per_million_rows": None}


def test_rates_of_no_shards_are_none() -> None:
    totals = sum_shards({})
    assert totals["useful_token_fraction"] is None
    assert totals["rows_per_second"] == {"read": None, "compute": None, "write": None}
    assert (totals["rows"], totals["shards"]) == (0, 0)


def test_output_files_are_listed_in_the_order_of_the_records(tmp_path: Path) -> None:
    job = claim_job(tmp_path, 12)
    for number, part in ((10, 0), (2, 1), (2, 0), (0, 0)):
        commit(job, number, part)
    paths = list(list_output_paths(job.folder, job.read_finished_shards()))
    assert [path.name for path in paths] == [
        "000000-00000.parquet",
        "000002-00000.parquet",
        "000002-00001.parquet",
        "000010-00000.parquet",
    ]
    assert all(path.is_file() for path in paths)


SLURM = {
    "SLURM_ARRAY_TASK_ID": "12",
    "SLURM_ARRAY_TASK_MIN": "10",
    "SLURM_ARRAY_TASK_MAX": "13",
    "SLURM_ARRAY_TASK_COUNT": "4",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2"}
BATCH = {"AWS_BATCH_JOB_ARRAY_INDEX": "2", "AWS_BATCH_JOB_ARRAY_SIZE": "4"}
ARRAY = {"job_count": "auto"}


@pytest.mark.parametrize(
    ("options", "environment", "slot"),
    [
        ({}, {}, JobSlot(0, 1)),
        ({"job_index": 1, "job_count": 3}, {}, JobSlot(1, 3)),
        (ARRAY, SLURM, JobSlot(2, 4)),
        (ARRAY, {**SLURM, "SLURM_ARRAY_TASK_ID": "10"}, JobSlot(0, 4)),
        (ARRAY, {**SLURM, "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_ID": "3"}, JobSlot(3, 4)),
        (ARRAY, {**SLURM, "SLURM_ARRAY_TASK_STEP": "2"}, JobSlot(1, 4)),
        ({}, SLURM, JobSlot(0, 1)),
        ({"job_count": 8}, SLURM, JobSlot(2, 8)),
        ({**ARRAY, "job_index": 0}, SLURM, JobSlot(0, 4)),
        ({"job_index": 3, "job_count": 5}, SLURM, JobSlot(3, 5)),
        ({"job_count": 3}, KUBERNETES, JobSlot(2, 3)),
        ({"job_index": 0, "job_count": 3}, KUBERNETES, JobSlot(0, 3)),
        ({}, KUBERNETES, JobSlot(0, 1)),
        (ARRAY, BATCH, JobSlot(2, 4)),
        ({"job_count": 3}, BATCH, JobSlot(2, 3)),
        ({**ARRAY, "job_index": 1}, BATCH, JobSlot(1, 4)),
        ({}, BATCH, JobSlot(0, 1)),
    ],
)
def test_the_slot_comes_from_the_settings_or_the_launcher(
    tmp_path: Path, options: dict[str, Any], environment: Mapping[str, str], slot: JobSlot
) -> None:
    assert resolve_slot(settings(tmp_path, predict=options), environment) == slot


NOT_BELOW = "predict.job_index = {} is not below the number of jobs, {}; set predict.job_count to"


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        ({"job_index": 3, "job_count": 3}, {}, NOT_BELOW.format(3, 3)),
        ({"job_index": 1}, {}, NOT_BELOW.format(1, 1)),
        ({"job_count": 2}, KUBERNETES, NOT_BELOW.format(2, 2)),
        ({"job_count": 2}, SLURM, NOT_BELOW.format(2, 2)),
        (ARRAY, {}, 'job_count = "auto" needs the variables of a Slurm array'),
        (ARRAY, KUBERNETES, 'job_count = "auto" needs the variables of a Slurm array'),
        ({"job_count": 3}, {}, "no launcher sets the index of this job; set predict.job_index"),
        (ARRAY, {**BATCH, "AWS_BATCH_JOB_ARRAY_SIZE": "x"}, "ARRAY_SIZE = 'x' is not a number"),
    ],
)
def test_an_invalid_or_unknown_index_or_count_is_refused(
    tmp_path: Path, options: dict[str, Any], environment: Mapping[str, str], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        resolve_slot(settings(tmp_path, predict=options), environment)


def artifact(folder: Path) -> Artifact:
    """Return an artifact that consists of its manifest."""
    manifest = ArtifactManifest(
        format=1,
        program=ProgramEntry(output_kind="vectors", output_size=2, inputs=()),
        compiled=Compilation(precision="fp32", backend=EagerBackend(), versions={}),
        target=TargetMachine(accelerator="cpu", chip="a chip", threads=1),
        buckets=(Bucket(length=8, batch_sizes=(1,)),),
        origin=WeightsOrigin(path="run", sha256="…"),
        files={},
    )
    (folder / "artifact").mkdir(exist_ok=True)
    (folder / "artifact" / "manifest.json").write_text(json.dumps(config.dump(manifest)))
    return Artifact(folder / "artifact", manifest)


PIECES: dict[str, list[Any]] = {"piece 0": [100, "content 0"], "piece 1": [101, "content 1"]}


def facts(folder: Path, kept_fields: dict[str, str] | None = None, **tables: Any) -> dict[str, Any]:
    document = collect_facts(
        settings(folder, **tables), artifact(folder), PIECES, kept_fields or {}
    )
    parsed: dict[str, Any] = json.loads(json.dumps(document))
    return parsed


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"predict": {"shard_records": 7}}, "shard_records"),
        ({"predict": {"prompt_name": "query"}}, "prompt_name"),
        ({"predict": {"text_fields": ("title",)}}, "text_fields"),
        ({"predict": {"batch_invariant": False}}, "batch_invariant"),
        ({"output": {"dtype": "int8"}}, "output"),
        ({"output": {"format": "npy"}}, "output"),
        ({"source": {"kind": "jsonl", "files": ("other.jsonl",)}}, "source"),
    ],
)
def test_settings_that_decide_the_output_are_facts(
    tmp_path: Path, tables: dict[str, Any], key: str
) -> None:
    base_facts, other = facts(tmp_path), facts(tmp_path, **tables)
    assert base_facts[key] != other[key]
    changed = {name for name in base_facts if base_facts[name] != other[name]}
    assert changed == {key, *({"machine"} if key == "batch_invariant" else ())}


@pytest.mark.parametrize(
    "tables",
    [
        {"execution": {"workers": 3, "executor": "inline", "max_attempts": 1}},
        {"predict": {"job_index": 1, "job_count": 2, "max_usd": 3.0}},
        {"execution": {"price": {"usd_per_hour": 2.0, "market": "own"}}},
    ],
)
def test_settings_of_the_execution_and_the_cost_are_not_facts(
    tmp_path: Path, tables: dict[str, Any]
) -> None:
    assert facts(tmp_path, **tables) == facts(tmp_path)


def test_pieces_artifact_and_kept_fields_are_facts(tmp_path: Path) -> None:
    base_facts = facts(tmp_path, {"id": "integer"})
    assert base_facts["pieces"] == PIECES
    assert base_facts["keep_fields"] == {"id": "integer"}
    assert base_facts["machine"]["name"]
    assert facts(tmp_path, predict={"batch_invariant": False})["machine"] == {}
    other = artifact(tmp_path)
    manifest = other.folder / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    changed = collect_facts(settings(tmp_path), other, PIECES, {"id": "integer"})
    assert changed["artifact_sha256"] != base_facts["artifact_sha256"]
    pieces = {**PIECES, "piece 0": [100, "other content"]}
    grown = collect_facts(settings(tmp_path), other, pieces, {})
    assert grown["pieces"] != changed["pieces"]


@pytest.mark.parametrize(("pieces", "count"), [(4, 2), (7, 3), (2, 5), (0, 2)])
def test_every_piece_belongs_to_one_slot(tmp_path: Path, pieces: int, count: int) -> None:
    shares = [build_job(tmp_path, pieces, index, count).piece_numbers for index in range(count)]
    assert sorted(number for share in shares for number in share) == list(range(pieces))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_job_hashes_only_the_shards_of_its_pieces(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [claim_job(tmp_path, 2, index, 2) for index in range(2)]
    hashes = {"000000-00000.parquet": hashlib.sha256(b"answers").hexdigest()}
    commit(jobs[0], 0, last=True, sha256=hashes)
    commit(jobs[1], 1, last=True)
    assert list(jobs[0].verify_finished_shards()) == [ShardId(0, 0), ShardId(1, 0)]
    assert "computing again" not in caplog.text
    assert list(jobs[1].verify_finished_shards()) == [ShardId(0, 0)]
    assert caplog.messages[-1:] == ["1 changed, computing again: 000001-00000"]


def test_a_line_of_another_shard_does_not_count(tmp_path: Path) -> None:
    """A line whose number was changed must not finish a shard that has no output."""
    job = claim_job(tmp_path, 2)
    commit(job, 0, last=True)
    ledger = job.job_folder / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"piece": 0', '"piece": 1'))
    assert job.read_finished_shards() == {}


@pytest.mark.parametrize("line", ["null", "[]", "{}", '{"piece": 0}', "[" * 5000])
def test_a_damaged_line_is_skipped_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: str
) -> None:
    job = claim_job(tmp_path)
    commit(job, 0, last=True)
    with (job.job_folder / "ledger.jsonl").open("a") as ledger:
        ledger.write(f"{line}\n")
    assert list(job.read_finished_shards()) == [ShardId(0, 0)]
    assert "1 damaged or truncated line ignored" in caplog.text
