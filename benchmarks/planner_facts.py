"""Plans public facts as a user would, and compares: times, memory, runs that fit and that do not.

The columns are kind, model, seq, batch_per_device, global_batch, devices, machines, chip, strategy,
precision, act_ckpt, compile, flash, measured_value, unit, notes and id. Each row becomes a run file
and is planned by the package's constants, which saw none of the rows.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from planner_chips import build_rates

from regauge.planner.run_plans.run_request import TrainingRequest, read_request
from regauge.planner.run_plans.software import REGAUGE, use_software
from regauge.planner.run_plans.task_plans import plan_tasks
from regauge.planner.training_job import Estimate
from regauge.planner.training_plan import TrainingPlan

GB = 1e9
SMALL, MIDDLE = 2e9, (1e9, 8.1e9)
"""Parameters below which a model is small, and between which it has 1 to 8 B."""
LLAMA = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096}
BERT = {"model_type": "bert", "vocab_size": 30522, "max_position_embeddings": 512}


def _llama(layers: int, hidden: int, heads: int, ffn: int, **others: int) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return LLAMA | sizes | {"intermediate_size": ffn} | others


def _bert(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return BERT | sizes | {"intermediate_size": 4 * hidden}


def _gpt2(layers: int, hidden: int, heads: int, vocab: int = 50257, length: int = 1024) -> dict:
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": length}
    return {"model_type": "gpt2", "vocab_size": vocab} | sizes


MODELS = {
    "bert-base": _bert(12, 768, 12),
    "bert-large": _bert(24, 1024, 16),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt3-5b": _gpt2(24, 4096, 32, 51200, 2048),
    "bloom-7b1~gpt2": _gpt2(30, 4096, 32, 250880, 2048),
    "llama-7b": _llama(32, 4096, 32, 11008),
    "llama-13b": _llama(40, 5120, 40, 13824),
    "llama-70b": _llama(80, 8192, 64, 28672, num_key_value_heads=8),
    "llama3-8b": _llama(32, 4096, 32, 14336, num_key_value_heads=8, vocab_size=128256),
    "llama3-70b": _llama(80, 8192, 64, 28672, num_key_value_heads=8, vocab_size=128256),
    "llama3.2-1b": _llama(
        16, 2048, 32, 8192, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True
    ),
    "llama3.2-3b": _llama(
        28, 3072, 24, 8192, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True
    ),
    "mistral-7b": _llama(32, 4096, 32, 14336, num_key_value_heads=8),
    "tinyllama-1.1b": _llama(22, 2048, 32, 5632, num_key_value_heads=4),
}
"""Sizes of public models, from their config.json files."""
MASKED = (335174458, 109514298)
"""Parameters of BERT with the layer over its vocabulary; other rows classify."""
SOFTWARE = {
    "liger": "Liger (fused|kernel)",
    "hf": "google-research/bert|DeepLearningExamples|HF Trainer|huggingface|transformers|DeepSpeed"
    "|FastChat|alpaca|LLaVA|oumi|fms-acc|peft",
    "megatron": "Megatron",
    "nemo": "nemo",
    "torchtitan": "torchtitan",
}
"""Software that `plan --software` knows -> names in the source and the notes of rows.

The BERT of Google and of NVIDIA is the one that transformers ports.
"""
STRATEGIES = {"fsdp2": {"kind": "fsdp", "sharding": "shard-grad-op"}}
"""Names of the rows that are not strategies of Regauge."""


@dataclass(frozen=True)
class Fact:
    """A public row with its plan."""

    row: dict[str, str]
    request: TrainingRequest
    plan: TrainingPlan
    software: str

    @property
    def kind(self) -> str:
        return self.row["kind"]

    @property
    def source(self) -> str:
        return self.row["source_url"]

    @property
    def parameters(self) -> float:
        return self.plan.job.shape.parameters(self.plan.job.head)

    @property
    def measurement(self) -> float:
        """Seconds per step, or bytes."""
        value, unit = float(self.row["measured_value"]), self.row["unit"]
        if unit.startswith("GB"):
            return value * GB
        if unit == "s/step":
            return value
        rows = float(self.row["global_batch"])
        devices = self.plan.devices if "device" in unit else 1
        return rows * (1 if "sequences" in unit else float(self.row["seq"])) / (value * devices)

    @property
    def estimate(self) -> Estimate:
        """The planned value; what torch allocates has no libraries and no fragmentation."""
        if self.kind != "memory":
            return self.plan.step_seconds
        memory = self.plan.memory
        if "max_allocated" not in self.row["unit"]:
            return memory.total
        used = memory.parts.total - memory.parts.context - memory.parts.fragmentation
        return memory.total.scale(used / memory.parts.total)

    @property
    def log_error(self) -> float:
        return math.log(self.estimate.p50 / self.measurement)


def find_software(row: dict[str, str]) -> str:
    """Return the software that a row names; Regauge without a name."""
    text = f"{row['source_url']} {row['notes']}"
    names = (name for name, words in SOFTWARE.items() if re.search(words, text, re.IGNORECASE))
    return next(names, REGAUGE)


def read_facts(path: Path, *, is_named: bool) -> tuple[list[Fact], int]:
    """Return the planned rows of a file, and how many no run file can express.

    With `is_named` each row is planned for the software that it names, not for Regauge.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    known = [row for row in rows if row["kind"] != "not expressible"]
    facts = [plan_fact(row, find_software(row) if is_named else REGAUGE) for row in known]
    return facts, len(rows) - len(known)


def plan_fact(row: dict[str, str], software: str = REGAUGE) -> Fact:
    """Return a row with the plan of its run file; raises RegaugeError if it cannot be planned."""
    request = use_software(read_request(write_tables(row), Path(row["id"])), software)
    devices, count = int(float(row["devices"])), int(float(row["machines"]))
    machine = build_rates(row["chip"], devices // count)
    job = request.place(devices)
    if machine is None or job is None:
        raise SystemExit(f"{row['id']}: unknown chip, or fewer rows than devices")
    return Fact(row, request, plan_tasks(request, job, machine, count), software)


def write_tables(row: dict[str, str]) -> dict[str, Any]:
    """Return the run file of a row."""
    name, _, rank = row["model"].partition(" LoRA r")
    sizes = dict(MODELS[name])
    architecture = sizes.pop("model_type")
    is_encoder = architecture == "bert"
    model: dict[str, Any] = {"architecture": architecture, "config": sizes}
    if rank:
        model["lora"] = {"rank": int(rank)}
    if row["flash"] == "False":
        model["attention"] = "eager"
    if is_encoder:
        model["dropout"] = 0.1
    length = int(float(row["seq"]))
    is_masked = int(float(row["params"])) in MASKED
    task = "clm" if not is_encoder else "mlm" if is_masked else "classify"
    layout = {"layout": "packed", "length": length}
    if task == "classify":
        layout = {"layout": "classes", "fields": {"text": length}}
    strategy = STRATEGIES.get(row["strategy"], {"kind": row["strategy"]})
    is_adafactor = "adafactor" in row["notes"]
    return {
        "task": {"kind": task},
        "rows": layout,
        "model": model,
        "strategy": strategy,
        "batch": {
            "rows": int(float(row["global_batch"])),
            "microbatch_rows": int(float(row["batch_per_device"])),
        },
        "optimizer": {"kind": "adafactor" if is_adafactor else "adamw"},
        "execution": {
            "precision": row["precision"],
            "activation_checkpointing": row["act_ckpt"],
            "compile": row["compile"],
        },
        "stop": {"steps": 1},
    }


GROUPS: dict[str, Callable[[Fact], bool]] = {
    "all": lambda _: True,
    "fp32, tf32": lambda fact: fact.row["precision"] in ("fp32", "tf32"),
    "fp8": lambda fact: fact.row["precision"] == "fp8",
    "bf16, fp16": lambda fact: fact.row["precision"] in ("bf16", "fp16"),
    "LoRA": lambda fact: "LoRA" in fact.row["model"],
    "below 2 B": lambda fact: fact.parameters < SMALL,
    "1 to 8 B": lambda fact: MIDDLE[0] <= fact.parameters <= MIDDLE[1],
    "several machines": lambda fact: float(fact.row["machines"]) > 1,
}


def judge_facts(path: Path) -> dict[str, dict[str, object]]:
    """Return the table of the errors in each group, and the verdicts.

    By default a plan is for Regauge. The rows are also planned for the software that they name.
    """
    tables: dict[str, dict[str, object]] = {}
    for is_named, label in ((False, "by default"), (True, "named software")):
        facts, missing = read_facts(path, is_named=is_named)
        for kind, title in (("throughput", "time"), ("memory", "memory")):
            rows = [fact for fact in facts if fact.kind == kind]
            for name, belongs in GROUPS.items():
                if group := [fact for fact in rows if belongs(fact)]:
                    tables[f"public {title} {label}, {name}"] = _summarize(group)
        tables[f"public verdicts {label}"] = judge_verdicts(facts)
    if times := [fact for fact in facts if fact.kind == "throughput"]:
        tables["public time, one constant utilisation"] = _judge_constant(times)
    return tables | {"public rows that no run file expresses": {"rows": missing}}


def _summarize(facts: Sequence[Fact]) -> dict[str, object]:
    errors = [abs(math.expm1(fact.log_error)) for fact in facts]
    inside = [fact.estimate.p10 <= fact.measurement <= fact.estimate.p90 for fact in facts]
    return {
        "rows": len(facts),
        "median": round(statistics.median(errors), 3),
        "p90": round(float(np.quantile(errors, 0.9)), 3),
        "bias": round(math.expm1(statistics.median(fact.log_error for fact in facts)), 3),
        "coverage": round(statistics.mean(inside), 3),
    }


def _judge_constant(facts: Sequence[Fact]) -> dict[str, object]:
    """Return the error of one utilisation of the peak for all rows: their own median."""
    shares = [
        fact.plan.mfu * fact.plan.step_seconds.p50 / fact.measurement
        for fact in facts
        if fact.plan.mfu is not None
    ]
    middle = statistics.median(shares)
    errors = [abs(share / middle - 1) for share in shares]
    return {"rows": len(errors), "median": round(statistics.median(errors), 3)}


def judge_verdicts(facts: Iterable[Fact]) -> dict[str, object]:
    """Return how many facts are decided, and which of them wrongly."""
    rows = [fact for fact in facts if fact.kind in ("fits", "oom")]
    decided = [fact for fact in rows if fact.plan.memory.verdict in ("fits", "does not fit")]
    wrong = [f for f in decided if (f.plan.memory.verdict == "fits") != (f.kind == "fits")]
    names = [re.sub(r"\s", "", fact.row["id"]) for fact in wrong]
    return {
        "rows": len(rows),
        "decided": len(decided),
        "right": len(decided) - len(wrong),
        "wrong": names,
    }


def list_facts(path: Path) -> list[str]:
    """Return one line per row: what is measured, and what is planned."""
    lines = []
    for fact in read_facts(path, is_named=True)[0]:
        if fact.kind in ("fits", "oom"):
            memory = fact.plan.memory
            share = memory.total.p50 / memory.capacity
            text = f"{memory.verdict}, {share:.2f} of the capacity"
        else:
            text = f"planned {fact.estimate.p50:.4g}, measured {fact.measurement:.4g}"
            text += f" ({math.expm1(fact.log_error):+.0%})"
        lines.append(f"{fact.row['id']} for {fact.software}, {fact.kind}: {text}")
    return lines
