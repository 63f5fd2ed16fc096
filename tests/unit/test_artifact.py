"""What is no whole artifact for this machine is refused in one line, and nothing of it is run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import regauge
from end_to_end.predicting import EAGER, exported, texts, trained, written
from regauge import accelerators
from regauge.artifacts import artifact as artifacts
from regauge.backends import Payload, Runner, Site
from regauge.backends.eager import Eager
from regauge.cli import main
from regauge.config import FORMAT
from regauge.errors import DataError, PreflightError, RegaugeError, SettingsError

FILES = {
    "weights.safetensors",
    "model/config.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "parity.json",
    "benchmark.json",
    "payload/program.py",
}
PAYLOAD = "payload/program.py"
CODES = {SettingsError: 2, DataError: 64, PreflightError: 76}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    more = ('candidates.precisions=["fp32"]', "shapes.lengths=[32]", "shapes.rows=4")
    return exported(trained(folder), folder / "artifact", *EAGER, *more)


@pytest.fixture
def artifact(original: Path, tmp_path: Path) -> Path:
    """Return a copy with a payload that says in a file that it was run."""
    folder = tmp_path / "artifact"
    shutil.copytree(original, folder)
    ran = tmp_path / "ran"
    (folder / PAYLOAD).write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    told(folder)
    return folder


def document(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return found


def put(folder: Path, changed: object) -> None:
    text = changed if isinstance(changed, str) else json.dumps(changed)
    (folder / "manifest.json").write_text(text)


def told(folder: Path) -> None:
    """Let the manifest tell of the files that are there."""
    files = {name: each.model_dump() for name, each in artifacts.stored(folder).items()}
    put(folder, {**document(folder), "files": files})


def refused(folder: Path, kind: type[RegaugeError], *wanted: str) -> str:
    """Return the line by which an artifact is refused, whoever opens it."""
    with pytest.raises(kind) as caught:
        artifacts.opened(folder)
    line = str(caught.value)
    assert all(each in line for each in wanted), line
    assert len(line.splitlines()) == 1
    assert caught.value.remedy
    assert caught.value.exit_code == CODES[kind]
    return line


def test_a_whole_artifact_is_opened(artifact: Path) -> None:
    found = artifacts.opened(artifact)
    assert set(found.manifest.files) == FILES
    assert found.folder == artifact
    assert found.payload == artifact / "payload"
    assert found.accelerator.kind == "cpu"
    assert set(found.weights()) == set(artifacts.Artifact(artifact, found.manifest).weights())
    assert artifacts.is_one(artifact)
    assert not artifacts.is_one(artifact / "model")


def test_an_artifact_without_its_weights_is_still_one(artifact: Path) -> None:
    (artifact / "weights.safetensors").unlink()
    with pytest.raises(
        DataError, match=r"weights\.safetensors is missing; copy the artifact again"
    ):
        regauge.load(artifact)
    shutil.rmtree(artifact / "payload")
    assert not artifacts.is_one(artifact)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_of_which_one_bit_is_another_is_refused(artifact: Path, name: str) -> None:
    path = artifact / name
    content = bytearray(path.read_bytes())
    for place in (0, len(content) // 2, len(content) - 1):
        content[place] ^= 1
        path.write_bytes(content)
        refused(artifact, DataError, str(path), "its hash is another", "copy the artifact again")
        content[place] ^= 1
    path.write_bytes(content)
    artifacts.opened(artifact)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_that_is_cut_or_grown_or_gone_is_refused(artifact: Path, name: str) -> None:
    path = artifact / name
    content = path.read_bytes()
    size = len(content)
    path.write_bytes(content[:-1])
    refused(artifact, DataError, f"{path} has {size - 1} bytes, and {size} were exported")
    path.write_bytes(content + b"\n")
    refused(artifact, DataError, f"{path} has {size + 1} bytes")
    path.unlink()
    refused(artifact, DataError, f"{path} is missing; copy")
    path.mkdir()
    refused(artifact, DataError, f"{path} is missing")


@pytest.mark.parametrize(
    "name", ["payload/more.so", "payload/deep/below/more.py", "tokenizer/added_tokens.json"]
)
def test_a_file_that_was_not_exported_is_refused(artifact: Path, name: str) -> None:
    more = artifact / name
    more.parent.mkdir(parents=True, exist_ok=True)
    more.write_text("import os")
    refused(artifact, DataError, f"{more} was not exported; remove it")


def test_a_payload_is_code_that_runs_only_where_it_is_what_was_exported(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Eager.load

    def run(self: Eager, payload: Payload, site: Site) -> Runner:
        exec((payload.folder / "program.py").read_text())  # noqa: S102 - what libraries do
        return load(self, payload, site)

    monkeypatch.setattr(Eager, "load", run)
    path = artifact / PAYLOAD
    content = path.read_text()
    path.write_text(content.replace("'", '"'))  # which does the same
    for opened in (artifacts.opened, regauge.load):
        with pytest.raises(DataError):
            opened(artifact)
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
    changed = document(artifact)
    changed["files"][name] = changed["files"][PAYLOAD]
    put(artifact, changed)
    refused(artifact, DataError, "lies outside of the artifact")


@pytest.mark.parametrize("name", [PAYLOAD, "weights.safetensors", "tokenizer/tokenizer.json"])
def test_a_link_out_of_the_artifact_is_refused(artifact: Path, tmp_path: Path, name: str) -> None:
    path, outside = artifact / name, tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    refused(artifact, DataError, f"{path} lies outside of the artifact; export it again")


def test_a_folder_that_is_a_link_out_of_the_artifact_is_refused(
    artifact: Path, tmp_path: Path
) -> None:
    (artifact / "payload").rename(tmp_path / "payload")
    (artifact / "payload").symlink_to(tmp_path / "payload")
    refused(artifact, DataError, "lies outside of the artifact")


def test_an_artifact_that_is_itself_reached_by_a_link_is_opened(
    artifact: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(artifact)
    assert artifacts.opened(tmp_path / "link").manifest == artifacts.opened(artifact).manifest


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "kind", "told"),
    [
        (lambda _: "{", DataError, "cannot be read"),
        (lambda _: "", DataError, "cannot be read"),
        (lambda _: [], SettingsError, "is no artifact's; name a folder that 'regauge export'"),
        (lambda _: {"layout": "packed", "format": 1}, SettingsError, "is no artifact's"),
        (lambda it: it | {"kind": "checkpoint"}, SettingsError, "is no artifact's"),
        (
            lambda it: it | {"format": FORMAT + 1},
            SettingsError,
            f"has format {FORMAT + 1}, and this Regauge reads {FORMAT}; install a later Regauge",
        ),
        (lambda it: it | {"format": "1"}, SettingsError, "has format 1, and this Regauge reads"),
        (
            lambda it: {key: it[key] for key in it if key != "format"},
            SettingsError,
            "has format None",
        ),
        (lambda it: it | {"payloads": 1}, DataError, "unknown key 'payloads'"),
        (
            lambda it: it | {"target": it["target"] | {"need": []}},
            DataError,
            "unknown key 'target.need'",
        ),
        (
            lambda it: {key: it[key] for key in it if key != "files"},
            DataError,
            "'files' is missing",
        ),
        (lambda it: it | {"shapes": [{"length": 0, "rows": [1]}]}, DataError, "shapes"),
        (
            lambda it: it | {"compiled": it["compiled"] | {"backend": {"kind": "eagre"}}},
            DataError,
            "no backends named 'eagre'",
        ),
    ],
)
def test_a_manifest_that_is_none_of_ours_is_refused(
    artifact: Path, change: Change, kind: type[RegaugeError], told: str
) -> None:
    put(artifact, change(document(artifact)))
    refused(artifact, kind, str(artifact / "manifest.json"), told)


def test_where_there_is_no_artifact_it_is_said(tmp_path: Path) -> None:
    refused(tmp_path, SettingsError, f"no artifact at {tmp_path}: there is no manifest.json")
    refused(tmp_path / "no", SettingsError, f"no artifact at {tmp_path / 'no'}")


def test_code_that_a_manifest_names_is_not_imported(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    (tmp_path / "foreign_backend.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    changed = document(artifact)
    changed["compiled"]["backend"] = {"kind": "foreign_backend:Evil"}
    put(artifact, changed)
    refused(artifact, DataError, "'foreign_backend:Evil' is code")
    assert not (tmp_path / "ran").exists()


def target(folder: Path, **changes: Any) -> None:
    changed = document(folder)
    changed["target"] |= changes
    put(folder, changed)


def test_instructions_that_this_machine_lacks_are_named(artifact: Path) -> None:
    here = sorted(accelerators.choose()[0].features())[:2]
    target(artifact, needs=here)
    artifacts.opened(artifact)
    target(artifact, needs=[*here, "avx9000", "abacus", "knots", "tallies", "zuse"])
    told = "needs abacus, avx9000, knots, tallies, which this machine lacks"
    way_out = "export it on this machine, or for more of them with --portable"
    refused(artifact, PreflightError, f"{artifact} {told}; {way_out}")


def test_an_artifact_for_another_device_is_refused(artifact: Path) -> None:
    found = {kind: each for kind, each in accelerators.survey().items() if each.fitness == 0}
    assert found
    for kind, availability in found.items():
        target(artifact, accelerator=kind)
        refused(artifact, PreflightError, f"is for '{kind}': {availability.reason}", "export it on")
    target(artifact, accelerator="tpu-9000")
    refused(artifact, PreflightError, "is for a device 'tpu-9000'; export it on this machine")


def test_a_backend_that_is_not_installed_is_named(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = accelerators.Availability(0, "its library is not installed")
    monkeypatch.setattr(Eager, "available", classmethod(lambda _: absent))
    refused(artifact, PreflightError, "is computed by 'eager': its library is not installed")


def identity(folder: Path, proof: Any) -> None:
    put(folder, {**document(folder), "identity": proof})


def test_where_no_proof_says_that_bits_stay_they_are_not_promised(artifact: Path) -> None:
    whole = document(artifact)["identity"]
    identity(artifact, None)
    with pytest.raises(PreflightError, match="has no proof that a text keeps its bits") as caught:
        regauge.load(artifact, threads=1)
    assert caught.value.exit_code == 76
    assert "predict.invariant = false" in caught.value.remedy
    assert regauge.load(artifact, invariant=False, threads=1).encode("w5").shape == (32,)
    identity(artifact, {**whole, "chip": "Zuse Z3"})
    with pytest.raises(PreflightError, match="shown on Zuse Z3, and this is"):
        regauge.load(artifact, threads=1)


@pytest.mark.parametrize(
    ("damage", "code", "wanted"),
    [
        (lambda it: (it / PAYLOAD).write_text("print(1)"), 64, "were exported"),
        (lambda it: (it / "weights.safetensors").unlink(), 64, "is missing"),
        (lambda it: target(it, needs=["avx9000"]), 76, "needs avx9000, which this machine lacks"),
        (lambda it: put(it, document(it) | {"format": 2}), 2, "install a later Regauge"),
        (lambda it: identity(it, None), 76, "has no proof"),
    ],
)
def test_a_verb_ends_with_the_line_and_its_code(
    artifact: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
    code: int,
    wanted: str,
) -> None:
    source = written(tmp_path / "texts.jsonl", 3)
    damage(artifact)
    given = ["--source", str(source), "--to", str(tmp_path / "out"), "execution.executor=inline"]
    capsys.readouterr()
    assert main(["predict", str(artifact), *given]) == code
    error = [line for line in capsys.readouterr().err.splitlines() if " rows/s" not in line]
    assert len(error) == 1
    assert wanted in error[0]
    assert not list((tmp_path / "out").glob("shards/*"))


def test_a_place_is_taken_only_when_all_went_well(tmp_path: Path) -> None:
    place = tmp_path / "artifact"

    def fail() -> None:
        with artifacts.written(place) as aside:
            (aside / "half").touch()
            assert not place.exists()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list(tmp_path.iterdir())
    place.mkdir()
    with artifacts.written(place) as aside:
        (aside / "whole").touch()
        assert not list(place.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]
    assert [path.name for path in place.iterdir()] == ["whole"]


@pytest.mark.parametrize("name", ["there", "file"])
def test_a_place_that_is_taken_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "thesis.txt").touch()
    (tmp_path / "file").touch()
    with (
        pytest.raises(SettingsError, match="exists; name another place with --to"),
        artifacts.written(tmp_path / name),
    ):
        pytest.fail("it was given a folder")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "there", "thesis.txt"]


def test_what_is_left_of_one_that_was_killed_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / ".artifact.aside" / "payload").mkdir(parents=True)
    with artifacts.written(tmp_path / "artifact") as aside:
        assert not list(aside.iterdir())
        (aside / "whole").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["artifact", "whole"]


def test_the_same_artifact_answers_as_before(original: Path, artifact: Path) -> None:
    """What the other tests change is a copy that works."""
    some = texts(6)
    first, second = (regauge.load(each, threads=1).encode(some) for each in (original, artifact))
    assert (first == second).all()
