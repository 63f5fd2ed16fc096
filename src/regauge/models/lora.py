"""LoRA adapters for linear layers (Hu et al., 2022), with peft.

An adapter adds alpha / rank x B A to a layer's weight. A is initialized randomly and B with zeros,
so that the initial model is unchanged. Only A and B are trained, saved and synchronized.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from regauge.data.tokenizer import list_tokenizer_files
from regauge.models import dual_encoder
from regauge.models.tokenizer_convention import COPY_REMEDY
from regauge.models.weights import base_weight_name, is_adapter_weight
from regauge.system import safetensors_io
from regauge.system.choices import did_you_mean
from regauge.system.errors import SettingsError
from regauge.system.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS, loadable_name
from regauge.system.json_files import read_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from regauge.models.init_weights import InitialWeights
    from regauge.models.settings import Lora, Model

TASK_TYPES = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
}
"""Class name ending -> peft's task name."""
ADAPTER_NAME = "default"
"""peft's name for a single adapter."""
ADAPTER_FOLDER = "adapter"


def add_adapters(model: PreTrainedModel, blocks: Sequence[nn.Module], settings: Lora) -> None:
    """Add adapters on the meta device to a model's linear layers, and freeze all other weights.

    Raises SettingsError if a target layer does not exist, or if peft is not installed.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError:
        problem = "model.lora needs peft, which is not installed"
        raise SettingsError(problem, "pip install 'regauge[lora]'") from None
    config = _build_lora_config(model, blocks, settings)
    with warnings.catch_warnings():  # `merge_adapters` unties them
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to True but")
        inject_adapter_in_model(config, model, low_cpu_mem_usage=True)


def merge_adapters(
    initial: InitialWeights, trained: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights without adapters, with the adapters merged into them.

    `trained` are the trained adapter and head weights by name, in fp32 on the CPU. A tied weight
    with an adapter in one of its layers is untied: all of its names are yielded.
    """
    tied_names = {name: others for name, *others in initial.tied_names}
    is_untied = adapts_tied_layers(initial.tied_names)
    for name, source in initial:
        if is_adapter_weight(name):
            continue
        weight = trained[name] if name in trained else source[:].float()
        yield base_weight_name(name), _merge_adapter(initial, trained, name, weight)
        for tied_name in tied_names.get(name, ()) if is_untied else ():
            own_weight = _merge_adapter(initial, trained, tied_name, weight.clone())
            yield base_weight_name(tied_name), own_weight


def _merge_adapter(
    initial: InitialWeights, trained: Mapping[str, Tensor], name: str, weight: Tensor
) -> Tensor:
    layer_name, has_adapter, _ = name.partition(".base_layer.weight")
    if not has_adapter:
        return weight
    layer: Any = initial.module(layer_name)
    down, up = (trained[f"{layer_name}.lora_{side}.{ADAPTER_NAME}.weight"] for side in "AB")
    product = up @ down * layer.scaling[ADAPTER_NAME]
    merged: Tensor = weight + (product.T if layer.fan_in_fan_out else product)
    return merged


def adapts_tied_layers(tied_names: Iterable[Iterable[str]]) -> bool:
    """Return whether an adapter is in only one of the layers that share a weight.

    The merged model then has an output layer of its own. `tied_names` are those of each weight.
    """
    return any(len({base_weight_name(name) == name for name in names}) > 1 for names in tied_names)


def save_adapters(
    folder: Path,
    model: PreTrainedModel,
    settings: Model,
    trained: Mapping[str, Tensor],
    *,
    blocks: Sequence[nn.Module],
    model_class: type,
    merged: Path,
) -> None:
    """Write a peft adapter folder that names its base model's class and folder.

    `model_class` is the transformers class, and `merged` the merged model's folder, which has the
    tokenizer.
    """
    if settings.lora is None:
        raise AssertionError("the run trains no adapters")
    folder.mkdir(parents=True, exist_ok=True)
    config = _build_lora_config(model, blocks, settings.lora)
    config.base_model_name_or_path = _find_base(settings, folder.name)
    name = model_class.__name__
    task_types = (task_type for end, task_type in TASK_TYPES.items() if name.endswith(end))
    config.task_type = next(task_types, None)
    if config.task_type is None:  # peft's AutoPeftModel then reads the class
        names = {"base_model_class": name, "parent_library": model_class.__module__}
        config.auto_mapping = names
    config.inference_mode = True
    root = f"{model.base_model_prefix}."
    heads = {
        name.removeprefix(root).partition(".")[0] for name in trained if not is_adapter_weight(name)
    }
    config.modules_to_save = sorted(heads) or None
    for file in list_tokenizer_files(merged):
        shutil.copyfile(file, folder / file.name)
    config.save_pretrained(folder)
    names = {name: name.replace(f".{ADAPTER_NAME}.", ".") for name in trained}
    weights = {f"base_model.model.{names[name]}": value for name, value in trained.items()}
    safetensors_io.write_tensors(folder / ADAPTER_WEIGHTS, weights)


def check_exportable(folder: Path) -> None:
    """Raise SettingsError if an adapter folder does not exist, or lacks a base model."""
    if not folder.is_dir():
        raise SettingsError("this run trained no adapters", "set model.lora, or export format hf")
    config = read_json(folder / ADAPTER_CONFIG, COPY_REMEDY)
    if config.get("base_model_name_or_path") is None:
        problem = "the adapters belong to random weights, which are in no folder"
        raise SettingsError(problem, "export format hf, which merges them")


def _find_base(settings: Model, encoder: str) -> str | None:
    if settings.path is None or settings.weights == "random":
        return None
    base = loadable_name(settings.path)
    folder = dual_encoder.encoder_folder(Path(base), encoder)
    return str(folder) if folder.exists() else base


def _build_lora_config(model: PreTrainedModel, blocks: Sequence[nn.Module], settings: Lora) -> Any:
    from peft import LoraConfig

    block_layers = {base_weight_name(name) for block in blocks for name in _linear_layers(block)}
    all_layers = [base_weight_name(name) for name in _linear_layers(model)]
    for target in settings.targets:
        if not any(f".{name}".endswith(f".{target}") for name in all_layers):
            options = sorted({name.rpartition(".")[2] for name in all_layers})
            raise SettingsError(
                f"model.lora.targets: {model.config.model_type} has no linear layer '{target}'",
                did_you_mean(target, options),
            )
    alpha: Any = settings.alpha  # annotated as int in peft, which only divides it
    return LoraConfig(
        r=settings.rank,
        lora_alpha=alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.targets or sorted(block_layers)),
        fan_in_fan_out=any(_is_transposed(layer) for layer in model.modules()),
        bias="none",
    )


def _linear_layers(module: nn.Module) -> Iterator[str]:
    """Yield the names of linear layers other than adapter layers."""
    for name, layer in module.named_modules():
        is_linear = isinstance(layer, nn.Linear) or _is_transposed(layer)
        if is_linear and not is_adapter_weight(f".{name}."):
            yield name.removesuffix(".base_layer")


def _is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer is GPT-2's Conv1D, a linear layer whose weight is [in, out]."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, Conv1D)
