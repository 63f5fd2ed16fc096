"""Golden run files of published models: what they weigh, and first steps at full width."""

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
from regauge import config, processes, verbs
from regauge.cli import main
from regauge.config import dump, merge
from regauge.models.flops import flops_per_token
from regauge.training.batch_finder.memory import describe_model
from regauge.training.defaults import resolve_defaults
from regauge.training.optimizer_step import optimizer_step
from regauge.training.run_setup import set_up
from regauge.training.settings import TrainSettings
from regauge.verbs import pipeline, train

WEIGHTS = {
    "bert-large": 335_174_458,
    "bert-1.5b": 1_527_814_522,
    "bert-5b": 5_042_667_322,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
}
"""Of each run file's model; those of Llama 2 are as Meta has published them."""
DEEP = ("bert-1.5b", "bert-5b", "llama2-13b", "llama2-70b")
"""Whose operations take torch the longest to count."""
SMALL = (
    "vocab_size=300",
    "hidden_size=32",
    "num_hidden_layers=2",
    "num_attention_heads=2",
    "intermediate_size=64",
)
LENGTH = 128
PYTHON = 'stage.text.source={kind="python-docs"}'
"""Text that every machine has, in the place of articles that must be fetched."""
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


def training(name: str, folder: Path, *overrides: str) -> TrainSettings:
    """Return the settings of a run file's training, of its first phase where it has two."""
    path = ROOT / "runs" / f"{name}.toml"
    if "stage" not in config.read(path):
        found: TrainSettings = verbs.load_settings(TrainSettings, path, overrides)
        return found
    work = pipeline.load(path, (f"output.folder={folder}", PYTHON, *overrides))
    phases: dict[str, Any] = {stage.name: stage.settings for stage in work.stages}
    first: TrainSettings = phases["phase-1"]
    return first


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_run_file_builds_its_model_without_memory(name: str, tmp_path: Path) -> None:
    told = describe_model(training(name, tmp_path / "out"))
    assert told["parameters"] == told["trained_parameters"] == WEIGHTS[name]
    assert told["gigabytes_per_process"]["all"] < 80


@pytest.mark.parametrize("name", ["bert-large", "bert-1.5b", "bert-5b"])
def test_the_weights_of_a_bert_are_those_of_transformers_own_class(
    name: str, tmp_path: Path
) -> None:
    for overrides, kind in (((), BertForMaskedLM), (PAIRS, BertForPreTraining)):
        settings = training(name, tmp_path / "out", *overrides)
        with torch.device("meta"):
            plain = kind(BertConfig(**settings.model.config))
        assert describe_model(settings)["parameters"] == plain.num_parameters()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] if name in DEEP else []) for name in WEIGHTS],
)
def test_the_cost_of_a_token_is_what_torch_counts(name: str, tmp_path: Path) -> None:
    """Of transformers' own class at full size, forward and backward, on the meta device."""
    settings = training(name, tmp_path / "out")
    kind = BertForMaskedLM if name.startswith("bert") else LlamaForCausalLM
    config_of = kind.config_class(**settings.model.config)
    config_of._attn_implementation = "eager"
    with torch.device("meta"):
        plain = kind(config_of)
        tokens = torch.zeros((1, LENGTH), dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        plain.base_model(tokens).last_hidden_state.sum().backward()
    found = counter.get_total_flops() / LENGTH
    # Those that torch adds are the products of rotary positions.
    assert flops_per_token(plain, LENGTH) == pytest.approx(found, rel=1e-4)


def test_the_weights_of_a_llama_are_those_of_transformers_own_class(tmp_path: Path) -> None:
    settings = training("llama2-70b", tmp_path / "out")
    with torch.device("meta"):
        plain = LlamaForCausalLM(LlamaForCausalLM.config_class(**settings.model.config))
    assert describe_model(settings)["parameters"] == plain.num_parameters()


@pytest.mark.parametrize("name", ["bert-large", "bert-1.5b", "bert-5b"])
def test_a_bert_has_two_phases_and_the_second_begins_with_the_first(
    name: str, tmp_path: Path
) -> None:
    work = pipeline.load(ROOT / "runs" / f"{name}.toml", (f"output.folder={tmp_path}/out", PYTHON))
    _, first, second = (stage.settings for stage in work.stages)
    assert second.model.path == f"{first.output.folder}/model"
    assert first.batch.rows == 64 * 384 == 64 * 16 * 24
    assert first.optimizer.kind == second.optimizer.kind == "lamb"
    seen = [phase.batch.rows * phase.stop.steps for phase in (first, second)]
    published = [65_536 * 7_038, 32_768 * 1_563]
    assert seen == pytest.approx(published, rel=1e-3)
    shares = [phase.optimizer.schedule.warmup_steps / phase.stop.steps for phase in (first, second)]
    assert shares == pytest.approx([0.2843, 0.128], abs=2e-4)


def test_twice_the_devices_are_a_step_of_twice_the_rows(tmp_path: Path) -> None:
    """As the run file says."""
    text = (ROOT / "runs" / "bert-large.toml").read_text()
    assert all(override in text for override in (*LARGER, *PAIRS))
    once, twice = (training("bert-large", tmp_path / "o", *more) for more in ((), LARGER))
    assert twice.batch.rows == 2 * once.batch.rows == 128 * 384
    assert twice.optimizer.learning_rate == 2 * once.optimizer.learning_rate
    assert twice.stop.steps == once.stop.steps // 2


def test_a_dry_run_of_a_pipeline_says_what_its_phases_weigh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(ROOT / "runs" / "bert-5b.toml")
    assert main(["pipeline", path, "--dry-run", f"output.folder={tmp_path}/out", PYTHON]) == 0
    told = capsys.readouterr().out
    assert f"parameters: {WEIGHTS['bert-5b']}" in told
    assert "strategy: zero1 over 8 processes, in bf16" in told
    assert f"unknown: no model at '{tmp_path}/out/2-phase-1/model'" in told
    assert not (tmp_path / "out").exists()


def test_a_dry_run_counts_rows_of_the_length_of_the_run_file(tmp_path: Path) -> None:
    """They have 512 tokens; the model can read 4,096."""
    folder = f"output.folder={tmp_path}/out"
    answer = train.main(ROOT / "runs" / "llama2-70b.toml", folder, dry_run=True)
    assert (answer["row_length"], answer["row_length_source"]) == (512, "[rows] of the run file")
    assert answer["flops_per_token"] == pytest.approx(4.147e11, rel=1e-3)
    phases = pipeline.main(ROOT / "runs" / "bert-large.toml", folder, PYTHON, dry_run=True)
    assert phases["stages"][1]["plan"]["row_length"] == 128


@pytest.mark.parametrize(
    ("override", "spread", "least", "most"),
    [
        ("strategy.sharding=full-shard", "fsdp over 8", 13.4, 13.5),
        ("strategy.sharding=shard-grad-op", "fsdp over 8", 13.4, 13.5),
        ('strategy={kind="hsdp", shards=8}', "hsdp over 16", 13.4, 13.5),
        ('strategy={kind="ddp"}', "ddp over 8", 120, 122),
    ],
)
def test_a_run_file_says_how_each_sharding_is_asked_for(
    override: str, spread: str, least: float, most: float, tmp_path: Path
) -> None:
    text = (ROOT / "runs" / "llama2-7b.toml").read_text()
    table = override.removeprefix("strategy=").removeprefix("strategy.sharding=")
    assert table in text
    two = ("execution.nodes.count=2", "execution.nodes.endpoint=node-0") if "16" in spread else ()
    told = describe_model(training("llama2-7b", tmp_path, override, *two))
    assert told["strategy"] == f"{spread} processes, in bf16"
    assert least < told["gigabytes_per_process"]["all"] < most


@pytest.mark.full
def test_the_second_phase_begins_with_the_weights_of_the_first(tmp_path: Path) -> None:
    """The whole pipeline at a small width; the second phase's rate is next to nothing."""
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
    heldout = [found for line in lines if (found := json.loads(line).get("heldout/loss"))]
    assert heldout[-1] < heldout[0]


def test_adapters_beside_a_published_folder_are_a_command_in_its_run_file(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="not proved here: adapters, which need peft")
    text = (ROOT / "runs" / "llama2-7b.toml").read_text()
    assert "lora={rank=16, alpha=32}" in text
    shape = dict(training("llama2-7b", tmp_path).model.config)
    folder = tmp_path / "Llama-2-7b-hf"
    LlamaForCausalLM.config_class(**shape).save_pretrained(folder)
    own = f'model={{path="{folder}", lora={{rank=16, alpha=32}}}}'
    told = describe_model(training("llama2-7b", tmp_path, own))
    assert told["parameters"] - told["trained_parameters"] == WEIGHTS["llama2-7b"]
    # Rank 16 beside q, k, v, o, gate, up and down of 32 layers.
    width, inner = 4096, 11008
    assert told["trained_parameters"] == 32 * 16 * (4 * 2 * width + 3 * (width + inner))
    assert told["gigabytes_per_process"]["all"] < 3


@pytest.fixture
def _alone() -> Iterator[None]:
    """Give back the threads that a run takes, and end its process group."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.large
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("name", ["bert-large", "bert-1.5b", "llama2-7b", "llama2-13b"])
def test_three_steps_at_full_width(name: str, tmp_path: Path) -> None:
    """All dimensions but depth, which is 2 layers; rows are short and the same in each step."""
    write = datasets.write_packed if name.startswith("bert") else datasets.write_chats
    data = write(tmp_path / "data", rows=4, heldout=2)
    file = dump(training(name, tmp_path / "out"))
    own: dict[str, Any] = {
        "output": {"folder": str(tmp_path / "out"), "trackers": []},
        "data": {"path": str(data), "workers": 0},
        "model": {"config": {"num_hidden_layers": 2}},
        "batch": {"rows": 4, "microbatch_rows": 2},
        "optimizer": {"schedule": {"kind": "constant", "warmup_steps": 0}},
        "execution": {"processes": 1, "nodes": {"count": 1}},
        "accelerator": {"kind": "cpu"},
    }
    settings = config.build(TrainSettings, merge(file, own))
    run = set_up(resolve_defaults(settings, processes.World()), processes.World())
    losses = []
    for arrays in map(run.context.read_batches, range(3)):
        batches = [{key: torch.from_numpy(value) for key, value in part.items()} for part in arrays]
        totals, norm = optimizer_step(*run, batches)
        losses.append(float(totals[0] / totals[1]))
        assert torch.isfinite(norm)
    weights = sum(value.numel() for value in run.state.model.module.parameters())
    sys.stdout.write(f"{name}, 2 layers, {weights:,} weights: {losses}\n")
    assert losses[2] < losses[0]
