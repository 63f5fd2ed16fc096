"""Model parallelism on two processes: equal outputs, half of the weights in each, clean exit."""

from __future__ import annotations

import datetime as dt
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import regauge
from distributed import datasets
from end_to_end.predicting import (
    EAGER,
    QUICK,
    export_run,
    random_texts,
    read_table,
    train_model,
    update_manifest,
    vector_column,
    write_records,
)
from regauge import config
from regauge.cli import main
from regauge.inference.backends import ExecutionContext, Payload, Shape
from regauge.inference.backends._model_parallel.group import RankGroup
from regauge.inference.backends._model_parallel.runner import ModelParallelRunner
from regauge.inference.backends._model_parallel.worker import RankWorker
from regauge.inference.export import engine
from regauge.inference.export.artifact import open_artifact
from regauge.inference.export.model import LoadedModel
from regauge.models.dropout import DropoutKeys
from regauge.models.generation.text_generation import GenerationProgram
from regauge.models.inference_modules import TextProgram, named_tensors
from regauge.models.io_spec import InputSpec, program_inputs
from regauge.models.modules import Encoder
from regauge.models.sentence_transformers import Pooling
from regauge.system.children import FunctionProcess
from regauge.system.errors import SettingsError, TransientError

VOCABULARY = 60
SHAPES = (Shape(8, 8), Shape(3, 24), Shape(1, 32), Shape(8, 8))
MAX_ERROR = 1e-6
"""Largest difference, as a share of the largest value."""
TIMEOUT_SECONDS = 5.0
SPLIT = (
    *("query", "key", "value", "intermediate.dense", "output.dense.weight"),
    *("q_proj", "k_proj", "v_proj", "up_proj", "gate_proj", "o_proj", "down_proj"),
)
"""Parts of the names of split weights, and of biases of column-parallel layers."""
TWO_DEVICES = 'candidates.backends=[{kind="eager", devices=2}]'
INDIVISIBLE = (
    r"devices = {} does not divide 4 heads \(num_attention_heads\); "
    r"set devices = {}, the nearest valid number$"
)
FP32 = 'candidates.precisions=["fp32"]'


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
    model = BertModel(BertConfig(**_widths(), **sizes), add_pooling_layer=False)
    return program(model, Pooling())


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaModel(LlamaConfig(**_widths(), **sizes, pad_token_id=0))
    return program(model, Pooling(modes=("lasttoken",)))


def _widths() -> dict[str, int]:
    return {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64}


def program(model: Any, pooling: Pooling) -> nn.Module:
    module = TextProgram(Encoder(model, DropoutKeys(), pooling), "vectors").eval()
    return module.requires_grad_(False)  # noqa: FBT003 - the API of torch


def build_seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


def batch(shape: Shape) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(shape.length)
    size = (shape.rows, shape.length)
    tokens = torch.randint(1, VOCABULARY, size, generator=draw, dtype=torch.int32)
    lengths = torch.randint(1, shape.length + 1, (shape.rows,), generator=draw, dtype=torch.int32)
    return tokens, lengths


def relative_difference(output: Tensor, expected: Tensor) -> float:
    return float((output.cpu() - expected.cpu()).abs().max() / expected.abs().max())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def worker_pid(runner: ModelParallelRunner) -> int:
    assert runner.ranks is not None
    [worker] = runner.ranks.workers
    return worker.child.process.pid


def start_runner(program: nn.Module, **options: Any) -> ModelParallelRunner:
    """Return a runner of a program on two devices."""
    backend = config.parse_choice("backends", {"kind": "eager", "devices": 2, **options})
    site = ExecutionContext(config.parse_choice("accelerators", "cpu"), 0, 1)
    inputs, weights = program_inputs(InputSpec()), named_tensors(program)
    payload = Payload(Path(), inputs, SHAPES, "fp32", lambda: weights, lambda: program)
    runner: ModelParallelRunner = backend.load(payload, site)
    return runner


def copy_for_two_devices(artifact: Path, folder: Path) -> Path:
    """Copy an artifact and change its manifest to two devices; return the copy."""
    shutil.copytree(artifact, folder)
    options = {"devices": 2, "timeout_seconds": TIMEOUT_SECONDS}
    update_manifest(folder, lambda it: it["compiled"]["backend"].update(options))
    return folder


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the artifact of a BERT encoder on one device."""
    folder = tmp_path_factory.mktemp("encoder")
    return export_run(train_model(folder), folder / "artifact", *EAGER, FP32)


@pytest.fixture(scope="module")
def encoder(artifact: Path) -> nn.Module:
    """Return the program of the artifact."""
    return engine.build_payload(open_artifact(artifact)).build_program()


@pytest.fixture(scope="module")
def parallel_model(
    artifact: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LoadedModel]:
    """Return the artifact on two devices; tests share it, because a start takes seconds."""
    model = regauge.load(
        copy_for_two_devices(artifact, tmp_path_factory.mktemp("two") / "artifact")
    )
    yield model
    runner_of(model).close()


@pytest.fixture
def parallel_runner(parallel_model: LoadedModel) -> ModelParallelRunner:
    return runner_of(parallel_model)


def runner_of(model: LoadedModel) -> ModelParallelRunner:
    runner: Any = model._engine.runner
    assert isinstance(runner, ModelParallelRunner)
    return runner


def check_equal(runner: ModelParallelRunner, program: nn.Module) -> float:
    """Compare several shapes, each computed twice; return the largest difference."""
    largest = 0.0
    for shape in SHAPES:
        inputs = batch(shape)
        with torch.no_grad():
            expected = program(*inputs)
        output = runner(*inputs)
        largest = max(largest, relative_difference(output, expected))
        assert torch.equal(output, runner(*inputs))
    assert runner.num_graphs() == 0
    return largest


def split_bytes(program: nn.Module) -> int:
    return sum(
        value.nbytes
        for name, value in named_tensors(program).items()
        if any(pattern in name for pattern in SPLIT)
    )


def check_halves(runner: ModelParallelRunner, program: nn.Module) -> None:
    """Check that each rank has half of the split weights, and all other weights."""
    size = sum(value.nbytes for value in named_tensors(program).values())
    assert runner.ranks is not None
    assert runner.ranks.bytes_per_rank == [size - split_bytes(program) // 2] * 2
    assert split_bytes(program) > size / 2


@pytest.mark.full
def test_two_devices_compute_the_same_with_half_of_the_weights_each(
    encoder: nn.Module, parallel_runner: ModelParallelRunner, figure: Callable[[str, float], None]
) -> None:
    difference = check_equal(parallel_runner, encoder)
    figure("model parallel over two processes", difference)
    assert difference < MAX_ERROR
    check_halves(parallel_runner, encoder)


def test_texts_have_equal_vectors_on_two_devices(
    artifact: Path, parallel_model: LoadedModel
) -> None:
    expected, vectors_of_two = (
        model.encode(random_texts(40)) for model in (regauge.load(artifact), parallel_model)
    )
    assert np.abs(vectors_of_two - expected).max() / np.abs(expected).max() < MAX_ERROR


def test_the_default_process_group_is_not_used(
    encoder: nn.Module, parallel_runner: ModelParallelRunner
) -> None:
    inputs = batch(SHAPES[1])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert relative_difference(parallel_runner(*inputs), encoder(*inputs)) < MAX_ERROR
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


@pytest.mark.full
def test_a_lost_rank_is_named_and_the_next_call_starts_new_processes(
    encoder: nn.Module, parallel_runner: ModelParallelRunner
) -> None:
    inputs = batch(SHAPES[0])
    first = worker_pid(parallel_runner)
    os.kill(first, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(
        TransientError, match=r"^rank 1 of 2 ended with exit code -9; run"
    ) as caught:
        parallel_runner(*inputs)
    assert time.monotonic() - start < TIMEOUT_SECONDS
    assert "\n" not in str(caught.value)
    assert relative_difference(parallel_runner(*inputs), encoder(*inputs)) < MAX_ERROR
    second = worker_pid(parallel_runner)
    os.kill(second, signal.SIGSTOP)
    with pytest.raises(TransientError, match=r"^rank 1 of 2 has not responded for 5 s; run"):
        parallel_runner(*inputs)
    assert not is_alive(first)
    assert not is_alive(second)


@pytest.mark.full
def test_generation_is_equal_on_two_devices_and_workers_end_with_the_runner() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    sizes: Any = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    tied = LlamaConfig(**_widths(), **sizes, pad_token_id=0, tie_word_embeddings=True)
    model: Any = LlamaForCausalLM(tied)
    text_program = GenerationProgram(model.eval(), 6, 0, (3,)).requires_grad_(False)  # noqa: FBT003
    runner = start_runner(text_program)
    for shape in SHAPES[:2]:
        assert torch.equal(runner(*batch(shape)), text_program(*batch(shape)))
    check_halves(runner, text_program)
    worker = worker_pid(runner)
    del runner
    assert not is_alive(worker)


@pytest.mark.full
def test_pipeline_parallelism_assigns_whole_layers() -> None:
    text_program = build_seeded(llama)
    runner = start_runner(text_program, parallelism="pipeline")
    assert check_equal(runner, text_program) < MAX_ERROR
    tensors = named_tensors(text_program).items()
    layer = sum(value.nbytes for name, value in tensors if "layers.0." in name)
    size = sum(value.nbytes for _, value in tensors)
    assert runner.ranks is not None
    assert runner.ranks.bytes_per_rank == [size - layer, size - 2 * layer]
    runner.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 3}, INDIVISIBLE.format(3, 2)),
        ({"devices": 8}, INDIVISIBLE.format(8, 4)),
        (
            {"devices": 3, "parallelism": "pipeline"},
            "TextProgram has 2 layers for 3 devices; set devices = 2, the nearest valid number$",
        ),
    ],
)
def test_an_indivisible_program_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        start_runner(build_seeded(bert), **options)


def test_an_unpicklable_program_is_refused_and_errors_of_a_worker_are_raised() -> None:
    pipe, worker_pipe = multiprocessing.Pipe()
    child = FunctionProcess(subprocess.Popen(["true"]), pipe)  # noqa: S607
    worker = RankWorker("rank 1 of 2", child)
    with pytest.raises(SettingsError, match="the program cannot be pickled for rank 1 of 2"):
        worker.send(lambda: None)
    worker_pipe.send(("failed", RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.receive()
    worker_pipe.close()
    with pytest.raises(TransientError, match="rank 1 of 2 is lost"):
        worker.send("anything")
    worker.child.kill()


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the artifacts of a causal encoder for one device, and for two."""
    folder = tmp_path_factory.mktemp("exports")
    run = train_model(folder, "llama", datasets.write_packed)
    last = 'text.pooling=["lasttoken"]'
    plain = export_run(run, folder / "plain", *EAGER, FP32, last)
    return plain, export_run(run, folder / "two", TWO_DEVICES, FP32, last, *QUICK)


@pytest.mark.full
def test_an_artifact_for_two_devices_is_loaded_and_used_by_predict(
    exports: tuple[Path, Path], tmp_path: Path
) -> None:
    plain, two = exports
    manifest = json.loads((two / "manifest.json").read_text())
    assert manifest["compiled"]["backend"]["devices"] == 2
    assert manifest["program"]["pooling"]["modes"] == ["lasttoken"]
    expected, vectors = (regauge.load(folder).encode(random_texts(40)) for folder in (plain, two))
    assert np.abs(vectors - expected).max() / np.abs(expected).max() < MAX_ERROR
    assert np.array_equal(predict_vectors(two, tmp_path, "inline"), vectors)


@pytest.mark.full
def test_predict_workers_start_ranks_and_leave_no_process(
    exports: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))  # so that their command lines contain the path
    vectors = predict_vectors(exports[1], tmp_path, "local")
    assert np.array_equal(vectors, predict_vectors(exports[1], tmp_path / "again", "inline"))
    commands = Path("/proc").glob("[0-9]*/cmdline")
    assert not [path for path in commands if str(tmp_path).encode() in _read(path)]


def predict_vectors(artifact: Path, folder: Path, executor: str) -> np.ndarray:
    folder.mkdir(exist_ok=True)
    source, out = write_records(folder / "texts.jsonl", 40), folder / "out"
    options = ["--source", str(source), "--to", str(out), "output.dtype=float32"]
    assert main(["predict", str(artifact), *options, f"execution.executor={executor}"]) == 0
    return vector_column(read_table(out))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended
        return b""


@pytest.mark.parametrize("is_extended", [False, True])
def test_a_group_of_another_package_is_used(
    monkeypatch: pytest.MonkeyPatch, *, is_extended: bool
) -> None:
    """A package registers the collectives of its device with torch, with one of two interfaces."""
    created: list[Any] = []

    def create(*arguments: Any) -> object:
        created.extend(arguments)
        return object()

    monkeypatch.setattr(dist.Backend, "_plugins", dict(dist.Backend._plugins))
    plugin = dist.Backend._BackendPlugin(create, is_extended)
    monkeypatch.setitem(dist.Backend._plugins, "ABACUS", plugin)
    store = dist.HashStore()
    RankGroup(1, 2, timeout_seconds=5).join("abacus", store)
    if is_extended:
        options, backend_options = created
        assert backend_options is None
        assert (options.group_rank, options.group_size) == (1, 2)
        assert options.global_ranks_in_group == [0, 1]
        assert options.timeout == dt.timedelta(seconds=5)
    else:
        assert created == [store, 1, 2, dt.timedelta(seconds=5)]


def test_a_device_without_collectives_has_one_rank() -> None:
    with pytest.raises(SettingsError, match="torch has no process group for 'abacus'"):
        RankGroup(0, 2, timeout_seconds=5).join("abacus", dist.HashStore())
