"""Writes the final models of a run as folders that transformers loads.

model/                  the model of the only task, or of the first one
tasks/<name>/model/     the models of the other tasks
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.files import check_own_folder
from regauge.models import (
    architectures,
    dual_encoder,
    heads,
    lora,
    sentence_transformers,
    tokenizer_convention,
    weights,
)
from regauge.models.modules import Encoder
from regauge.models.multitask import modules_by_task
from regauge.training.run_record import TASKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from regauge.models.modules import TextModule
    from regauge.training.context import RunContext
    from regauge.training.state import TrainState
    from regauge.training.task_runtime import TaskRuntime

INNER_PREFIX = "model."
"""Prefix of the names of the transformers model in the module of a task."""


def write_models(context: RunContext, state: TrainState) -> None:
    """Write the model of each task; every process calls this."""
    main_task, *other_tasks = context.tasks
    write_model(context, state, main_task, context.folder / "model")
    for task in other_tasks:
        write_model(context, state, task, context.folder / TASKS / task.name / "model")


def write_model(context: RunContext, state: TrainState, task: TaskRuntime, folder: Path) -> None:
    """Write the model of one task; every process calls this.

    A text encoder is also described for sentence-transformers. The first process holds at most the
    weights of one file at a time. LoRA adapters are merged, and saved in a separate folder, too.
    """
    module = modules_by_task(state.model.module)[task.name]
    run_names = {id(value): name for name, value in state.model.module.named_parameters()}
    names = {name: run_names[id(value)] for name, value in module.named_parameters()}
    trained_names = [name for name, value in module.named_parameters() if value.requires_grad]
    trained = ((name, state.model.full_tensor(names[name])) for name in trained_names)
    if not context.world.is_main_process:
        deque(trained, maxlen=0)
        return
    for output in (folder, folder.with_name(lora.ADAPTER_FOLDER)):
        check_own_folder(output)
    if context.settings.model.lora:
        trained_weights = dict(trained)
        _save_adapters(context, module, trained_weights, folder.with_name(lora.ADAPTER_FOLDER))
        all_weights = lora.merge_adapters(state.initial_weights, trained_weights)
    else:
        frozen_names = {names[name]: name for name in names.keys() - set(trained_names)}
        all_weights = _add_frozen(state, trained, frozen_names)
    _write_folder(context, module, all_weights, folder)
    if isinstance(module, Encoder):
        fields = task.task.input_spec(task.manifest)
        tokens = fields.max_row_tokens(module.max_tokens) or task.bucket_lengths[-1]
        description = sentence_transformers.SentenceEncoder(
            tokenization=sentence_transformers.Tokenization(max_length=tokens),
            pooling=module.pooling,
        )
        inner: Any = module.model
        sentence_transformers.write_description(folder, description, inner.config.hidden_size)


def _save_adapters(
    context: RunContext, module: TextModule, trained: dict[str, Tensor], root: Path
) -> None:
    """Write the LoRA adapters of each encoder of a module, without merging them."""
    options, base = context.settings.model.lora, context.settings.model.path
    if options is None:
        raise AssertionError("the run trains no adapters")
    for folder, prefix, model in dual_encoder.iterate_encoders(module, root):
        adapters = {
            name.removeprefix(prefix): value
            for name, value in trained.items()
            if name.startswith(prefix)
        }
        blocks = architectures.find_blocks(model)
        lora.save_adapters(folder, model, options, adapters, blocks=blocks, base=base)


def _write_folder(
    context: RunContext,
    module: TextModule,
    all_weights: Iterator[tuple[str, Tensor]],
    folder: Path,
) -> None:
    """Write the weights, the head, the configuration and the tokenizer of a model."""
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

    config = inner.config
    config.architectures = [architectures.class_name(inner)]
    tokenizer = Path(context.settings.task_configs[0].data.path) / "tokenizer"
    weights.save_model_folder(folder, config, model_weights(), tokenizer)
    document_encoder.finish(config, tokenizer)
    heads.write_head(folder, head)
    tokenizer_convention.write_convention(folder)


def _add_frozen(
    state: TrainState,
    trained: Iterator[tuple[str, Tensor]],
    frozen: dict[str, str],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the trained weights, then the initial values of the frozen ones.

    `frozen` maps the names in the module of the run to the names in the module of the task.
    """
    yield from trained
    if frozen:
        yield from (
            (frozen[name], values[:]) for name, values in state.initial_weights if name in frozen
        )
