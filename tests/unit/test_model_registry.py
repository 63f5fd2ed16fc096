"""The model registry in a folder: versions, stages, the log, and everything that may be damaged."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from distributed.datasets import write_packed, write_pairs
from regauge.cli import main
from regauge.config import FORMAT, build
from regauge.data.dataset import read_manifest
from regauge.data.mixture import read_data_manifest
from regauge.data.settings import DataSettings
from regauge.inference.predict.provenance import trace_output
from regauge.registry import stages
from regauge.registry.check import check_registry
from regauge.registry.lineage import collect_folder_lineage
from regauge.registry.model_reference import locate_model, parse_reference
from regauge.registry.registered_version import RegisteredVersion
from regauge.registry.registry import Registry
from regauge.system.errors import DataError, RegaugeError, SettingsError, TransientError
from regauge.system.files import sha256
from regauge.system.json_files import write_sealed
from regauge.training.task_schedule import data_fingerprint
from unit.small_artifacts import RUN_ID, write_artifact, write_run

POINTER = "models/qa/stages/production.json"


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """Return a registry with three versions of `qa`, and no stage."""
    registry = Registry(tmp_path / "registry", create=True)
    for seed in (1, 2, 3):
        registry.register("qa", write_artifact(tmp_path / f"artifact-{seed}", seed))
    return registry


@pytest.fixture
def root(registry: Registry) -> Path:
    return Path(registry.address)


def read_json(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


# Versions


def test_a_version_has_the_lineage_of_its_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", tmp_path / "data")
    registry = Registry(tmp_path / "registry", create=True)
    version = registry.register("qa", write_artifact(tmp_path / "artifact", 4, run))
    document = registry.resolve("qa", 1).document
    lineage = document["lineage"]
    assert version.is_new
    assert lineage["data"][0]["fingerprint"] == "a1b2"
    assert lineage["data"][0]["manifest_sha256"] == sha256(tmp_path / "data" / "manifest.json")
    assert lineage["data"][0]["rows"] == {"train": 100, "heldout": 10}
    assert lineage["data"][0]["source"]["files"] == ["a.jsonl"]
    assert lineage["code"]["packages"] == {"torch": "2.13"}
    assert lineage["settings"]["optimizer"] == {"learning_rate": 0.1}
    assert "run" not in lineage["settings"]
    assert lineage["checkpoint"]["run_id"] == RUN_ID
    assert lineage["checkpoint"]["weights_sha256"] == "weights-4"
    assert lineage["checkpoint"]["model_step"] == 40
    assert document["parity"]["quality_loss"] == 0.004
    assert document["evaluation"] == {"metrics": {"heldout/mrr": 0.5}}
    assert document["usd"] == 1.5
    assert document["content_sha256"] == sha256(tmp_path / "artifact" / "manifest.json")
    for name, item in document["files"].items():
        assert sha256(Path(version.folder) / name) == item["sha256"]


def test_a_run_is_found_from_any_folder_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The export recorded paths relative to `project`."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    run = write_run(project / "out/model", project / "data")
    document = read_json(run / "run.json")
    document |= {"data": {"path": "data"}, "output": {"folder": "out/model"}}
    (run / "run.json").write_text(json.dumps(document))
    other = write_run(elsewhere / "out/model", elsewhere / "data")
    document["run"]["run_id"] = "another"
    (other / "run.json").write_text(json.dumps(document))
    registry = Registry(tmp_path / "registry", create=True)
    monkeypatch.chdir(elsewhere)
    artifact = write_artifact(project / "artifact", 4, Path("out/model"), run_id=RUN_ID)
    version = registry.register("qa", artifact).document
    assert version["lineage"]["checkpoint"]["run"] == str(run)
    assert version["lineage"]["data"][0]["path"] == str(project / "data")
    assert version["lineage"]["data"][0]["rows"] == {"train": 100, "heldout": 10}
    assert version["usd"] == 1.5
    assert not caplog.messages
    moved = shutil.copytree(artifact, tmp_path / "moved")
    assert collect_folder_lineage(moved)["settings"] == {}
    assert f"its run {RUN_ID} is not in out/model" in caplog.text
    named = registry.register("named", moved, run=run).document
    assert named["lineage"]["checkpoint"]["run_id"] == RUN_ID


def write_multitask_run(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Return a run with two tasks and a mixed dataset, and path -> fingerprint of its datasets."""
    run = write_run(tmp_path / "run", tmp_path / "data")
    new, old = (
        write_packed(tmp_path / name, seed=seed) for seed, name in enumerate(("new", "old"))
    )
    pairs = write_pairs(tmp_path / "pairs")
    mixed = {"path": str(new), "mix": [{"path": str(old), "fraction": 0.5}]}
    tasks = [{"name": "words", "data": None}, {"name": "search", "data": {"path": str(pairs)}}]
    manifests = [read_data_manifest(build(DataSettings, mixed)), read_manifest(pairs)]
    settings = {**read_json(run / "run.json"), "data": mixed, "task": tasks}
    settings["run"]["data_fingerprint"] = data_fingerprint(manifests)
    (run / "run.json").write_text(json.dumps(settings))
    return run, {str(path): read_manifest(path).fingerprint for path in (new, old, pairs)}


def test_every_dataset_of_a_run_has_its_own_fingerprint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder, fingerprints = write_multitask_run(tmp_path)
    artifact = write_artifact(tmp_path / "artifact", 1, run_folder)
    registry = Registry(tmp_path / "registry", create=True)
    registry.register("qa", artifact)
    shown = run(capsys, "show", "qa", "1", "--registry", registry.address)[1]
    assert {row["path"]: row["fingerprint"] for row in shown["data"]} == fingerprints
    assert all(row["rows"]["train"] == 40 for row in shown["data"])
    shutil.rmtree(tmp_path / "old")
    write_packed(tmp_path / "old", rows=30)
    changed = collect_folder_lineage(artifact)["data"]
    assert [row["fingerprint"] for row in changed] == [None] * 3, "they are no longer the run's"


@pytest.mark.parametrize("content", ["{", "[]", '{"run": 3}', "no table data"])
def test_a_damaged_run_is_one_warning(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_folder = write_run(tmp_path / "run", tmp_path / "data")
    without_path = json.dumps({**read_json(run_folder / "run.json"), "data": {}})
    text = without_path if content == "no table data" else content
    (run_folder / "run.json").write_text(text)
    registry = Registry(tmp_path / "registry", create=True)
    artifact = write_artifact(tmp_path / "artifact", 1, run_folder)
    lineage = registry.register("qa", artifact).document["lineage"]
    [message] = caplog.messages
    assert "\n" not in message
    assert (lineage["data"], lineage["settings"]) == ([], {})
    assert lineage["unknown"].startswith("data, settings and run_id: ")
    assert lineage["checkpoint"]["run"] == str(run_folder)
    assert lineage["checkpoint"]["model_step"] == 40
    assert lineage["code"]["packages"] == {"torch": "2.13"}
    (output := tmp_path / "output").mkdir()
    job = {"artifact_sha256": "0" * 64, "source": {}, "pieces": {}}
    recorded = {"content_sha256": "0" * 64, "model": str(artifact), "lineage": lineage}
    for name, document in (("job.json", job), ("lineage.json", recorded)):
        (output / name).write_text(json.dumps({"format": FORMAT, **document}))
    assert trace_output(output)["unknown"] == lineage["unknown"]


def test_the_parent_is_the_version_whose_run_training_started_from(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "registry", create=True)
    first = write_run(tmp_path / "one", tmp_path / "data")
    second = write_run(tmp_path / "two", tmp_path / "data", start=str(first))
    registry.register("qa", write_artifact(tmp_path / "a", 1, first))
    version = registry.register("qa", write_artifact(tmp_path / "b", 2, second))
    assert version.document["parent"] == 1
    with pytest.raises(SettingsError, match="'qa' has no version 7; name one of: 1, 2"):
        registry.register("qa", write_artifact(tmp_path / "c", 3, second), parent=7)


def test_the_same_content_is_registered_once(registry: Registry, tmp_path: Path) -> None:
    again = registry.register("qa", tmp_path / "artifact-2")
    assert (again.number, again.is_new) == (2, False)
    assert registry.register("other", tmp_path / "artifact-2").number == 1


def test_a_version_may_refer_to_its_folder(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "registry", create=True)
    artifact = write_artifact(tmp_path / "artifact")
    version = registry.register("qa", artifact, by_reference=True)
    assert version.folder == str(artifact)
    assert not (tmp_path / "registry/models/qa/versions/1/files").exists()
    assert locate_model(f"{registry.address}/qa@1") == str(artifact)
    (artifact / "payload/program.bin").write_bytes(b"changes")
    with pytest.raises(DataError, match="has changed: its hash differs"):
        locate_model(f"{registry.address}/qa@1")


def test_a_changed_artifact_is_not_registered(registry: Registry, tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path / "artifact", 9)
    (artifact / "weights.safetensors").write_bytes(b"other")
    with pytest.raises(DataError, match="has changed since it was exported"):
        registry.register("qa", artifact)
    (artifact / "weights.safetensors").unlink()
    with pytest.raises(DataError, match=r"weights\.safetensors is missing"):
        registry.register("qa", artifact)
    assert [version.number for version in registry.list_versions("qa")] == [1, 2, 3]


# Stages


def test_promotions_and_rollbacks_are_in_the_log(registry: Registry) -> None:
    for number in (1, 2, 3):
        registry.promote("qa", number, why=f"version {number} is better")
    assert registry.list_stages("qa") == {"production": 3}
    assert registry.roll_back("qa", why="3 is slow").version == 2
    assert registry.roll_back("qa", why="2 is slow").version == 1
    with pytest.raises(SettingsError, match="had no version before version 1"):
        registry.roll_back("qa", why="1 is slow")
    registry.promote("qa", 3, why="3 is fast now")
    assert registry.roll_back("qa", why="no").version == 1
    rows = [entry.summarize() for entry in registry.read_log("qa")]
    assert [row["version"] for row in rows] == [1, 2, 3, 2, 1, 3, 1]
    assert [row["previous_version"] for row in rows] == [None, 1, 2, 3, 2, 1, 3]
    assert [row["action"] for row in rows[2:5]] == ["promote", "rollback", "rollback"]
    assert rows[3]["why"] == "3 is slow"
    assert "@" in rows[0]["by"]
    assert not check_registry(registry).findings


def test_a_repeated_promotion_changes_nothing(registry: Registry) -> None:
    assert registry.promote("qa", 1, why="first").is_new
    assert not registry.promote("qa", 1, why="again").is_new
    assert len(registry.read_log("qa")) == 1


def test_the_version_at_a_time(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps back does not change the order of the log."""
    for number, seconds in ((1, 1_000_000), (2, 2_000_000), (3, 1_500_000)):
        monkeypatch.setattr(stages.time, "time", lambda seconds=seconds: seconds)
        registry.promote("qa", number, why="it is time")
    times = ("1970-01-12T13:46", "1970-01-12T13:47", "1970-01-24T03:33", "1970-01-24T03:34")
    versions = [registry.find_at("qa", time) for time in times]
    assert [version and version.number for version in versions] == [None, 1, 1, 3]
    assert registry.find_at("qa", "1970-01-12T14:47+01:00") == versions[1]
    with pytest.raises(SettingsError, match="'last Tuesday' is not a time"):
        registry.find_at("qa", "last Tuesday")


def test_the_second_of_two_promotions_is_refused(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other promotion happens while the files of this one are hashed."""
    registry.promote("qa", 1, why="first")
    check = RegisteredVersion.check_files

    def promote_meanwhile(version: RegisteredVersion) -> None:
        check(version)
        if version.number == 2:
            registry.promote("qa", 3, why="faster")

    monkeypatch.setattr(RegisteredVersion, "check_files", promote_meanwhile)
    problem = "another command has changed qa@production meanwhile: it is version 3"
    with pytest.raises(TransientError, match=problem):
        registry.promote("qa", 2, why="slower")
    assert registry.list_stages("qa") == {"production": 3}
    assert [entry.version for entry in registry.read_log("qa")] == [1, 3]


def test_a_stage_with_another_version_than_expected_is_not_changed(registry: Registry) -> None:
    problem = "qa@production is empty, not version 1"
    with pytest.raises(DataError, match=problem):
        registry.promote("qa", 2, why="better than 1", expected_version=1)
    registry.promote("qa", 1, why="first")
    registry.promote("qa", 2, why="better than 1", expected_version=1)
    with pytest.raises(DataError, match="qa@production is version 2, not version 1"):
        registry.promote("qa", 3, why="better than 1", expected_version=1)


def test_a_corrupted_version_is_not_promoted(registry: Registry) -> None:
    registry.promote("qa", 1, why="first")
    weights = Path(registry.resolve("qa", 2).folder) / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    with pytest.raises(DataError, match=r"version 2 of 'qa' is corrupted: .*weights\.safetensors"):
        registry.promote("qa", 2, why="better")
    weights.write_bytes(b"short")
    with pytest.raises(DataError, match="has 5 bytes, not 256"):
        registry.promote("qa", 2, why="better")
    assert registry.list_stages("qa") == {"production": 1}


def test_a_new_stage_needs_a_flag(registry: Registry) -> None:
    with pytest.raises(SettingsError, match="no stage 'productoin'; did you mean 'production'"):
        registry.promote("qa", 1, "productoin", why="first")
    registry.promote("qa", 1, "europe", why="first", create_stage=True)
    registry.promote("qa", 2, "europe", why="second")
    assert registry.list_stages("qa") == {"europe": 2}


# Bad input


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda registry: registry.resolve("qaa", 1), "has no model 'qaa'; did you mean 'qa'"),
        (lambda registry: registry.resolve("qa", 8), "'qa' has no version 8; name one of: 1, 2, 3"),
        (lambda registry: registry.resolve("qa"), "no version of 'qa' is in stage 'production'"),
        (lambda registry: registry.promote("qa", 1, why=" "), "no reason; write one: --why"),
        (lambda registry: registry.resolve("../qa", 1), "invalid model name '../qa'"),
        (lambda registry: registry.promote("qa", 1, "../x", why="x"), "invalid stage '../x'"),
        (lambda registry: registry.roll_back("qa", why="x"), "no version of 'qa' is in stage"),
    ],
)
def test_an_invalid_request_is_refused(registry: Registry, action: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        action(registry)


def test_another_folder_is_no_registry(tmp_path: Path) -> None:
    (tmp_path / "mlruns").mkdir()
    (tmp_path / "mlruns" / "meta.yaml").write_text("a: 1")
    with pytest.raises(SettingsError, match=r"no registry at .*mlruns: registry.json is missing"):
        Registry(tmp_path / "mlruns")
    with pytest.raises(SettingsError, match=r"it contains other files \(meta.yaml\)"):
        Registry(tmp_path / "mlruns", create=True)
    with pytest.raises(SettingsError, match="needs conditional writes"):
        Registry("memory://registry", create=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "contains .*, not an object"),
        (json.dumps({"format": FORMAT, "kind": "x"}), "is damaged: '(kind|model)'"),
        (json.dumps({"format": 1}), "was written by an earlier Regauge"),
        (json.dumps({"format": 99}), "was written by a later Regauge"),
        (json.dumps({}), "has no format version"),
    ],
)
@pytest.mark.parametrize("name", ["registry.json", POINTER, "models/qa/versions/1/version.json"])
def test_a_damaged_document_is_one_line(
    registry: Registry, root: Path, name: str, content: str, message: str
) -> None:
    registry.promote("qa", 1, why="first")
    (root / name).write_text(content)
    with pytest.raises(DataError, match=message) as error:
        Registry(root).resolve("qa")
    assert str(root / name) in error.value.problem


def test_a_changed_document_is_refused(registry: Registry, root: Path) -> None:
    registry.promote("qa", 1, why="first")
    registry.promote("qa", 2, why="second")
    (root / POINTER).write_text(json.dumps({**read_json(root / POINTER), "version": 1}))
    with pytest.raises(DataError, match="its document_sha256 differs"):
        registry.resolve("qa")


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_text("{")])
def test_a_lost_pointer_is_restored_from_the_log(
    registry: Registry, root: Path, damage: Any
) -> None:
    registry.promote("qa", 1, why="first")
    registry.promote("qa", 2, why="second")
    damage(root / POINTER)
    entry = root / "models/qa/log/production/00000002.json"
    for action in (lambda: registry.resolve("qa"), lambda: registry.promote("qa", 3, why="x")):
        with pytest.raises(DataError) as error:
            action()
        assert error.value.remedy == f"copy {entry} to {root / POINTER}"
    shutil.copyfile(entry, root / POINTER)
    assert registry.promote("qa", 3, why="third").version == 3
    assert not check_registry(registry).findings


def test_an_entry_that_is_only_in_the_pointer_is_written_to_the_log(
    registry: Registry, root: Path
) -> None:
    registry.promote("qa", 1, why="first")
    entry = root / "models/qa/log/production/00000001.json"
    content = entry.read_bytes()
    entry.unlink()  # as if the command had been killed before it
    assert [item.version for item in registry.read_log("qa")] == [1]
    registry.promote("qa", 2, why="second")
    assert entry.read_bytes() == content
    assert not check_registry(registry).findings


# Verification


def test_a_whole_registry_has_no_finding(registry: Registry) -> None:
    registry.promote("qa", 1, why="first")
    summary = check_registry(registry)
    assert (summary.num_versions, summary.num_files, summary.num_entries) == (3, 12, 1)
    assert not summary.findings


def rewrite(path: Path, **changes: Any) -> None:
    """Change a document, with a new checksum."""
    document = {**read_json(path), **changes}
    document.pop("document_sha256")
    write_sealed(path, document)


@pytest.mark.parametrize(
    ("damage", "subject", "problem"),
    [
        (
            lambda root: (root / "models/qa/versions/2/files/parity.json").unlink(),
            "qa@2",
            "parity.json is missing",
        ),
        (
            lambda root: (root / "models/qa/versions/2/version.json").unlink(),
            "qa@2",
            "its registration was not finished",
        ),
        (
            lambda root: rewrite(root / "models/qa/versions/3/version.json", content_sha256="0"),
            "qa@3",
            "its content_sha256 is not that of its files",
        ),
        (
            lambda root: rewrite(root / "models/qa/versions/3/version.json", parent=9),
            "qa@3",
            "its parent, version 9, is missing",
        ),
        (
            lambda root: rewrite(
                root / "models/qa/versions/3/version.json",
                lineage={"checkpoint": {"weights_sha256": "other"}},
            ),
            "qa@3",
            "its lineage names other weights than its manifest",
        ),
        (
            lambda root: rewrite(root / "models/qa/log/production/00000001.json", why="other"),
            "qa@production",
            "00000002.json does not follow the entry before",
        ),
        (
            lambda root: (root / "models/qa/log/production/00000001.json").unlink(),
            "qa@production",
            "00000001.json is missing",
        ),
        (
            lambda root: rewrite(root / POINTER, version=8),
            "qa@production",
            "names version 8, which is missing",
        ),
        (
            lambda root: rewrite(root / POINTER, version=3),
            "qa@production",
            "names other content for version 3",
        ),
        (lambda root: (root / POINTER).unlink(), "qa@production", "production.json is missing"),
    ],
)
def test_a_difference_is_named(
    registry: Registry, root: Path, damage: Any, subject: str, problem: str
) -> None:
    registry.promote("qa", 1, why="first")
    registry.promote("qa", 2, why="second")
    damage(root)
    findings = [item for item in check_registry(registry).findings if item.subject == subject]
    assert [item for item in findings if problem in item.problem], findings


# References


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("registry/qa@production", ("registry", "qa", "production")),
        ("/a/b/qa@12", ("/a/b", "qa", "12")),
        ("s3://bucket/models/qa@staging", ("s3://bucket/models", "qa", "staging")),
        (Path("s3://bucket/models/qa@staging"), ("s3://bucket/models", "qa", "staging")),
        ("qa@production", None),
        ("out/model", None),
        ("org/model", None),
        ("registry/qa@", None),
        ("registry/@production", None),
    ],
)
def test_a_reference_is_parsed(text: str | Path, expected: tuple[str, ...] | None) -> None:
    assert parse_reference(text) == expected


def test_an_existing_folder_is_no_reference(tmp_path: Path) -> None:
    (tmp_path / "qa@production").mkdir()
    assert parse_reference(tmp_path / "qa@production") is None
    assert locate_model("out/model") == "out/model"


# The command line


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the JSON document and the error line of a command."""
    code = main(["models", *arguments, "--json"])
    output = capsys.readouterr()
    return code, json.loads(output.out), output.err


def test_the_command_line(
    registry: Registry,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REGAUGE_REGISTRY", registry.address)
    artifact = write_artifact(tmp_path / "artifact-4", 4)
    assert run(capsys, "register", "qa", str(artifact))[1]["version"] == 4
    assert run(capsys, "promote", "qa", "4", "--why", "better")[1]["changed"] is True
    assert run(capsys, "promote", "qa", "v1", "--why", "bug", "--expect", "4")[0] == 0
    assert run(capsys, "rollback", "qa", "--why", "fixed")[1]["version"] == 4
    assert run(capsys, "list")[1]["models"] == [
        {"name": "qa", "versions": 4, "latest": 4, "production": 4}
    ]
    assert run(capsys, "list", "qa")[1]["versions"][3]["stages"] == "production"
    assert [row["why"] for row in run(capsys, "show", "qa")[1]["log"]] == ["better", "bug", "fixed"]
    shown = run(capsys, "show", "qa", "2")[1]
    assert shown["reference"] == f"{registry.address}/qa@2"
    assert shown["parity"]["quality_loss"] == 0.002
    assert run(capsys, "show", "qa", "--at", "2020-01-01")[1]["version"] is None
    assert run(capsys, "show", "qa", "--stage", "production")[1]["version"] == 4
    assert run(capsys, "verify")[1]["problems"] == []
    assert main(["models", "show", "qa"]) == 0
    assert main(["models", "show", "qa", "2"]) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("promote", "qa", "9", "--why", "x"), 2, "'qa' has no version 9"),
        (("promote", "qa", "1"), 2, "the change has no reason"),
        (("promote", "qa"), 2, "the argument VERSION is missing"),
        (("promote", "qa", "one", "--why", "x"), 2, "'one' is not a version"),
        (("rollback", "qa", "1", "--why", "x"), 2, "rollback does not take a version"),
        (("show", "qaa"), 2, "did you mean 'qa'"),
        (("list", "--registry", "nowhere"), 2, "no registry at nowhere"),
        (("register", "qa", "nowhere"), 2, "no folder 'nowhere'"),
        (("trace", "nowhere"), 2, "nowhere does not exist"),
        (("trace", "/"), 2, "job.json is missing"),
    ],
)
def test_a_wrong_command_is_one_line(
    registry: Registry,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    monkeypatch.setenv("REGAUGE_REGISTRY", registry.address)
    assert main(["models", *arguments]) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in " ".join(lines)
    assert "; " in " ".join(lines)


def test_verify_names_the_damage_and_exits_with_64(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "models/qa/versions/2/files/weights.safetensors").write_bytes(b"x")
    code, document, line = run(capsys, "verify", "qa", "--registry", str(root))
    assert code == 64
    assert [item["subject"] for item in document["problems"]] == ["qa@2"]
    assert "1 problems; the first is qa@2: version 2 of 'qa' is corrupted" in " ".join(line.split())
    assert run(capsys, "verify", "qa", "1", "--registry", str(root))[0] == 0


def test_a_registry_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REGAUGE_REGISTRY", raising=False)
    assert main(["models", "list"]) == 2
    assert "no registry is named" in capsys.readouterr().err


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_registry_that_cannot_be_written_is_refused(registry: Registry, root: Path) -> None:
    (root / "models/qa").chmod(0o500)
    try:
        with pytest.raises((RegaugeError, PermissionError)):
            registry.promote("qa", 1, why="first")
    finally:
        (root / "models/qa").chmod(0o700)
