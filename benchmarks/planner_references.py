"""The published scaling results that the planner was asked to reproduce, as its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner_rows import Sample

from regauge.machines.machine_rates import MachineRates, find_machine
from regauge.planner.calibration import PlannerConstants, load_calibration
from regauge.planner.model_shape import shape_from_config
from regauge.planner.step_time import plan_step
from regauge.planner.training_job import TrainingJob
from regauge.training.strategies.fsdp import Fsdp
from regauge.training.strategies.zero1 import Zero1

BERT = {
    "model_type": "bert",
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
BERT_LARGE_15B = BERT | {
    "hidden_size": 1600,
    "intermediate_size": 6400,
    "num_hidden_layers": 48,
    "num_attention_heads": 25,
}
LLAMA2_7B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
SOURCE = "Gaudi DL1, DeepSpeed ZeRO-1, bf16, sequence 128: weak scaling"
STACK = "DeepSpeed ZeRO-1"


@dataclass(frozen=True)
class Reference:
    """A published scaling table: sequences per second for each number of machines."""

    name: str
    job: TrainingJob
    machine: MachineRates
    rates: dict[int, float]
    assumptions: str

    def predict(self, count: int, calibration: PlannerConstants) -> float:
        """Return the planned sequences per second."""
        rows = self.machine.devices * count * self.job.micro_batch * self.job.accumulation
        return rows / plan_step(self.job, self.machine, count, calibration).total


def gaudi_tables() -> list[Reference]:
    """Return the two tables of DL1. The batch of BERT-large is unpublished: 32 x 8 is assumed."""
    machine = find_machine("dl1.24xlarge")
    large = {1: 1379.76, 2: 2705.57, 4: 5291.58, 8: 9977.54}
    larger = {1: 276.66, 8: 1883.63, 16: 3659.15}
    return [
        Reference(
            "BERT-large 340M", _bert(BERT, 32, 8), machine, large, "micro-batch 32 x 8 assumed"
        ),
        Reference("BERT 1.5B", _bert(BERT_LARGE_15B, 16, 24), machine, larger, "none"),
    ]


def _bert(config: dict[str, object], micro_batch: int, accumulation: int) -> TrainingJob:
    return TrainingJob(
        shape=shape_from_config(config),
        length=128,
        micro_batch=micro_batch,
        accumulation=accumulation,
        strategy=Zero1(),
        precision="bf16-master",
        head="masked-lm",
        has_fused_attention=False,
        dropout=True,
        stack=STACK,
    )


def single_machines() -> list[Sample]:
    """Return the rows of one machine, which calibrate the stack; more machines are predicted."""
    samples = []
    for table in gaudi_tables():
        job, machine = table.job, table.machine
        rows = machine.devices * job.micro_batch * job.accumulation
        samples.append(
            Sample(
                name=f"dl1 {table.name}",
                source=SOURCE,
                date="",
                job=job,
                machine=machine,
                count=1,
                step_seconds=rows / table.rates[1],
                memory_bytes=None,
                is_out_of_memory=False,
                published_mfu=None,
                row={},
            )
        )
    return samples


def judge_references() -> dict[str, dict[str, object]]:
    """Return planned and published rates, and their relative differences."""
    calibration = load_calibration()
    tables: dict[str, dict[str, object]] = {}
    for table in gaudi_tables():
        for count, rate in table.rates.items():
            planned = table.predict(count, calibration)
            tables[f"DL1, {table.name}, {count} machines"] = _compare(planned, rate)
    tables["Llama-2 FSDP, p5.48xlarge, 1 to 16 machines, efficiency"] = _compare(
        llama_efficiency(calibration), 0.87
    )
    return tables


def llama_efficiency(calibration: PlannerConstants, counts: Sequence[int] = (1, 16)) -> float:
    """Return the weak scaling efficiency of Llama-2 7B; size and batch are assumed."""
    machine = find_machine("p5.48xlarge")
    shape = shape_from_config(LLAMA2_7B)
    job = TrainingJob(shape, 4096, 1, strategy=Fsdp(), recomputation="full")
    first, last = (plan_step(job, machine, count, calibration).total for count in counts)
    return first / last


def _compare(planned: float, published: float) -> dict[str, object]:
    return {
        "planned": round(planned, 3),
        "published": published,
        "difference": round(planned / published - 1, 4),
    }
