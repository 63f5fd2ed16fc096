"""Process that sends requests to a server: one JSON line in for each load, one line out.

The first line has the target and the texts' file; an empty document answers it. The process ends
at the end of its input. It is separate from the server and from the program that analyses the
results.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from regauge.evaluation.benchmark.http_load import HttpLoad, HttpTarget, LoadResult
from regauge.system import processes
from regauge.system.json_files import parse_object, read_json_list


def main() -> None:
    """Run the loads of the standard input."""
    processes.die_with_parent()
    first = parse_object(sys.stdin.readline())
    texts = read_json_list(Path(first["texts"]), "start the benchmark again")
    with asyncio.Runner(loop_factory=_find_loop_factory()) as runner:
        runner.run(_run_loads(HttpTarget(**first["target"]), texts))


async def _run_loads(target: HttpTarget, texts: list[str]) -> None:
    async with HttpLoad(target, texts) as load:
        _write_line({})
        for line in sys.stdin:
            result = await _run_load(load, parse_object(line))
            _write_line(result._asdict())


def _write_line(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


async def _run_load(load: HttpLoad, spec: dict[str, Any]) -> LoadResult:
    """Run one load at its start time on the monotonic clock, which all processes share."""
    await asyncio.sleep(max(0.0, spec["start_at"] - time.monotonic()))
    if "concurrency" in spec:
        return await load.run_closed(
            spec["concurrency"], spec["texts_per_request"], spec["seconds"]
        )
    return await load.run_open(spec["arrivals"], spec["texts_per_request"], spec["seconds"])


def _find_loop_factory() -> Any:
    """Return the event loop of uvloop if it is installed, which sends more requests per second."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    main()
