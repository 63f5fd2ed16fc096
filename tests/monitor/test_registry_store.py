"""A registry in a folder and in an S3 store: kills, simultaneous promotions, failing requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest
from s3fs import S3FileSystem

from faults.stores import Rule, Store, start_store
from monitor.registry_commands import run_and_kill, run_commands
from regauge.registry.check import check_registry
from regauge.registry.model_reference import find_cache, locate_model
from regauge.registry.pipelines.serving_model import find_serving, find_serving_version
from regauge.registry.pipelines.settings import RegistryModel
from regauge.registry.registered_version import RegisteredVersion
from regauge.registry.registry import Registry
from regauge.registry.storage import open_storage
from regauge.system import object_store
from regauge.system.errors import DataError, SettingsError, TransientError
from unit.small_artifacts import write_artifact

BUCKET = "models"
NUM_PROMOTERS = 5
UNFINISHED = "its registration was not finished"
CONFLICT = "another command has changed qa@production meanwhile"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    with start_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(object_store, "MIN_WAIT_SECONDS", 0.01)
        boto3.client("s3", endpoint_url=store.url).create_bucket(Bucket=BUCKET)
        S3FileSystem.clear_instance_cache()
        yield store


@pytest.fixture(params=["folder", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return an address without a registry."""
    if request.param == "folder":
        return str(tmp_path / "registry")
    request.getfixturevalue("store")
    return f"s3://{BUCKET}/registry"


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    for seed, name in enumerate(("one", "two", "three")):
        write_artifact(tmp_path / "artifacts" / name, seed)
    return tmp_path / "artifacts"


def check_after_kill(address: str) -> None:
    """Check that a reader sees a whole registry, or none."""
    if open_storage(address).read("registry.json") is None:
        return
    registry = Registry(address)
    problems = [finding.problem for finding in check_registry(registry).findings]
    assert set(problems) <= {UNFINISHED}
    if registry.list_models() and (stages := registry.list_stages("qa")):
        assert len(stages) == 1
        registry.resolve("qa").check_files()
        assert registry.read_log("qa")[-1].version == stages["production"]


def test_a_registry_is_whole_after_a_kill_at_any_write(
    address: str, artifacts: Path, figure: Any
) -> None:
    """Each sequence starts where the killed one has ended, and the last one is not killed.

    In the S3 store, whose requests take longer, it is killed at every third of these moments.
    """
    num_kills, step = 0, 3 if address.startswith("s3") else 1
    while run_and_kill(folder := f"{address}-{num_kills}", artifacts, step * num_kills):
        num_kills += 1
        check_after_kill(folder)
        run_commands(folder, artifacts)
        registry = Registry(folder)
        versions = [entry.version for entry in registry.read_log("qa")]
        hashes = [registry.resolve("qa", version).content_sha256 for version in versions]
        assert len(hashes) >= 2
        assert hashes[-1] == registry.resolve("qa").content_sha256
        assert registry.resolve("qa").document["parity"]["quality_loss"] == 0.001
        check_after_kill(folder)
    assert num_kills >= 12
    figure("kills of a registry command", num_kills)


def test_simultaneous_promotions_leave_one_version(address: str, tmp_path: Path) -> None:
    """Every promotion is in the log, or its command fails; a reader always sees one version."""
    registry = Registry(address, create=True)
    for seed in range(NUM_PROMOTERS + 1):
        registry.register("qa", write_artifact(tmp_path / f"artifact-{seed}", seed))
    registry.promote("qa", 1, why="first")
    barrier, is_done = threading.Barrier(NUM_PROMOTERS, timeout=60), threading.Event()
    versions_seen: list[int] = []

    def promote(number: int) -> str:
        writer = Registry(address)
        barrier.wait()
        try:
            writer.promote("qa", number, why=f"version {number}", expected_version=1)
        except (TransientError, DataError) as error:
            return error.problem
        return ""

    def read() -> None:
        reader = Registry(address)
        while not is_done.is_set():
            versions_seen.append(reader.resolve("qa").number)

    with ThreadPoolExecutor(NUM_PROMOTERS + 1) as executor:
        reading = executor.submit(read)
        numbers = range(2, NUM_PROMOTERS + 2)
        try:
            problems = list(executor.map(promote, numbers))
        finally:
            is_done.set()
        reading.result()
    assert problems.count("") == 1
    assert all(
        problem.startswith(CONFLICT) or "not version 1" in problem
        for problem in problems
        if problem
    )
    winner = list(numbers)[problems.index("")]
    assert [entry.version for entry in registry.read_log("qa")] == [1, winner]
    assert registry.list_stages("qa") == {"production": winner}
    assert set(versions_seen) <= {1, winner}
    assert not check_registry(registry).findings


def test_simultaneous_registrations_get_different_numbers(address: str, tmp_path: Path) -> None:
    Registry(address, create=True)
    folders = [write_artifact(tmp_path / str(seed), seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as executor:
        versions = list(executor.map(lambda path: Registry(address).register("qa", path), folders))
    assert sorted(version.number for version in versions) == [1, 2, 3, 4]
    assert not check_registry(Registry(address)).findings


def test_simultaneous_registrations_of_one_content_make_one_version(
    address: str, artifacts: Path
) -> None:
    Registry(address, create=True).register("qa", artifacts / "two")
    barrier = threading.Barrier(4, timeout=60)

    def register(_: int) -> RegisteredVersion:
        registry = Registry(address)
        barrier.wait()
        return registry.register("qa", artifacts / "one")

    with ThreadPoolExecutor(4) as executor:
        versions = list(executor.map(register, range(4)))
    assert [version.number for version in versions] == [2, 2, 2, 2]
    assert sum(version.is_new for version in versions) == 1
    assert [version.number for version in Registry(address).list_versions("qa")] == [1, 2]
    assert not check_registry(Registry(address)).findings


# The S3 store


@pytest.fixture
def s3_registry(store: Store, artifacts: Path) -> Registry:
    registry = Registry(f"s3://{BUCKET}/registry", create=True)
    for name in ("one", "two"):
        registry.register("qa", artifacts / name)
    registry.promote("qa", 1, why="first")
    assert not store.rules
    return registry


@pytest.mark.parametrize("effect", ["slow", "reset", "lost"])
@pytest.mark.parametrize("key", ["stages/production.json", "log/production", "version.json"])
def test_a_failing_request_is_repeated(
    s3_registry: Registry, store: Store, artifacts: Path, effect: str, key: str
) -> None:
    """A request whose answer is lost was done: its repetition is no conflict."""
    store.rules = [Rule("PUT", key, effect, count=2)]
    version = s3_registry.register("qa", artifacts / "three")
    assert version.is_new
    assert s3_registry.promote("qa", version.number, why="better").is_new
    assert store.rules[0].num_triggered == 2
    assert [entry.version for entry in s3_registry.read_log("qa")] == [1, 3]
    assert not check_registry(s3_registry).findings


def test_a_store_without_conditions_is_refused(store: Store) -> None:
    store.rules = [Rule("PUT", "", "ignore", count=10**6)]
    with pytest.raises(SettingsError, match="ignores If-Match and If-None-Match"):
        Registry(f"s3://{BUCKET}/other", create=True)
    with pytest.raises(SettingsError, match=r"registry\.json is missing"):
        Registry(f"s3://{BUCKET}/other")


def test_a_bucket_that_does_not_exist_is_refused(store: Store) -> None:
    assert not store.rules
    with pytest.raises(SettingsError, match=r"no registry at s3://nowhere/r"):
        Registry("s3://nowhere/r")


def test_a_store_that_does_not_answer_is_reported(
    s3_registry: Registry, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "MAX_TRIES", 2)
    store.rules = [Rule("GET", "production", "slow", count=10**6)]
    with pytest.raises(TransientError, match=r"s3://models/registry does not answer"):
        s3_registry.resolve("qa")


def test_a_version_is_downloaded_once_and_verified(
    s3_registry: Registry, store: Store, artifacts: Path
) -> None:
    folder = Path(locate_model(f"{s3_registry.address}/qa@production"))
    assert folder == find_cache() / s3_registry.resolve("qa").content_sha256
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    original = artifacts / "one"
    assert names == sorted(
        path.relative_to(original) for path in original.rglob("*") if path.is_file()
    )
    store.rules = [Rule("GET", "files/weights.safetensors", "slow", count=1)]
    assert locate_model(f"{s3_registry.address}/qa@1") == str(folder)
    assert store.rules[0].num_triggered == 0, "it was downloaded again"
    (folder / "weights.safetensors").write_bytes(b"damaged")
    assert locate_model(f"{s3_registry.address}/qa@1") == str(folder)
    content = (folder / "weights.safetensors").read_bytes()
    assert content == (original / "weights.safetensors").read_bytes()
    assert [path.name for path in find_cache().iterdir()] == [folder.name]


def test_the_serving_model_of_a_pipeline_is_a_local_folder(
    s3_registry: Registry, artifacts: Path
) -> None:
    settings = RegistryModel(path=s3_registry.address, model="qa")
    assert find_serving_version(settings) == "1"
    assert not find_cache().exists(), "only the number is read"
    serving = find_serving(settings)
    assert serving is not None
    assert serving.version == "1"
    assert Path(serving.artifact) == find_cache() / s3_registry.resolve("qa").content_sha256
    manifest = Path(serving.artifact) / "manifest.json"
    assert manifest.read_bytes() == (artifacts / "one" / "manifest.json").read_bytes()
    assert find_serving(settings.model_copy(update={"stage": "staging"})) is None


@pytest.mark.parametrize("damage", ["change", "remove"])
def test_a_corrupted_version_is_not_downloaded(
    s3_registry: Registry, store: Store, damage: str
) -> None:
    client = boto3.client("s3", endpoint_url=store.url)
    key = "registry/models/qa/versions/2/files/payload/program.bin"
    if damage == "change":
        client.put_object(Bucket=BUCKET, Key=key, Body=b"changes")
    else:
        client.delete_object(Bucket=BUCKET, Key=key)
    problem = "has changed" if damage == "change" else "is missing"
    for action in (
        lambda: locate_model(f"{s3_registry.address}/qa@2"),
        lambda: s3_registry.promote("qa", 2, why="better"),
    ):
        with pytest.raises(DataError, match=rf"version 2 of 'qa' .*program\.bin {problem}"):
            action()
    assert not list(find_cache().glob("*")) if find_cache().exists() else True
    assert s3_registry.list_stages("qa") == {"production": 1}
    [finding] = check_registry(s3_registry).findings
    assert finding.subject == "qa@2"
