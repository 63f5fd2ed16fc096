"""Models on the Hugging Face hub, tested against a loopback server of its protocol."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from distributed import datasets
from distributed.runs import BERT
from loopback import serve
from regauge.data.dataset import read_manifest
from regauge.data.settings import TokenizerSettings
from regauge.data.tokenizer import train_tokenizer
from regauge.models import weights
from regauge.models.architectures import build_model
from regauge.models.settings import Model

RUN = """
output = {{ folder = "{folder}/out", trackers = ["jsonl"] }}
data = {{ path = "{data}", workers = 0 }}
task.kind = "mlm"
model.path = "{name}"
batch = {{ rows = 4, microbatch_rows = 4 }}
stop.steps = 1
accelerator.kind = "cpu"
execution = {{ threads = 1, precision = "fp32", supervision.preflight = "brief" }}
"""
PREPARE = """
source = {{ kind = "jsonl", files = ["{folder}/a.jsonl"] }}
data.path = "{folder}/data"
task = "mlm"
model.path = "team/open"
rows.length = 8
split.heldout_fraction = 0.0
prepare.processes = 1
"""
COMMIT = "0" * 39 + "1"


class Hub(BaseHTTPRequestHandler):
    """A hub with a public model, `team/open`, and a gated one; both have the files of `folder`."""

    folder: Path
    requested_paths: list[str]

    def do_GET(self) -> None:
        self.requested_paths.append(self.path)
        if self.path.startswith(("/api/models/team/open", "/api/models/team/gated")):
            files = sorted(self.folder.iterdir())
            name = "/".join(self.path.split("/")[3:5])
            if "/tree/" in self.path:
                self._send_json([_describe_file(path) for path in files])
            else:
                names = [{"rfilename": path.name} for path in files]
                self._send_json({"id": name, "modelId": name, "sha": COMMIT, "siblings": names})
        elif self.path.startswith("/team/open/resolve/"):
            self._send_file()
        elif self.path.startswith("/team/gated/resolve/"):
            self._refuse("GatedRepo")
        else:
            self._refuse("RepoNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send_json(self, document: Any) -> None:
        self._answer(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _send_file(self) -> None:
        data = (self.folder / Path(self.path).name).read_bytes()
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        self._answer(200, data, {"ETag": etag, "X-Repo-Commit": COMMIT})

    def _refuse(self, code: str) -> None:
        self._answer(401, b"{}", {"X-Error-Code": code, "X-Error-Message": "no"})

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def _describe_file(path: Path) -> dict[str, Any]:
    oid = hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
    return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": oid}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a hub that has one small BERT in several files."""
    root = tmp_path_factory.mktemp("hub")
    model, _ = build_model(Model(**{**BERT, "dropout": 0.0}), "masked", datasets.VOCABULARY, seed=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "MAX_FILE_BYTES", 40_000)
        weights.save_model_folder(root / "bert", model.config, model.named_parameters(), root)
    kind = type("BertHub", (Hub,), {"folder": root / "bert", "requested_paths": []})
    with serve(ThreadingHTTPServer(("127.0.0.1", 0), kind), "hub") as address:
        yield address


@pytest.fixture
def tokenizer_hub(tmp_path: Path) -> Iterator[str]:
    """Yield the address of a hub whose model has a tokenizer and a file of weights."""
    folder = tmp_path / "hub"
    settings = TokenizerSettings(vocab_size=300)
    train_tokenizer(iter([["one two three"] * 9]), settings, folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    kind = type("TokenizerHub", (Hub,), {"folder": folder, "requested_paths": []})
    with serve(ThreadingHTTPServer(("127.0.0.1", 0), kind), "hub") as address:
        yield address


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def train_model(name: str, endpoint: str, *options: str) -> subprocess.CompletedProcess[str]:
        run_file = tmp_path / "run.toml"
        data = tmp_path / "data"
        if not data.exists():
            datasets.write_packed(data, rows=8, heldout=2)
        run_file.write_text(RUN.format(folder=tmp_path, data=data, name=name))
        return run_with_hub(endpoint, tmp_path / "home", "train", str(run_file), *options)

    return train_model


def run_with_hub(endpoint: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command with a hub and a folder for its downloads."""
    hub_variables = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_ETAG_TIMEOUT": "2",
    }
    rest = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    command = [sys.executable, "-m", "regauge", *arguments]
    return subprocess.run(
        command, env={**rest, **hub_variables}, capture_output=True, text=True, check=False
    )


Train = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("name", "problem", "remedy"),
    [
        ("team/gated", "hub model 'team/gated' is gated", "accept its terms on the hub"),
        ("team/none", "the hub has no public model 'team/none'", "if it is private"),
    ],
)
def test_a_gated_or_missing_model_is_refused_with_a_remedy(
    hub: str, train: Train, tmp_path: Path, name: str, problem: str, remedy: str
) -> None:
    completed = train(name, hub)
    assert completed.returncode == 2, completed.stderr
    (line,) = completed.stderr.strip().splitlines()
    assert problem in line
    assert remedy in line
    assert "run: hf auth login (or set HF_TOKEN), or name a local folder" in line
    assert not (tmp_path / "out").exists()


def test_an_unreachable_hub_is_reported_in_one_line(train: Train) -> None:
    completed = train("team/open", "http://127.0.0.1:9")
    assert completed.returncode == 2, completed.stderr
    (line,) = completed.stderr.strip().splitlines()
    assert "there is no folder 'team/open', and the hub cannot be reached; " in line
    assert line.endswith("name a folder with weights")


@pytest.mark.full
def test_a_model_is_downloaded_once_and_trained(hub: str, train: Train, tmp_path: Path) -> None:
    """A dry run downloads nothing."""
    plan = train("team/open", hub, "--dry-run").stdout
    assert "parameters: unknown: there is no folder 'team/open', and no copy from the hub" in plan
    completed = train("team/open", hub)
    assert completed.returncode == 0, completed.stderr
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()
    again = train("team/open", "http://127.0.0.1:9", "--dry-run")
    assert "parameters: 29260" in again.stdout, again.stderr


@pytest.mark.full
def test_a_tokenizer_is_downloaded_without_the_weights(tokenizer_hub: str, tmp_path: Path) -> None:
    """A dry run downloads nothing; the name of the model is the name of its tokenizer."""
    (tmp_path / "a.jsonl").write_text('{"text": "one two"}\n{"text": "two three"}\n')
    run_file = tmp_path / "run.toml"
    run_file.write_text(PREPARE.format(folder=tmp_path))

    def prepare(*options: str, endpoint: str = tokenizer_hub) -> subprocess.CompletedProcess[str]:
        return run_with_hub(endpoint, tmp_path / "home", "prepare", str(run_file), *options)

    plan = prepare("--dry-run", endpoint="http://127.0.0.1:9")
    assert "action: download the tokenizer 'team/open' and prepare the dataset" in plan.stdout
    completed = prepare()
    assert completed.returncode == 0, completed.stderr
    manifest = read_manifest(tmp_path / "data")
    assert manifest.settings["tokenizer"]["path"] == "team/open"
    downloaded = {path.name for path in (tmp_path / "home").rglob("*") if path.is_file()}
    assert "tokenizer.json" in downloaded
    assert not any(name.endswith(".safetensors") for name in downloaded)
    again = prepare("--dry-run", endpoint="http://127.0.0.1:9")
    assert "action: nothing; the dataset is finished" in again.stdout, again.stderr
    missing = prepare("tokenizer.path=team/none", "data.path=none")
    assert missing.returncode == 2
    assert "the hub has no public model 'team/none'" in missing.stderr
