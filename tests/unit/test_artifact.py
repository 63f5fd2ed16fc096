"""Damaged or foreign artifacts are refused with one line, before any of their code runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import regauge
from end_to_end.predicting import (
    EAGER,
    export_run,
    random_texts,
    train_model,
    update_manifest,
    write_records,
)
from regauge import accelerators
from regauge.cli import main
from regauge.config import FORMAT
from regauge.inference.backends import ExecutionContext, Payload, Runner
from regauge.inference.backends.eager import EagerBackend
from regauge.inference.export.artifact import Artifact, is_artifact, open_artifact
from regauge.system.errors import DataError, PreflightError, RegaugeError, SettingsError
from regauge.system.json_files import CHECKSUM

FILES = {
    "weights.safetensors",
    "model/config.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "parity.json",
    "benchmark.json",
    "bucket_times.json",
    "parity_rows.json",
    "parity_rows.safetensors",
    "payload/program.py",
}
PAYLOAD = "payload/program.py"
CODES = {SettingsError: 2, DataError: 64, PreflightError: 76}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    more = ('candidates.precisions=["fp32"]', "buckets.lengths=[32]", "buckets.max_batch_size=4")
    return export_run(train_model(folder), folder / "artifact", *EAGER, *more)


@pytest.fixture
def artifact(original: Path, tmp_path: Path) -> Path:
    """Return a copy with a payload that creates the file `ran` when it is executed."""
    folder = tmp_path / "artifact"
    shutil.copytree(original, folder)
    ran = tmp_path / "ran"
    (folder / PAYLOAD).write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    update_manifest(folder)
    return folder


def read_document(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return {name: value for name, value in document.items() if name != CHECKSUM}


def write_document(folder: Path, document: object) -> None:
    text = document if isinstance(document, str) else json.dumps(document)
    (folder / "manifest.json").write_text(text)


def assert_refused(folder: Path, kind: type[RegaugeError], *excerpts: str) -> str:
    """Return the error line of an artifact that cannot be opened; it must contain `excerpts`."""
    with pytest.raises(kind) as caught:
        open_artifact(folder)
    line = str(caught.value)
    assert all(excerpt in line for excerpt in excerpts), line
    assert len(line.splitlines()) == 1
    assert caught.value.remedy
    assert caught.value.exit_code == CODES[kind]
    return line


def test_an_intact_artifact_is_opened(artifact: Path) -> None:
    opened = open_artifact(artifact)
    assert set(opened.manifest.files) == FILES
    assert opened.folder == artifact
    assert opened.payload_folder == artifact / "payload"
    assert opened.accelerator.kind == "cpu"
    assert set(opened.load_weights()) == set(Artifact(artifact, opened.manifest).load_weights())
    assert is_artifact(artifact)
    assert not is_artifact(artifact / "model")


def test_an_artifact_without_weights_is_reported_as_damaged(artifact: Path) -> None:
    (artifact / "weights.safetensors").unlink()
    with pytest.raises(
        DataError, match=r"weights\.safetensors is missing; copy the artifact again"
    ):
        regauge.load(artifact)
    shutil.rmtree(artifact / "payload")
    assert not is_artifact(artifact)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_flipped_bit_is_detected(artifact: Path, name: str) -> None:
    path = artifact / name
    content = bytearray(path.read_bytes())
    for offset in (0, len(content) // 2, len(content) - 1):
        content[offset] ^= 1
        path.write_bytes(content)
        problem = f"{path} has changed since it was exported: its hash differs"
        assert_refused(artifact, DataError, problem, "copy the artifact again")
        content[offset] ^= 1
    path.write_bytes(content)
    open_artifact(artifact)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_truncated_extended_or_missing_file_is_detected(artifact: Path, name: str) -> None:
    path = artifact / name
    content = path.read_bytes()
    size = len(content)
    path.write_bytes(content[:-1])
    assert_refused(artifact, DataError, f"{path} has {size - 1} bytes; {size} were exported")
    path.write_bytes(content + b"\n")
    assert_refused(artifact, DataError, f"{path} has {size + 1} bytes")
    path.unlink()
    assert_refused(artifact, DataError, f"{path} is missing; copy")
    path.mkdir()
    assert_refused(artifact, DataError, f"{path} is missing")


@pytest.mark.parametrize(
    "name", ["payload/more.so", "payload/deep/below/more.py", "tokenizer/added_tokens.json"]
)
def test_an_additional_file_is_refused(artifact: Path, name: str) -> None:
    more = artifact / name
    more.parent.mkdir(parents=True, exist_ok=True)
    more.write_text("import os")
    assert_refused(artifact, DataError, f"{more} was not exported; remove it")


def test_the_code_of_a_payload_runs_only_if_its_hash_matches(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = EagerBackend.load

    def run(self: EagerBackend, payload: Payload, site: ExecutionContext) -> Runner:
        exec((payload.folder / "program.py").read_text())  # noqa: S102 - what libraries do
        return load(self, payload, site)

    monkeypatch.setattr(EagerBackend, "load", run)
    path = artifact / PAYLOAD
    content = path.read_text()
    path.write_text(content.replace("'", '"'))  # the same code with other quotes
    for open_or_load in (open_artifact, regauge.load):
        with pytest.raises(DataError):
            open_or_load(artifact)
    assert not (tmp_path / "ran").exists()
    path.write_text(content)
    regauge.load(artifact, threads=1)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../secret", "payload/../../secret", "{absolute}"])
def test_a_file_outside_of_the_artifact_is_refused(
    artifact: Path, tmp_path: Path, name: str
) -> None:
    secret = tmp_path / "secret"
    shutil.copyfile(artifact / PAYLOAD, secret)
    name = name.format(absolute=secret)
    changed = read_document(artifact)
    changed["files"][name] = changed["files"][PAYLOAD]
    write_document(artifact, changed)
    assert_refused(artifact, DataError, "is outside of the artifact")


@pytest.mark.parametrize("name", [PAYLOAD, "weights.safetensors", "tokenizer/tokenizer.json"])
def test_a_symbolic_link_out_of_the_artifact_is_refused(
    artifact: Path, tmp_path: Path, name: str
) -> None:
    path, outside = artifact / name, tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    assert_refused(artifact, DataError, f"{path} is outside of the artifact; export it again")


def test_a_folder_link_out_of_the_artifact_is_refused(artifact: Path, tmp_path: Path) -> None:
    (artifact / "payload").rename(tmp_path / "payload")
    (artifact / "payload").symlink_to(tmp_path / "payload")
    assert_refused(artifact, DataError, "is outside of the artifact")


def test_an_artifact_behind_a_symbolic_link_is_opened(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(artifact)
    assert open_artifact(tmp_path / "link").manifest == open_artifact(artifact).manifest


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda _: "{", DataError, "cannot be read"),
        (lambda _: "", DataError, "cannot be read"),
        (lambda _: [], DataError, "cannot be read: it contains [], not an object"),
        (
            lambda _: {},
            SettingsError,
            "is not the manifest of an artifact; name a folder that 'regauge export' wrote",
        ),
        (
            lambda _: {"layout": "packed", "format": 1},
            SettingsError,
            "is not the manifest of an artifact",
        ),
        (
            lambda it: it | {"kind": "checkpoint"},
            SettingsError,
            "is not the manifest of an artifact",
        ),
        (
            lambda it: it | {"format": FORMAT + 1},
            DataError,
            f"was written by a later Regauge (format {FORMAT + 1}); install the Regauge that reads",
        ),
        (
            lambda it: it | {"format": 1},
            DataError,
            "was written by an earlier Regauge (format 1); export the model again",
        ),
        (
            lambda it: it | {"format": "1"},
            DataError,
            "has no format version; export the model again",
        ),
        (
            lambda it: {key: it[key] for key in it if key != "format"},
            DataError,
            "has no format version",
        ),
        (lambda it: it | {"payloads": 1}, DataError, "unknown key 'payloads'"),
        (
            lambda it: it | {"target": it["target"] | {"required_feature": []}},
            DataError,
            "unknown key 'target.required_feature'",
        ),
        (
            lambda it: {key: it[key] for key in it if key != "files"},
            DataError,
            "'files' is missing",
        ),
        (lambda it: it | {"buckets": [{"length": 0, "batch_sizes": [1]}]}, DataError, "buckets"),
        (
            lambda it: it | {"compiled": it["compiled"] | {"backend": {"kind": "eagre"}}},
            DataError,
            "no backend named 'eagre'",
        ),
    ],
)
def test_an_invalid_manifest_is_refused(
    artifact: Path, change: Change, kind: type[RegaugeError], message: str
) -> None:
    write_document(artifact, change(read_document(artifact)))
    assert_refused(artifact, kind, str(artifact / "manifest.json"), message)


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path, SettingsError, f"no artifact at {tmp_path}: manifest.json is missing")
    assert_refused(tmp_path / "no", SettingsError, f"no artifact at {tmp_path / 'no'}")


def test_custom_code_that_a_manifest_names_is_not_imported(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    (tmp_path / "foreign_backend.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    backend = {"kind": "foreign_backend:Evil"}
    update_manifest(artifact, lambda it: it["compiled"].update(backend=backend))
    assert_refused(artifact, DataError, "'foreign_backend:Evil' is custom code, but the run file")
    assert not (tmp_path / "ran").exists()


def set_target(folder: Path, **changes: Any) -> None:
    update_manifest(folder, lambda it: it["target"].update(changes))


def test_missing_cpu_features_are_named(artifact: Path) -> None:
    present = sorted(accelerators.choose()[0].features())[:2]
    set_target(artifact, required_features=present)
    open_artifact(artifact)
    set_target(
        artifact, required_features=[*present, "avx9000", "abacus", "knots", "tallies", "zuse"]
    )
    problem = "needs abacus, avx9000, knots, tallies, which this machine lacks"
    remedy = "export it on this machine, or for older CPUs with --portable"
    assert_refused(artifact, PreflightError, f"{artifact} {problem}; {remedy}")


def test_an_artifact_for_another_accelerator_is_refused(artifact: Path) -> None:
    survey = accelerators.survey()
    absent = {
        kind: availability for kind, availability in survey.items() if availability.fitness == 0
    }
    assert absent
    for kind, availability in absent.items():
        set_target(artifact, accelerator=kind)
        problem = f"needs accelerator '{kind}': {availability.reason}"
        assert_refused(artifact, PreflightError, problem, "export it on")
    set_target(artifact, accelerator="tpu-9000")
    problem = "needs accelerator 'tpu-9000', which is unknown here"
    assert_refused(artifact, PreflightError, f"{problem}; export it on this machine")


def test_a_backend_that_is_not_installed_is_named(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = accelerators.Availability(0, "its library is not installed")
    monkeypatch.setattr(EagerBackend, "available", classmethod(lambda _: absent))
    assert_refused(artifact, PreflightError, "needs backend 'eager': its library is not installed")


def set_proof(folder: Path, proof: Any) -> None:
    update_manifest(folder, lambda it: it.update(batch_invariance=proof))


def test_batch_invariance_needs_a_proof_for_this_chip(artifact: Path) -> None:
    proof = read_document(artifact)["batch_invariance"]
    set_proof(artifact, None)
    with pytest.raises(PreflightError, match="is not proved batch-invariant") as caught:
        regauge.load(artifact, threads=1)
    assert caught.value.exit_code == 76
    assert "predict.batch_invariant = false" in caught.value.remedy
    assert regauge.load(artifact, batch_invariant=False, threads=1).encode("w5").shape == (32,)
    set_proof(artifact, {**proof, "chip": "Zuse Z3"})
    with pytest.raises(PreflightError, match="proved on Zuse Z3; this machine has"):
        regauge.load(artifact, threads=1)


@pytest.mark.parametrize(
    ("damage", "code", "message"),
    [
        (lambda it: (it / PAYLOAD).write_text("print(1)"), 64, "were exported"),
        (lambda it: (it / "weights.safetensors").unlink(), 64, "is missing"),
        (
            lambda it: set_target(it, required_features=["avx9000"]),
            76,
            "needs avx9000, which this machine lacks",
        ),
        (
            lambda it: write_document(it, read_document(it) | {"format": 1}),
            64,
            "was written by an earlier Regauge (format 1); export the model again",
        ),
        (lambda it: set_proof(it, None), 76, "is not proved batch-invariant"),
    ],
)
def test_predict_exits_with_the_error_line_and_its_code(
    artifact: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
    code: int,
    message: str,
) -> None:
    source = write_records(tmp_path / "texts.jsonl", 3)
    damage(artifact)
    command = ["predict", str(artifact), "--source", str(source), "--to", str(tmp_path / "out")]
    capsys.readouterr()
    assert main([*command, "execution.executor=inline"]) == code
    error = [line for line in capsys.readouterr().err.splitlines() if " rows/s" not in line]
    assert len(error) == 1
    assert message in error[0]
    assert not list((tmp_path / "out").glob("shards/*"))


def test_the_copy_of_an_artifact_gives_the_same_vectors(original: Path, artifact: Path) -> None:
    """The copies that the other tests damage are usable before."""
    samples = random_texts(6)
    expected, copied = (
        regauge.load(folder, threads=1).encode(samples) for folder in (original, artifact)
    )
    assert (expected == copied).all()
