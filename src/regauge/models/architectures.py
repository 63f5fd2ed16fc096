"""Builds transformers models from the `[model]` table or from saved folders."""

from __future__ import annotations

import inspect
import re
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from regauge.models import lora
from regauge.models.dropout import DropoutKeys, replace_dropout
from regauge.models.heads import freeze_encoder, train_head
from regauge.models.init_weights import (
    CPU,
    META,
    build_initial_weights,
    materialize,
    materialize_buffers,
)
from regauge.models.io_spec import DEFAULT_CLASS_NAME, read_class_names
from regauge.models.weight_files import WEIGHTS_FILE, unwrap_name
from regauge.models.weights import POOLER_PREFIX, list_weights, starts_untied, untie
from regauge.system import choices
from regauge.system.errors import SettingsError, first_line
from regauge.system.hub import CONFIG, GENERATION_CONFIG, is_custom_module, resolve_model

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from regauge.models.settings import Lora, Model

HeadKind = Literal["none", "masked", "pairs", "causal", "classes", "tokens"]
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]

AUTO_CLASSES: dict[HeadKind, str] = {
    "none": "AutoModel",
    "masked": "AutoModelForMaskedLM",
    "pairs": "AutoModelForPreTraining",
    "causal": "AutoModelForCausalLM",
    "classes": "AutoModelForSequenceClassification",
    "tokens": "AutoModelForTokenClassification",
}
LOAD_OPTIONS: dict[str, Any] = {"dtype": torch.float32, "use_safetensors": True}
"""Options for reading weights with transformers: as fp32, never from a pickle."""
FUSED_ATTENTION = "sdpa"
"""transformers' name for torch's fused scaled dot product attention."""


class ClassHead(NamedTuple):
    """A head that outputs class scores, or one value."""

    outputs: int
    """Number of classes; 1 for regression."""
    names: tuple[str, ...] = ()
    """Class names; empty to keep those in the configuration."""
    problem_type: ProblemType = "single_label_classification"


def build_model(
    settings: Model,
    head: HeadKind,
    vocab_size: int,
    seed: int,
    pad_id: int = 0,
    *,
    class_head: ClassHead | None = None,
    keys: DropoutKeys | None = None,
) -> tuple[PreTrainedModel, DropoutKeys]:
    """Build a transformers model in fp32 on the CPU; return it with its dropout keys.

    `class_head` describes a classification head. `keys` are another model's dropout keys, to share.
    Equal settings, vocabulary size and seed give equal weights. If torch's default device is meta,
    the model is without weights until `materialize`.

    Raises SettingsError if the architecture, attention, configuration, weights or vocabulary size
    does not fit.
    """
    silence_transformers()
    deferred = torch.get_default_device().type == META.type
    with CPU:
        try:
            config = _build_config(settings, vocab_size, pad_id)
            if class_head is not None:
                # The class names of a weights folder are those of other classes.
                given_names = () if settings.path else read_class_names(config.id2label)
                _set_classes(config, class_head, class_head.names or given_names)
                if getattr(config, "pad_token_id", None) is None:  # finds the last token of a text
                    config.pad_token_id = pad_id
            model = _build_on_meta(settings, head, config)
        except (AssertionError, OSError, TypeError, ValueError, StrictDataclassError) as error:
            reason = _find_reason(error)
            name = settings.architecture or settings.path
            if "attention implementation" in reason:
                problem = f"'{name}' does not support attention '{FUSED_ATTENTION}'"
                raise SettingsError(problem, 'set model.attention = "eager"') from None
            remedy = "correct model.config" if settings.architecture else "correct model.path"
            raise SettingsError(f"cannot build '{name}': {reason}", remedy) from None
        _check_vocabulary(model, vocab_size, settings)
        keys = keys or DropoutKeys()
        _add_dropout_and_adapters(model, settings, keys)
        layers, has_head = settings.trainable_layers, head != "none"
        freeze_encoder(model, find_blocks(model), layers, trains_pooler=has_head)
        if not deferred:
            materialize(model, build_initial_weights(model, settings, seed))
    return model, keys


def _set_classes(config: PretrainedConfig, head: ClassHead, names: tuple[str, ...]) -> None:
    """Set the number of classes, their names and the problem type; a regression has one output."""
    if len(names) != head.outputs:
        names = tuple(f"{DEFAULT_CLASS_NAME}{index}" for index in range(head.outputs))
    config.num_labels = head.outputs
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in config.id2label.items()}
    config.problem_type = head.problem_type


def _build_on_meta(settings: Model, head: HeadKind, config: PretrainedConfig) -> PreTrainedModel:
    """Build a model on the meta device, with its buffers on the CPU."""
    import transformers

    attention = "eager" if settings.attention == "eager" else FUSED_ATTENTION
    config._attn_implementation = attention  # noqa: SLF001 - as from_config's argument does
    _set_dropout(config, settings.dropout)
    auto_class = getattr(transformers, AUTO_CLASSES[head])
    # The private mapping is the only way to find the class that an auto class would build.
    model_class = auto_class._model_mapping.get(type(config), None)  # noqa: SLF001
    options = no_pooler_argument(model_class) if head == "none" else {}
    with META:
        model: PreTrainedModel = auto_class.from_config(config, dtype=torch.float32, **options)
    if _starts_untied(settings, model):
        config.tie_word_embeddings = False
        return _build_on_meta(settings, head, config)
    model.float()
    if settings.path is not None:  # torch trains no embedding of the padding, which may end texts
        embeddings: Any = model.get_input_embeddings()
        embeddings.padding_idx = None
    if settings.attention == "chunked":
        from regauge.models.attention import enable_chunked_attention

        enable_chunked_attention(model)
    materialize_buffers(model)
    return model


def silence_transformers() -> None:
    """Disable the library's warnings and progress bars."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def load_model(folder: Path) -> PreTrainedModel:
    """Load a transformers folder in the saved class and in fp32.

    A missing pooling layer is left out. Raises SettingsError if the model is missing, if
    transformers lacks its class, or if other weights are missing.
    """
    import transformers

    if (folder / CONFIG).is_file() and is_custom_module(folder):
        problem = f"'{folder}' has a custom module, whose code is named by the run file of its run"
        raise SettingsError(problem, "export it with that run file: regauge export RUN.toml")
    silence_transformers()
    stored = list_weights(folder)
    names = {name: unwrap_name(name) for name in stored}
    renamed = {f"^{re.escape(name)}$": plain for name, plain in names.items() if plain != name}
    options = {"key_mapping": renamed} if renamed else {}
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        load = partial(
            _find_class(config, folder).from_pretrained,
            folder,
            **LOAD_OPTIONS,
            **options,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
        )
        model, info = load()
        if any(key.startswith(POOLER_PREFIX) for key in info["missing_keys"]):
            model, info = load(add_pooling_layer=False)
    except (ImportError, OSError, ValueError, SafetensorError) as error:
        raise SettingsError(
            f"no model at '{folder}': {first_line(error)}", "name another folder"
        ) from None
    _check_loading(folder, info)
    loaded: PreTrainedModel = model
    if starts_untied(loaded, stored, str(folder)):
        untie(loaded)
    return loaded


def _check_loading(folder: Path, info: dict[str, Any]) -> None:
    """Raise SettingsError if weights in the folder are missing or have other shapes."""
    if info["mismatched_keys"]:
        name, stored, expected = min(info["mismatched_keys"])
        shapes = f"{tuple(stored)}, but {CONFIG} implies {tuple(expected)}"
        remedy = f"name a folder whose {CONFIG} and weights are of one model"
        raise SettingsError(f"'{folder}': '{name}' is {shapes}", remedy)
    if info["missing_keys"]:
        missing = min(info["missing_keys"])
        raise SettingsError(f"'{folder}' lacks the weight '{missing}'", "name a complete model")


def _find_class(config: PretrainedConfig, folder: Path) -> Any:
    """Return the class named in a configuration, or the base model if it names none.

    Raises SettingsError if transformers does not have the class.
    """
    import transformers

    name = (config.architectures or ["AutoModel"])[0]
    model_class = getattr(transformers, name, None)
    if model_class is None:
        problem = f"'{folder}' declares the class '{name}', which transformers does not have"
        raise SettingsError(problem, f"name a class of transformers in architectures of {CONFIG}")
    return model_class


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers: those in the module list with the most weights.

    For two encoders with the same structure, returns the layers of both.
    """
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    structures = [
        (sum(value.numel() for value in blocks.parameters()), [type(block) for block in blocks])
        for blocks in lists
    ]
    largest = max(structures, key=itemgetter(0), default=None)
    matching = (blocks for blocks, item in zip(lists, structures, strict=True) if item == largest)
    return [block for blocks in matching for block in blocks]


def _build_config(settings: Model, vocab_size: int, pad_id: int) -> PretrainedConfig:
    from transformers import AutoConfig

    if settings.path is not None:
        folder = resolve_model(settings.path)
        try:
            saved: PretrainedConfig = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError) as error:
            remedy = f"set model.path to a folder with {CONFIG} and {WEIGHTS_FILE}"
            problem = f"no model at '{settings.path}': {first_line(error)}"
            raise SettingsError(problem, remedy) from None
        return saved
    default = _config_class(str(settings.architecture))()
    fields = tuple({*default.to_dict(), *default.attribute_map})
    for name in settings.config:
        if name not in fields:
            remedy = choices.did_you_mean(name, fields)
            raise SettingsError(f"unknown key 'model.config.{name}'", remedy)
    values = {"vocab_size": vocab_size, **settings.config}
    if "pad_token_id" not in values and isinstance(getattr(default, "pad_token_id", None), int):
        values["pad_token_id"] = pad_id
    return type(default)(**values)


def _find_reason(error: Exception) -> str:
    """Return an error's reason; a huggingface_hub validator puts it below its own name."""
    reason = str(error).strip().splitlines()[1:] if isinstance(error, StrictDataclassError) else []
    text = reason[0].strip().partition(": ")[2] if reason else first_line(error)
    return text.rstrip(".")


def _config_class(architecture: str) -> type[PretrainedConfig]:
    from transformers import CONFIG_MAPPING

    if architecture not in CONFIG_MAPPING:
        remedy = choices.did_you_mean(architecture, tuple(CONFIG_MAPPING.keys()))
        raise SettingsError(f"transformers has no architecture '{architecture}'", remedy[:200])
    config_class: type[PretrainedConfig] = CONFIG_MAPPING[architecture]
    return config_class


def no_pooler_argument(model_class: Any) -> dict[str, bool]:
    """Return the argument that leaves the pooling layer out, if a class has it; no task uses it."""
    name = "add_pooling_layer"
    return {name: False} if name in inspect.signature(model_class.__init__).parameters else {}


def _set_dropout(config: PretrainedConfig, rate: float | None) -> None:
    """Set the dropout rate of hidden states in a configuration; attention dropout becomes 0.

    If `rate` is None, other rates stay.
    """
    for name in _read_dropout(config):
        if name.startswith("att"):
            setattr(config, name, 0.0)
        elif rate is not None:
            setattr(config, name, 0.0 if name.startswith("classifier") else rate)


def _read_dropout(config: PretrainedConfig) -> dict[str, float]:
    return {
        name: value
        for name, value in config.to_dict().items()
        if ("dropout" in name or name.endswith("pdrop"))
        and isinstance(value, float | int)
        and not isinstance(value, bool)
    }


def restore_dropout(config: PretrainedConfig, start: Path) -> None:
    """Reset the dropout rates to those in the folder of the initial weights."""
    from transformers import AutoConfig

    for name, value in _read_dropout(AutoConfig.from_pretrained(start)).items():
        if hasattr(config, name):
            setattr(config, name, value)


def _add_dropout_and_adapters(model: PreTrainedModel, settings: Model, keys: DropoutKeys) -> None:
    """Add LoRA adapters to a model, and replace torch's dropout by `CounterDropout`."""
    is_counter = settings.dropout_kind == "counter"
    count = replace_dropout(model, settings.dropout, keys) if is_counter else 0
    if settings.dropout and is_counter and not count:
        raise SettingsError(
            f"architecture '{settings.architecture or settings.path}' has no hidden dropout",
            "set model.dropout = 0",
        )
    if settings.lora is not None:
        add_adapters(model, settings.lora)
        if is_counter:
            replace_dropout(model, settings.lora.dropout, keys, first_layer=count)


def add_adapters(model: PreTrainedModel, settings: Lora) -> None:
    """Add LoRA adapters to a model on the meta device; only they and a classifier's head train."""
    lora.add_adapters(model, find_blocks(model), settings)
    if is_classifier(model) or is_token_classifier(model):
        train_head(model)


def build_template(folder: Path, start: Model | None = None) -> PreTrainedModel:
    """Build a folder's model, written by Regauge, on the meta device.

    With the settings of its run, `start`, weights are tied as in the run, before adapters are
    merged.
    """
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    options = {"dtype": torch.float32, **no_pooler_argument(model_class)}
    if start is not None:
        first_config = _build_config(start, config.vocab_size, 0)
        config.tie_word_embeddings = first_config.tie_word_embeddings
    with META:
        model: PreTrainedModel = model_class._from_config(config, **options)  # noqa: SLF001 - as auto classes do
        if start is not None and _starts_untied(start, model):
            config.tie_word_embeddings = False
            model = model_class._from_config(config, **options)  # noqa: SLF001 - as auto classes do
    return model


def _starts_untied(settings: Model, model: PreTrainedModel) -> bool:
    """Return whether the weights that a run starts from untie those of its model."""
    if settings.path is None or settings.weights == "random":
        return False
    return starts_untied(model, list_weights(resolve_model(settings.path)), settings.path)


def read_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Load a folder's generation configuration into a model, if there is one."""
    from transformers import GenerationConfig

    if (folder / GENERATION_CONFIG).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)


def _check_vocabulary(model: PreTrainedModel, vocab_size: int, settings: Model) -> None:
    embeddings: Any = model.get_input_embeddings()
    size = embeddings.weight.shape[0]
    if vocab_size > size:
        raise SettingsError(
            f"the tokenizer has {vocab_size} entries, but the model's vocabulary has {size}",
            "prepare the data with the tokenizer of the model"
            if settings.path
            else "omit model.config.vocab_size, or increase it",
        )


def is_classifier(model: nn.Module) -> bool:
    """Return whether a model is a sequence classification or regression model."""
    return class_name(model).endswith("ForSequenceClassification")


def is_token_classifier(model: nn.Module) -> bool:
    return class_name(model).endswith("ForTokenClassification")


def class_name(model: nn.Module) -> str:
    """Return the name of a model's transformers class, also if a wrapper subclasses it."""
    return transformers_class(model).__name__


def transformers_class(model: nn.Module) -> type:
    """Return a model's transformers class, also if a wrapper subclasses it."""
    return next(kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))
