"""Pages of metrics that tests serve over HTTP: runs, servers and exporters of devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loopback import Answer, Request, answer_requests
from regauge.monitoring.vocabulary import METRICS, PREDICT_STATES, RANK_ALIVE, Metric

LABEL_VALUES = {"run": "a", "rank": "0", "route": "/embed", "model": "m", "device": "0"}
CONTENT_TYPE = "text/plain; version=0.0.4"


class Page:
    """A page whose text may change; it is served at `address`."""

    def __init__(self, render: Callable[[], str]) -> None:
        self.render = render
        self.address = ""
        self.num_reads = 0


@contextmanager
def serve_page(render: Callable[[], str]) -> Iterator[Page]:
    """Serve a page on the loopback interface for the duration of a block."""
    page = Page(render)

    def respond(_: Request) -> Answer:
        page.num_reads += 1
        return 200, page.render().encode(), {"Content-Type": CONTENT_TYPE}

    with answer_requests(respond, "metrics page") as url:
        page.address = url.removeprefix("http://")
        yield page


class Vocabulary:
    """A page with every metric of the vocabulary, for a run and a server in a bad state."""

    def __init__(self) -> None:
        self.is_bad = True
        self._began_at = time.time()
        self._lock = threading.Lock()

    def render(self) -> str:
        """Return the page; counters grow with time."""
        with self._lock:
            return "".join(f"{line}\n" for metric in METRICS for line in self._list_lines(metric))

    def _list_lines(self, metric: Metric) -> Iterator[str]:
        kind = "gauge" if metric.type == "info" else metric.type
        yield f"# TYPE {metric.name} {kind}"
        seconds = time.time() - self._began_at
        if metric.type == "histogram":
            labels = self._format_labels(metric)
            bucket = labels[:-1] + "," if labels else "{"
            yield f'{metric.name}_bucket{bucket}le="1.0"}} {10 * seconds}'
            yield f'{metric.name}_bucket{bucket}le="+Inf"}} {20 * seconds}'
            yield f"{metric.name}_sum{labels} {5 * seconds}"
            yield f"{metric.name}_count{labels} {20 * seconds}"
            return
        yield f"{metric.name}{self._format_labels(metric)} {self._find_value(metric, seconds)}"
        if metric is RANK_ALIVE:
            yield f'{metric.name}{{run="a",run_id="run_id",rank="1"}} 1'

    @staticmethod
    def _format_labels(metric: Metric) -> str:
        special = {"status": "503", "state": PREDICT_STATES[0], "phase": "step", "verb": "train"}
        values = {**LABEL_VALUES, **special}
        pairs = [f'{name}="{values.get(name, name)}"' for name in metric.labels]
        return f"{{{','.join(pairs)}}}" if pairs else ""

    def _find_value(self, metric: Metric, seconds: float) -> float:
        now = time.time()
        name = metric.name.removeprefix("regauge_")
        if name.endswith("timestamp_seconds"):
            return self._began_at - 3600 if self.is_bad else now
        values = {
            "train_tokens_total": 0.0,
            "rank_alive": 0.0,
            "rank_stopped": 1.0,
            "run_failed": 1.0,
            "serve_workers": 0.0,
            "serve_draining": 1.0,
            "serve_queue_wait_seconds": 9.0,
            "run_goodput_ratio": 0.1,
            "run_cost_usd_total": 95.0 + seconds / 1000,
            "run_budget_usd": 100.0,
            "predict_failed_records_total": 5.0,
            "rank_straggler_delay_seconds": 5.0,
            "device_utilization_ratio": 0.0,
            "rank_phase": 1.0,
        }
        if name in values and self.is_bad:
            return values[name]
        return 1.0 + seconds if metric.type == "counter" or name == "rank_step" else 0.5


def render_dcgm(*, is_old: bool = False, xid: int | None = 0, drop: tuple[str, ...] = ()) -> str:
    """Return a page of dcgm-exporter: the names of version 1.x, or those of today.

    The error code is absent if `xid` is None, as are the metrics in `drop`.
    """
    current = {
        "DCGM_FI_DEV_GPU_UTIL": 90,
        "DCGM_FI_DEV_MEM_COPY_UTIL": 40,
        "DCGM_FI_DEV_FB_USED": 60000,
        "DCGM_FI_DEV_FB_FREE": 20000,
        "DCGM_FI_DEV_SM_CLOCK": 1410,
        "DCGM_FI_DEV_GPU_TEMP": 61,
        "DCGM_FI_DEV_POWER_USAGE": 300,
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.9,
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.4,
        "DCGM_FI_PROF_DRAM_ACTIVE": 0.3,
        "DCGM_FI_DEV_XID_ERRORS": xid,
    }
    old = {
        "dcgm_gpu_utilization": 90,
        "dcgm_mem_copy_utilization": 40,
        "dcgm_fb_used": 60000,
        "dcgm_fb_free": 20000,
        "dcgm_sm_clock": 1410,
        "dcgm_gpu_temp": 61,
        "dcgm_power_usage": 300,
        "dcgm_fi_prof_pipe_tensor_active": 0.4,
        "dcgm_xid_errors": xid,
    }
    labels = '{gpu="0",uuid="GPU-1"}' if is_old else '{gpu="0",UUID="GPU-2",Hostname="gpu-node"}'
    values = old if is_old else current
    lines = [
        f"# TYPE {name} gauge\n{name}{labels} {value}\n"
        for name, value in values.items()
        if value is not None and name not in drop
    ]
    if not is_old:
        error = '{gpu="0",UUID="GPU-2",Hostname="gpu-node",xid="79"}'
        lines.append(f"DCGM_EXP_XID_ERRORS_COUNT{error} {0 if not xid else 1}\n")
    return "".join(lines)


def render_incomplete_runs() -> str:
    """Return the metrics of runs that lack some, and of a server that starts."""
    lines = (
        'regauge_run_info{run="b",run_id="1",verb="train",version="0"} 1',
        'regauge_rank_step{run="c",rank="0"} 5',
        'regauge_run_cost_usd_total{run="d"} 101',
        'regauge_run_budget_usd{run="d"} 100',
        "regauge_serve_draining 0",
    )
    return "".join(f"{line}\n" for line in lines)


def render_other_vendors() -> str:
    """Return the metrics of the exporters for Trainium, Gaudi and TPU."""
    seconds = time.time() % 1e6
    lines = (
        'neuroncore_utilization_ratio{neuroncore="1",runtime_tag="7"} 0.8',
        'neuron_runtime_memory_used_bytes{memory_location="neuron_device",runtime_tag="7"} 9e9',
        'neuron_runtime_memory_used_bytes{memory_location="host",runtime_tag="7"} 1e9',
        f'execution_errors_total{{error_type="generic",runtime_tag="7"}} {seconds}',
        'hardware_ecc_events_total{event_type="mem_ecc_uncorrected",neuron_device_index="0"} 0',
        "system_memory_used_bytes 1e9",
        "system_memory_total_bytes 4e9",
        'habanalabs_utilization{device="hl0",UUID="H1"} 70',
        'habanalabs_memory_used_bytes{device="hl0",UUID="H1"} 8e9',
        'habanalabs_memory_total_bytes{device="hl0",UUID="H1"} 9.6e10',
        'habanalabs_clock_soc_mhz{device="hl0",UUID="H1"} 1500',
        'habanalabs_temperature_onchip{device="hl0",UUID="H1"} 55',
        'habanalabs_power_mW{device="hl0",UUID="H1"} 350000',
        'habanalabs_pending_rows_with_double_bit_ecc_errors{device="hl0",UUID="H1"} 0',
        'tpu_mxu_duty_cycle{chip="3"} 42',
        'tpu_hbm_memory_used_bytes{chip="3"} 123456',
        'tpu_ici_drop_packets_total{chip="3"} 0',
    )
    return "".join(f"{line}\n" for line in lines)
