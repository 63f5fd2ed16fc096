"""Serving of embeddings over HTTP: `regauge serve`, compared with FastAPI and infinity.

All servers have the same model and sentences, run together on this machine, and are measured
alternately by the same client (`regauge.evaluation.benchmark.load_processes`). FastAPI with
sentence-transformers has two styles, see `peer_fastapi.py`. Infinity is installed in a separate
environment in the cache folder. A server that cannot run is recorded with the reason.

    python benchmarks/serve.py [--model FOLDER] [--artifact FOLDER] [--texts FILE] [--quick]
                               [--programs NAME …] [--infinity FOLDER] [--json OUT]

The client needs processor time of the same machine; its share is part of the result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from peers import REGAUGE
from predict import PACKAGED_MODEL, find_packaged_model, run_regauge
from recording import RESULTS, summarize, write_result
from text import read_sentences

import regauge
from regauge.accelerators.cpu import Cpu
from regauge.evaluation.benchmark import serving_summary
from regauge.evaluation.benchmark.http_load import HttpTarget, LoadResult, detect_target
from regauge.evaluation.benchmark.load_generator import draw_arrivals, search_rate
from regauge.evaluation.benchmark.load_processes import LoadProcesses
from regauge.evaluation.benchmark.served_target import (
    RunningServer,
    build_serve_command,
    read_phase_seconds,
    run_server,
    subtract_phases,
)
from regauge.evaluation.benchmark.serving_settings import SaturationSettings
from regauge.evaluation.report.charts import Bar, chart_bars
from regauge.evaluation.report.drawing import draw_file
from regauge.system import processes
from regauge.system.errors import RegaugeError
from regauge.system.files import write_atomic

HERE = Path(__file__).parent
PLAIN, BATCHED, INFINITY = "FastAPI", "FastAPI, batched", "infinity"
ONE_THREAD = f"{REGAUGE}, 1 thread per worker"
OURS = (REGAUGE, ONE_THREAD)
PROGRAMS = {
    "regauge": REGAUGE,
    "one-thread": ONE_THREAD,
    "fastapi": PLAIN,
    "batched": BATCHED,
    "infinity": INFINITY,
}
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "regauge-benchmarks"
INFINITY_VERSION = "0.0.78"
INSTALL_SECONDS, START_SECONDS = 1200.0, 120.0
LOADS = {"single": (1, 1), "crowd": (64, 1), "bulk": (8, 32)}
"""(connections, texts of a request) of each closed loop."""
SATURATING = "crowd"
"""The closed loop whose throughput is the saturation."""
FRACTIONS = (0.1, 0.5, 0.9)
"""Rates of the open loop, as fractions of the saturation of a peer."""
MIN_REQUESTS = 120
"""Requests of an open loop; a p99 needs more than 100."""
SLO_MS = 100.0
OPEN_KEYS = ("rate", "requests_per_second", "p50_ms", "p99_ms", "max_ms", "statuses")
"""Figures of an open loop in the result: the offered rate, the answered requests per second, ..."""
NUM_SENTENCES, MAX_CHARACTERS = 2000, 400
BARE_TEXTS, BARE_CALLS = 512, 30
EXPORT_OPTIONS = ("candidates.timing_seconds=1",)


class Durations(NamedTuple):
    """Seconds and repetitions of the measurements."""

    repeats: int
    closed: float
    open: float
    trial: float
    num_trials: int


FULL = Durations(repeats=3, closed=3.0, open=4.0, trial=4.0, num_trials=9)
QUICK = Durations(repeats=1, closed=1.5, open=1.5, trial=1.0, num_trials=5)


class Scratch(NamedTuple):
    """The temporary folder, the texts, and the servers and clients to stop at the end."""

    folder: Path
    texts: list[str]
    stack: ExitStack


@dataclass
class Program:
    """A running server, its client and its figures."""

    name: str
    server: RunningServer
    load: LoadProcesses
    closed: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    open: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Figures of the open loops by peer and fraction, such as `infinity 50%`."""
    saturation: float | None = None
    """The largest rate of requests that meets the objective."""

    def measure(self, run_load: Callable[[], LoadResult], num_texts: int) -> dict[str, Any]:
        """Return the figures of a load, with the processor time of the server per text."""
        before, phases = self.server.read_processor_seconds(), read_phase_seconds(self.server.url)
        result = run_load()
        seconds = self.server.read_processor_seconds() - before
        figures = serving_summary.summarize_load(result, num_texts, SLO_MS)
        texts = figures["texts_per_second"] * figures["duration_seconds"]
        spent = subtract_phases(read_phase_seconds(self.server.url), phases)
        return {
            **figures,
            "processor_ms_per_text": 1e3 * seconds / texts if texts else None,
            "phase_ms_per_text": {name: 1e3 * value / texts for name, value in spent.items()}
            if texts
            else {},
        }


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="default: the packaged all-MiniLM-L6-v2")
    parser.add_argument("--texts", type=Path, help="default: docs of this Python")
    parser.add_argument("--artifact", type=Path, help="exported before; default: export the model")
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--infinity", type=Path, default=CACHE / "infinity", help="environment")
    parser.add_argument("--quick", action="store_true", help="shorter measurements, one repeat")
    parser.add_argument("--json", type=Path, default=RESULTS / "serve.json")
    options = parser.parse_args()
    name = options.model.name if options.model else PACKAGED_MODEL
    options.model = options.model or find_packaged_model()
    durations = QUICK if options.quick else FULL
    sentences = read_sentences(options.texts, NUM_SENTENCES)
    texts = [sentence for sentence in sentences if len(sentence) <= MAX_CHARACTERS]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        figures: dict[str, Any] = {"model": name, "load_average_before": os.getloadavg()[0]}
        failures: dict[str, str] = {}
        programs = []
        for key in options.programs:
            title = PROGRAMS[key]
            try:
                port = processes.find_free_port()
                command = _build_command(key, options, folder, port)
                programs.append(_start(title, command, port, Scratch(folder, texts, stack)))
            except (RegaugeError, SystemExit, OSError) as error:
                failures[title] = " ".join(str(error).split())
                sys.stderr.write(f"{title} cannot run: {failures[title]}\n")
        artifact = options.artifact or folder / "artifact"
        if artifact.exists():
            figures["artifact"] = _describe_artifact(artifact, texts)
        _measure_all(programs, durations)
        figures |= _summarize(programs, durations) | {"failures": failures}
        figures["load_average_after"] = os.getloadavg()[0]
        _draw_phases(programs, options.json.with_suffix(".svg"))
    packages = ("fastapi", "uvicorn", "sentence-transformers", "transformers", "aiohttp")
    write_result(options.json, "serving", Cpu().chip_peak("fp32"), figures, *packages)


def _build_command(key: str, options: argparse.Namespace, folder: Path, port: int) -> list[str]:
    """Return the command of a server; export the artifact or install infinity if needed."""
    model = options.model
    if PROGRAMS[key] in OURS:
        artifact = options.artifact or folder / "artifact"
        if not artifact.exists():
            run_regauge("export", "--model", str(model), "--to", str(artifact), *EXPORT_OPTIONS)
        settings = ("serve.workers.threads=1",) if PROGRAMS[key] == ONE_THREAD else ()
        return build_serve_command(str(artifact), port, settings)
    if key == "infinity":
        program = str(_install_infinity(options.infinity))
        address = ["--host", "127.0.0.1", "--port", str(port), "--url-prefix", "/v1"]
        engine = ["--engine", "torch", "--device", "cpu", "--no-bettertransformer"]
        return [program, "v2", "--model-id", str(model), *engine, *address]
    style = "plain" if key == "fastapi" else "batched"
    return [sys.executable, str(HERE / "peer_fastapi.py"), str(model), str(port), "--style", style]


def _install_infinity(folder: Path) -> Path:
    """Return the program of infinity; install it in an environment, with this version of torch."""
    program = folder / "bin" / "infinity_emb"
    if not program.exists():
        torch = version("torch").partition("+")[0]
        packages = [f"infinity-emb[server,torch]=={INFINITY_VERSION}", f"torch=={torch}"]
        commands = (
            [sys.executable, "-m", "venv", str(folder)],
            [str(folder / "bin" / "pip"), "install", "--quiet", *packages],
        )
        for command in commands:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS
            )
            if done.returncode:
                raise SystemExit(f"not installed: {done.stderr.strip()[-500:]}")
    return program


def _start(name: str, command: list[str], port: int, scratch: Scratch) -> Program:
    """Start a server and its client, one after the other, so that no start slows another one."""
    log = scratch.folder / f"{port}.log"
    variables = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "true"}
    url = f"http://127.0.0.1:{port}"
    try:
        server = scratch.stack.enter_context(
            run_server(command, url, log, START_SECONDS, variables)
        )
    except RegaugeError as error:
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        raise SystemExit(f"{error}: {' '.join(lines[-3:])[-500:]}") from None
    client_folder = scratch.folder / f"client-{port}"
    client_folder.mkdir()
    target = asyncio.run(detect_target(HttpTarget(url, "openai")))
    load = scratch.stack.enter_context(LoadProcesses(target, scratch.texts, client_folder))
    load.run_closed(8, 8, 1.0)
    return Program(name, server, load)


def _describe_artifact(folder: Path, texts: list[str]) -> dict[str, Any]:
    """Return the candidate that the export chose, and the speed of its runner in this process."""
    compiled = json.loads((folder / "manifest.json").read_text())["compiled"]
    model = regauge.load(folder)
    model.encode(texts[:BARE_TEXTS])
    milliseconds = []
    for text in texts[:BARE_CALLS]:
        began = time.perf_counter()
        model.encode([text])
        milliseconds.append(1e3 * (time.perf_counter() - began))
    windows = {load: connections * size for load, (connections, size) in LOADS.items()}
    return {
        "backend": compiled["backend"]["kind"],
        "precision": compiled["precision"],
        "bare_single_text_p50_ms": statistics.median(milliseconds),
        "bare_texts_per_second": {
            f"{window} at a time": _time_bare(model, texts[:BARE_TEXTS], window)
            for window in (*windows.values(), BARE_TEXTS)
        },
    }


def _time_bare(model: regauge.Model, texts: list[str], window: int) -> float:
    """Return the texts per second without a server; `window` texts are packed at once."""
    began = time.perf_counter()
    for start in range(0, len(texts), window):
        model.encode(texts[start : start + window])
    return len(texts) / (time.perf_counter() - began)


def _measure_all(programs: list[Program], durations: Durations) -> None:
    """Measure every load of all programs, alternating between the programs."""
    for _ in range(durations.repeats):
        for key, (connections, texts) in LOADS.items():
            for program in programs:
                run_load = partial(program.load.run_closed, connections, texts, durations.closed)
                figures = program.measure(run_load, texts)
                program.closed.setdefault(key, []).append(figures)
    for program in programs:
        program.saturation = _search_saturation(program, durations)
    for index, (peer, fraction) in enumerate(product(programs, FRACTIONS)):
        if peer.name not in OURS:
            rate = fraction * statistics.median(_list_speeds(peer, SATURATING))
            _measure_equal_load(
                programs, peer, (f"{peer.name} {fraction:.0%}", rate, index), durations
            )


def _search_saturation(program: Program, durations: Durations) -> float | None:
    """Return the largest rate of requests with one text at which p99 is within SLO_MS."""
    saturation, count = SaturationSettings(slo_ms=SLO_MS), iter(range(100))

    def try_rate(rate: float) -> bool:
        arrivals = draw_arrivals(rate, durations.trial, 11, next(count))
        figures = program.measure(lambda: program.load.run_open(arrivals, 1, durations.trial), 1)
        return serving_summary.meets_objective(figures, saturation)

    def meets(rate: float) -> bool:
        """Try a rate twice at most: one pause of the machine ruins the p99 of a trial."""
        return try_rate(rate) or try_rate(rate)

    start = 0.5 * statistics.median(_list_speeds(program, SATURATING))
    return search_rate(meets, start, precision=0.1, max_trials=durations.num_trials)


def _measure_equal_load(
    programs: list[Program], peer: Program, load: tuple[str, float, int], durations: Durations
) -> None:
    """Measure a peer and Regauge with the same arrivals; `load` is (name, rate, seed)."""
    name, rate, seed = load
    seconds = max(durations.open, MIN_REQUESTS / rate)
    arrivals = draw_arrivals(rate, seconds, 7, seed)
    for program in programs:
        if program.name in (*OURS, peer.name):
            figures = program.measure(partial(program.load.run_open, arrivals, 1, seconds), 1)
            program.open[name] = {"rate": rate, **figures}


def _list_speeds(program: Program, load: str) -> list[float]:
    return [figures["texts_per_second"] for figures in program.closed[load]]


def _summarize(programs: list[Program], durations: Durations) -> dict[str, Any]:
    """Return the figures of all programs, and the ratios of Regauge to the others."""
    figures = {program.name: _summarize_program(program) for program in programs}
    return {
        "durations": durations._asdict(),
        "loads": {name: f"{size[0]} connections x {size[1]}" for name, size in LOADS.items()},
        "slo_ms": SLO_MS,
        "programs": figures,
        "peers": dict(_compare(programs)),
    }


def _summarize_program(program: Program) -> dict[str, Any]:
    return {
        "start_seconds": round(program.server.start_seconds, 2),
        "closed_loop": {
            load: {
                "texts_per_second": summarize(_list_speeds(program, load)),
                **{
                    key: _median_known(repeats, key)
                    for key in ("p50_ms", "p99_ms", "processor_ms_per_text")
                },
                "phase_ms_per_text": repeats[-1]["phase_ms_per_text"],
                "statuses": repeats[-1]["statuses"],
                "generator": repeats[-1]["generator"],
            }
            for load, repeats in program.closed.items()
        },
        "requests_per_second_at_slo": program.saturation,
        "open_loop": {
            load: {key: figures[key] for key in OPEN_KEYS} for load, figures in program.open.items()
        },
    }


def _median_known(repeats: list[dict[str, Any]], key: str) -> float | None:
    """Return the median of a figure; None if a repeat does not have it."""
    values = [repeat[key] for repeat in repeats]
    return None if None in values else statistics.median(values)


def _compare(programs: list[Program]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the ratios of the throughput of Regauge to each peer, repeat by repeat."""
    ours = [program for program in programs if program.name in OURS]
    peers = [program for program in programs if program.name not in OURS]
    for program, peer in product(ours, peers):
        pairs = zip(_list_speeds(program, SATURATING), _list_speeds(peer, SATURATING), strict=True)
        ratios = [our_speed / peer_speed for our_speed, peer_speed in pairs]
        speeds = program.saturation, peer.saturation
        yield (
            f"{program.name} : {peer.name}",
            {
                "speedup": round(statistics.median(ratios), 2),
                "range": [round(min(ratios), 2), round(max(ratios), 2)],
                "ratio_at_slo": round(speeds[0] / speeds[1], 2) if all(speeds) else None,
            },
        )


def _draw_phases(programs: list[Program], path: Path) -> None:
    """Draw the milliseconds per text of each phase of Regauge, for the loads of the closed loop."""
    bars = [
        Bar(f"{LOADS[load][0]} x {LOADS[load][1]}", tuple(phases.items()))
        for program in programs
        if program.name == REGAUGE
        for load, repeats in program.closed.items()
        if (phases := repeats[-1]["phase_ms_per_text"])
    ]
    title = "Milliseconds of the server per text: connections x texts of a request"
    for chart in chart_bars(title, bars, " ms"):
        write_atomic(path, draw_file(chart, REGAUGE))


if __name__ == "__main__":
    main()
