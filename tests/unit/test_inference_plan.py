"""Inference plans of models without an artifact, compared with published measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from regauge import cli
from regauge.machines.machine_rates import find_machine
from regauge.planner import inference_plan, intervals
from regauge.planner.inference_plan import ModelRequest
from regauge.planner.model_shape import shape_from_config
from regauge.planner.roofline import RooflineTimes, place_model
from unit.plans import list_heavy_imports, read_plan

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_user_files")
BERT = {
    "model_type": "bert",
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
LLAMA_7B = {
    "model_type": "llama",
    "tie_word_embeddings": False,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
}
LLAMA_70B = LLAMA_7B | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
}


@pytest.mark.parametrize(
    ("name", "rows", "length", "measured"),
    [
        ("inf1.xlarge", 1, 256, 35.7),
        ("inf1.xlarge", 10, 256, 343.7),
        ("inf1.xlarge", 1, 128, 28.2),
        ("inf1.xlarge", 10, 128, 121.1),
        ("inf2.xlarge", 1, 256, 8.31),
        ("inf2.xlarge", 10, 256, 72.9),
        ("inf2.xlarge", 1, 128, 3.1),
        ("inf2.xlarge", 10, 128, 23.6),
    ],
)
def test_products_give_the_published_times_of_encoders(
    name: str, rows: int, length: int, measured: float
) -> None:
    """One core computes alone, with the bandwidth of its chip. ELECTRA-large has BERT's blocks."""
    machine = find_machine(name)
    alone = replace(machine, memory_bandwidth=machine.memory_bandwidth * machine.devices)
    times = RooflineTimes(shape_from_config(BERT), alone)
    estimate = intervals.estimate(times.milliseconds(length, rows), inference_plan.ROOFLINE_SPREAD)
    assert estimate.p10 <= measured <= estimate.p90


@pytest.mark.parametrize(
    ("config", "devices", "tokens_per_second"),
    [
        *((LLAMA_7B, *row) for row in ((1, 104.9), (2, 168.84), (4, 254.02), (8, 328.43))),
        *((LLAMA_70B, *row) for row in ((2, 21.32), (4, 38.01), (8, 62.5))),
    ],
)
def test_generation_has_the_published_speed(
    config: dict[str, Any], devices: int, tokens_per_second: float
) -> None:
    """gpt-fast, batch size 1 with a short prompt on A100 80 GB."""
    machine = find_machine("p4de.24xlarge")
    times = RooflineTimes(shape_from_config(config), machine, devices, 200)
    assert 1 / times.token_seconds(105, 1) == pytest.approx(tokens_per_second, rel=0.25)


def test_the_cache_limits_the_batch_of_a_causal_model() -> None:
    """Llama 2 7B: 13.48 GB of weights, 0.524 MB of keys and values for each token."""
    machine = find_machine("p4de.24xlarge")
    times = RooflineTimes(shape_from_config(LLAMA_7B), machine, 1, 1000)
    tokens = 2000
    expected = 2 * 6_738_415_616 + 4 * 4096 * 32 * tokens
    activations = 2 * 1000 * (4 * 4096 + 2 * 11008)
    assert times.memory_bytes(1000, 1) == pytest.approx(expected + activations, rel=1e-6)
    assert times.fits(1000, 32)
    assert not times.fits(1000, 64)
    placed = place_model(shape_from_config(LLAMA_70B), machine, 1000, 1000)
    assert [item.devices for item in placed] == [2, 4, 8], "138 GB of weights in 80 GiB each"


def test_a_product_bound_by_computation_is_not_scaled_by_bandwidth() -> None:
    """An L4 has half of an A10G's bandwidth and 1.7 times its products: it is faster here."""
    shapes, histogram = ((128, 64),), (*[0] * 128, 1)
    request = ModelRequest(shapes, histogram, shape_from_config(BERT))
    names = ["g4dn.xlarge", "g5.xlarge", "g6.xlarge", "g6e.xlarge"]
    options = inference_plan.plan_prediction(request, 1_000_000, names)
    speed = {item.instance.name: item.rows_per_second.p50 for item in options}
    assert 1 < speed["g6.xlarge"] / speed["g5.xlarge"] < 121 / 70
    assert options[0].instance.name != "g4dn.xlarge"


def write_config(folder: Path, config: dict[str, Any]) -> str:
    """Write the configuration of a model folder, and return the folder."""
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_model_folder_is_planned_on_every_machine_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_config(tmp_path, BERT)
    answer = read_plan(capsys, folder, "--tokens", "128", "--predict", "2000000", "--all")
    options = answer["options"]
    assert answer["more_options"] == 0
    assert len(options) > 30
    first = options[0]
    assert first["tokens_per_second"] == pytest.approx(128 * first["rows_per_second"], rel=1e-3)
    assert first["usd"] == pytest.approx(2 * first["usd_per_million"], rel=1e-3)
    assert first["usd_p10"] < first["usd"] < first["usd_p90"]
    assert not options[0]["machines"].endswith("g4dn.xlarge")


def test_a_causal_model_generates_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_config(tmp_path, LLAMA_70B)
    arguments = (folder, "--tokens", "500", "--new-tokens", "100")
    answer = read_plan(capsys, *arguments, "--on", "p4de.24xlarge,p4d.24xlarge,g5.xlarge")
    options = {item["machines"]: item for item in answer["options"]}
    assert set(options) == {"1 x p4de.24xlarge", "1 x p4d.24xlarge"}, "a g5.xlarge has 24 GB"
    assert all(item["replicas"] < 8 for item in options.values()), "138 GB are in several devices"
    served = read_plan(capsys, *arguments, "--serve", "2", "--on", "p4de.24xlarge")["options"][0]
    assert served["latency_ms_p10"] < served["latency_ms"] < served["latency_ms_p90"]


def test_the_latency_is_that_of_the_batch_that_the_memory_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request waits for two batches; more rows would be in time, and do not fit."""
    folder = write_config(tmp_path, LLAMA_7B)
    purpose = ("--tokens", "1000", "--new-tokens", "100", "--serve", "5")
    [option] = read_plan(capsys, folder, *purpose, "--on", "g5.xlarge")["options"]
    machine, rows = find_machine("g5.xlarge"), option["batch_rows"]
    times = RooflineTimes(shape_from_config(LLAMA_7B), machine, new_tokens=100)
    assert option["latency_ms"] == pytest.approx(2 * times.milliseconds(1000, rows), rel=1e-3)
    assert times.fits(1000, rows)
    assert not times.fits(1000, 2 * rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--new-tokens", "9"), "a bert encodes texts; remove --new-tokens"),
        (("--tokens", "513"), "513 tokens are more than the model's 512"),
        (("--tokens", "0"), "--tokens 0 is not positive"),
        (("--serve", "5", "--slo-ms", "0.001"), "no machine type answers"),
        (("execution.price.region=ap-east-7",), "no price in ap-east-7"),
        (("--on", "c7i.xlarge"), "no accelerator of known speed holds"),
    ],
)
def test_refused_plans_of_a_model(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", write_config(tmp_path, BERT), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_of_a_model_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    assert list_heavy_imports(write_config(tmp_path, BERT), "--json") == []
