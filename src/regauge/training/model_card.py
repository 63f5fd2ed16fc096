"""Model cards: a model folder's README.md, built from the run's documents.

The metadata at the top follows https://huggingface.co/docs/hub/model-cards. The same run gives the
same bytes. A card ends with its hash, so a README written or edited by somebody is not lost.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.utils import yaml_dump  # type: ignore[attr-defined]
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from regauge.config import RUN_IDENTITY
from regauge.config.output_files import ATTEMPTS, ENVIRONMENT, RESULT, SAVED_RUN
from regauge.config.run_names import name_run
from regauge.data.dataset import MANIFEST
from regauge.machines.catalog import find_price
from regauge.machines.settings import Price
from regauge.run_folders import formatting
from regauge.run_folders.documents import AttemptLine
from regauge.run_folders.run_folder import read_model_metrics
from regauge.system import jsonl
from regauge.system.files import write_atomic
from regauge.system.json_files import find_json
from regauge.system.log import logger
from regauge.system.wording import format_count

README, TEMPLATE = "README.md", "model_card.md.jinja"
REMEDY = "copy the folder again"
_MARK = re.compile(r"\n<!-- Regauge model card ([0-9a-f]{64}) -->\n\Z")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_IGNORED_METRICS = {"items"}

PIPELINES = {
    "ForMaskedLM": "fill-mask",
    "ForPreTraining": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
}
"""transformers class name suffix -> Hub pipeline."""
PEFT_CLASSES = {
    "CAUSAL_LM": "AutoPeftModelForCausalLM",
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
}
"""Adapter task type -> peft class."""


@dataclass(frozen=True)
class _Model:
    library: str
    pipeline: str | None = None
    tags: tuple[str, ...] = ()
    peft_class: str = ""
    num_labels: int = 0
    """Classes of an adapter's classifier; 0 for other models."""
    has_usage: bool = True
    """Whether a library loads the folder without further code."""


@dataclass(frozen=True)
class _Run:
    name: str
    settings: dict[str, Any]
    packages: dict[str, str]
    last_attempt: dict[str, Any]
    result: dict[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)


def write_card(
    run: Path, folder: Path, result: dict[str, Any] | None = None, step: int | None = None
) -> None:
    """Write a model folder's card; a README that is not a card is kept and logged.

    `result` is the result of a run that ends now; by default it is read. `step` is the step of the
    weights, by default the final model's.
    """
    target = folder / README
    if target.exists() and not is_card(target.read_text(encoding="utf-8", errors="replace")):
        logger.warning("%s was not written by Regauge and is kept; no model card", target)
        return
    write_atomic(target, render_card(run, folder, result, step))


def is_card(text: str) -> bool:
    match = _MARK.search(text)
    return match is not None and match[1] == _hash(text[: match.start()])


def render_card(
    run: Path, folder: Path, result: dict[str, Any] | None = None, step: int | None = None
) -> str:
    facts = _read_run(run, result, step)
    task = _select_task(facts.settings, folder)
    model = _describe_model(folder)
    step = step if step is not None else facts.result.get("model_step")
    metrics = _select_metrics(facts.metrics, task.get("name"))
    datasets = _list_datasets(facts.settings, task)
    text = _template().render(
        metadata=_render_metadata(facts, model, task, metrics, datasets),
        name=facts.name,
        summary=_describe_purpose(model, task),
        model=model,
        datasets=[_describe_dataset(path) for path in datasets],
        metrics={key: formatting.number(metrics[key]) for key in metrics},
        step=formatting.number(step),
        training=_list_training(facts, task, step),
        cost=_list_cost(facts),
        lineage=_list_lineage(facts),
    )
    body = re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"
    return f"{body}\n<!-- Regauge model card {_hash(body)} -->\n"


def _hash(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _template() -> Any:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(  # noqa: S701 - the output is Markdown, not HTML
        loader=loader, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template(TEMPLATE)


def _read_run(run: Path, result: dict[str, Any] | None, step: int | None) -> _Run:
    result = result or find_json(run / RESULT, REMEDY) or {}
    environment = find_json(run / ENVIRONMENT, REMEDY) or {}
    return _Run(
        name=name_run(run),
        settings=find_json(run / SAVED_RUN, REMEDY) or {},
        packages=environment.get("packages", {}),
        last_attempt=jsonl.read_last_line(run / ATTEMPTS, AttemptLine) or {},
        result=result,
        metrics=read_model_metrics(run, result, step),
    )


def _select_task(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the table of the task trained in a folder: `tasks/<name>/model`, or the first."""
    tasks = settings.get("task", {})
    if isinstance(tasks, dict):
        return tasks
    by_name = {task["name"]: task for task in tasks}
    return dict(by_name.get(folder.parent.name, tasks[0]))


def _select_metrics(metrics: dict[str, float], task: str | None) -> dict[str, float]:
    """Return a task's held-out metrics, sorted by name, without the counts."""
    prefixes = ("heldout/",) if task is None else (f"heldout.{task}/", f"heldout.{task}.")
    return {
        name: value
        for name, value in sorted(metrics.items())
        if name.startswith(prefixes) and name.rpartition("/")[2] not in _IGNORED_METRICS
    }


def _describe_model(folder: Path) -> _Model:
    adapter = find_json(folder / "adapter_config.json", REMEDY)
    if adapter is not None:
        name = PEFT_CLASSES.get(str(adapter.get("task_type")), "AutoPeftModel")
        merged = find_json(folder.with_name("model") / "config.json", REMEDY) or {}
        labels = merged.get("id2label", ()) if name == PEFT_CLASSES["SEQ_CLS"] else ()
        return _Model("peft", tags=("lora",), peft_class=name, num_labels=len(labels))
    config = find_json(folder / "config.json", REMEDY) or {}
    has_documents = (folder / "documents" / "config.json").is_file()
    if (folder / "modules.json").is_file() and not has_documents:
        pipeline = "sentence-similarity"
        tags = ("sentence-transformers", "feature-extraction")
        return _Model("sentence-transformers", pipeline, tags)
    (name,) = (config.get("architectures") or [""])[:1]
    matches = [pipeline for end, pipeline in PIPELINES.items() if name.endswith(end)]
    is_plain = not has_documents and not (folder / "head.safetensors").is_file()
    if matches and is_plain:
        return _Model("transformers", matches[0])
    return _Model("regauge", has_usage=bool(name))


def _render_metadata(
    facts: _Run,
    model: _Model,
    task: dict[str, Any],
    metrics: dict[str, float],
    datasets: list[Path],
) -> str:
    """Return the YAML front matter; unknown values are left out."""
    sources = [source for path in datasets for source in _list_sources(_read_manifest(path))]
    hub_datasets = sorted({str(s["name"]) for s in sources if _is_hub_dataset(s)})
    start = str(facts.settings.get("model", {}).get("path") or "")
    results = [
        {"type": name.partition("/")[2], "name": name, "value": value}
        for name, value in metrics.items()
    ]
    evaluation = {
        "task": {"type": model.pipeline or str(task.get("kind"))},
        "dataset": {"type": ", ".join(hub_datasets) or "custom", "name": "held-out rows"},
        "metrics": results,
    }
    index = [{"name": facts.name, "results": [evaluation]}] if results else None
    table = {
        "library_name": model.library,
        "pipeline_tag": model.pipeline,
        "base_model": start if _is_hub_name(start) else None,
        "tags": ["regauge", *model.tags, str(task.get("kind"))],
        "datasets": hub_datasets,
        "model-index": index,
    }
    known = {key: value for key, value in table.items() if value}
    return str(yaml_dump(known, sort_keys=False))


def _is_hub_name(path: str) -> bool:
    return bool(_HUB_NAME.fullmatch(path)) and not Path(path).exists()


def _is_hub_dataset(source: dict[str, Any]) -> bool:
    return source.get("kind") == "huggingface" and _is_hub_name(str(source.get("name")))


def _describe_purpose(model: _Model, task: dict[str, Any]) -> str:
    kinds = {"peft": "LoRA adapters", "sentence-transformers": "A sentence encoder"}
    subject = kinds.get(model.library, "A transformer model")
    return f"{subject}, trained by Regauge on the task `{task.get('kind')}`."


def _list_datasets(settings: dict[str, Any], task: dict[str, Any]) -> list[Path]:
    data = {**settings.get("data", {}), **(task.get("data") or {})}
    mixed = [entry["path"] for entry in data.get("mix") or () if entry.get("path")]
    paths = [path for path in (data.get("path"), *mixed) if path]
    return [Path(path) for path in paths]


def _read_manifest(path: Path) -> dict[str, Any]:
    return find_json(path / MANIFEST, REMEDY) or {}


def _list_sources(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    source = manifest.get("settings", {}).get("source", ())
    return [source] if isinstance(source, dict) else list(source)


def _describe_dataset(path: Path) -> dict[str, str]:
    manifest = _read_manifest(path)
    rows = {f"`{path}`": "dataset"}
    for name, split in manifest.get("splits", {}).items():
        shards = split.get("shards", ())
        count, tokens = split["rows"], sum(shard.get("tokens", 0) for shard in shards)
        texts = (format_count(count, "row"), format_count(tokens, "token"))
        rows[f"split `{name}`"] = ", ".join(texts)
    for source in _list_sources(manifest):
        names = source.get("files") or source.get("roots") or source.get("name") or ""
        names = [names] if isinstance(names, str) else names
        rows[f"source `{source.get('kind')}`"] = ", ".join(f"`{name}`" for name in names) or "-"
    return rows


def _list_training(facts: _Run, task: dict[str, Any], step: int | None) -> dict[str, str]:
    settings, attempt = facts.settings, facts.last_attempt
    execution = settings.get("execution", {})
    batch = {**settings.get("batch", {}), **(task.get("batch") or {})}
    optimizer = settings.get("optimizer", {})
    accelerator = (settings.get("accelerator") or {}).get("kind", formatting.UNKNOWN)
    processes = attempt.get("processes") or execution.get("processes") or 1
    machines = format_count(attempt.get("nodes") or 1, "machine")
    return {
        "task": f"`{task.get('kind')}`",
        "steps": formatting.number(step),
        "rows of a step": formatting.number(batch.get("rows")),
        "optimizer": f"`{optimizer.get('kind')}`",
        "learning rate": f"{optimizer.get('learning_rate')}",
        "precision": str(execution.get("precision", formatting.UNKNOWN)),
        "hardware": f"`{accelerator}`, {format_count(processes, 'process')}, {machines}",
        "strategy": f"`{(settings.get('strategy') or {}).get('kind', 'single')}`",
        "seed": str(settings.get("seed")),
    }


def _list_cost(facts: _Run) -> dict[str, str]:
    result = facts.result
    table = facts.settings.get("execution", {}).get("price") or {}
    price = find_price(Price.model_validate(table))
    rows = {
        "tokens": formatting.number(facts.result.get("tokens")),
        "training time": formatting.duration(result.get("seconds")),
        "machine time": formatting.duration(result.get("machine_seconds")),
        "dollars": formatting.dollars(result.get("usd")),
    }
    if price is not None:
        rows["price of a machine"] = price.description
    return rows


def _list_lineage(facts: _Run) -> dict[str, str]:
    settings, identity = facts.settings, facts.settings.get(RUN_IDENTITY, {})
    model = settings.get("model", {})
    origin = model.get("init_from") or {}
    rows = {"run": f"`{identity.get('run_id')}`"}
    if model.get("path"):
        rows["initial weights"] = f"`{model['path']}`"
    else:
        rows["initial weights"] = f"random, `{model.get('architecture')}`"
    if origin:
        rows["earlier run"] = f"`{origin.get('path')}`, step {origin.get('step', 'final')}"
    rows["hash of the initial weights"] = f"`{identity.get('weights_checksum')}`"
    rows["fingerprint of the data"] = f"`{identity.get('data_fingerprint')}`"
    return rows | {f"version of {name}": number for name, number in facts.packages.items()}
