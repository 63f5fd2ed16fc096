"""Every metric exported by Regauge: name, type, labels and meaning.

Names follow the Prometheus conventions: base units, `_total` for counters, `_ratio` for fractions,
and times as timestamps, so that an age is `time() - timestamp`. Labels have few values: they never
contain a step, a text or a request. The label `run` is the name of a run, and `run_id` is unique.

Source of the conventions: https://prometheus.io/docs/practices/naming/
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MetricType = Literal["gauge", "counter", "histogram", "info"]
PREFIX = "regauge"
RUN = ("run", "run_id")
RANK = (*RUN, "rank")
SERVED_MODEL = ("model",)
DEVICE = ("device",)


RunLabels = tuple[str, str]
"""A run's label values, in the order of RUN."""


@dataclass(frozen=True)
class Metric:
    name: str
    """Sample name; a histogram adds `_bucket`, `_sum` and `_count`."""
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    metric: Metric
    value: float
    labels: tuple[str, ...] = ()
    """Label values, in the metric's label order."""


def _gauge(name: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(f"{PREFIX}_{name}", "gauge", text, labels)


def _counter(name: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(f"{PREFIX}_{name}_total", "counter", text, labels)


def _histogram(name: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(f"{PREFIX}_{name}", "histogram", text, labels)


RUN_INFO = Metric(
    f"{PREFIX}_run_info",
    "info",
    "Identity of a run; the value is 1.",
    (*RUN, "verb", "version"),
)
RUN_ATTEMPT = _gauge("run_attempt", RUN, "Number of the current attempt; the first one is 1.")
RUN_FAILURES = _counter("run_failures", (*RUN, "kind"), "Failed attempts by kind of failure.")
RUN_FAILED = _gauge("run_failed", RUN, "Whether the command has failed for good (1) or not (0).")
RUN_COST = _counter("run_cost_usd", RUN, "Cost of the run so far in US dollars.")
RUN_BUDGET = _gauge("run_budget_usd", RUN, "Cost at which the run stops, in US dollars.")
RUN_TIME = _counter("run_time_seconds", (*RUN, "account"), "Time of the run by account.")
RUN_GOODPUT = _gauge("run_goodput_ratio", RUN, "Productive share of the time of the run.")
RUN_PLANNED_STEPS = _gauge("run_planned_steps", RUN, "Number of steps of the whole run.")
RUN_CHECKPOINT_STEP = _gauge("run_checkpoint_step", RUN, "Step of the newest whole checkpoint.")
RUN_CHECKPOINT_TIMESTAMP = _gauge(
    "run_checkpoint_timestamp_seconds", RUN, "Time of the newest whole checkpoint."
)

RANK_ALIVE = _gauge("rank_alive", RANK, "Whether the process of a rank exists (1) or not (0).")
RANK_STOPPED = _gauge(
    "rank_stopped", RANK, "Whether a signal such as SIGSTOP has stopped a rank (1) or not (0)."
)
RANK_PROGRESSING = _gauge(
    "rank_progressing", RANK, "Whether a rank has reported within half of its hang limit (1)."
)
RANK_HEALTHY = _gauge(
    "rank_healthy", RANK, "Whether a rank is not a straggler and its loss is finite (1) or not (0)."
)
RANK_STEP = _gauge("rank_step", RANK, "Number of steps that a rank has done.")
RANK_BEAT_TIMESTAMP = _gauge(
    "rank_beat_timestamp_seconds", RANK, "Time of the last heartbeat of a rank."
)
RANK_STEP_TIMESTAMP = _gauge(
    "rank_step_timestamp_seconds", RANK, "Time at which a rank finished its last step."
)
RANK_PHASE = _gauge("rank_phase", (*RANK, "phase"), "1 for the current phase of a rank.")
RANK_SILENCE_LIMIT = _gauge(
    "rank_silence_limit_seconds", RANK, "Silence after which the attempt ends, in this phase."
)
RANK_MEMORY = _gauge("rank_resident_memory_bytes", RANK, "Resident memory of a rank's process.")
RANK_DEVICE_MEMORY = _gauge(
    "rank_device_memory_bytes", RANK, "Device memory that a rank has allocated at most."
)
RANK_DELAY = _gauge(
    "rank_straggler_delay_seconds", RANK, "Time per step by which a rank delays the others."
)

TRAIN_LOSS = _gauge("train_loss", RUN, "Mean training loss since the last log line.")
TRAIN_GRADIENT_NORM = _gauge("train_gradient_norm", RUN, "Norm of the gradient before clipping.")
TRAIN_LEARNING_RATE = _gauge("train_learning_rate", RUN, "Learning rate of the last step.")
TRAIN_EPOCH = _gauge("train_epoch", RUN, "Passes over the training data so far.")
TRAIN_TOKENS = _counter("train_tokens", RUN, "Tokens that the run was trained on, no padding.")
TRAIN_COMPUTED_TOKENS = _counter("train_computed_tokens", RUN, "Tokens including padding.")
TRAIN_TOKEN_RATE = _gauge("train_tokens_per_second", RUN, "Throughput of tokens, no padding.")
TRAIN_PADDING = _gauge("train_padding_ratio", RUN, "Share of the computed tokens that is padding.")
TRAIN_MFU = _gauge("train_mfu_ratio", RUN, "Model FLOPs utilization of the devices.")
TRAIN_COMPILED_GRAPHS = _counter("train_compiled_graphs", RUN, "Graphs that were compiled.")
TRAIN_SKIPPED_STEPS = _counter(
    "train_skipped_steps",
    RUN,
    "Steps without an update, after a spike or a non-finite gradient.",
)
EVALUATION_SCORE = _gauge(
    "evaluation_score", (*RUN, "metric"), "Last value of a metric of an evaluation."
)

PREDICT_RECORDS = _counter("predict_records", RUN, "Records in finished shards.")
PREDICT_FAILED_RECORDS = _counter("predict_failed_records", RUN, "Records without an output.")
PREDICT_STATES = ("finished", "running", "requeued")
"""Shard states; a shard that has not started is in none of them."""
PREDICT_SHARDS = _gauge(
    "predict_shards", (*RUN, "state"), "Shards by state: finished, running or requeued."
)
PREDICT_WORKERS = _gauge("predict_workers", RUN, "Worker processes.")

SERVE_REQUESTS = _counter(
    "serve_requests",
    ("route", "model", "status"),
    "Answers, but not to probes; routes without a model have an empty one.",
)
SERVE_REQUEST_SECONDS = _histogram(
    "serve_request_seconds", ("route", "model"), "Time from the headers of a request to its answer."
)
SERVE_PHASE_SECONDS = _counter(
    "serve_phase_seconds", ("phase",), "Time of the phases read, tokenize, compute and serialize."
)
SERVE_RECORDS = _counter("serve_records", (), "Computed records.")
SERVE_PADDED_TOKENS = _counter("serve_padded_tokens", (), "Computed tokens, padding included.")
SERVE_TRUNCATED_RECORDS = _counter("serve_truncated_records", (), "Records that were truncated.")
SERVE_BATCH_RECORDS = _histogram("serve_batch_records", (), "Records per batch.")
SERVE_QUEUE_RECORDS = _gauge("serve_queue_records", SERVED_MODEL, "Records that wait in the queue.")
SERVE_QUEUE_SECONDS = _gauge(
    "serve_queue_wait_seconds", SERVED_MODEL, "Expected wait of a new interactive request."
)
SERVE_WORKERS = _gauge("serve_workers", SERVED_MODEL, "Ready worker processes of a loaded model.")
SERVE_DRAINING = _gauge(
    "serve_draining", (), "Whether the server refuses new requests and will end (1) or not (0)."
)
SERVE_MODEL_INFO = Metric(
    f"{PREFIX}_serve_model_info", "info", "Served version of a model.", ("model", "version")
)
SERVE_FIRST_TOKEN_SECONDS = _histogram(
    "serve_time_to_first_token_seconds",
    SERVED_MODEL,
    "Time from a request to the first token of an answer.",
)
SERVE_PROMPT_TOKENS = _counter(
    "serve_prompt_tokens", SERVED_MODEL, "Prompt tokens of the answers with a first token."
)
SERVE_GENERATION_TOKENS = _counter(
    "serve_generation_tokens", SERVED_MODEL, "Generated tokens, without end tokens."
)
SERVE_KV_CACHE_BLOCKS = _gauge(
    "serve_kv_cache_blocks", SERVED_MODEL, "Blocks of the key-value caches of all workers."
)
SERVE_KV_CACHE_USAGE = _gauge(
    "serve_kv_cache_usage_ratio", SERVED_MODEL, "Share of these blocks that running answers use."
)

DEVICE_UTILIZATION = _gauge("device_utilization_ratio", DEVICE, "Share of time that it computes.")
DEVICE_MEMORY_USED = _gauge("device_memory_used_bytes", DEVICE, "Used device memory.")
DEVICE_MEMORY_TOTAL = _gauge("device_memory_total_bytes", DEVICE, "Size of the device memory.")
DEVICE_POWER = _gauge("device_power_watts", DEVICE, "Power draw.")
DEVICE_TEMPERATURE = _gauge("device_temperature_celsius", DEVICE, "Temperature of the chip.")
DEVICE_ERRORS = _counter(
    "device_errors", DEVICE, "Errors that the driver logs, or uncorrected memory errors."
)
DEVICE_ERROR_CODE = _gauge(
    "device_error_code", DEVICE, "Code of the driver's last error (XID); 0 without one."
)

METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
"""All metrics, in file order."""


def build_table() -> str:
    """Return the table of metrics in Markdown, shown in docs/guides/monitoring.md."""
    lines = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.type} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"
