"""A server follows a stage of a registry, and a job of `predict` records its version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import regauge
from regauge.cli import main
from regauge.registry.registry import Registry
from serve.servers import (
    QUICK_HTTP,
    copy_artifact,
    encoder,
    other_encoder,
    start_server,
    wait_for,
)
from serve.test_hot_swap import TEXT, WAIT_SECONDS, Load, find_version, versions

__all__ = ["encoder", "other_encoder", "versions"]


@pytest.fixture
def registry(tmp_path: Path, encoder: Path, other_encoder: Path) -> Registry:
    """Return a registry with two encoders; the first one is in production."""
    registry = Registry(tmp_path / "registry", create=True)
    registry.register("docs", encoder)
    registry.register("docs", other_encoder)
    registry.promote("docs", 1, why="first")
    return registry


def test_a_server_follows_a_stage_under_load(
    registry: Registry, versions: list[np.ndarray], tmp_path: Path
) -> None:
    """A promotion and a rollback replace the version; a corrupted version is refused."""
    reference = f"{registry.address}/docs@production"
    with start_server(tmp_path / "server", reference, *QUICK_HTTP) as server:
        assert "Serving docs at" in server.log
        load = Load(server, versions)
        with load.run():
            wait_for(lambda: load.total > 50)
            registry.promote("docs", 2, why="better")
            wait_for(lambda: load.counts[1], WAIT_SECONDS)
            registry.roll_back("docs", why="worse")
            wait_for(lambda: "docs@production is version 1" in server.log.split("version 2")[-1])
            wait_for(lambda: find_version(server, versions) == 0, WAIT_SECONDS)
            weights = Path(registry.resolve("docs", 2).folder) / "weights.safetensors"
            content = weights.read_bytes()
            registry.promote("docs", 2, "staging", why="check")
            registry.promote("docs", 2, why="again")
            weights.write_bytes(content[:-8] + bytes(8))
            wait_for(lambda: "docs keeps its version" in server.log, WAIT_SECONDS)
            count = load.total
            wait_for(lambda: load.total > count + 50)
        assert load.failures == []
        assert find_version(server, versions) == 0
        assert "is corrupted" in server.log
        assert "Traceback" not in server.log


def test_a_server_refuses_a_wrong_reference(registry: Registry, tmp_path: Path) -> None:
    for text, message in (
        (f"{registry.address}/docs@stable", "no version of 'docs' is in stage 'stable'"),
        (f"{registry.address}/doc@production", "has no model 'doc'; did you mean 'docs'"),
        (f"{tmp_path}/nowhere/docs@production", "registry.json is missing"),
    ):
        folder = tmp_path / "server"
        with start_server(folder, f"model={text}", is_ready=False) as server:
            assert server.process.wait(120) == 2
            assert message in " ".join(server.log.split())
            assert "Traceback" not in server.log


def test_predict_records_the_version_and_trace_prints_it(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": f"w{i} w{i + 1}"}) + "\n" for i in range(6, 26)))
    output = tmp_path / "vectors"
    reference = f"{registry.address}/docs@production"
    options = ("--source", str(source), "--to", str(output), "execution.executor=inline")
    assert main(["predict", reference, *options]) == 0
    registry.promote("docs", 2, why="later")
    capsys.readouterr()
    [shard] = (output / "shards").iterdir()
    assert main(["models", "trace", str(shard), "--json"]) == 0
    trace = json.loads(capsys.readouterr().out)
    document = registry.resolve("docs", 1).document
    assert trace["unchanged"] is True
    assert trace["rows"] == 20
    assert trace["artifact"]["sha256"] == document["content_sha256"]
    assert (trace["registry"]["model"], trace["registry"]["version"]) == ("docs", 1)
    for name in ("checkpoint", "data", "code", "settings"):
        assert trace[name] == document["lineage"][name]
        assert trace[name]
    assert trace["predict"]["inputs"] == [str(source)]
    assert main(["models", "trace", str(output)]) == 0
    shard.write_bytes(shard.read_bytes()[::-1])
    capsys.readouterr()
    assert main(["models", "trace", str(shard), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unchanged"] is False
    assert main(["predict", reference, *options]) == 64, "the stage has another version now"


def test_an_output_without_a_registry_is_traced(
    encoder: Path, registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copied artifact has its lineage in the output; a registry is searched for its version."""
    artifact = copy_artifact(encoder, tmp_path / "artifact")
    source, output = tmp_path / "texts.jsonl", tmp_path / "vectors"
    source.write_text(json.dumps({"text": TEXT}) + "\n")
    options = ("--source", str(source), "--to", str(output), "execution.executor=inline")
    assert main(["predict", str(artifact), *options]) == 0
    shutil.rmtree(artifact)
    capsys.readouterr()
    assert main(["models", "trace", str(output), "--json"]) == 0
    trace = json.loads(capsys.readouterr().out)
    assert trace["registry"] is None
    assert trace["checkpoint"]["run_id"]
    assert trace["data"][0]["fingerprint"]
    arguments = ["models", "trace", str(output), "--registry", registry.address, "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["registry"]["version"] == 1


def test_load_reads_a_reference(registry: Registry, versions: list[np.ndarray]) -> None:
    model = regauge.load(f"{registry.address}/docs@production", threads=1)
    assert np.allclose(model.encode(TEXT), versions[0], atol=1e-5)
    registry.promote("docs", 2, why="second")
    model = regauge.load(f"{registry.address}/docs@production", threads=1)
    assert np.allclose(model.encode(TEXT), versions[1], atol=1e-5)
