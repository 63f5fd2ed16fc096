"""Plans of training jobs: order, monotonicity, intervals and the published DL1 tables."""

from __future__ import annotations

import dataclasses
import math
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.machines.machine_rates import GIB, MachineRates, find_machine
from regauge.planner import intervals, memory_plan
from regauge.planner.calibration import load_calibration
from regauge.planner.expected_goodput import plan_goodput
from regauge.planner.model_shape import shape_from_config
from regauge.planner.network import Link, Topology
from regauge.planner.step_time import plan_step, traffic_seconds
from regauge.planner.training_job import Estimate, ModelParallelism, TrainingJob
from regauge.planner.training_plan import TrainingPlan, plan_training
from regauge.system import choices
from regauge.system.errors import SettingsError
from regauge.training.strategies import Strategy

P5 = "p5.48xlarge"


def _load(name: str, **table: Any) -> Strategy:
    strategy: Strategy = choices.load("strategies", name)(**table)
    return strategy


SINGLE, DDP, ZERO1, FSDP, HSDP = map(_load, ("single", "ddp", "zero1", "fsdp", "hsdp"))


def _config(layers: int = 12, hidden: int = 1024) -> dict[str, object]:
    return {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
    }


def _job(layers: int = 12, **fields: object) -> TrainingJob:
    defaults = {"length": 1024, "micro_batch": 4, "strategy": FSDP}
    return TrainingJob(shape_from_config(_config(layers)), **(defaults | fields))  # type: ignore[arg-type]


def _formula_bytes(job: TrainingJob, count: int = 1) -> float:
    machine, constants = find_machine(P5), load_calibration().find_memory()
    return memory_plan.plan_parts(job, machine.devices * count, constants).total


def _step(job: TrainingJob, count: int = 1) -> float:
    return plan_step(job, find_machine(P5), count, load_calibration()).total


@given(
    layers=st.integers(1, 80),
    batch=st.integers(1, 64),
    length=st.sampled_from([128, 512, 4096]),
    recomputation=st.sampled_from(["none", "selective", "full"]),
    strategy=st.sampled_from([DDP, ZERO1, FSDP]),
)
def test_more_work_never_costs_less(
    layers: int, batch: int, length: int, recomputation: str, strategy: Strategy
) -> None:
    """One more row, twice the length or one more layer: more seconds, and no less memory.

    The memory of a small batch is that of the update, which follows the activations.
    """
    options = {"recomputation": recomputation, "strategy": strategy}
    base = _job(layers, micro_batch=batch, length=length, **options)
    for larger in (
        _job(layers, micro_batch=batch + 1, length=length, **options),
        _job(layers, micro_batch=batch, length=2 * length, **options),
        _job(layers + 1, micro_batch=batch, length=length, **options),
    ):
        assert _formula_bytes(larger) >= _formula_bytes(base)
        assert _step(larger) > _step(base)


def test_stragglers_count_machines_that_exchange_gradients() -> None:
    """The four machines of one pipelined model lose nothing; four copies of it do."""
    pipeline = _job(strategy=DDP, accumulation=4, parallelism=ModelParallelism(pipeline=32))
    machine, calibration = find_machine(P5), load_calibration()
    assert plan_step(pipeline, machine, 4, calibration).growth == 0
    parts = plan_step(pipeline, machine, 16, calibration)
    growth = calibration.find_stack(machine.chip, None).growth
    compute = parts.matmul + parts.attention + parts.traffic
    assert growth > 0
    assert parts.growth == pytest.approx(compute * ((1 + growth) ** 2 - 1))


def test_estimates_overlap_if_both_medians_are_in_the_other_interval() -> None:
    wide, narrow = Estimate(0.5, 1.0, 2.0), Estimate(1.4, 1.5, 1.6)
    assert intervals.overlaps(wide, Estimate(0.9, 1.5, 2.0))
    assert not intervals.overlaps(wide, narrow)
    assert not intervals.overlaps(narrow, wide)


@given(count=st.integers(1, 64), layers=st.integers(1, 80), batch=st.integers(1, 64))
def test_sharding_orders_the_strategies(count: int, layers: int, batch: int) -> None:
    """More machines never need more memory under FSDP; HSDP needs at least that of FSDP."""
    job = _job(layers, micro_batch=batch)
    assert _formula_bytes(job, count + 1) <= _formula_bytes(job, count)
    zero1, ddp, fsdp, hsdp = (
        _formula_bytes(dataclasses.replace(job, strategy=strategy), count)
        for strategy in (ZERO1, DDP, FSDP, HSDP)
    )
    assert zero1 <= ddp
    assert hsdp >= fsdp


@given(batch=st.integers(1, 64), layers=st.integers(2, 80))
def test_recomputation_trades_memory_for_time(batch: int, layers: int) -> None:
    """Full recomputation stores least and computes most."""
    jobs = [_job(layers, micro_batch=batch, recomputation=name) for name in ("none", "full")]
    assert _formula_bytes(jobs[1]) < _formula_bytes(jobs[0])
    assert _step(jobs[1]) > _step(jobs[0])


@given(devices=st.integers(2, 64), size=st.floats(1e3, 1e10))
def test_a_bucket_has_an_efficient_size(devices: int, size: float) -> None:
    """Many small messages take longer than one, and never less than the bandwidth permits."""
    link = Link(3e11, 2e7, 2e-5)
    topology = Topology(link, link, devices, 4)
    whole = topology.seconds("all_reduce", size)
    assert topology.seconds("all_reduce", size, 8) > whole > size * 1.5 / 3e11


def test_half_of_the_bandwidth_at_half_size() -> None:
    """A message of `half_size` bytes takes twice the seconds of its bytes."""
    link = Link(bandwidth=1e11, half_size=1e8, latency=0.0)
    assert link.seconds("all_gather", 1e8, 4) == pytest.approx(2 * 0.75 * 1e8 / 1e11)
    assert link.seconds("all_reduce", 1e8, 4) == pytest.approx(4 * 0.75 * 1e8 / 1e11)
    assert link.seconds("all_gather", 1e8, 1) == 0


def test_gathered_states_need_bytes_of_the_formula() -> None:
    """DDP with bf16 autocast and Adam holds 16 bytes a parameter, and a cast of 2."""
    job = _job(strategy=DDP)
    parts = memory_plan.plan_parts(job, 8, load_calibration().find_memory())
    parameters = job.shape.parameters("lm")
    assert parts.weights + parts.gradients + parts.optimizer == 16 * parameters
    assert parts.working_set == 2 * parameters
    sharded = memory_plan.plan_parts(_job(), 8, load_calibration().find_memory())
    assert sharded.weights + sharded.gradients + sharded.optimizer == 2 * parameters


@pytest.mark.parametrize(
    ("size", "verdict"), [(40, "fits"), (70, "undecided"), (120, "does not fit")]
)
def test_verdicts_are_certain_only_far_from_the_capacity(size: float, verdict: str) -> None:
    """80 GiB, with a spread of 10 %."""
    total = intervals.estimate(size * GIB, 0.10)
    assert memory_plan.judge(total, 80 * GIB) == verdict


def test_head_dim_changes_memory_and_time() -> None:
    """A head_dim of twice hidden / heads needs more of both."""
    wide = shape_from_config(_config() | {"head_dim": 128})
    job = _job()
    wider = dataclasses.replace(job, shape=wide)
    assert _formula_bytes(wider) > _formula_bytes(job)
    assert _step(wider) > 1.05 * _step(job)


GAUDI_TABLES = [
    (1024, 24, 16, (32, 8), {1: 1379.76, 2: 2705.57, 4: 5291.58, 8: 9977.54}),
    (1600, 48, 25, (16, 24), {1: 276.66, 8: 1883.63, 16: 3659.15}),
]


@pytest.mark.parametrize(("hidden", "layers", "heads", "batch", "rates"), GAUDI_TABLES)
def test_the_gaudi_tables_are_within_five_percent(
    hidden: int, layers: int, heads: int, batch: tuple[int, int], rates: dict[int, float]
) -> None:
    """One machine calibrates the stack; the others are predictions. 32 x 8 is an assumption."""
    config = {
        "model_type": "bert",
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    job = TrainingJob(
        shape_from_config(config),
        128,
        *batch,
        strategy=ZERO1,
        precision="bf16-master",
        head="masked-lm",
        has_fused_attention=False,
        dropout=True,
        stack="DeepSpeed ZeRO-1",
    )
    for count, rate in rates.items():
        plan = plan_training(job, find_machine("dl1.24xlarge"), count)
        assert plan.rows_per_step / plan.step_seconds.p50 == pytest.approx(rate, rel=0.05)
        assert plan.mfu is None, "the peak of Gaudi1 is unpublished"


def test_intervals_cover_rows_drawn_from_the_model() -> None:
    """p10 to p90 covers 75 to 85 % of rows with the spread of the stack."""
    plan = plan_training(_job(), find_machine(P5))
    spread = math.log(plan.step_seconds.p90 / plan.step_seconds.p50) / intervals.NORMAL_P90
    draw = random.Random(7)  # noqa: S311 (no secret)
    rows = [plan.step_seconds.p50 * math.exp(draw.gauss(0, spread)) for _ in range(4000)]
    inside = sum(plan.step_seconds.p10 <= row <= plan.step_seconds.p90 for row in rows)
    assert 0.75 <= inside / len(rows) <= 0.85


def _relative_width(plan: TrainingPlan) -> float:
    return plan.step_seconds.p90 / plan.step_seconds.p10


def test_a_plan_far_from_measured_rows_is_wide_and_says_so() -> None:
    """A measured job on H100, then a job of another size, then a chip without rows."""
    shape = shape_from_config(_config(32, 4096))
    near = TrainingJob(shape, 2048, 6, strategy=FSDP, stack="llm-foundry bf16")
    far = dataclasses.replace(near, length=64, micro_batch=1)
    machine = find_machine(P5)
    plans = [plan_training(near, machine), plan_training(far, machine)]
    plans.append(plan_training(near, find_machine("g6.12xlarge")))
    widths = [_relative_width(plan) for plan in plans]
    assert 1.05 * widths[0] < widths[1] < widths[2]
    assert "no measured row is near this job: the interval is wide" in plans[1].notes
    assert any(note.startswith("unmeasured chip: L4 has the") for note in plans[2].notes)
    assert plans[2].constants.rows == 0


def test_cost_and_hours_follow_the_step() -> None:
    """Dollars are hours x machines x price."""
    plan = plan_training(_job(), find_machine(P5), 4)
    hours, usd = plan.hours(1000, goodput=0.9), plan.usd(1000, goodput=0.9)
    price = plan.machine.usd_per_hour
    assert price is not None
    assert usd is not None
    assert hours.p50 == pytest.approx(plan.step_seconds.p50 * 1000 / 0.9 / 3600)
    assert usd.p90 == pytest.approx(hours.p90 * 4 * price)
    unknown = dataclasses.replace(plan.machine, usd_per_hour=None)
    assert plan_training(_job(), unknown).usd(1) is None


def test_padding_lowers_useful_throughput_alone() -> None:
    """A third of real tokens: a third of the rate, and the same seconds."""
    machine = find_machine(P5)
    full, padded = (plan_training(_job(useful_fraction=x), machine) for x in (1.0, 1 / 3))
    assert padded.step_seconds == full.step_seconds
    ratio = full.tokens_per_second.p50 / padded.tokens_per_second.p50
    assert ratio == pytest.approx(3)


def test_pipelines_idle_and_tensor_parallelism_divides() -> None:
    """A pipeline of 4 with 8 microbatches idles 3 / 8 of the computation."""
    job = _job(strategy=SINGLE, accumulation=8, parallelism=ModelParallelism(1, 4))
    parts = plan_step(job, find_machine(P5), 1, load_calibration())
    compute = parts.matmul + parts.attention + parts.traffic
    assert parts.bubble == pytest.approx(3 / 8 * compute)
    groups = dataclasses.replace(job, parallelism=ModelParallelism(1, 4, interleaved=3))
    assert plan_step(groups, find_machine(P5), 1, load_calibration()).bubble == pytest.approx(
        compute / 8
    )
    halved = dataclasses.replace(job, parallelism=ModelParallelism(2, 4))
    assert plan_step(halved, find_machine(P5), 1, load_calibration()).matmul == parts.matmul / 2


def test_pipelines_of_fsdp_hold_a_stage() -> None:
    """FSDP under a pipeline keeps the weights and fp32 gradients of its stage; else two layers."""
    constants = load_calibration().find_memory()
    flat = _job(strategy=FSDP, recomputation="full")
    deep = dataclasses.replace(flat, parallelism=ModelParallelism(1, 4))
    fp32 = dataclasses.replace(flat, precision="fp32")
    jobs = (flat, deep, fp32, dataclasses.replace(deep, precision="fp32"))
    held = [memory_plan.plan_parts(job, 64, constants).working_set for job in jobs]
    shape = flat.shape
    unit = max(shape.layer_parameters, shape.embedding_parameters / 2)
    assert held[0] == 2 * unit * (2 + 4)
    stage = 3 * shape.layer_parameters + shape.embedding_parameters
    assert held[1] == 6 * stage
    assert held[2:] == [2 * unit * (4 + 4), 8 * stage], "fp32 gathers 4 bytes a weight"


def test_the_update_follows_the_activations() -> None:
    """The larger one counts: 4 bytes of a parameter, or activations and logits."""
    constants = load_calibration().find_memory()
    small, large = (
        memory_plan.plan_parts(_job(strategy=SINGLE, precision="fp32", length=size), 1, constants)
        for size in (8, 4096)
    )
    parameters = _job().shape.parameters("lm")
    assert small.working_set > 0
    total = small.activations + small.logits + small.working_set
    assert total == pytest.approx(4 * parameters)
    assert large.working_set == 0


def test_the_last_stage_of_a_pipeline_has_the_logits() -> None:
    """The first stage has 4 microbatches in flight, the last one has one and the logits."""
    constants = dataclasses.replace(load_calibration().find_memory(), activation_scale=1.0)
    job = _job(8, strategy=SINGLE, accumulation=8, parallelism=ModelParallelism(1, 4))
    layers = 2 * memory_plan.layer_activation_bytes(job)
    inputs = 2 * job.shape.hidden * job.tokens_per_pass
    parts = memory_plan.plan_parts(job, 4, constants)
    logits = memory_plan.logit_bytes(job)
    assert 3 * layers < logits, "the last stage has the most"
    assert (parts.activations, parts.logits) == (layers + inputs, logits)
    deep = dataclasses.replace(job, shape=_job(80).shape)
    parts = memory_plan.plan_parts(deep, 4, constants)
    assert (parts.activations, parts.logits) == (pytest.approx(40 * layers + inputs), 0.0)


def test_eager_norms_store_fp32_copies() -> None:
    """Two RMS norms without fusion store 8 h bytes more for each token: fp32 inputs."""
    job = _job()
    eager = dataclasses.replace(job, has_fused_norms=False)
    more = memory_plan.layer_activation_bytes(eager) - memory_plan.layer_activation_bytes(job)
    assert more == 8 * job.shape.hidden * job.tokens_per_pass


def test_embeddings_are_not_quantized() -> None:
    """4-bit weights have 0.55 bytes, and embeddings 2."""
    constants = load_calibration().find_memory()
    job = _job(strategy=SINGLE, precision="nf4", trained_fraction=0.01)
    weights = memory_plan.plan_parts(job, 1, constants).weights
    shape = job.shape
    rest = shape.parameters("lm") - shape.embedding_parameters
    assert weights == pytest.approx(0.55 * rest + 2 * shape.embedding_parameters)


def test_stored_scores_move_more_bytes() -> None:
    """An attention that stores its scores has more traffic; autocast adds the casts of weights."""
    constants = load_calibration().find_stack("H100-SXM-80GB")
    machine, fused = find_machine(P5), _job(strategy=SINGLE, precision="pure")
    stored = dataclasses.replace(fused, has_fused_attention=False)
    seconds = [traffic_seconds(job, machine, constants) for job in (fused, stored)]
    scores = fused.shape.attention.heads * fused.length * fused.tokens_per_pass
    more = constants.traffic * fused.shape.layers * 16 * 2 * scores  # 16 reads and writes of bf16
    assert seconds[1] - seconds[0] == pytest.approx(more / machine.memory_bandwidth)
    cast = dataclasses.replace(fused, precision="autocast")
    bytes_each = 2 * (4.0 + 2.0) / 0.7
    assert traffic_seconds(cast, machine, constants) - seconds[0] == pytest.approx(
        fused.shape.parameters("lm") * bytes_each / machine.memory_bandwidth
    )


def test_accumulated_gradients_overlap_with_the_last_backward_pass_alone() -> None:
    """DDP sums once for 64 passes, and hides no more of it than for one pass."""
    machine, calibration = find_machine("g5.12xlarge"), load_calibration()
    once, often = (
        plan_step(_job(strategy=DDP, accumulation=number), machine, 4, calibration)
        for number in (1, 64)
    )
    assert once.exposed > 0
    assert often.exposed > 0.95 * once.exposed


def test_goodput_has_its_best_interval() -> None:
    """The interval of Young and Daly loses less than half or twice of it."""
    plan = plan_goodput(16, checkpoint_seconds=30, restart_seconds=300)
    between = 86400 / plan.failures_per_day

    def loss(interval: float) -> float:
        return 30 / interval + (interval / 2 + 300) / between

    best = loss(plan.interval_seconds)
    assert plan.share == pytest.approx(1 - best)
    assert best < min(loss(plan.interval_seconds / 2), loss(plan.interval_seconds * 2))


def test_unknown_machines_are_refused() -> None:
    """The nearest name is offered, and a machine without accelerators is refused."""
    with pytest.raises(SettingsError, match=r"did you mean 'p5\.48xlarge'"):
        find_machine("p5.48xlarg")
    with pytest.raises(SettingsError, match="no accelerator"):
        find_machine("c7i.4xlarge")


def test_trainium_devices_are_cores() -> None:
    """trn1.32xlarge has 16 chips of 2 cores; each core has half of a chip."""
    machine: MachineRates = find_machine("trn1.32xlarge")
    assert machine.devices == 32
    assert machine.peak_flops == 95e12


def test_a_plan_needs_neither_torch_nor_numpy() -> None:
    """In a new process, as `regauge plan` runs."""
    code = (
        "import sys; from regauge.planner import training_plan;"
        "sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
