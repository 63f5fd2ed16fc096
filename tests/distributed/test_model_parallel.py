"""A program over two processes: equal answers, half of the weights in each, and nothing left."""

from __future__ import annotations

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
from end_to_end.predicting import EAGER, QUICK, exported, table, texts, trained, vectors, written
from regauge import config
from regauge.artifacts import artifact as artifacts
from regauge.artifacts import engine
from regauge.artifacts.model import Loaded
from regauge.backends import Payload, Shape, Site
from regauge.backends._parallel import Parallel
from regauge.backends._parts import Follower
from regauge.cli import main
from regauge.errors import SettingsError, TransientError
from regauge.models.dropout import DropoutKeys
from regauge.models.inference_modules import TextProgram, WriteProgram, tensors
from regauge.models.io_spec import Fields, of_texts
from regauge.models.modules import Encoder
from regauge.models.sentence_transformers import Pooling

VOCABULARY = 60
SHAPES = (Shape(8, 8), Shape(3, 24), Shape(1, 32), Shape(8, 8))
ERROR = 1e-6
"""Largest difference, as a share of the largest value."""
PART_SECONDS = 5.0
FIRST = ("query", "key", "value", "intermediate.dense", "q_proj", "k_proj", "v_proj", "up_proj")
DIVIDED = (*FIRST, "gate_proj", "output.dense.weight", "o_proj", "down_proj")
"""What names of divided weights contain, and biases of layers whose outputs are divided."""
TWO = 'candidates.backends=[{kind="eager", parts=2}]'
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
    made = TextProgram(Encoder(model, DropoutKeys(), pooling), "vectors").eval()
    return made.requires_grad_(False)  # noqa: FBT003 - torch's own


def drawn(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


def batch(shape: Shape) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(shape.length)
    size = (shape.rows, shape.length)
    tokens = torch.randint(1, VOCABULARY, size, generator=draw, dtype=torch.int32)
    lengths = torch.randint(1, shape.length + 1, (shape.rows,), generator=draw, dtype=torch.int32)
    return tokens, lengths


def differ(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pid(runner: Parallel) -> int:
    assert runner.crew is not None
    [follower] = runner.crew.followers
    return follower.process.pid


def started(whole: nn.Module, **how: Any) -> Parallel:
    """Return a program that is divided over two processes."""
    backend = config.choose("backends", {"kind": "eager", "parts": 2, **how})
    site = Site(config.choose("accelerators", "cpu"), torch.device("cpu"), 1)
    given: Any = of_texts(Fields()), SHAPES, "fp32", lambda: tensors(whole), lambda: whole
    runner: Parallel = backend.load(Payload(Path(), *given), site)
    return runner


def with_two(artifact: Path, folder: Path) -> Path:
    """Return a copy of an artifact that is computed by two processes."""
    shutil.copytree(artifact, folder)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["compiled"]["backend"] |= {"parts": 2, "part_seconds": PART_SECONDS}
    path.write_text(json.dumps(manifest))
    return folder


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the artifact of a BERT encoder, for one process."""
    folder = tmp_path_factory.mktemp("encoder")
    return exported(trained(folder), folder / "artifact", *EAGER, FP32)


@pytest.fixture(scope="module")
def encoder(artifact: Path) -> nn.Module:
    """Return its program."""
    return engine.payload(artifacts.opened(artifact)).program()


@pytest.fixture(scope="module")
def loaded(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """Return the artifact over two processes; tests share it, since to start one costs seconds."""
    found = regauge.load(with_two(artifact, tmp_path_factory.mktemp("two") / "artifact"))
    yield found
    runner_of(found).close()


@pytest.fixture
def divided(loaded: Loaded) -> Parallel:
    return runner_of(loaded)


def runner_of(loaded: Loaded) -> Parallel:
    runner: Any = loaded._engine.runner
    assert isinstance(runner, Parallel)
    return runner


def check_equal(runner: Parallel, whole: nn.Module) -> float:
    """Compare several shapes, each computed twice; return the largest difference."""
    most = 0.0
    for shape in SHAPES:
        given = batch(shape)
        with torch.no_grad():
            expected = whole(*given)
        found = runner(*given)
        most = max(most, differ(found, expected))
        assert torch.equal(found, runner(*given))
    assert runner.graphs() == 0
    return most


def divided_bytes(whole: nn.Module) -> int:
    return sum(
        value.nbytes
        for name, value in tensors(whole).items()
        if any(part in name for part in DIVIDED)
    )


def check_halves(runner: Parallel, whole: nn.Module) -> None:
    """See that each part holds half of what is divided, and all of the rest."""
    size = sum(value.nbytes for value in tensors(whole).values())
    assert runner.crew is not None
    assert runner.crew.held == [size - divided_bytes(whole) // 2] * 2
    assert divided_bytes(whole) > size / 2


def test_two_processes_answer_as_one_with_half_of_the_weights(
    encoder: nn.Module, divided: Parallel, figure: Callable[[str, float], None]
) -> None:
    most = check_equal(divided, encoder)
    figure("divided over two processes", most)
    assert most < ERROR
    check_halves(divided, encoder)


def test_texts_have_equal_vectors(artifact: Path, loaded: Loaded) -> None:
    expected, found = (each.encode(texts(40)) for each in (regauge.load(artifact), loaded))
    assert np.abs(found - expected).max() / np.abs(expected).max() < ERROR


def test_a_group_of_training_is_left_alone(encoder: nn.Module, divided: Parallel) -> None:
    given = batch(SHAPES[1])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert differ(divided(*given), encoder(*given)) < ERROR
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_a_lost_part_is_named_and_the_next_call_starts_another(
    encoder: nn.Module, divided: Parallel
) -> None:
    given = batch(SHAPES[0])
    first = pid(divided)
    os.kill(first, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(TransientError, match=r"^part 2 of 2 ended with code -9; run") as told:
        divided(*given)
    assert time.monotonic() - began < PART_SECONDS
    assert "\n" not in str(told.value)
    assert differ(divided(*given), encoder(*given)) < ERROR
    second = pid(divided)
    os.kill(second, signal.SIGSTOP)
    with pytest.raises(TransientError, match=r"^part 2 of 2 has not answered for 5 s; run"):
        divided(*given)
    assert not alive(first)
    assert not alive(second)


def test_a_model_writes_as_it_does_alone_and_its_parts_end_with_the_runner() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    sizes: Any = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    tied = LlamaConfig(**_widths(), **sizes, pad_token_id=0, tie_word_embeddings=True)
    model: Any = LlamaForCausalLM(tied)
    whole = WriteProgram(model.eval(), 6, 0, (3,)).requires_grad_(False)  # noqa: FBT003
    runner = started(whole)
    for shape in SHAPES[:2]:
        assert torch.equal(runner(*batch(shape)), whole(*batch(shape)))
    check_halves(runner, whole)
    follower = pid(runner)
    del runner
    assert not alive(follower)


@pytest.mark.full
def test_parts_share_layers_in_turn() -> None:
    whole = drawn(llama)
    runner = started(whole, share="layers")
    assert check_equal(runner, whole) < ERROR
    every = tensors(whole).items()
    layer = sum(value.nbytes for name, value in every if "layers.0." in name)
    size = sum(value.nbytes for _, value in every)
    assert runner.crew is not None
    assert runner.crew.held == [size - layer, size - 2 * layer]
    runner.close()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"parts": 3}, r"3 parts cannot share 4 heads \(num_attention_heads\); .* is 2$"),
        ({"parts": 8}, r"8 parts cannot share 4 heads \(num_attention_heads\); .* is 4$"),
        (
            {"parts": 3, "share": "layers"},
            "3 parts cannot share 2 layers of TextProgram; the nearest number that can is 2$",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(how: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        started(drawn(bert), **how)


def test_what_a_part_cannot_be_told_is_refused_and_what_it_fails_with_is_raised() -> None:
    ours, theirs = multiprocessing.Pipe()
    part = Follower("part 2 of 2", subprocess.Popen(["true"]), ours)  # noqa: S607
    with pytest.raises(SettingsError, match="another process cannot be told the program"):
        part.say(lambda: None)
    theirs.send(("failed", RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        part.hear()
    theirs.close()
    with pytest.raises(TransientError, match="part 2 of 2 is lost"):
        part.say("anything")
    part.end()


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the artifacts of a causal encoder for one process, and for two."""
    folder = tmp_path_factory.mktemp("exports")
    run = trained(folder, "llama", datasets.packed)
    last = 'text.pooling=["lasttoken"]'
    plain = exported(run, folder / "plain", *EAGER, FP32, last)
    return plain, exported(run, folder / "two", TWO, FP32, last, *QUICK)


def test_what_was_exported_for_two_is_loaded_and_predicted_with(
    exports: tuple[Path, Path], tmp_path: Path
) -> None:
    plain, two = exports
    manifest = json.loads((two / "manifest.json").read_text())
    assert manifest["compiled"]["backend"]["parts"] == 2
    assert manifest["program"]["pooling"]["modes"] == ["lasttoken"]
    expected, found = (regauge.load(folder).encode(texts(40)) for folder in (plain, two))
    assert np.abs(found - expected).max() / np.abs(expected).max() < ERROR
    assert np.array_equal(predicted(two, tmp_path, "inline"), found)


@pytest.mark.full
def test_processes_of_predict_start_parts_and_leave_none(
    exports: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))  # by which all of them are known
    found = predicted(exports[1], tmp_path, "local")
    assert np.array_equal(found, predicted(exports[1], tmp_path / "again", "inline"))
    commands = Path("/proc").glob("[0-9]*/cmdline")
    assert not [path for path in commands if str(tmp_path).encode() in _read(path)]


def predicted(artifact: Path, folder: Path, executor: str) -> np.ndarray:
    folder.mkdir(exist_ok=True)
    source, out = written(folder / "texts.jsonl", 40), folder / "out"
    asked = ["--source", str(source), "--to", str(out), "output.dtype=float32"]
    assert main(["predict", str(artifact), *asked, f"execution.executor={executor}"]) == 0
    return vectors(table(out))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""
