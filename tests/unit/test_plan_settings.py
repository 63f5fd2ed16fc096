"""Settings that decide a plan: precision, passes, processes, strategies and machines left out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from architecture.tree import ROOT
from regauge import config
from regauge.machines.machine_rates import find_machine, find_precision_obstacle
from regauge.models import losses
from regauge.planner import memory_plan
from regauge.planner.calibration import load_calibration
from regauge.planner.run_plans import option_search
from regauge.planner.run_plans.run_request import find_divisor, read_request
from regauge.planner.run_plans.software import use_software
from regauge.planner.search import training_plans
from regauge.planner.search.plan_options import Machines
from regauge.planner.step_time import find_rates, optimizer_seconds, plan_step
from regauge.planner.training_plan import plan_training
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from regauge.planner.run_plans.run_request import TrainingRequest

pytestmark = pytest.mark.usefixtures("no_user_files")
LLAMA = ROOT / "runs" / "llama2-7b.toml"


def read_run(**tables: dict[str, Any]) -> TrainingRequest:
    """Return the run of the Llama 2 7B run file with changed tables."""
    read = config.read(LLAMA)
    changed = {name: {**read.get(name, {}), **table} for name, table in tables.items()}
    return read_request({**read, **changed}, LLAMA)


def test_products_are_as_fast_as_the_precision() -> None:
    def find_matmul(name: str, precision: str) -> float:
        job = read_run(execution={"precision": precision}).place(8)
        assert job is not None
        return plan_step(job, find_machine(name), 1, load_calibration()).matmul

    # The smallest intensity at which a product is fast differs, so ratios are below the peaks'.
    assert 3 < find_matmul("p3.16xlarge", "fp32") / find_matmul("p3.16xlarge", "fp16") < 125 / 15.7
    assert 1.5 < find_matmul("p5.48xlarge", "bf16") / find_matmul("p5.48xlarge", "fp8") <= 2
    assert 1 < find_matmul("p4d.24xlarge", "tf32") / find_matmul("p4d.24xlarge", "bf16") <= 2


@pytest.mark.parametrize(
    ("name", "precision", "usable"),
    [("p3.2xlarge", "bf16", "fp16, fp32"), ("p4d.24xlarge", "fp8", "bf16, fp16, tf32, fp32")],
)
def test_a_precision_that_the_chip_lacks_is_refused(name: str, precision: str, usable: str) -> None:
    request = read_run(execution={"precision": precision, "processes": "auto"})
    with pytest.raises(SettingsError, match=f"no {precision}: it has {usable}"):
        option_search.place_job(request, find_machine(name), 1)
    assert find_precision_obstacle("A100-SXM-40GB", "bf16") is None


def test_the_last_pass_may_leave_devices_idle() -> None:
    """64 rows in microbatches of 8 on 6 devices are 8 microbatches: 2 passes, not 1.3."""
    request = read_run(batch={"rows": 64, "microbatch_rows": 8})
    job = request.place(6)
    assert job is not None
    assert (job.micro_batch, job.accumulation) == (8, 2)
    machine = replace(find_machine("p4d.24xlarge"), devices=6)
    assert plan_training(job, machine).rows_per_step == 64
    assert find_divisor(64, 10) == 8


def test_processes_of_the_run_file_are_the_devices() -> None:
    machine = find_machine("p4d.24xlarge")
    request = read_run(execution={"processes": 2})
    assert option_search.use_processes(request, machine).devices == 2
    with pytest.raises(SettingsError, match=r"processes = 9, and p4d\.24xlarge has 8 devices"):
        option_search.use_processes(read_run(execution={"processes": 9}), machine)


def test_fsdp_sums_whole_gradients_over_several_passes() -> None:
    one, two = (read_run(batch={"rows": rows, "microbatch_rows": 4}).place(8) for rows in (32, 64))
    assert one is not None
    assert two is not None
    constants = load_calibration().find_memory()
    before, after = (memory_plan.plan_parts(job, 8, constants) for job in (one, two))
    assert one.weights is not None
    layers = 2 * one.shape.layer_parameters * 4  # the gradients of two layers, in the first one
    assert after.working_set - before.working_set == 4 * one.weights.num_trained - layers


def test_a_loss_holds_the_logits_of_one_chunk() -> None:
    assert losses.CHUNK_TOKENS == memory_plan.CHUNK_TOKENS
    job = read_run().place(8)
    assert job is not None
    many = replace(job, micro_batch=8 * job.micro_batch)
    hidden = 2 * 2 * 7 * job.tokens_per_pass * job.shape.hidden
    assert memory_plan.logit_bytes(many) - memory_plan.logit_bytes(job) == hidden


def test_machines_left_out_of_a_comparison_are_named() -> None:
    request = read_run(execution={"processes": "auto"})
    answer = training_plans.rank(
        replace(request, steps=10), Machines(compare="p5.48xlarge,p3.2xlarge,g5.xlarge")
    )
    notes = " | ".join(answer["notes"])
    assert "left out 1 x p3.2xlarge: V100-SXM2-16GB has no bf16" in notes
    assert "left out 1 x g5.xlarge: the run does not fit" in notes


def test_a_region_without_prices_is_no_lack_of_memory() -> None:
    request = replace(read_run(execution={"price": {"region": "eu-nowhere-1"}}), steps=10)
    with pytest.raises(SettingsError, match="eu-nowhere-1"):
        training_plans.rank(request, Machines(cheapest=True))


def test_unmeasured_chips_follow_a_measured_relative_and_say_so() -> None:
    calibration = load_calibration()
    near, far = calibration.find_stack("A100-SXM-80GB"), calibration.find_stack("B200-SXM")
    assert far.source == "H100-SXM-80GB", "similar FLOPs per byte"
    assert far.spread > 2 * near.spread
    assert not calibration.has_rows("B200-SXM")
    # Its best product achieves 1,745 of 2,250 TFLOP/s, the H100's 794.5 of 989.4.
    share = 1745 / 2250 / (794.5 / 989.4)
    nearest = calibration.find_stack("H100").efficiency
    assert far.efficiency == pytest.approx(nearest * share, rel=1e-5)


def test_an_unknown_key_of_the_rows_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"unknown key 'rows\.lenght'; did you mean 'length'"):
        read_run(rows={"lenght": 5})


def test_software_decides_what_is_stored() -> None:
    """Transformers alone casts fp32 weights; with sharded states it keeps bf16 and fp32 ones."""
    request = read_run(strategy={"kind": "fsdp"}, model={})
    plans = {name: use_software(request, name).job for name in ("hf", "liger", "megatron")}
    assert {job.precision for job in plans.values()} == {"bf16-master"}
    tokens, shape = request.job.tokens_per_pass, request.job.shape
    # bf16 logits, fp32 ones, their shifted copy and log softmax: 2 + 4 + 4 + 4 bytes.
    assert memory_plan.logit_bytes(plans["hf"]) == 14 * tokens * shape.vocab
    assert memory_plan.logit_bytes(plans["liger"]) == memory_plan.logit_bytes(request.job)
    single = replace(
        request, job=replace(request.job, strategy=config.parse_choice("strategies", "single"))
    )
    assert use_software(single, "hf").job.precision == "autocast"
    lora = replace(request, job=replace(request.job, trained_fraction=0.01))
    assert use_software(lora, "hf").job.precision == "pure"
    assert use_software(request, "regauge").job == request.job


def test_unknown_software_is_refused() -> None:
    with pytest.raises(SettingsError, match="--software: unknown 'nemmo'") as caught:
        use_software(read_run(), "nemmo")
    assert "nemo" in caught.value.remedy


def test_fp32_products_without_matrix_units_are_near_the_peak() -> None:
    """A V100 has 15.7 TFLOP/s in fp32, of which large products achieve 0.9."""
    job = read_run(execution={"precision": "fp32"}).place(8)
    assert job is not None
    machine = find_machine("p3.16xlarge")
    constants = load_calibration().find_stack(machine.chip, is_fused=False)
    layers, others, _, slower = find_rates(job, machine, constants)
    assert layers == others == pytest.approx(0.9 * 15.7e12)
    assert slower >= 1


def test_an_eager_update_moves_more_bytes() -> None:
    """A fused AdamW on fp32 states: 2 x (4 + 8) + 4 bytes a parameter; many kernels: 100."""
    job = replace(read_run(strategy={"kind": "ddp"}).job, precision="fp32")
    machine = find_machine("p4d.24xlarge")
    eager = replace(job, has_fused_update=False)
    seconds = [optimizer_seconds(item, machine, 1) for item in (job, eager)]
    assert seconds[1] / seconds[0] == pytest.approx(100 / 28)
