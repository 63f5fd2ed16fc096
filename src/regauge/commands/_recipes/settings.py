"""Builds a recipe's tables from a data file and a model, and writes its run file."""

from __future__ import annotations

import json
import math
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.commands._recipes import field_choice
from regauge.commands._recipes.data_file import (
    DataFile,
    FieldSummary,
    describe_source,
    read_data_file,
)
from regauge.config import build, dump, read_saved_run
from regauge.config.output_files import SAVED_RUN
from regauge.config.toml_format import format_key, format_toml
from regauge.data.dataset import read_manifest
from regauge.data.settings import RowLayout
from regauge.system.errors import SettingsError
from regauge.system.json_files import find_json
from regauge.training.settings import TrainSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Tables = dict[str, Any]
DEFAULT_TOKENS = 128
"""A text field's token limit if a run file does not name one."""
MAX_TOKENS, TOKEN_STEP = 512, 32
"""Largest recipe token limit, and the multiple to which limits are rounded up."""
SPECIAL_TOKENS = 2
MIN_STEPS = 200
"""Minimum steps for a model with random weights on small data."""
FINE_TUNING_EPOCHS, MAX_EPOCHS = 3, 40
SMALL_DATA, SMALL_DATA_HELDOUT = 5000, 0.1
"""Records below which a larger fraction is held out, to give metrics enough records."""
MIN_BATCH_ROWS, MIN_STEPS_PER_EPOCH = 8, 8
"""Smallest global batch for small data, and the minimum steps per epoch."""
EVALUATIONS, UNKNOWN_EVERY_STEPS = 5, 100
"""Evaluations in a run on small data, and the steps between two on data of unknown size."""
CSV = "output.format=csv"
TRIPLET_KEYS = ("anchor", "positive", "negative")
MAX_NORM_ERROR = 1e-3
"""Largest deviation at which a teacher's vector has length 1."""
MIN_CHAT_TOKENS = 256
"""Minimum conversation length in tokens."""
WIDTH = 256
ENCODER = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 1024}
DECODER = {**ENCODER, "num_key_value_heads": 4}
MAX_LINE = 100
EXAMPLES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lm": ("text", "texts.txt", {"text": "A text."}),
    "classify": ("csv", "train.csv", {"text": "A text.", "label": "positive"}),
    "tokens": ("conll", "train.conll", {"tokens": ["Ada", "works"], "tags": ["B-PER", "O"]}),
    "embed": ("jsonl", "pairs.jsonl", {"query": "A question?", "document": "Its answer."}),
    "triplet": ("jsonl", "triplets.jsonl", dict.fromkeys(("anchor", "positive", "negative"), "A.")),
    "similarity": ("csv", "graded.csv", {"sentence1": "A.", "sentence2": "B.", "score": 0.5}),
    "distill": (
        "parquet",
        "vectors.parquet",
        {"text": "A text.", "embedding": [1.0, *[0.0] * 255]},
    ),
    "sft": ("jsonl", "chats.jsonl", {"messages": [{"role": "user", "content": "Hello!"}]}),
    "dpo": ("jsonl", "choices.jsonl", dict.fromkeys(("prompt", "chosen", "rejected"), "A text.")),
    "mlm": ("text", "texts.txt", {"text": "A text."}),
    "rank": ("jsonl", "results.jsonl", {"query": "words", "document": "A text.", "label": 1.0}),
    "increment": ("jsonl", "new.jsonl", {"text": "A text."}),
}
"""Recipe -> source kind, file and record assumed if no data file is named."""


class Recipe(NamedTuple):
    """A run file's tables, in order, and the command for using the trained model."""

    tables: Tables
    use: str


class Job(NamedTuple):
    name: str
    """Run file name without its suffix; also names the output folders."""
    data: DataFile
    model: str | None
    """Folder or hub name of the initial weights; None for random weights."""
    validation: Tables | None = None
    """The `source` table of the held-out records, if they are in another file."""

    @property
    def file(self) -> str:
        """Data file path."""
        return str(self.data.source["files"][0])

    @property
    def folder(self) -> str:
        return f"out/{self.name}"


def build_lm(job: Job) -> Recipe:
    """Return a causal language model trained on documents."""
    tables = _describe_documents(job, "clm", _describe_decoder(256))
    return Recipe(tables, _format_command("generate", job.folder, "--prompt", "The"))


def build_mlm(job: Job) -> Recipe:
    """Return a masked language model trained on documents."""
    tables = _describe_documents(job, "mlm", _describe_encoder(256))
    return Recipe(tables, _format_command("evaluate", job.folder))


def _describe_documents(job: Job, task: str, model: Tables) -> Tables:
    text = field_choice.find_text(job.data)
    length = 256
    rows = {"layout": "packed", "length": length, **({} if text == "text" else {"text": text})}
    values = job.data.fields[text].values
    tokens = sum(FieldSummary([str(value)]).num_tokens for value in values)
    return {
        **_describe_data(job, rows, vocab_size=4096),
        "task": {"kind": task},
        **_describe_training(job, 16, tokens / length, model),
    }


def build_classify(job: Job) -> Recipe:
    """Return a text classifier."""
    label = field_choice.find_label(job.data)
    text = field_choice.find_text(job.data, {label})
    task = {"kind": "classify", "text_fields": [text], "label": label}
    limits = _limit_tokens(job.data, text)
    rows = {"layout": "fields", "fields": limits, "labels": [label]}
    return _build_fields_recipe(job, task, rows, options=[CSV])


def build_embed(job: Job) -> Recipe:
    """Return a text embedding encoder trained on pairs."""
    query, document = field_choice.find_pair(job.data)
    negatives = field_choice.find_negatives(job.data)
    task: Tables = {"kind": "contrastive", "query": query, "document": document}
    if negatives:
        task["negatives"] = negatives
    rows = {"layout": "fields", "fields": _limit_tokens(job.data, query, document, *negatives)}
    texts = f"predict.text_fields={json.dumps([document], ensure_ascii=False)}"
    return _build_fields_recipe(job, task, rows, batch_rows=64, options=[texts])


def build_tokens(job: Job) -> Recipe:
    """Return a classifier of words, such as named entities."""
    words, tags = field_choice.find_tagged(job.data)
    task: Tables = {"kind": "tokens", "words": words, "tags": tags}
    rows = {"layout": "tagged", "fields": _limit_tokens(job.data, words), "labels": [tags]}
    tables = _build_fields_recipe(job, task, rows).tables
    return Recipe(tables, _format_command("evaluate", job.folder))


def build_triplet(job: Job) -> Recipe:
    """Return text embeddings trained on triplets."""
    texts = field_choice.find_triplet(job.data)
    task: Tables = {"kind": "triplet", **dict(zip(TRIPLET_KEYS, texts, strict=True))}
    return _build_vectors_recipe(job, task, texts)


def build_similarity(job: Job) -> Recipe:
    """Return text embeddings trained on graded pairs."""
    label = field_choice.find_score(job.data)
    texts = field_choice.find_pair(job.data, {label})
    task: Tables = {"kind": "similarity", "text_fields": list(texts), "label": label}
    return _build_vectors_recipe(job, task, texts, floats=[label])


def build_distill(job: Job) -> Recipe:
    """Return a text encoder that learns a teacher's vectors."""
    vector = field_choice.find_vector(job.data)
    text = field_choice.find_text(job.data, {vector})
    example: Any = job.data.fields[vector].values[0]
    task: Tables = {"kind": "distill", "text_fields": [text], "vector": vector}
    if not math.isclose(math.hypot(*example), 1, rel_tol=MAX_NORM_ERROR):
        task["normalize"] = False
    recipe = _build_vectors_recipe(job, task, (text,), vectors=[vector])
    if job.model is None:
        heads = math.gcd(len(example), ENCODER["num_attention_heads"])
        size = {"hidden_size": len(example), "num_attention_heads": heads}
        recipe.tables["model"]["config"] |= size
    return recipe


def build_dpo(job: Job) -> Recipe:
    """Return a causal model trained on preferences, with LoRA if it has weights."""
    field_choice.check_preferences(job.data)
    return _build_chat_recipe(job, "dpo", "preferences")


def build_sft(job: Job) -> Recipe:
    """Return a causal model fine-tuned on conversations, with LoRA if it has weights."""
    field_choice.check_conversations(job.data)
    return _build_chat_recipe(job, "sft", "chat")


def _build_chat_recipe(job: Job, task: str, layout: str) -> Recipe:
    tokens = sum(field.num_tokens for field in job.data.fields.values())
    length = max(_round_tokens(tokens), MIN_CHAT_TOKENS)
    rows: Tables = {"layout": layout, "length": length}
    if job.model is None or not _has_chat_template(job.model):
        rows["chat_template"] = "alpaca"
    tables = {
        **_describe_data(job, rows, vocab_size=4096),
        "task": {"kind": task},
        **_describe_training(job, 16, job.data.num_records, _describe_decoder(length)),
    }
    if job.model is not None:
        tables["model"]["lora"] = {"rank": 16}
    return Recipe(tables, _format_command("generate", job.folder))


def build_rank(job: Job) -> Recipe:
    """Return a ranker for query candidates."""
    label = field_choice.find_label(job.data, field_choice.RELEVANCE_NAMES)
    group = field_choice.find_group(job.data)
    query, document = field_choice.find_pair(job.data, {label, group or label})
    task: Tables = {"kind": "rank", "query": [query], "document": [document], "label": label}
    if features := field_choice.find_features(job.data, {label, query, document}):
        task["numeric_features"] = features
    rows = {
        "layout": "groups",
        "group_by": group or query,
        "shared": [query],
        "fields": _limit_tokens(job.data, query, document),
        "floats": [label, *features],
    }
    return _build_fields_recipe(job, task, rows, batch_rows=16, options=[CSV])


def build_increment(job: Job) -> Recipe:
    """Return training that continues an earlier run on new data, mixed with the old data."""
    if job.model is None or not (Path(job.model) / SAVED_RUN).is_file():
        raise SettingsError("an increment continues a run", "name its output folder with --model")
    run = build(TrainSettings, read_saved_run(Path(job.model)))
    if len(run.task_configs) > 1:
        raise SettingsError(f"{job.model} has several tasks", "name a run with one task")
    old = _find_dataset(run.data.path, Path(job.model))
    rows = build(RowLayout, read_manifest(Path(old)).settings["rows"])
    data = f"{job.folder}-data"
    tables = {
        **_describe_sources(job),
        "tokenizer": {"path": f"{old}/tokenizer"},
        "rows": dump(rows, with_defaults=False),
        **_hold_out(job),
        "data": {"path": data, "mix": [{"path": old, "fraction": 0.5, "name": "old"}]},
        "task": dump(run.task_configs[0].task, with_defaults=False),
        "model": {"init_from": {"path": job.model, "optimizer": "reset", "schedule": "restart"}},
        "batch": {"rows": run.batch.rows},
        "stop": {"epochs": FINE_TUNING_EPOCHS},
        "output": {"folder": job.folder},
    }
    return Recipe(tables, _format_command("evaluate", job.folder))


BUILDERS: dict[str, Callable[[Job], Recipe]] = {
    "lm": build_lm,
    "mlm": build_mlm,
    "classify": build_classify,
    "tokens": build_tokens,
    "embed": build_embed,
    "triplet": build_triplet,
    "similarity": build_similarity,
    "distill": build_distill,
    "sft": build_sft,
    "dpo": build_dpo,
    "rank": build_rank,
    "increment": build_increment,
}
"""Recipe name -> builder."""
JOBS = {
    "classification": ("classify", "tokens"),
    "search and vectors": ("embed", "triplet", "similarity", "distill", "rank"),
    "language models": ("lm", "mlm", "sft", "dpo"),
    "new data": ("increment",),
}
"""Job -> recipes."""
DESCRIPTIONS = {
    "lm": "A language model of your texts, from scratch or from a model",
    "classify": "A classifier of texts, with the names of your classes",
    "tokens": "A classifier of words, such as names of persons and places",
    "embed": "Text embeddings for search, from pairs of texts",
    "triplet": "Text embeddings from a text, a matching one and another one",
    "similarity": "Text embeddings from pairs of texts with a grade",
    "distill": "A small text encoder that learns the vectors of a larger one",
    "mlm": "A masked language model of your texts, to start other jobs from",
    "dpo": "Preference optimization of a causal model on chosen and rejected answers",
    "sft": "Supervised fine-tuning of a causal model on conversations, with LoRA for a start model",
    "rank": "A ranker of search results or items, from texts and numbers",
    "increment": "An earlier run continues with new data",
}


def _build_fields_recipe(
    job: Job, task: Tables, rows: Tables, *, batch_rows: int = 32, options: Sequence[str] = ()
) -> Recipe:
    """Return an encoder recipe; `rows` is left out if it is the task's default.

    `options` are overrides for the predicting command.
    """
    limits = rows["fields"].values()
    is_default = set(limits) == {DEFAULT_TOKENS} and rows.get("group_by") in rows.get(
        "shared", [None]
    )
    length = sum(limits) if task["kind"] == "rank" else max(limits)
    tables = {
        **_describe_data(job, {} if is_default else rows, vocab_size=4096),
        "task": task,
        **_describe_training(
            job, batch_rows, job.data.num_records, _describe_encoder(max(length, DEFAULT_TOKENS))
        ),
    }
    words = ["predict", job.folder, "--source", job.file, "--to", f"{job.folder}-output"]
    return Recipe(tables, _format_command(*words, *options))


def _build_vectors_recipe(job: Job, task: Tables, texts: Sequence[str], **rows: Any) -> Recipe:
    """Return an encoder recipe whose last command writes the vectors of the last text field."""
    limits = _limit_tokens(job.data, *texts)
    fields = f"predict.text_fields={json.dumps([texts[-1]], ensure_ascii=False)}"
    layout = {"layout": "fields", "fields": limits, **rows}
    return _build_fields_recipe(job, task, layout, options=[fields])


def _find_dataset(path: str, run: Path) -> str:
    """Return a run's dataset; its path may be relative to a folder above the run."""
    from regauge.data.unprepared import is_prepared

    folders = (Path(), *(Path(os.path.relpath(parent)) for parent in run.resolve().parents))
    datasets = (folder / path for folder in folders)
    return str(next((folder for folder in datasets if is_prepared(folder)), path))


def _format_command(*words: str) -> str:
    return shlex.join(["regauge", *words])


def _describe_data(job: Job, rows: Tables, vocab_size: int) -> Tables:
    tables: Tables = {**_describe_sources(job), "data": {"path": f"{job.folder}-data"}}
    if rows:
        tables["rows"] = rows
    if job.model is None:
        tables["tokenizer"] = {"vocab_size": vocab_size}
    return {**tables, **_hold_out(job)}


def _describe_sources(job: Job) -> Tables:
    """Return the tables of the records; a validation file has only the keys that differ."""
    source, other = job.data.source, job.validation
    if other is None:
        return {"source": source}
    is_alike = {**source, "files": ()} == {**other, "files": ()}
    return {
        "source": source,
        "validation": {"source": {"files": other["files"]} if is_alike else other},
    }


def _hold_out(job: Job) -> Tables:
    """Return the `split` table for small data without a validation file, or nothing."""
    if job.validation is not None:
        return {}
    if job.data.is_complete and job.data.num_records < SMALL_DATA:
        return {"split": {"heldout_fraction": SMALL_DATA_HELDOUT}}
    return {}


def _describe_training(job: Job, batch_rows: int, num_rows: float, model: Tables) -> Tables:
    rows, epochs, every = batch_rows, FINE_TUNING_EPOCHS, UNKNOWN_EVERY_STEPS
    if job.data.is_complete:
        while rows > MIN_BATCH_ROWS and num_rows < MIN_STEPS_PER_EPOCH * rows:
            rows //= 2
        steps_per_epoch = max(num_rows / rows, 1)
        if job.model is None:
            epochs = max(epochs, min(math.ceil(MIN_STEPS / steps_per_epoch), MAX_EPOCHS))
        every = max(round(epochs * steps_per_epoch / EVALUATIONS), 1)
    return {
        "model": {"path": job.model} if job.model else model,
        "batch": {"rows": rows},
        "stop": {"epochs": epochs},
        "evaluation": {"every_steps": every},
        "output": {"folder": job.folder},
    }


def _describe_encoder(length: int) -> Tables:
    config = {"hidden_size": WIDTH, **ENCODER, "max_position_embeddings": length}
    return {"architecture": "bert", "config": config}


def _describe_decoder(length: int) -> Tables:
    config = {"hidden_size": WIDTH, **DECODER, "max_position_embeddings": length}
    return {"architecture": "llama", "config": config}


def _limit_tokens(data: DataFile, *names: str) -> dict[str, int]:
    """Return each text field's token limit: at least the default, rounded up."""
    limits = {name: _round_tokens(data.fields[name].num_tokens + SPECIAL_TOKENS) for name in names}
    return {name: max(limit, DEFAULT_TOKENS) for name, limit in limits.items()}


def _round_tokens(tokens: int) -> int:
    return min(math.ceil(tokens / TOKEN_STEP) * TOKEN_STEP, MAX_TOKENS)


def _has_chat_template(model: str) -> bool:
    """Return whether a local model has a chat template; a hub model's is unknown."""
    folder = Path(model)
    if not folder.is_dir() or (folder / "chat_template.jinja").exists():
        return True
    config = find_json(folder / "tokenizer_config.json", "replace it") or {}
    return "chat_template" in config


def write_recipe(
    name: str,
    run_file: str,
    data: Path | None,
    model: str | None,
    validation: Path | None = None,
) -> str:
    """Return a recipe's run file.

    `run_file` is its path; the output folders share its name. `data` is a record file; without one,
    the fields have common names. `model` is a folder or a name on the Hugging Face Hub, and
    `validation` a file with the held-out records.
    """
    heldout = None if validation is None else describe_source(validation, "--validation")
    if data is None:
        kind, file, record = EXAMPLES[name]
        fields = {field: FieldSummary([value]) for field, value in record.items()}
        contents = DataFile({"kind": kind, "files": (file,)}, 1, is_complete=False, fields=fields)
        note = f"# Its data is {file}, with the fields: {', '.join(record)}."
    else:
        contents, note = read_data_file(data), ""
    recipe = BUILDERS[name](Job(Path(run_file).stem, contents, model, heldout))
    return "\n".join([*_format_header(name, run_file, recipe, note), *format_tables(recipe.tables)])


def _format_header(name: str, run_file: str, recipe: Recipe, note: str) -> list[str]:
    return [
        f"# {DESCRIPTIONS[name]}.",
        *([note] if note else []),
        "#",
        *(f"#   regauge {verb} {shlex.quote(run_file)}" for verb in ("prepare", "train")),
        f"#   {recipe.use}",
        "",
    ]


def format_tables(tables: dict[str, Any]) -> list[str]:
    """Return TOML lines; a table is one line if it is short enough."""
    lines = []
    for name, value in tables.items():
        line = f"{name} = {format_toml(value)}"
        if isinstance(value, dict) and (len(value) == 1 or len(line) > MAX_LINE):
            lines += [
                f"{name}.{format_key(key)} = {format_toml(item)}" for key, item in value.items()
            ]
        else:
            lines.append(line)
    return [*lines, ""]
