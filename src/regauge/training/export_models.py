"""Writes the final models as folders that transformers loads.

model/                  the model of the only task, or the first one
tasks/<name>/model/     the other tasks' models
"""

from __future__ import annotations

import copy
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.models import architectures, dual_encoder, heads, lora, sentence_transformers, weights
from regauge.models.custom import CustomModule
from regauge.models.modules import Encoder
from regauge.models.multitask import modules_by_task
from regauge.models.tensors import find_tied_weights
from regauge.models.text_form import TextUse, write_text_form
from regauge.system.errors import SettingsError
from regauge.system.files import check_own_folder
from regauge.system.hub import record_step, resolve_model
from regauge.training.run_record import TASKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from regauge.models.modules import TextModule
    from regauge.models.settings import Model
    from regauge.training.context import RunContext
    from regauge.training.state import TrainState
    from regauge.training.task_runtime import TaskRuntime

INNER_PREFIX = "model."
"""Name prefix of the transformers model in a task's module."""


def write_models(context: RunContext, state: TrainState, step: int) -> None:
    """Write each task's model; every process calls this.

    Each model's configuration records `step`, the step of the weights.
    """
    main_task, *other_tasks = context.tasks
    write_model(context, state, main_task, context.folder / "model", step)
    for task in other_tasks:
        write_model(context, state, task, context.folder / TASKS / task.name / "model", step)


def write_model(
    context: RunContext, state: TrainState, task: TaskRuntime, folder: Path, step: int
) -> None:
    """Write one task's model, and the step of its weights; every process calls this.

    A text encoder is also described for sentence-transformers. The first process holds at most one
    file's weights at a time. LoRA adapters are merged, and also saved in a separate folder.
    """
    module = modules_by_task(state.model.module)[task.name]
    run_names = {id(value): name for name, value in state.model.module.named_parameters()}
    names = {name: run_names[id(value)] for name, value in module.named_parameters()}
    trained_names = [name for name, value in module.named_parameters() if value.requires_grad]
    adapters: dict[str, Tensor] = {}
    trained = ((name, state.model.full_tensor(names[name])) for name in trained_names)
    if not context.world.is_main_process:
        deque(trained, maxlen=0)
        return
    for output in (folder, folder.with_name(lora.ADAPTER_FOLDER)):
        check_own_folder(output)
    if context.settings.model.lora:
        adapters = dict(trained)
        all_weights = lora.merge_adapters(state.initial_weights, adapters)
    else:
        frozen_names = {names[name]: name for name in names.keys() - set(trained_names)}
        all_weights = _add_frozen(state, trained, frozen_names)
    _write_folder(context, task, module, all_weights, folder)
    record_step(folder, step)
    if adapters:
        _save_adapters(context.settings.model, module, adapters, folder)
    if isinstance(module, Encoder):
        tokenization = sentence_transformers.Tokenization(
            max_length=_find_max_length(task, module) or task.bucket_lengths[-1],
            truncation_side=task.manifest.tokenizer.truncation_side,
            prompts=task.task.export_prompts(task.manifest),
        )
        description = sentence_transformers.SentenceEncoder(
            tokenization=tokenization, pooling=module.pooling
        )
        inner: Any = module.model
        width = inner.config.hidden_size
        arguments = architectures.no_pooler_argument(architectures.transformers_class(inner))
        sentence_transformers.write_description(folder, description, width, arguments)


def _save_adapters(
    settings: Model, module: TextModule, trained: dict[str, Tensor], merged: Path
) -> None:
    root = merged.with_name(lora.ADAPTER_FOLDER)
    for folder, prefix, model in dual_encoder.iterate_encoders(module, root):
        adapters = {
            name.removeprefix(prefix): value
            for name, value in trained.items()
            if name.startswith(prefix)
        }
        blocks = architectures.find_blocks(model)
        lora.save_adapters(
            folder,
            model,
            settings,
            adapters,
            blocks=blocks,
            model_class=architectures.transformers_class(model),
            merged=merged,
        )


def _write_folder(
    context: RunContext,
    task: TaskRuntime,
    module: TextModule,
    all_weights: Iterator[tuple[str, Tensor]],
    folder: Path,
) -> None:
    inner: Any = module.model
    document_encoder = dual_encoder.DualEncoderWriter(folder)
    buffers = module.named_buffers()
    head = {name: value.cpu() for name, value in buffers if heads.is_head_weight(name)}

    def model_weights() -> Iterator[tuple[str, Tensor]]:
        for name, value in document_encoder.split_off(all_weights):
            if heads.is_head_weight(name):
                head[name] = value
            else:
                yield name.removeprefix(INNER_PREFIX), value

    config, start = copy.deepcopy(inner.config), _find_start(context)
    if start is not None:
        architectures.restore_dropout(config, start)
    config.architectures = [architectures.class_name(inner)]
    if lora.adapts_tied_layers(find_tied_weights(inner)):
        config.tie_word_embeddings = False
    tokenizer = _find_tokenizer(context, task)
    weights.save_model_folder(folder, config, model_weights(), tokenizer)
    document_encoder.finish(config, tokenizer)
    heads.write_head(folder, head)
    use = None
    if not isinstance(module, CustomModule):
        use = TextUse(
            tokenizer,
            task.manifest.tokenizer,
            _find_max_length(task, module),
            is_generative=task.task.generative,
            has_special_tokens=task.task.has_special_tokens,
        )
    write_text_form(folder, module, use, start)


def _find_start(context: RunContext) -> Path | None:
    """Return the folder of the initial weights; None if there is none, or no longer."""
    path = context.settings.model.path
    with suppress(SettingsError):
        return resolve_model(path) if path is not None else None
    return None


def _find_tokenizer(context: RunContext, task: TaskRuntime) -> Path:
    paths = {config.name: config.data.path for config in context.settings.task_configs}
    return Path(paths[task.name]) / "tokenizer"


def _find_max_length(task: TaskRuntime, module: TextModule) -> int | None:
    """Return the maximum tokens per text; None if unlimited."""
    return task.task.input_spec(task.manifest).max_row_tokens(module.max_tokens)


def _add_frozen(
    state: TrainState,
    trained: Iterator[tuple[str, Tensor]],
    frozen: dict[str, str],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the trained weights, then the initial values of the frozen ones.

    `frozen` maps names in the run's module to names in the task's module.
    """
    yield from trained
    if frozen:
        yield from (
            (frozen[name], values[:]) for name, values in state.initial_weights if name in frozen
        )
