"""The models that a run ends with, as folders that transformers loads.

model/                  that of the run's task, or of the first of several
tasks/<name>/model/     those of the others
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.models import architectures as models
from regauge.models import (
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

    from regauge.training.context import RunContext
    from regauge.training.objectives import TaskRuntime
    from regauge.training.state import TrainState

INNER = "model."
"""Before the names of transformers' model in the module of a task."""


def write_models(context: RunContext, state: TrainState) -> None:
    """Write the model of each task; every process calls this."""
    first, *others = context.tasks
    write_model(context, state, first, context.folder / "model")
    for each in others:
        write_model(context, state, each, context.folder / TASKS / each.name / "model")


def write_model(context: RunContext, state: TrainState, task: TaskRuntime, folder: Path) -> None:
    """Write the model of one task; one that makes vectors says how.

    The first process holds no more of its weights at a time than one file takes. Adapters are
    written beside it, and merged in it.
    """
    module, adapters = (
        modules_by_task(state.model.module)[task.name],
        context.settings.model.lora,
    )
    inner: Any = module.model
    named = {id(value): name for name, value in state.model.module.named_parameters()}
    names = {name: named[id(value)] for name, value in module.named_parameters()}
    trained = [name for name, value in module.named_parameters() if value.requires_grad]
    values = ((name, state.model.full_tensor(names[name])) for name in trained)
    if not context.world.first:
        deque(values, maxlen=0)
        return
    if adapters:
        found = dict(values)
        beside, base = folder.with_name(lora.FOLDER), context.settings.model.path
        for place, prefix, model in dual_encoder.encoders(module, beside):
            own = {
                name.removeprefix(prefix): found[name]
                for name in trained
                if name.startswith(prefix)
            }
            lora.save(place, model, adapters, own, blocks=models.blocks(model), base=base)
        every = lora.merged(state.initial_weights, found)
    else:
        frozen = {names[name]: name for name in names.keys() - set(trained)}
        every = _with_frozen(state, values, frozen)
    head = {name: value.cpu() for name, value in module.named_buffers() if heads.of_head(name)}

    other = dual_encoder.Beside(folder)

    def of_model() -> Iterator[tuple[str, Tensor]]:
        for name, value in other.rest(every):
            if heads.of_head(name):
                head[name] = value
            else:
                yield name.removeprefix(INNER), value

    config = inner.config
    config.architectures = [models.class_name(inner)]
    tokenizer = Path(context.settings.task_configs[0].data.path) / "tokenizer"
    weights.save(folder, config, of_model(), tokenizer)
    other.finish(config, tokenizer)
    heads.write_head(folder, head)
    tokenizer_convention.mark(folder)
    if isinstance(module, Encoder):
        fields = task.task.fields(task.manifest)
        tokens = fields.longest(module.longest) or task.ladder[-1]
        told = sentence_transformers.Sentences(
            reads=sentence_transformers.Reads(tokens=tokens), pooling=module.pooling
        )
        sentence_transformers.write(folder, told, inner.config.hidden_size)


def _with_frozen(
    state: TrainState,
    trained: Iterator[tuple[str, Tensor]],
    frozen: dict[str, str],
) -> Iterator[tuple[str, Tensor]]:
    """Yield trained weights, and those that are not as they were before the first step.

    `frozen` has the names of these in the task's own module by those in the whole one.
    """
    yield from trained
    if frozen:
        yield from (
            (frozen[name], values[:]) for name, values in state.initial_weights if name in frozen
        )
