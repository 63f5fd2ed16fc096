"""Artifacts are replaced under load without a failed request, and models share the memory."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

import regauge
from regauge.inference.export.artifact import open_unchecked
from regauge.inference.export.manifest import WEIGHTS
from regauge.serving.loaded_version import LoadedVersion
from regauge.serving.model_set import ModelSet
from regauge.serving.model_slot import CanaryTrial, ModelSlot
from regauge.serving.server_metrics import ServerMetrics
from regauge.serving.settings import ModelSettings, QueueSettings, Serve, WorkerSettings
from serve.chaos_backend import RAISES
from serve.servers import (
    QUICK_HTTP,
    ServerProcess,
    copy_artifact,
    copy_with_chaos,
    draw_texts,
    encoder,
    install_chaos,
    is_running,
    list_children,
    other_encoder,
    read_resources,
    start_server,
    update_manifest,
    wait_for,
)
from serve.simulation import run_simulated
from serve.test_server_faults import damage_pooling
from serve.vectors import write_vectors

__all__ = ["encoder", "other_encoder"]

TEXT = "w5 w6 w7"
NUM_CLIENTS = 4
WAIT_SECONDS = 200.0
"""Time in which a new version must answer; the machine may be busy."""


@pytest.fixture(scope="module")
def versions(encoder: Path, other_encoder: Path) -> list[np.ndarray]:
    """Return the vector of the text by each version."""
    paths = (encoder, other_encoder)
    vectors = [np.asarray(regauge.load(path, threads=1).encode(TEXT)) for path in paths]
    assert not np.allclose(*vectors, atol=0.01)
    return vectors


def switch(link: Path, target: Path) -> None:
    """Point a link to another folder, in one step."""
    temporary = link.with_name("new")
    temporary.symlink_to(target)
    temporary.replace(link)


class Load:
    """Keep-alive clients that send one text until they are stopped."""

    def __init__(self, server: ServerProcess, versions: list[np.ndarray]) -> None:
        self.counts = [0] * len(versions)
        """Answers of each version."""
        self.failures: list[str] = []
        self._server = server
        self._versions = versions
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        return sum(self.counts)

    @contextmanager
    def run(self) -> Iterator[None]:
        with ThreadPoolExecutor(NUM_CLIENTS) as executor:
            clients = [executor.submit(self._send) for _ in range(NUM_CLIENTS)]
            try:
                yield
            finally:
                self._stopped.set()
            for client in clients:
                client.result()

    def _send(self) -> None:
        with httpx.Client(base_url=self._server.address, timeout=120) as client:
            while not self._stopped.is_set():
                try:
                    response = client.post("/embed", json={"inputs": TEXT})
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                    return
                version = self._find_version(response)
                with self._lock:
                    self.counts[version] += 1

    def _find_version(self, response: httpx.Response) -> int:
        if response.status_code != 200:
            self.failures.append(f"{response.status_code}: {response.text}")
            return 0
        vector = np.array(response.json()[0], np.float32)
        matches = [np.allclose(vector, known, atol=1e-5) for known in self._versions]
        if matches.count(True) != 1:
            self.failures.append(f"an answer of no version: {vector[:4]}")
            return 0
        return matches.index(True)


def find_version(server: ServerProcess, versions: list[np.ndarray]) -> int:
    vector = server.embed(TEXT)[0]
    return next(i for i, known in enumerate(versions) if np.allclose(vector, known, atol=1e-5))


@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.full)])
def test_a_new_version_replaces_the_old_one_under_load(
    encoder: Path,
    other_encoder: Path,
    versions: list[np.ndarray],
    tmp_path: Path,
    figure: Callable[[str, float], None],
    count: int,
) -> None:
    link = tmp_path / "live"
    broken = copy_artifact(other_encoder, tmp_path / "broken")
    damage_pooling(broken)
    link.symlink_to(encoder)
    with start_server(tmp_path / "server", f"model={link}", *QUICK_HTTP) as server:
        [first] = server.workers
        load = Load(server, versions)
        with load.run():
            wait_for(lambda: load.total > 100)
            switch(link, broken)
            wait_for(lambda: "the new one does not load" in server.log, WAIT_SECONDS)
            assert load.counts[1] == 0
            switch(link, other_encoder)
            figure(
                "seconds until a new version answers",
                wait_for(lambda: load.counts[1], WAIT_SECONDS),
            )
            wait_for(lambda: load.total >= count, 300)
        assert load.failures == []
        assert "model keeps its version" in server.log
        assert "row 0 of parity_rows.json" in server.log
        assert find_version(server, versions) == 1
        wait_for(lambda: not is_running(first))
        wait_for(lambda: len(server.workers) == 1)
        assert "Traceback" not in server.log


def test_a_folder_is_overwritten_in_place(
    encoder: Path, other_encoder: Path, versions: list[np.ndarray], tmp_path: Path
) -> None:
    """The manifest arrives first, and the other files later: half a version never answers."""
    folder = copy_artifact(encoder, tmp_path / "artifact")
    with start_server(tmp_path / "server", f"model={folder}", *QUICK_HTTP) as server:
        load = Load(server, versions)
        with load.run():
            wait_for(lambda: load.total > 20)
            shutil.copy2(other_encoder / "manifest.json", folder)
            wait_for(lambda: "the new one does not load" in server.log, WAIT_SECONDS)
            shutil.copytree(other_encoder, folder, dirs_exist_ok=True)
            wait_for(lambda: load.counts[1], WAIT_SECONDS)
        assert load.failures == []
        assert find_version(server, versions) == 1


def test_overwritten_files_never_change_a_version_that_answers(
    encoder: Path, other_encoder: Path, versions: list[np.ndarray], tmp_path: Path
) -> None:
    """A worker is killed while the weights are those of another version, and none before."""
    folder = copy_artifact(encoder, tmp_path / "artifact")
    with start_server(tmp_path / "server", f"model={folder}", *QUICK_HTTP) as server:
        [worker] = server.workers
        load = Load(server, versions)
        with load.run():
            wait_for(lambda: load.total > 20)
            with (folder / WEIGHTS).open("wb") as file:
                total = load.total
                wait_for(lambda: load.total > total + 20)
                file.write((other_encoder / WEIGHTS).read_bytes())
            total = load.total
            wait_for(lambda: load.total > total + 20)
            assert is_running(worker)
            os.kill(worker, signal.SIGKILL)
            wait_for(lambda: not is_running(worker))
            total = load.total
            wait_for(lambda: load.total > total + 20, WAIT_SECONDS)
            assert load.counts[1] == 0
            shutil.copytree(other_encoder, folder, dirs_exist_ok=True)
            wait_for(lambda: load.counts[1], WAIT_SECONDS)
        assert load.failures == []
        assert str(folder) in server.log
        assert "artifact-" not in server.log


@pytest.mark.full
def test_a_canary_gets_its_share_and_is_promoted_or_discarded(
    encoder: Path, other_encoder: Path, versions: list[np.ndarray], tmp_path: Path
) -> None:
    """A canary that fails is discarded; one that does not is promoted."""
    packages = tmp_path / "packages"
    packages.mkdir()
    variables = install_chaos(packages)
    failing = copy_with_chaos(other_encoder, tmp_path / "failing")
    link = tmp_path / "live"
    link.symlink_to(encoder)
    options = ("serve.models.canary_share=0.25", "serve.models.canary_seconds=20", *QUICK_HTTP)
    arguments = (f"model={link}", *options)
    with start_server(tmp_path / "server", *arguments, environment=variables) as server:
        switch(link, failing)
        wait_for(lambda: "gets 25 % of the requests" in server.log, WAIT_SECONDS)
        statuses = [server.post("/embed", {"inputs": f"w{RAISES}"}).status_code for _ in range(8)]
        assert statuses == [200] * 8
        assert "model keeps its version: the new one failed" in server.log
        assert {find_version(server, versions) for _ in range(8)} == {0}
        switch(link, other_encoder)
        wait_for(lambda: server.log.count("gets 25 % of the requests") == 2, WAIT_SECONDS)
        answers = [find_version(server, versions) for _ in range(40)]
        assert answers.count(1) == 10
        wait_for(lambda: "replaced by version" in server.log, WAIT_SECONDS)
        assert {find_version(server, versions) for _ in range(8)} == {1}
        wait_for(lambda: len(server.workers) == 1)
        assert "Traceback" not in server.log


class FakeSlot(ModelSlot):
    """A model whose folder has the versions 1, 2, ... one after the other."""

    number = 0

    async def _find_version(self) -> tuple[Path, Any]:
        self.number += 1
        return Path("folder"), ((str(self.number), 0, 0, 0),)

    async def _start_version(self, folder: Path) -> LoadedVersion:
        async def drain() -> None:
            """Do nothing."""

        version: Any = SimpleNamespace(
            content_sha256=str(self.number), contract={}, program=None, drain=drain, num_answers=0,
            keep_open=nullcontext, has_failed=False,
        )  # fmt: skip
        del folder
        return version


def test_a_canary_without_enough_requests_is_not_promoted() -> None:
    """The answers of an earlier canary do not count; every second request goes to a canary."""
    limits = ModelSettings(canary_share=0.5, canary_seconds=0.01, canary_requests=3)
    anything: Any = None
    slot = FakeSlot("model", Serve(artifacts={"model": "a"}, models=limits), anything, anything)

    async def answer() -> None:
        async with slot.use() as version:
            version.num_answers += 1

    async def run() -> None:
        first = await slot.load()
        await slot.check_for_new_version()
        second = slot.canary
        await asyncio.sleep(0.3)
        assert (slot.current, slot.canary) == (first, second)
        for _ in range(5):
            await CanaryTrial().run(answer)
        assert second is not None
        assert second.num_answers == 2
        await slot.check_for_new_version()
        third = slot.canary
        for _ in range(4):
            await CanaryTrial().run(answer)
        await asyncio.sleep(0.3)
        assert (slot.current, slot.canary) == (first, third)
        for _ in range(2):
            await CanaryTrial().run(answer)
        while slot.canary is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert slot.current is third

    asyncio.run(run())


def test_a_canary_is_discarded_for_a_failure_that_the_old_version_does_not_have(
    encoder: Path, other_encoder: Path, tmp_path: Path
) -> None:
    """The old version answers instead; a request that fails with both decides nothing."""
    packages = tmp_path / "packages"
    packages.mkdir()
    variables = install_chaos(packages)
    current = copy_artifact(encoder, tmp_path / "current")
    prompt = {"prompts": {"query": "w9 "}}
    update_manifest(current, lambda document: document["program"]["tokenization"].update(prompt))
    link = tmp_path / "live"
    link.symlink_to(current)
    options = ("serve.models.canary_share=0.5", "serve.models.canary_seconds=600", *QUICK_HTTP)
    faults = ("serve.item_errors=true", f"model={link}")
    with start_server(tmp_path / "server", *faults, *options, environment=variables) as server:

        def post(**body: Any) -> list[int]:
            return [server.post("/embed", body).status_code for _ in range(4)]

        def load_canary(folder: Path) -> None:
            count = server.log.count("gets 50 % of the requests")
            switch(link, folder)
            wait_for(lambda: server.log.count("gets 50 % of") > count, WAIT_SECONDS)

        def count_discards() -> int:
            return server.log.count("keeps its version: the new one failed")

        load_canary(other_encoder)
        assert post(inputs=TEXT, prompt_name="passage") == [422] * 4
        assert post(inputs=[TEXT, "w5 " * 60]) == [200] * 4
        assert (count_discards(), len(server.workers)) == (0, 2)
        assert post(inputs=TEXT, prompt_name="query") == [200] * 4
        assert "the new one failed: no prompt is called 'query'" in server.log
        load_canary(copy_with_chaos(current, tmp_path / "poisoned"))
        answers = [server.post("/embed", {"inputs": [TEXT, f"w{RAISES}"]}) for _ in range(2)]
        assert all(answer.json()[1] for answer in answers)
        assert "the new one failed: it could not compute a record" in server.log
        assert count_discards() == 2


def test_a_new_version_keeps_the_contract_of_the_one_that_answers(
    tiny_artifacts: Mapping[str, Path], tmp_path: Path
) -> None:
    """Every difference that breaks a client is refused, unless a setting allows it."""
    classifier = tiny_artifacts["classifier"]
    labels = copy_artifact(classifier, tmp_path / "labels")
    names = {"labels": ["anger", "joy", "fear"]}
    update_manifest(labels, lambda document: document["program"].update(names))
    tokenizer = copy_artifact(classifier, tmp_path / "tokenizer")
    path = tokenizer / "tokenizer" / "tokenizer.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "normalizer": {"type": "Lowercase"}}))
    update_manifest(tokenizer)
    padded = copy_artifact(classifier, tmp_path / "padded")
    path = padded / "tokenizer" / "tokenizer.json"
    truncation = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps({**document, "truncation": truncation}, indent=1))
    update_manifest(padded)
    link = tmp_path / "live"
    link.symlink_to(classifier)
    body = {"inputs": "anna lives here"}
    with start_server(tmp_path / "server", f"model={link}", *QUICK_HTTP) as server:
        before = server.post("/predict", body).json()
        refused = {
            "output kind and width and labels": tiny_artifacts["encoder"],
            "labels": labels,
            "tokenizer": tokenizer,
        }
        for difference, folder in refused.items():
            switch(link, folder)
            problem = f"does not load: {folder} has another {difference}"
            wait_for(lambda problem=problem: problem in server.log, WAIT_SECONDS)
            assert server.post("/predict", body).json() == before
        switch(link, padded)
        wait_for(lambda: "replaced by version" in server.log, WAIT_SECONDS)
    switch(link, classifier)
    arguments = (f"model={link}", *QUICK_HTTP, "serve.models.allow_other_contract=true")
    with start_server(tmp_path / "other", *arguments) as server:
        switch(link, labels)
        wait_for(lambda: "replaced by version" in server.log, WAIT_SECONDS)
        after = server.post("/predict", body).json()
        assert [row["score"] for row in after] == pytest.approx([row["score"] for row in before])
        assert after != before


def test_a_new_version_waits_for_the_vectors_that_are_searched(
    encoder: Path, other_encoder: Path, tmp_path: Path
) -> None:
    """Queries and rows are always of one version, whatever is cached."""
    texts = draw_texts(30, seed=3)
    folders = {}
    for path in (encoder, other_encoder):
        vectors = np.asarray(regauge.load(path, threads=1).encode(texts))
        folder = tmp_path / path.parent.name
        folders[path] = write_vectors(folder, open_unchecked(path), vectors, {"name": texts})
    link, vectors = tmp_path / "live", tmp_path / "vectors"
    link.symlink_to(encoder)
    vectors.symlink_to(folders[encoder])
    arguments = (f"model={link}", *QUICK_HTTP, f"serve.search.vectors={vectors}")

    def rank(path: Path, text: str) -> list[int]:
        model = regauge.load(path, threads=1)
        scores = np.asarray(model.encode(texts)) @ np.asarray(model.encode(text))
        order = np.argsort(-scores, kind="stable")[:10]
        return [int(number) for number in order]

    def search(text: str) -> list[int]:
        answer = server.get("/search", params={"q": text})
        return [row["id"] for row in answer.json()["results"]]

    queries = texts[:4]
    ranks = {path: [rank(path, text) for text in queries] for path in folders}
    assert ranks[encoder] != ranks[other_encoder]
    with start_server(tmp_path / "server", *arguments) as server:
        assert [search(text) for text in queries] == ranks[encoder]
        switch(link, other_encoder)
        wait_for(lambda: "has vectors from another artifact" in server.log, WAIT_SECONDS)
        assert [search(text) for text in queries] == ranks[encoder]
        switch(vectors, folders[other_encoder])
        wait_for(lambda: "replaced by version" in server.log, WAIT_SECONDS)
        assert [search(text) for text in queries] == ranks[other_encoder]


def test_models_are_loaded_at_their_first_request_and_unloaded(
    encoder: Path, other_encoder: Path, versions: list[np.ndarray], tmp_path: Path
) -> None:
    """With `max_loaded = 1`, requests to two models at once never load both."""
    limits = ("serve.models.max_loaded=1", "serve.models.min_loaded_seconds=0.1")
    arguments = (f"one={encoder}", f"two={other_encoder}", *limits)
    with start_server(tmp_path, *arguments, "serve.queue.timeout_seconds=300") as server:
        models = server.get("/health").json()["models"]
        assert [model["loaded"] for model in models.values()] == [True, False]
        most_workers = 0
        stopped = threading.Event()

        def watch() -> None:
            nonlocal most_workers
            while not stopped.is_set():
                most_workers = max(most_workers, len(server.workers))
                time.sleep(0.02)

        def send(name: str) -> httpx.Response:
            body: dict[str, Any] = {"inputs": TEXT, "model": name}
            return httpx.post(f"{server.address}/embed", json=body, timeout=300)

        with ThreadPoolExecutor(5) as executor:
            watching = executor.submit(watch)
            names = ["two", "two", "one", "two"]
            responses = list(executor.map(send, names))
            stopped.set()
            watching.result()
        for name, response in zip(names, responses, strict=True):
            assert response.status_code == 200, response.text
            expected = versions[name == "two"]
            assert np.allclose(response.json()[0], expected, atol=1e-5)
        assert most_workers == 1
        models = server.get("/health").json()["models"]
        assert sum(model["loaded"] for model in models.values()) == 1
        assert server.get("/v1/models").json()["data"][1]["id"] == "two"


def test_a_stuck_worker_is_replaced_before_its_requests_expire() -> None:
    assert WorkerSettings().hang_timeout_seconds < QueueSettings().timeout_seconds


class CountedSlot(ModelSlot):
    """A model that loads in a second, and counts how often."""

    num_loads = 0

    async def read_program(self) -> None:
        """Do nothing, because the folder does not exist."""

    async def load(self) -> LoadedVersion:
        if self.current is None:
            await asyncio.sleep(1)
            version: Any = SimpleNamespace(keep_open=nullcontext, has_failed=False, worker_pids=[])
            self.current, self.loaded_at = version, asyncio.get_running_loop().time()
            self.num_loads += 1
        return self.current

    async def stop(self) -> None:
        self.current = None


@pytest.mark.parametrize("min_seconds", [0.0, 10.0])
def test_alternating_requests_do_not_reload_models_all_the_time(min_seconds: float) -> None:
    """Waiting requests share a load, a model stays for a minimum time, and only one is loaded."""
    limits = ModelSettings(max_loaded=1, min_loaded_seconds=min_seconds)
    settings = Serve(artifacts={"one": "a", "two": "b"}, models=limits)
    anything: Any = None
    models = ModelSet(settings, ServerMetrics(), anything)
    counted = {name: CountedSlot(name, settings, anything, anything) for name in models.slots}
    models.slots.update(counted)
    waits: list[float] = []

    async def send(name: str) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        async with models.use(models.find(name)):
            assert sum(slot.current is not None for slot in models.slots.values()) == 1
            waits.append(loop.time() - start)

    async def send_all(client: int) -> None:
        for number in range(60):
            await send(("one", "two")[(client + number) % 2])
            await asyncio.sleep(0.5 + client / 7)

    async def run() -> float:
        start = asyncio.get_running_loop().time()
        await models.start()
        await asyncio.gather(*map(send_all, range(4)))
        return asyncio.get_running_loop().time() - start

    seconds = run_simulated(run())
    num_loads = sum(slot.num_loads for slot in counted.values())
    assert num_loads <= 1 + seconds / (min_seconds + 1)
    assert max(waits) <= 2 * (min_seconds + 1)


@pytest.mark.full
def test_the_memory_of_models_is_limited(
    encoder: Path, other_encoder: Path, tmp_path: Path
) -> None:
    """A limit below two workers keeps one; a model that is unused for the longest time goes."""
    arguments = (f"one={encoder}", f"two={other_encoder}", "serve.models.max_memory_gb=0.01")
    with start_server(tmp_path, *arguments, "serve.queue.timeout_seconds=300") as server:
        [first] = list_children(server.process.pid)
        assert read_resources(first)[0] > 10
        assert server.post("/embed", {"inputs": TEXT, "model": "two"}).status_code == 200
        assert not is_running(first)
        wait_for(lambda: len(server.workers) == 1)
