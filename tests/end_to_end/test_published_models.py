"""Run files of published models: parameters, FLOPs, memory, and first steps at full width."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining, LlamaForCausalLM

from architecture.tree import ROOT
from distributed import datasets
from regauge import commands, config
from regauge.cli import main
from regauge.commands import pipeline, train
from regauge.config import dump, merge
from regauge.models.flops import flops_per_token
from regauge.system import processes
from regauge.training.batch_finder.model_size import describe_model
from regauge.training.defaults import resolve_defaults
from regauge.training.optimizer import optimizer_step
from regauge.training.run_setup import set_up
from regauge.training.settings import TrainSettings

WEIGHTS = {
    "bert-large": 335_174_458,
    "bert-1.5b": 1_527_814_522,
    "bert-5b": 5_042_667_322,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
}
"""Number of parameters of each run file's model; Meta has published the numbers of Llama 2."""
DEEP = ("bert-1.5b", "bert-5b", "llama2-13b", "llama2-70b")
"""Models whose FLOPs take PyTorch the longest to count."""
SMALL = (
    "vocab_size=300",
    "hidden_size=32",
    "num_hidden_layers=2",
    "num_attention_heads=2",
    "intermediate_size=64",
)
LENGTH = 128
PYTHON = 'stage.text.source={kind="python-docs"}'
"""Text that every machine has; it replaces articles that need a download."""
PAIRS = (
    "stage.text.rows.phase-1.layout=sentence-pairs",
    "stage.phase-1.task.next_sentence=true",
)
LARGER = (
    "stage.phase-1.batch.rows=49152",
    "stage.phase-1.optimizer.learning_rate=0.003",
    "stage.phase-1.stop.steps=9384",
    "stage.phase-1.optimizer.schedule.warmup_steps=2668",
)


def load_training(name: str, folder: Path, *overrides: str) -> TrainSettings:
    """Return the training settings of a run file; if it has two phases, those of the first."""
    path = ROOT / "runs" / f"{name}.toml"
    if "stage" not in config.read(path):
        settings: TrainSettings = commands.load_settings(TrainSettings, path, overrides)
        return settings
    work = pipeline.load(path, (f"output.folder={folder}", PYTHON, *overrides))
    phases: dict[str, Any] = {stage.name: stage.settings for stage in work.stages}
    first: TrainSettings = phases["phase-1"]
    return first


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_run_file_builds_its_model_without_memory(name: str, tmp_path: Path) -> None:
    plan = describe_model(load_training(name, tmp_path / "out"))
    assert plan["parameters"] == plan["trained_parameters"] == WEIGHTS[name]
    assert plan["memory_gb_per_process"]["total"] < 80


@pytest.mark.parametrize("name", ["bert-large", "bert-1.5b", "bert-5b"])
def test_a_bert_has_as_many_parameters_as_in_transformers(name: str, tmp_path: Path) -> None:
    for overrides, kind in (((), BertForMaskedLM), (PAIRS, BertForPreTraining)):
        settings = load_training(name, tmp_path / "out", *overrides)
        with torch.device("meta"):
            plain = kind(BertConfig(**settings.model.config))
        assert describe_model(settings)["parameters"] == plain.num_parameters()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] if name in DEEP else []) for name in WEIGHTS],
)
def test_flops_per_token_equal_the_count_of_pytorch(name: str, tmp_path: Path) -> None:
    """PyTorch counts the FLOPs of transformers' class at full size, forward and backward."""
    settings = load_training(name, tmp_path / "out")
    kind = BertForMaskedLM if name.startswith("bert") else LlamaForCausalLM
    architecture = kind.config_class(**settings.model.config)
    architecture._attn_implementation = "eager"
    with torch.device("meta"):
        plain = kind(architecture)
        tokens = torch.zeros((1, LENGTH), dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        plain.base_model(tokens).last_hidden_state.sum().backward()
    counted = counter.get_total_flops() / LENGTH
    # PyTorch also counts the products of rotary position embeddings.
    assert flops_per_token(plain, LENGTH) == pytest.approx(counted, rel=1e-4)


def test_a_llama_has_as_many_parameters_as_in_transformers(tmp_path: Path) -> None:
    settings = load_training("llama2-70b", tmp_path / "out")
    with torch.device("meta"):
        plain = LlamaForCausalLM(LlamaForCausalLM.config_class(**settings.model.config))
    assert describe_model(settings)["parameters"] == plain.num_parameters()


@pytest.mark.parametrize("name", ["bert-large", "bert-1.5b", "bert-5b"])
def test_a_bert_has_two_phases_and_the_second_starts_from_the_first(
    name: str, tmp_path: Path
) -> None:
    work = pipeline.load(ROOT / "runs" / f"{name}.toml", (f"output.folder={tmp_path}/out", PYTHON))
    _, first, second = (stage.settings for stage in work.stages)
    assert second.model.path == f"{first.output.folder}/model"
    assert first.batch.rows == 64 * 384 == 64 * 16 * 24
    assert first.optimizer.kind == second.optimizer.kind == "lamb"
    trained_rows = [phase.batch.rows * phase.stop.steps for phase in (first, second)]
    published = [65_536 * 7_038, 32_768 * 1_563]
    assert trained_rows == pytest.approx(published, rel=1e-3)
    warmup_ratios = [
        phase.optimizer.schedule.warmup_steps / phase.stop.steps for phase in (first, second)
    ]
    assert warmup_ratios == pytest.approx([0.2843, 0.128], abs=2e-4)


def test_twice_the_devices_double_the_batch_and_the_learning_rate(tmp_path: Path) -> None:
    """The run file documents these overrides."""
    text = (ROOT / "runs" / "bert-large.toml").read_text()
    assert all(override in text for override in (*LARGER, *PAIRS))
    once, twice = (load_training("bert-large", tmp_path / "o", *more) for more in ((), LARGER))
    assert twice.batch.rows == 2 * once.batch.rows == 128 * 384
    assert twice.optimizer.learning_rate == 2 * once.optimizer.learning_rate
    assert twice.stop.steps == once.stop.steps // 2


def test_a_dry_run_of_a_pipeline_shows_the_parameters_of_its_phases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(ROOT / "runs" / "bert-5b.toml")
    assert main(["pipeline", path, "--dry-run", f"output.folder={tmp_path}/out", PYTHON]) == 0
    output = capsys.readouterr().out
    assert f"parameters: {WEIGHTS['bert-5b']}" in output
    assert "strategy: zero1 on 8 processes, in bf16" in output
    assert f"unknown: no model at '{tmp_path}/out/2-phase-1/model'" in output
    assert not (tmp_path / "out").exists()


def test_a_dry_run_uses_the_row_length_of_the_run_file(tmp_path: Path) -> None:
    """The rows have 512 tokens; the model accepts 4,096."""
    folder = f"output.folder={tmp_path}/out"
    plan = train.main(ROOT / "runs" / "llama2-70b.toml", folder, dry_run=True)
    assert (plan["row_length"], plan["row_length_source"]) == (512, "[rows] of the run file")
    assert plan["flops_per_token"] == pytest.approx(4.147e11, rel=1e-3)
    phases = pipeline.main(ROOT / "runs" / "bert-large.toml", folder, PYTHON, dry_run=True)
    assert phases["stages"][1]["plan"]["row_length"] == 128


@pytest.mark.parametrize(
    ("override", "strategy", "min_gb", "max_gb"),
    [
        ("strategy.sharding=full-shard", "fsdp on 8", 13.4, 13.5),
        ("strategy.sharding=shard-grad-op", "fsdp on 8", 13.4, 13.5),
        ('strategy={kind="hsdp", shards=8}', "hsdp on 16", 13.4, 13.5),
        ('strategy={kind="ddp"}', "ddp on 8", 120, 122),
    ],
)
def test_a_run_file_documents_each_sharding(
    override: str, strategy: str, min_gb: float, max_gb: float, tmp_path: Path
) -> None:
    text = (ROOT / "runs" / "llama2-7b.toml").read_text()
    table = override.removeprefix("strategy=").removeprefix("strategy.sharding=")
    assert table in text
    two_nodes = (
        ("execution.nodes.count=2", "execution.nodes.endpoint=node-0") if "16" in strategy else ()
    )
    plan = describe_model(load_training("llama2-7b", tmp_path, override, *two_nodes))
    assert plan["strategy"] == f"{strategy} processes, in bf16"
    assert min_gb < plan["memory_gb_per_process"]["total"] < max_gb


@pytest.mark.full
def test_the_second_phase_starts_with_the_weights_of_the_first(tmp_path: Path) -> None:
    """The pipeline runs at a small width; the second phase has a learning rate of 1e-12."""
    texts = [
        {"text": f"{n} and {n + 1} make {2 * n + 1}; twice {n} is {2 * n}."} for n in range(400)
    ]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, texts)))
    small = (
        f"output.folder={tmp_path}/out",
        f'stage.text.source={{kind="jsonl", files=["{tmp_path}/text.jsonl"]}}',
        "stage.text.tokenizer.vocab_size=300",
        "stage.text.split.heldout_fraction=0.1",
        "stage.text.prepare.processes=1",
        *(f"stage.phase-1.model.config.{key}" for key in SMALL),
        *(f"stage.phase-{phase}.batch={{rows=8, microbatch_rows=8}}" for phase in (1, 2)),
        "stage.phase-1.stop.steps=8",
        "stage.phase-1.optimizer.schedule.warmup_steps=2",
        "stage.phase-2.stop.steps=1",
        "stage.phase-2.optimizer.schedule.warmup_steps=0",
        "stage.phase-2.optimizer.learning_rate=1e-12",
        "execution.processes=1",
        "execution.precision=fp32",
        "execution.supervision.preflight=brief",
        *PAIRS,
        "stage.text.rows.phase-2.layout=sentence-pairs",
        "stage.phase-2.task.next_sentence=true",
    )
    assert main(["pipeline", str(ROOT / "runs" / "bert-large.toml"), *small]) == 0
    first, second = (
        load_file(tmp_path / "out" / f"{stage}/model/model.safetensors")
        for stage in ("2-phase-1", "3-phase-2")
    )
    assert first.keys() == second.keys()
    for key, value in first.items():
        torch.testing.assert_close(second[key], value, rtol=0, atol=1e-9)
    lines = (tmp_path / "out/2-phase-1/metrics.jsonl").read_text().splitlines()
    heldout = [loss for line in lines if (loss := json.loads(line).get("heldout/loss"))]
    assert heldout[-1] < heldout[0]


def test_a_run_file_documents_adapters_for_published_weights(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="not proved here: adapters, which need peft")
    text = (ROOT / "runs" / "llama2-7b.toml").read_text()
    assert "lora={rank=16, alpha=32}" in text
    shape = dict(load_training("llama2-7b", tmp_path).model.config)
    folder = tmp_path / "Llama-2-7b-hf"
    LlamaForCausalLM.config_class(**shape).save_pretrained(folder)
    adapters = f'model={{path="{folder}", lora={{rank=16, alpha=32}}}}'
    plan = describe_model(load_training("llama2-7b", tmp_path, adapters))
    assert plan["parameters"] - plan["trained_parameters"] == WEIGHTS["llama2-7b"]
    # Rank 16 for q, k, v, o, gate, up and down of 32 layers.
    width, inner = 4096, 11008
    assert plan["trained_parameters"] == 32 * 16 * (4 * 2 * width + 3 * (width + inner))
    assert plan["memory_gb_per_process"]["total"] < 3


@pytest.fixture
def _restore_process_state() -> Iterator[None]:
    """Restore the number of threads after a run, and end its process group."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.large
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("_restore_process_state")
@pytest.mark.parametrize("name", ["bert-large", "bert-1.5b", "llama2-7b", "llama2-13b"])
def test_three_steps_at_full_width(name: str, tmp_path: Path) -> None:
    """The models have full width and 2 layers; rows are short and equal in each step."""
    write = datasets.write_packed if name.startswith("bert") else datasets.write_chats
    data = write(tmp_path / "data", rows=4, heldout=2)
    document = dump(load_training(name, tmp_path / "out"))
    changes: dict[str, Any] = {
        "output": {"folder": str(tmp_path / "out"), "trackers": []},
        "data": {"path": str(data), "workers": 0},
        "model": {"config": {"num_hidden_layers": 2}},
        "batch": {"rows": 4, "microbatch_rows": 2},
        "optimizer": {"schedule": {"kind": "constant", "warmup_steps": 0}},
        "execution": {"processes": 1, "nodes": {"count": 1}},
        "accelerator": {"kind": "cpu"},
    }
    settings = config.build(TrainSettings, merge(document, changes))
    run = set_up(resolve_defaults(settings, processes.World()), processes.World())
    losses = []
    for microbatches in map(run.context.read_batches, range(3)):
        batches = [
            {key: torch.from_numpy(value) for key, value in arrays.items()}
            for arrays in microbatches
        ]
        totals, norm = optimizer_step(*run, batches)
        losses.append(float(totals[0] / totals[1]))
        assert torch.isfinite(norm)
    weights = sum(value.numel() for value in run.state.model.module.parameters())
    sys.stdout.write(f"{name}, 2 layers, {weights:,} weights: {losses}\n")
    assert losses[2] < losses[0]
