"""A run on one accelerator is the run on any other, and moves between them in mid-flight.

Every pair of the accelerators that this machine offers is tested, in fp32 with dropout on.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import datasets
from distributed.jobs import lines, losses
from distributed.runs import settings
from regauge import accelerators, choices, processes
from regauge.errors import LimitReachedError
from regauge.models.tensors import move
from regauge.training import dry_run, trainer
from regauge.training import run as training_run
from regauge.training.compile.warmup import GraphGuard
from regauge.training.context import RunContext
from regauge.training.run import attempt
from regauge.training.state import TrainState

STEPS = 50
LOSS, METRIC = 1e-4, 1e-3
HERE = tuple(kind for kind, found in accelerators.survey().items() if found.fitness > 0)
PAIRS = list(itertools.permutations(HERE, 2))
TASKS = ("mlm", "clm", "contrastive")
ALONE = "one accelerator is here: that a run is the same on another, and moves, is not proved"

pytestmark = [
    pytest.mark.skipif(not PAIRS, reason=ALONE),
    pytest.mark.timeout(300),
]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("data")
    packed = datasets.packed(root / "packed")
    return {"mlm": packed, "clm": packed, "contrastive": datasets.pairs(root / "pairs")}


Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Path]) -> Run:
    """Return a function that goes on with a run, or does it once for the same arguments."""
    root, done = tmp_path_factory.mktemp("runs"), {}

    def run(kind: str, task: str, /, name: str = "", **changes: Any) -> Path:
        key = json.dumps([kind, task, name, changes], sort_keys=True)
        if key not in done:
            folder = root / (name or f"{len(done)}-{kind}-{task}")
            table: dict[str, Any] = {
                "accelerator": kind,
                "stop": {"steps": STEPS, "tokens": changes.pop("tokens", None)},
                "evaluation": {"every_steps": 25},
                "output": {"checkpoint": {"every_steps": 20}},
                **changes,
            }
            try:
                attempt(settings(folder, data[task], task, **table), processes.World())
            except LimitReachedError:
                assert table["stop"]["tokens"] is not None
            done[key] = folder
        return done[key]

    return run


def worst(one: Path, other: Path, figure: Callable[[str, float], None], what: str) -> None:
    """Compare the losses of every step, and the held-out metrics."""
    ours, theirs = losses(lines(one)), losses(lines(other))
    assert len(ours) == len(theirs) == STEPS
    found = max(abs(a - b) / abs(a) for a, b in zip(ours, theirs, strict=True))
    figure(f"loss {what}", found)
    assert found < LOSS
    metrics = [
        json.loads((folder / "result.json").read_text())["metrics"] for folder in (one, other)
    ]
    for name, value in metrics[0].items():
        assert metrics[1][name] == pytest.approx(value, rel=METRIC), name


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(HERE, 2)))
def test_fifty_steps_are_the_same(
    run: Run,
    first: str,
    second: str,
    task: str,
    figure: Callable[[str, float], None],
    supports: Callable[[str, str, str], None],
) -> None:
    worst(run(first, task), run(second, task), figure, f"{first} {second} {task}")
    for kind in (first, second):
        supports(kind, "single", task)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_run_that_moves_twice_ends_where_the_unmoved_one_ends(
    run: Run, first: str, second: str, figure: Callable[[str, float], None]
) -> None:
    task, name = "mlm", f"moved-{first}-{second}"
    every = json.loads((run(first, task) / "result.json").read_text())["tokens"]
    for kind, limit in ((first, every * 2 // 5), (second, every * 4 // 5), (first, None)):
        folder = run(kind, task, name=name, tokens=limit)
    assert {line["attempt"] for line in lines(folder)} == {1, 2, 3}
    worst(run(first, task), folder, figure, f"moved twice {first} {second}")
    results = [
        json.loads((path / "result.json").read_text()) for path in (run(first, task), folder)
    ]
    assert results[0]["tokens"] == results[1]["tokens"], "the ledger did not go on"


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_checkpoint_arrives_to_the_last_bit(
    first: str, second: str, run: Run, data: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the second one saves at once is what the first one had saved."""
    kept: list[dict[str, torch.Tensor]] = []
    save = trainer.save_checkpoint

    def spied(context: RunContext, state: TrainState, metrics: dict[str, float]) -> None:
        kept.append({name: value.detach().cpu().clone() for name, value in state.tensors().items()})
        save(context, state, metrics)

    monkeypatch.setattr(trainer, "save_checkpoint", spied)
    folder = run(first, "mlm", name=f"arrives-{first}-{second}", stop={"steps": 4})
    seen: list[dict[str, torch.Tensor]] = []
    resume = training_run.resume_latest

    def looked(context: RunContext, state: TrainState) -> bool:
        is_resumed = resume(context, state)
        seen.append({name: value.detach().cpu().clone() for name, value in state.tensors().items()})
        return is_resumed

    monkeypatch.setattr(training_run, "resume_latest", looked)
    attempt(
        settings(folder, data["mlm"], "mlm", accelerator=second, stop={"steps": 6}),
        processes.World(),
    )
    saved, loaded = kept[0], seen[0]
    assert saved.keys() == loaded.keys()
    assert any(name.startswith("optimizer.") for name in saved)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


@pytest.mark.parametrize("kind", HERE)
@pytest.mark.parametrize("task", ["mlm", "contrastive"])
def test_no_graph_is_made_after_the_warm_up(
    kind: str, task: str, tmp_path: Path, data: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 steps with evaluations and saves; a lazy device has made as many as were planned."""
    accelerator = choices.load("accelerators", kind)()
    guards: list[GraphGuard] = []
    init = GraphGuard.__init__

    def kept(self: GraphGuard, *arguments: Any) -> None:
        init(self, *arguments)
        guards.append(self)

    monkeypatch.setattr(GraphGuard, "__init__", kept)
    changes = {
        "accelerator": kind,
        "stop": {"steps": 200},
        "evaluation": {"every_steps": 60},
        "output": {"every_steps": 7, "checkpoint": {"every_steps": 50}},
        # A process keeps its graphs: those of the other tests are of another width.
        "model": {"config": {"hidden_size": 48}},
    }
    run = settings(tmp_path / "run", data[task], task, **changes)
    accelerator.claim(0, 1)
    before = accelerator.graphs_compiled()
    planned = dry_run.plan(run).get("graphs")
    attempt(run, processes.World())
    assert guards[0].late == 0
    made = accelerator.graphs_compiled() - before
    assert made == (planned if accelerator.lazy else 0)


@pytest.mark.parametrize("kind", HERE)
def test_a_move_keeps_tied_weights_tied(kind: str) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = torch.nn.Embedding(7, 3)
            self.head = torch.nn.Linear(3, 7, bias=False)
            self.head.weight = self.embeddings.weight
            self.register_buffer("places", torch.arange(5, dtype=torch.int32))

    device = choices.load("accelerators", kind)().claim(0, 1)
    module = Tied()
    move(module, device)
    assert module.head.weight is module.embeddings.weight
    assert len(list(module.parameters())) == 1
    assert module.head.weight.device.type == module.places.device.type == device.type
    assert module.places.dtype == torch.int32
