"""Models of transformers, made from a run file's table; in and out as their own folders."""

from __future__ import annotations

import inspect
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from regauge import choices
from regauge.errors import SettingsError, plain
from regauge.models import lora
from regauge.models import weights as folders
from regauge.models.dropout import DropoutKeys, install
from regauge.models.hub import CONFIG, at
from regauge.models.init_weights import HOST, META, initial_weights, make_buffers, materialize

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from regauge.models.settings import Model

Head = Literal["none", "masked", "pairs", "causal", "classes"]

AUTO_CLASSES: dict[Head, str] = {
    "none": "AutoModel",
    "masked": "AutoModelForMaskedLM",
    "pairs": "AutoModelForPreTraining",
    "causal": "AutoModelForCausalLM",
    "classes": "AutoModelForSequenceClassification",
}
SAFELY: dict[str, Any] = {"dtype": torch.float32, "use_safetensors": True}
"""How transformers reads weights here: as fp32, and never from a pickle."""
FUSED = "sdpa"
"""Attention of transformers by torch's fused operation."""
POOLING = "pooler."
"""Beginning of the names of a pooling layer's weights."""


def build(
    settings: Model,
    head: Head,
    vocabulary: int,
    seed: int,
    pad: int = 0,
    *,
    outputs: int = 0,
    keys: DropoutKeys | None = None,
) -> tuple[PreTrainedModel, DropoutKeys]:
    """Return a transformers model in fp32 on the CPU, and the keys of its dropout.

    `pad` is the tokenizer's number of padding, `outputs` how many a head of classes has, `keys`
    those of a model beside it. Equal settings, vocabulary and seed give equal weights. Where
    torch's default device is meta the model has none yet: `first_weights` gives them later. Raises
    SettingsError where the architecture, its attention, a field of its configuration, its weights
    or the vocabulary does not fit.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    deferred = torch.get_default_device().type == META.type
    with HOST:
        try:
            config = _configuration(settings, vocabulary, pad)
            if outputs:
                config.num_labels = outputs
            model = _made(settings, head, config)
        except (AssertionError, OSError, TypeError, ValueError, StrictDataclassError) as error:
            reason = plain(error)
            name = settings.architecture or settings.path
            if "attention implementation" in reason:
                problem = f"'{name}' has no attention of kind '{FUSED}'"
                raise SettingsError(problem, 'set model.attention = "eager"') from None
            raise SettingsError(f"no model of '{name}': {reason}", "correct [model]") from None
        _fit_vocabulary(model, vocabulary, settings)
        keys = keys or DropoutKeys()
        _adapt(model, settings, keys)
        if not deferred:
            materialize(model, initial_weights(model, settings, seed))
    return model, keys


def _made(settings: Model, head: Head, config: PretrainedConfig) -> PreTrainedModel:
    """Return a model on the meta device, with its buffers on the CPU."""
    import transformers

    written = settings.attention == "eager"
    config._attn_implementation = "eager" if written else FUSED  # noqa: SLF001 - as from_config's argument does
    _set_dropout(config, settings.dropout)
    auto = getattr(transformers, AUTO_CLASSES[head])
    # Its mapping is the only way to ask an auto class for the class that it would make.
    kind = auto._model_mapping.get(type(config), None)  # noqa: SLF001
    extra = _without_pooler(kind) if head == "none" else {}
    with META:
        model: PreTrainedModel = auto.from_config(config, dtype=torch.float32, **extra)
    model.float()
    if settings.attention == "chunked":
        from regauge.models.attention import chunk

        chunk(model)
    make_buffers(model)
    return model


def load(folder: Path) -> PreTrainedModel:
    """Return the model of a transformers folder as the class that it was saved from, in fp32.

    Raises SettingsError for a folder that holds none, or holds it without some of its weights; a
    pooling layer alone may be absent, and then is.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folders.refuse_pickles(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        name = (config.architectures or ["AutoModel"])[0]
        auto = getattr(transformers, name, transformers.AutoModel)
        read = partial(auto.from_pretrained, folder, **SAFELY, output_loading_info=True)
        model, found = read()
        if any(key.startswith(POOLING) for key in found["missing_keys"]):
            model, found = read(add_pooling_layer=False)
    except (OSError, ValueError, SafetensorError) as error:
        raise SettingsError(
            f"no model at '{folder}': {plain(error)}", "name another folder"
        ) from None
    if found["missing_keys"]:
        first = min(found["missing_keys"])
        raise SettingsError(f"'{folder}' lacks the weight '{first}'", "name a complete model")
    loaded: PreTrainedModel = model
    return loaded


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a model: the module list that holds the most weights.

    Of two equal encoders, those of both.
    """
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    forms = [
        (sum(value.numel() for value in part.parameters()), [type(block) for block in part])
        for part in lists
    ]
    largest = max(forms, key=itemgetter(0), default=None)
    alike = (part for part, form in zip(lists, forms, strict=True) if form == largest)
    return [block for part in alike for block in part]


def _configuration(settings: Model, vocabulary: int, pad: int) -> PretrainedConfig:
    from transformers import AutoConfig

    if settings.path is not None:
        folder = at(settings.path)
        try:
            saved: PretrainedConfig = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError) as error:
            remedy = f"set model.path to a folder with {CONFIG} and {folders.WHOLE}"
            raise SettingsError(f"no model at '{settings.path}': {plain(error)}", remedy) from None
        return saved
    known = _configuration_class(str(settings.architecture))()
    fields = tuple({*known.to_dict(), *known.attribute_map})
    for name in settings.config:
        if name not in fields:
            remedy = choices.did_you_mean(name, fields)
            raise SettingsError(f"unknown key 'model.config.{name}'", remedy)
    own = {"vocab_size": vocabulary, **settings.config}
    if "pad_token_id" not in own and isinstance(getattr(known, "pad_token_id", None), int):
        own["pad_token_id"] = pad
    return type(known)(**own)


def _configuration_class(architecture: str) -> type[PretrainedConfig]:
    from transformers import CONFIG_MAPPING

    if architecture not in CONFIG_MAPPING:
        remedy = choices.did_you_mean(architecture, tuple(CONFIG_MAPPING.keys()))
        raise SettingsError(f"transformers has no architecture '{architecture}'", remedy[:200])
    kind: type[PretrainedConfig] = CONFIG_MAPPING[architecture]
    return kind


def _without_pooler(kind: Any) -> dict[str, Any]:
    """Return the argument of a class that leaves a pooling layer out, which no task here uses."""
    wanted = "add_pooling_layer"
    return {wanted: False} if wanted in inspect.signature(kind.__init__).parameters else {}


def _set_dropout(config: PretrainedConfig, rate: float) -> None:
    """Set every hidden dropout of a configuration to the rate, and those of attention to 0."""
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float | int):
            setattr(config, name, 0.0 if name.startswith(("att", "classifier")) else rate)


def _adapt(model: PreTrainedModel, settings: Model, keys: DropoutKeys) -> None:
    """Put adapters into a model, and its own dropout in the place of the framework's."""
    own = settings.dropout_kind == "counter"
    count = install(model, settings.dropout, keys) if settings.dropout and own else 0
    if settings.dropout and own and not count:
        raise SettingsError(
            f"architecture '{settings.architecture or settings.path}' has no hidden dropout",
            "set model.dropout = 0",
        )
    if settings.lora is not None:
        lora.install(model, blocks(model), settings.lora)
        if own:
            install(model, settings.lora.dropout, keys, first=count)


def template(folder: Path) -> PreTrainedModel:
    """Return the model of a folder that was saved here, on the meta device."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    extra = _without_pooler(kind)
    with META:
        model: PreTrainedModel = kind._from_config(config, dtype=torch.float32, **extra)  # noqa: SLF001 - what an auto class calls
    return model


def _fit_vocabulary(model: PreTrainedModel, vocabulary: int, settings: Model) -> None:
    embeddings: Any = model.get_input_embeddings()
    size = embeddings.weight.shape[0]
    if vocabulary > size:
        raise SettingsError(
            f"the tokenizer has {vocabulary} entries, the model's vocabulary {size}",
            "prepare the data with the model's own tokenizer"
            if settings.path
            else "leave model.config.vocab_size out, or make it larger",
        )


def classifies(model: nn.Module) -> bool:
    """Return whether a model scores the classes of a text, or one value."""
    return class_name(model).endswith("ForSequenceClassification")


def class_name(model: nn.Module) -> str:
    """Return the name of a model's transformers class, under any wrapper that subclasses it."""
    return next(
        kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith("transformers.")
    )
