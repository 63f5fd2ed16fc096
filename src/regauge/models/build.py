"""Models of transformers, made from a run file's table; in and out as their own folders."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError

from regauge import registry
from regauge.errors import SettingsError
from regauge.models.dropout import DropoutKeys, install

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from regauge.models.settings import Model

Head = Literal["none", "masked", "causal"]

AUTO_CLASSES: dict[Head, str] = {
    "none": "AutoModel",
    "masked": "AutoModelForMaskedLM",
    "causal": "AutoModelForCausalLM",
}
SAFELY: dict[str, Any] = {"dtype": torch.float32, "use_safetensors": True}
"""How transformers reads weights here: as fp32, and never from a pickle."""


def build(
    settings: Model, head: Head, vocabulary: int, seed: int, pad: int = 0
) -> tuple[PreTrainedModel, DropoutKeys]:
    """Return a transformers model in fp32 on the CPU, and the keys of its dropout.

    `pad` is the tokenizer's number of padding. Equal settings, vocabulary and seed give equal
    weights. Raises SettingsError where the architecture, its attention, a field of its
    configuration or the vocabulary does not fit.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    try:
        model = _made(settings, head, vocabulary, pad)
    except (AssertionError, OSError, TypeError, ValueError, StrictDataclassError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        name = settings.architecture or settings.path
        if "attention implementation" in reason:
            problem = f"'{name}' has no attention of kind '{settings.attention}'"
            raise SettingsError(problem, 'set model.attention = "eager"') from None
        raise SettingsError(f"no model of '{name}': {reason}", "correct [model]") from None
    _fit_vocabulary(model, vocabulary, settings)
    keys = DropoutKeys()
    if settings.dropout and settings.dropout_kind == "counter":
        _install(model, settings, keys)
    return model.float(), keys


def _made(settings: Model, head: Head, vocabulary: int, pad: int) -> PreTrainedModel:
    import transformers

    config = _configuration(settings, vocabulary, pad)
    config._attn_implementation = settings.attention  # noqa: SLF001 - as from_config's argument does
    _set_dropout(config, settings.dropout)
    auto = getattr(transformers, AUTO_CLASSES[head])
    extra = _without_pooler(auto, config) if head == "none" else {}
    if settings.path is None or settings.weights == "random":
        model: PreTrainedModel = auto.from_config(config, **extra)
    else:
        path = weights_at(settings.path)
        _refuse_pickles(Path(path))
        model = auto.from_pretrained(path, config=config, **SAFELY, **extra)
    return model


def weights_at(path: str) -> str:
    """Return where a path's weights lie: the final model of a run, or the folder or hub name."""
    model = Path(path) / "model"
    return str(model) if (model / "config.json").is_file() else path


def load(folder: Path) -> PreTrainedModel:
    """Return the model of a transformers folder as the class that it was saved from, in fp32.

    Raises SettingsError for a folder that holds none, or holds it without some of its weights; a
    pooling layer alone may be absent, and then is.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    _refuse_pickles(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        name = (config.architectures or ["AutoModel"])[0]
        auto = getattr(transformers, name, transformers.AutoModel)
        read = partial(auto.from_pretrained, folder, **SAFELY, output_loading_info=True)
        model, found = read()
        if any(key.startswith("pooler.") for key in found["missing_keys"]):
            model, found = read(add_pooling_layer=False)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(f"no model at '{folder}': {reason}", "name another folder") from None
    if found["missing_keys"]:
        first = min(found["missing_keys"])
        raise SettingsError(f"'{folder}' lacks the weight '{first}'", "name a complete model")
    loaded: PreTrainedModel = model
    return loaded


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder's weights: safetensors, or pickles where there are none."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def pickled(folder: Path) -> bool:
    """Return whether a folder has its weights in pickles alone."""
    return any(file.suffix == ".bin" for file in weight_files(folder))


def _refuse_pickles(folder: Path) -> None:
    if pickled(folder):
        raise SettingsError(
            f"the weights in '{folder}' are a pickle",
            f"run: regauge import {folder} --to OTHER, and name that folder",
        )


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a model: the module list that holds the most weights."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    if not lists:
        return []
    largest = max(lists, key=lambda part: sum(value.numel() for value in part.parameters()))
    return list(largest)


def matmul_parameters(model: nn.Module) -> int:
    """Return the weights of the repeated layers that enter a matrix product."""
    return sum(
        value.numel() for block in blocks(model) for value in block.parameters() if value.ndim > 1
    )


def _configuration(settings: Model, vocabulary: int, pad: int) -> PretrainedConfig:
    from transformers import AutoConfig

    if settings.path is not None:
        try:
            saved: PretrainedConfig = AutoConfig.from_pretrained(weights_at(settings.path))
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            remedy = "set model.path to a folder with config.json and model.safetensors"
            raise SettingsError(f"no model at '{settings.path}': {reason}", remedy) from None
        return saved
    known = _configuration_class(str(settings.architecture))()
    fields = tuple({*known.to_dict(), *known.attribute_map})
    for name in settings.config:
        if name not in fields:
            remedy = registry.did_you_mean(name, fields)
            raise SettingsError(f"unknown key 'model.config.{name}'", remedy)
    own = {"vocab_size": vocabulary, **settings.config}
    if "pad_token_id" not in own and isinstance(getattr(known, "pad_token_id", None), int):
        own["pad_token_id"] = pad
    return type(known)(**own)


def _configuration_class(architecture: str) -> type[PretrainedConfig]:
    from transformers import CONFIG_MAPPING

    if architecture not in CONFIG_MAPPING:
        remedy = registry.did_you_mean(architecture, tuple(CONFIG_MAPPING.keys()))
        raise SettingsError(f"transformers has no architecture '{architecture}'", remedy[:200])
    kind: type[PretrainedConfig] = CONFIG_MAPPING[architecture]
    return kind


def _without_pooler(auto: Any, config: PretrainedConfig) -> dict[str, Any]:
    """Return the argument that leaves a pooling layer out, which no task here uses."""
    kind = auto._model_mapping[type(config)]  # noqa: SLF001 - the only way to ask for the class
    wanted = "add_pooling_layer"
    return {wanted: False} if wanted in inspect.signature(kind.__init__).parameters else {}


def _set_dropout(config: PretrainedConfig, rate: float) -> None:
    """Set every hidden dropout of a configuration to the rate, and those of attention to 0."""
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float | int):
            setattr(config, name, 0.0 if name.startswith(("att", "classifier")) else rate)


def _install(model: nn.Module, settings: Model, keys: DropoutKeys) -> None:
    if not install(model, settings.dropout, keys):
        raise SettingsError(
            f"architecture '{settings.architecture or settings.path}' has no hidden dropout",
            "set model.dropout = 0",
        )


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


def save(
    folder: Path, config: PretrainedConfig, weights: dict[str, torch.Tensor], tokenizer: Path
) -> None:
    """Write a folder that transformers loads: configuration, weights, tokenizer."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    contiguous = {name: value.contiguous() for name, value in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    for file in sorted(tokenizer.glob("*.json")):
        (folder / file.name).write_bytes(file.read_bytes())


def class_name(model: nn.Module) -> str:
    """Return the name of a model's transformers class, under any wrapper that subclasses it."""
    return next(
        kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith("transformers.")
    )
