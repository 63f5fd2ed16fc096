"""Reads published measurements as jobs of the planner: one sample for each row of a CSV file.

The columns are those of the files that `fit_planner.py` and `planner_accuracy.py` take.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from planner_chips import build_rates, find_chip

from regauge.machines.machine_rates import MachineRates
from regauge.planner.calibration import MemoryConstants
from regauge.planner.memory_plan import plan_parts
from regauge.planner.model_shape import AttentionShape, ModelShape
from regauge.planner.training_job import ModelParallelism, TrainingJob
from regauge.training.strategies import Shards, Strategy
from regauge.training.strategies.ddp import Ddp
from regauge.training.strategies.fsdp import Fsdp
from regauge.training.strategies.single import Single
from regauge.training.strategies.zero1 import Zero1

GIB = 2**30
DEVICES_PER_MACHINE = 8
"""Devices of a machine, if a row does not state the number of machines."""
KNOWN_SHAPES = {
    # layers, hidden, heads, kv_heads, head_dim, ffn, vocab, is_gated
    "falcon-7b": (32, 4544, 71, 1, 64, 18176, 65024, False),
    "gemma-2b": (18, 2048, 8, 1, 256, 16384, 256000, True),
    "gemma-7b": (28, 3072, 16, 16, 256, 24576, 256000, True),
    "gemma-2-9b": (42, 3584, 16, 8, 256, 14336, 256000, True),
    "phi-2": (32, 2560, 32, 32, 80, 10240, 51200, False),
    "phi-1.5": (24, 2048, 32, 32, 64, 8192, 51200, False),
    "Phi-3-mini-4k-instruct": (32, 3072, 32, 32, 96, 8192, 32064, True),
    "StableLM Alpha": (16, 4096, 32, 32, 128, 16384, 50688, False),
    "stablelm-base-alpha-3b": (16, 4096, 32, 32, 128, 16384, 50688, False),
    "tiny-llama": (22, 2048, 32, 4, 64, 5632, 32000, True),
    "baichuan2-13b": (40, 5120, 40, 40, 128, 13696, 125696, True),
    "aquila2-7b": (32, 4096, 32, 32, 128, 11008, 100008, True),
    "gpt-52b": (64, 8192, 64, 64, 128, 32768, 50257, False),
    "T5-3B": (48, 1024, 32, 32, 128, 16384, 32128, False),
}
"""Sizes of models whose rows lack them, from their public config.json files."""
TIED_GATED = ("gemma-2b", "gemma-7b", "gemma-2-9b", "llama3.2-3b")
SEQUENCE_PARALLEL = ("torchtitan", "Korthikanti")
"""Sources whose tensor parallelism divides the inputs of a layer by position, too."""
INTERLEAVED = {("Korthikanti", "GPT 175B"): 3, ("Korthikanti", "GPT 530B"): 3}
"""Groups of layers of a pipeline stage, by table 3 of Korthikanti et al., 2022."""
ENCODERS = ("bert", "roberta", "distilbert", "electra")
ENCODER_POSITIONS = 512
"""Positions of these encoders: longer rows are cut."""
LONG_ROWS = 2
"""Rows in a microbatch of the second phase of BERT's pre-training on Trainium."""
FINE_TUNED = ("squad", "distilbert", "roberta")
DEFAULT_LENGTHS = {"GPT-2 XL": 1024, "T5-3B": 512}
CONFIG_HUB_DEVICES = {"phi-2": 2, "stablelm-base-alpha-3b": 2, "tiny-llama": 1}
"""Devices of the full fine-tuning files of litgpt's config hub, on machines with four.

Its LoRA files have one device: the rows with four GPUs are equal to those with one.
"""
LITGPT_LENGTH = 1037
"""Tokens of the longest row of Alpaca, which the tables of litgpt and torchtune train on."""
SHORT_ROW = 128
"""Tokens of a row in the first phase of BERT's pre-training."""
CONTRADICTION = 0.75
"""Share of its states below which a reported memory is not that of the row's settings."""
NO_OVERHEAD = MemoryConstants("", 0.0, 1.0, 1.0, 0.1, 1, "")
SHARDS_ALL = 3
"""Stage of ZeRO that shards all states."""
GLOBAL_BATCHES = {
    "NVIDIA NeMo": lambda _: 2048,
    "NVIDIA DeepLearningExamples": lambda length: 65536 if length <= SHORT_ROW else 32768,
}
"""Rows of an update, of sources whose rows omit it, by row length."""


@dataclass(frozen=True)
class Sample:
    """A measured row as a job of the planner."""

    name: str
    source: str
    date: str
    job: TrainingJob
    machine: MachineRates
    count: int
    step_seconds: float | None
    memory_bytes: float | None
    is_out_of_memory: bool
    published_mfu: float | None
    row: dict[str, str]

    @property
    def devices(self) -> int:
        """Number of devices of all machines."""
        return self.machine.devices * self.count

    @property
    def is_contradictory(self) -> bool:
        """Whether the states of the row's settings alone exceed the reported memory.

        Such a row was measured with other settings.
        """
        if self.memory_bytes is None or self.is_out_of_memory:
            return False
        parts = plan_parts(self.job, self.devices, NO_OVERHEAD)
        states = parts.weights + parts.gradients + parts.optimizer
        return self.memory_bytes < CONTRADICTION * states

    @property
    def family(self) -> str:
        """Short name of the source."""
        return short_source(self.source)


def read_samples(path: Path) -> list[Sample]:
    """Return the training rows of a file that the planner can express."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "train"]
    samples = [parse_row(row) for row in rows]
    return [sample for sample in samples if sample is not None]


def short_source(source: str) -> str:
    """Return a short name of a source."""
    for name in (
        "llm-foundry",
        "torchtitan",
        "NeMo",
        "DeepLearningExamples",
        "Neuron",
        "habana",
        "litgpt",
        "torchtune",
        "FlagPerf",
        "BigScience",
        "torchao",
        "ultra-scale",
        "DeepSpeed",
        "Korthikanti",
        "MT-NLG",
        "ColossalAI",
        "HF blog",
        "awsome",
    ):
        if name.lower() in source.lower():
            return name
    return source


def parse_row(row: dict[str, str]) -> Sample | None:
    """Return a row as a sample; None if the planner cannot express its model or its machine."""
    shape = parse_shape(row)
    if "offload" in row["strategy"].lower():  # states in main memory: no strategy of the planner
        return None
    devices, count = count_devices(row)
    machine = build_rates(row["hardware"], max(devices // count, 1))
    if shape is None or machine is None:
        return None
    job = parse_job(row, shape, machine.devices * count)
    is_planned = find_chip(row["hardware"]) is not None  # a chip without rates has a memory alone
    memory = number(row["memory_gb"])
    is_gib = "memory GiB" in row["notes"] or "mem nvidia-smi GiB" in row["notes"]
    is_gib |= short_source(row["source"]) in (
        "torchtitan",
        "torchtune",
        "torchao",
        "FlagPerf",
    )
    return Sample(
        name=row["id"],
        source=row["source"],
        date=row["date"],
        job=job,
        machine=machine,
        count=count,
        step_seconds=step_seconds(row, job, machine.devices * count) if is_planned else None,
        memory_bytes=memory * (GIB if is_gib else 1e9) if memory else None,
        is_out_of_memory=row["outcome"] == "OOM",
        published_mfu=number(row["mfu"]),
        row=row,
    )


def parse_shape(row: dict[str, str]) -> ModelShape | None:
    """Return the shape of a row's model; None if its sizes are unknown."""
    name, vocab = row["model"], int(number(row["vocab"]) or 0)
    is_encoder = any(word in name.lower() for word in ENCODERS)
    if number(row["layers"]):
        layers, hidden, heads = (int(float(row[key])) for key in ("layers", "hidden", "heads"))
        kv_heads = int(number(row["kv_heads"]) or heads)
        ffn = int(number(row["ffn"]) or 4 * hidden)
        head_dim, is_gated = hidden // heads, "llama" in name.lower() or "mistral" in name
    elif name in KNOWN_SHAPES:
        layers, hidden, heads, kv_heads, head_dim, ffn, vocab, is_gated = KNOWN_SHAPES[name]
    else:
        return None
    length = row_length(row)
    attention = AttentionShape(heads, kv_heads, head_dim, is_causal=not is_encoder)
    is_tied = not is_gated or name in TIED_GATED
    is_tied &= short_source(row["source"]) != "litgpt"  # its models have two matrices
    positions = 0 if is_gated else max(length, 512 if is_encoder else 0)
    return ModelShape(
        family=name,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        vocab=vocab or 50368,
        attention=attention,
        is_gated=is_gated,
        embedding_parameters=((vocab or 50368) + positions) * hidden,
        vector_parameters=2 * hidden if is_gated or "mpt" in name else 9 * hidden + ffn,
        norm_parameters=hidden,
        head_parameters=0 if is_tied else vocab * hidden,
        head_matmul=hidden * hidden if is_encoder else 0,
    )


def row_length(row: dict[str, str]) -> int:
    """Return the tokens of a training row."""
    default = DEFAULT_LENGTHS.get(row["model"], LITGPT_LENGTH)
    length = int(number(row["seq_len"]) or default)
    if "finetune baseline" in row["strategy"] and "baseline not packed" in row["notes"]:
        length = min(length, LITGPT_LENGTH)  # Alpaca, too
    is_encoder = any(word in row["model"].lower() for word in ENCODERS)
    if "Neuron" in row["source"] and is_encoder and number(row["micro_batch"]) == LONG_ROWS:
        return ENCODER_POSITIONS  # the second phase, whatever the table says
    return min(length, ENCODER_POSITIONS) if is_encoder else length


def count_devices(row: dict[str, str]) -> tuple[int, int]:
    """Return the number of devices of a row, and of machines."""
    devices = int(number(row["n_devices"]) or 1)
    if is_config_hub(row) and devices > 1:
        is_full = row["strategy"].startswith("full")
        devices = CONFIG_HUB_DEVICES.get(row["model"], devices) if is_full else 1
    return devices, int(number(row["n_nodes"]) or -(-devices // DEVICES_PER_MACHINE))


def is_config_hub(row: dict[str, str]) -> bool:
    """Return whether a row measures a file of litgpt's config hub."""
    return "config_hub" in row["repo_file"]


def parse_job(row: dict[str, str], shape: ModelShape, devices: int) -> TrainingJob:
    """Return the job of a row."""
    tensor, pipeline = int(number(row["tp"]) or 1), int(number(row["pp"]) or 1)
    context = int(number(row["cp"]) or 1)
    source = short_source(row["source"])
    parallelism = ModelParallelism(
        tensor,
        pipeline,
        context,
        source in SEQUENCE_PARALLEL,
        INTERLEAVED.get((source, row["model"]), 1),
    )
    micro_batch = int(number(row["micro_batch"]) or 1)
    length = row_length(row)
    batch = number(row["global_batch"])
    if batch is None and row["source"].startswith(tuple(GLOBAL_BATCHES)):
        rule = next(v for k, v in GLOBAL_BATCHES.items() if row["source"].startswith(k))
        batch = rule(length)
    copies = max(devices // parallelism.devices, 1)
    accumulation = number(row["grad_accum"]) if source != "DeepLearningExamples" else None
    if pipeline > 1 and "ColossalAI" not in source and "torchtitan" not in source:
        accumulation = None
    is_unknown = not accumulation and not batch
    accumulation = accumulation or (batch or 0) / copies / micro_batch
    if is_unknown:  # a pipeline has no fewer microbatches than stages
        accumulation = pipeline
    if (source == "torchtitan" and pipeline > 1) or source == "ColossalAI":
        accumulation, micro_batch = micro_batch, 1
    is_lora = "lora" in row["strategy"].lower() or "Adapter" in row["strategy"]
    return TrainingJob(
        shape=shape,
        length=length,
        micro_batch=micro_batch,
        accumulation=max(round(accumulation), 1),
        strategy=parse_strategy(row, devices // (tensor * pipeline)),
        recomputation=parse_recomputation(row),
        precision=parse_precision(row),
        head=parse_head(row, shape),
        parallelism=parallelism,
        has_fused_attention=has_fused_attention(row),
        has_fused_norms=has_fused_norms(row),
        dropout=not shape.attention.is_causal,
        logits=parse_logits(row),
        optimizer="8bit" if source == "torchtune" and not is_lora else "adamw",
        trained_fraction=0.003 if is_lora else 1.0,
        has_fp32_gradients=has_fp32_gradients(row),
        stack=parse_stack(row),
    )


def parse_logits(row: dict[str, str]) -> str:
    """Return how a row's software computes the loss.

    torchtune has chunks by default. torchtitan compiles the loss since 2025.
    """
    text, source = row["strategy"], short_source(row["source"])
    if source == "torchtune":
        is_default = not row["activation_ckpt"]
        return "chunked" if "chunked" in text or "+activation" in text or is_default else "eager"
    if source == "torchtitan" and row["date"] < "2025":
        return "eager"
    return "fused" if is_compiled(row) else "eager"


def is_compiled(row: dict[str, str]) -> bool:
    """Return whether torch.compile fused the row's operations."""
    text = row["strategy"] + row["notes"]
    later = short_source(row["source"]) == "torchtune" and "+compile" not in text
    return "compile" in text or (later and ("chunked" in text or "+activation" in text))


def has_fused_norms(row: dict[str, str]) -> bool:
    """Return whether the row's software keeps no fp32 copies in norms."""
    is_kernel = short_source(row["source"]) in ("Neuron", "NeMo") or is_megatron(row)
    return is_kernel or is_compiled(row)


class Zero2(Zero1):
    """DeepSpeed's ZeRO-2, which Regauge does not have: it divides the gradients, too."""

    kind: ClassVar[str] = "zero2"

    def count_shards(self, processes: int) -> Shards:
        """Return the division of gradients and moments."""
        return Shards(gradients=processes, optimizer=processes)


def parse_strategy(row: dict[str, str], copies: int) -> Strategy:
    """Return the strategy of a row."""
    text, stage = row["strategy"], number(row["zero_stage"])
    if copies == 1:
        return Single()
    if stage == SHARDS_ALL or "FSDP" in text or "ZeRO-3" in text:
        return Fsdp()
    if stage in (1, 2):
        return Zero1() if stage == 1 else Zero2()
    if short_source(row["source"]) == "NeMo" or is_megatron(row):
        return Zero1()
    return Ddp()


def parse_recomputation(row: dict[str, str]) -> str:
    """Return the recomputation of a row; the recipes of torchtune recompute by default."""
    text = row["activation_ckpt"]
    if not text and short_source(row["source"]) == "torchtune":
        return "full"
    if text in ("True", "full"):
        return "full"
    if text == "selective+SP":  # the scores of the attention alone, as fused kernels do: 1 %
        return "none"
    return "selective" if "selective" in text else "none"


def parse_precision(row: dict[str, str]) -> str:
    """Return the precision of a row."""
    text, source = row["precision"].lower(), short_source(row["source"])
    if "qlora" in row["strategy"].lower() or "nf4" in row["strategy"]:
        return "nf4"
    if "fp8" in text:
        return "fp8"
    if "pure" in text or "true" in text or source == "torchtune":
        return "pure"
    if text.startswith("fp32"):  # Neuron's compiler casts fp32 products by default
        return "tf32" if source == "Neuron" else "fp32"
    if is_megatron(row):
        return "bf16-master"
    if source in ("BigScience", "NeMo", "Korthikanti", "MT-NLG") or "ZeRO" in row["strategy"]:
        return "bf16-master"
    return "autocast"


def has_fp32_gradients(row: dict[str, str]) -> bool:
    """Return whether the software accumulates the gradients of bf16 weights in fp32."""
    source = short_source(row["source"])
    if source == "FlagPerf":  # DeepSpeed keeps those of fp16 weights in fp16
        return is_megatron(row) and "DeepSpeed" not in row["strategy"]
    return source == "NeMo" or (source == "BigScience" and row["precision"] == "bf16")


def is_megatron(row: dict[str, str]) -> bool:
    """Return whether Megatron ran a row of FlagPerf."""
    text = row["strategy"]
    return "Megatron" in text or "FlagScale" in text or bool(re.match(r"TP\d", text))


def parse_head(row: dict[str, str], shape: ModelShape) -> str:
    """Return the output layer of a row's task."""
    if shape.attention.is_causal:
        return "lm"
    name = row["model"].lower()
    if "wikitext" in row["notes"]:  # transformers computes the logits of every position
        return "lm"
    is_fine_tuned = any(word in name for word in FINE_TUNED) or "habana" in row["source"]
    return "none" if is_fine_tuned else "masked-lm"


def has_fused_attention(row: dict[str, str]) -> bool:
    """Return whether the row's software never stores the scores of the attention."""
    source = short_source(row["source"])
    if source == "FlagPerf":
        return is_megatron(row) or ("flash" in row["notes"] and "no flash" not in row["notes"])
    return source not in ("BigScience", "DeepLearningExamples", "DeepSpeed", "HF blog", "habana")


def parse_stack(row: dict[str, str]) -> str:
    """Return the software stack of a row: its source, and the options that change its speed."""
    source, text = short_source(row["source"]), row["strategy"]
    options = ""
    if source == "llm-foundry":
        options = row["precision"].split("/")[0].replace("amp_", "") + (
            " pure" if "PURE" in row["precision"] else ""
        )
    elif source in ("torchtitan", "torchao"):
        options = ("compile" if is_compiled(row) else "eager") + (
            " float8" if "fp8" in row["precision"] else ""
        )
    elif source == "DeepLearningExamples":
        names = ("PyTorch", "TensorFlow2", "TensorFlow1", "TensorFlow")
        options = next((name for name in names if name in row["notes"]), "")
        options += " " + row["repo_file"].split("@")[-1][:7]
        options += " ELECTRA" if "ELECTRA" in row["repo_file"] else ""
        options += " DGX-2H" if row["instance"] == "DGX-2H" else ""  # 450 W instead of 350 W
        options += " multi" if re.search("multi", row["notes"], re.IGNORECASE) else ""
    elif source == "Neuron":
        options = "fp32" if row["precision"] == "FP32" else "bf16"
        options += "" if "xNC(DP)" in text else " distributed"
        options += " master" if "FP32Optimizer" in row["precision"] else ""
    elif source == "litgpt":
        options = "lora" if "lora" in text.lower() or "Adapter" in text else "full"
        options += " nf4" if parse_precision(row) == "nf4" else ""
        options += " hub" if is_config_hub(row) else ""  # LoRA of all matrices, with dropout
    elif source == "FlagPerf":
        options = "Megatron" if is_megatron(row) else "DeepSpeed" if "Deep" in text else ""
    elif source == "torchtune":
        options = "LoRA" if "LoRA" in text else "full"
    elif source == "BigScience":  # another partition: embeddings count as a layer
        options = "rebalanced" if "Rebalancing layers" in row["notes"] else ""
    elif source == "DeepSpeed":
        options = "kernels" if "kernels" in text else "PyTorch"
    return f"{source} {options}".strip()


def step_seconds(row: dict[str, str], job: TrainingJob, devices: int) -> float | None:
    """Return the measured seconds of a step, from the throughput; None without one."""
    rate, unit = number(row["throughput"]), row["throughput_unit"]
    if not rate:
        return None
    rows = max(devices // job.parallelism.devices, 1) * job.micro_batch * job.accumulation
    if unit == "tokens/s/device":
        return rows * job.length / (rate * devices)
    if unit == "tokens/s":
        return rows * job.length / rate
    return rows / rate if unit in ("sequences/s", "samples/s") else None


def number(text: str) -> float | None:
    """Return the number in a cell; None if it is empty."""
    try:
        return float(text)
    except ValueError:
        return None


def with_stack(sample: Sample, stack: str | None) -> Sample:
    """Return a sample with another stack."""
    return replace(sample, job=replace(sample.job, stack=stack))
