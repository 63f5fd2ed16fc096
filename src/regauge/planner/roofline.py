"""Times without a measurement, from a model's matrix products and memory traffic.

A product takes LAUNCH_SECONDS + sqrt(compute² + memory²), with its FLOPs at a share of the chip's
peak, and its bytes at a bandwidth share. 4,500 bf16 products measured on A100, H100 and B200
(aisimulate 0.13) give the constants: above 1 GFLOP, their mean error is 12 %. Other chips'
shares are in `product_shares.csv`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.machines.catalog import load_chips
from regauge.system.files import read_csv_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.machines.machine_rates import MachineRates
    from regauge.planner.model_shape import ModelShape

LAUNCH_SECONDS = 3.5e-6
PRODUCT_SHARE = 0.8
"""Peak share in products, for a chip whose largest measured rate is unknown."""
MEMORY_SHARE = 0.75
DECODE_SHARE = 0.7
"""Bandwidth share in generation: gpt-fast measured 1,397 of 2,039 GB/s with Llama 2 7B."""
ATTENTION_SHARE = 0.27
"""Peak share in attention, as in the A100's training rows in `calibration.json`."""
MEMORY_LIMIT = 0.9
"""Memory share for weights, cache and activations, as vLLM's `gpu_memory_utilization`."""
LINK_SHARE = 0.8
REDUCE_SECONDS, REDUCE_SECONDS_PER_DEVICE = 6e-6, 2e-6
"""All-reduce latency: 10, 14 and 22 µs on 2, 4 and 8 A100 with NCCL 2.27 (aisimulate)."""
BYTES = 2
"""Bytes per weight and activation: bf16, or fp16 on chips without bf16."""


@cache
def _load_shares() -> Mapping[str, float]:
    rows = read_csv_rows(Path(__file__).with_name("product_shares.csv"))
    return {row["chip"]: float(row["share"]) for row in rows}


def find_product_share(name: str) -> float:
    """Return the peak share that large products achieve on a chip."""
    chip = load_chips()[name]
    if chip.measured_bf16_teraflops and chip.bf16_teraflops:
        return chip.measured_bf16_teraflops / chip.bf16_teraflops
    return _load_shares().get(name, PRODUCT_SHARE)


@dataclass(frozen=True)
class RooflineTimes:
    """A model's batch times on the devices that hold one copy.

    With `new_tokens`, a row is a prompt, whose time includes the generated tokens.
    """

    shape: ModelShape
    machine: MachineRates
    devices: int = 1
    new_tokens: int = 0

    def milliseconds(self, length: int, rows: int) -> float:
        """Return the milliseconds for `rows` rows with `length` tokens each."""
        seconds = self.pass_seconds(length, rows)
        if self.new_tokens:
            seconds += self.new_tokens * self.token_seconds(length + self.new_tokens / 2, rows)
        return 1000 * seconds

    def pass_seconds(self, length: int, rows: int) -> float:
        """Return a forward pass's seconds, without an output layer for encoders."""
        shape, tokens = self.shape, length * rows
        attention = shape.attention
        inputs = (shape.hidden, attention.width + 2 * attention.kv_width)
        products = [inputs, (attention.width, shape.hidden), (shape.ffn, shape.hidden)]
        products.append((shape.hidden, shape.ffn * (2 if shape.is_gated else 1)))
        layer = sum(self._product_seconds(tokens, *sizes) for sizes in products[:2])
        layer += sum(self._product_seconds(tokens, *sizes, is_ffn=True) for sizes in products[2:])
        scores = 4 * tokens * attention.width * shape.attention_span(length)
        scores *= 0.5 if attention.is_causal else 1.0
        layer += scores / (ATTENTION_SHARE * self._peak)
        # Two norms with residual sums read and write 6 h, an activation function 2 f or 3 f.
        values = 6 * shape.hidden + (3 if shape.is_gated else 2) * shape.ffn * shape.active_experts
        layer += BYTES * tokens * values / (MEMORY_SHARE * self._bandwidth)
        layer += self._reduce_seconds(tokens)
        head = self._product_seconds(rows, shape.hidden, shape.vocab) if self.new_tokens else 0.0
        return shape.layers * layer + head

    def token_seconds(self, context: float, rows: int) -> float:
        """Return the seconds for one more token in each row after `context` tokens."""
        shape = self.shape
        used = shape.layers * shape.used_matmul(rows) + shape.logit_matmul
        computed = shape.layers * shape.active_matmul + shape.logit_matmul
        moved = BYTES * used + rows * shape.cache_bytes(context, BYTES)
        compute = 2 * rows * computed / (find_product_share(self.machine.chip) * self._peak)
        seconds = math.hypot(compute, moved / (DECODE_SHARE * self._bandwidth))
        return seconds + shape.layers * self._reduce_seconds(rows)

    def memory_bytes(self, length: int, rows: int) -> float:
        """Return one device's bytes for weights, key-value cache and activations."""
        shape, tokens = self.shape, rows * length
        cache_bytes = rows * shape.cache_bytes(length + self.new_tokens, BYTES)
        activations = BYTES * tokens * (4 * shape.hidden + 2 * shape.ffn * shape.active_experts)
        weights = BYTES * shape.parameters("lm" if self.new_tokens else "none")
        return (weights + cache_bytes * bool(self.new_tokens) + activations) / self.devices

    def fits(self, length: int, rows: int) -> bool:
        """Return whether a batch fits into the memory."""
        return self.memory_bytes(length, rows) <= MEMORY_LIMIT * self.machine.memory_bytes

    @property
    def _peak(self) -> float:
        return (self.machine.peak_flops or 0.0) * self.devices

    @property
    def _bandwidth(self) -> float:
        return self.machine.memory_bandwidth * self.devices

    def _product_seconds(
        self, tokens: int, inputs: int, outputs: int, *, is_ffn: bool = False
    ) -> float:
        """Return a product's seconds; each token passes the active experts."""
        shape = self.shape
        active = shape.active_experts if is_ffn else 1
        used = min(shape.experts, tokens * active) if is_ffn else 1
        flops = 2 * tokens * inputs * outputs * active
        moved = BYTES * (used * inputs * outputs + tokens * active * (inputs + outputs))
        compute = flops / (find_product_share(self.machine.chip) * self._peak)
        return LAUNCH_SECONDS + math.hypot(compute, moved / (MEMORY_SHARE * self._bandwidth))

    def _reduce_seconds(self, tokens: int) -> float:
        """Return one layer's seconds in its two all-reduces, by the ring formula."""
        if self.devices == 1:
            return 0.0
        moved = 2 * (self.devices - 1) / self.devices * BYTES * tokens * self.shape.hidden
        latency = REDUCE_SECONDS + REDUCE_SECONDS_PER_DEVICE * self.devices
        return 2 * (latency + moved / (LINK_SHARE * self.machine.link_bandwidth))


def place_model(
    shape: ModelShape, machine: MachineRates, length: int, new_tokens: int
) -> list[RooflineTimes]:
    """Return the model on each number of devices that holds it, the fewest first.

    Several devices divide the weights, as tensor parallelism does.
    """
    counts = [2**power for power in range(machine.devices.bit_length())]
    all_times = [RooflineTimes(shape, machine, count, new_tokens) for count in counts]
    return [item for item in all_times if machine.peak_flops and item.fits(length, 1)]
