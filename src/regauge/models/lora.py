"""Low-rank adapters beside linear layers (Hu et al., 2022), by peft; all else stays as it is.

An adapter adds alpha / rank x B A to a layer's weight. A is drawn, B begins at zero, so that the
model begins as it is without adapters. What is trained, saved and spread are A and B alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from regauge import safetensors_io
from regauge.choices import did_you_mean
from regauge.errors import SettingsError
from regauge.models.weights import adapting, plain_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from regauge.models.init_weights import InitialWeights
    from regauge.models.settings import Lora

ADAPTER = "default"
"""What peft calls an adapter that is alone."""
FOLDER, WEIGHTS = "adapter", "adapter_model.safetensors"


def install(model: PreTrainedModel, blocks: Sequence[nn.Module], settings: Lora) -> None:
    """Put adapters on the meta device beside a model's linear layers, and leave them to be trained.

    Raises SettingsError for a layer that the model does not have, and where peft is not installed.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError:
        needed = "model.lora needs peft, which is not installed here"
        raise SettingsError(needed, "pip install 'regauge[lora]'") from None
    found = _configuration(model, blocks, settings)
    inject_adapter_in_model(found, model, low_cpu_mem_usage=True)


def merged(first: InitialWeights, trained: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model without adapters, each whole and with its adapter's product.

    `trained` has the adapters' weights by their names, and those of a head, on the CPU in fp32.
    """
    for name, values in first:
        if adapting(name):
            continue
        holder, behind, _ = name.partition(".base_layer.weight")
        weight = trained[name] if name in trained else values[:].float()
        if behind:
            layer: Any = first.part(holder)
            down, up = (trained[f"{holder}.lora_{side}.{ADAPTER}.weight"] for side in "AB")
            product = up @ down * layer.scaling[ADAPTER]
            weight = weight + (product.T if layer.fan_in_fan_out else product)
        yield plain_name(name), weight


def save(
    folder: Path,
    model: PreTrainedModel,
    settings: Lora,
    trained: Mapping[str, Tensor],
    *,
    blocks: Sequence[nn.Module],
    base: str | None,
) -> None:
    """Write a folder that peft loads beside the model that the adapters were trained on, `base`."""
    folder.mkdir(parents=True, exist_ok=True)
    found = _configuration(model, blocks, settings)
    found.base_model_name_or_path = base
    found.inference_mode = True
    found.save_pretrained(folder)
    names = {name: name.replace(f".{ADAPTER}.", ".") for name in trained}
    own = {f"base_model.model.{names[name]}": value for name, value in trained.items()}
    safetensors_io.write(folder / WEIGHTS, own)


def _configuration(model: PreTrainedModel, blocks: Sequence[nn.Module], settings: Lora) -> Any:
    from peft import LoraConfig

    inside = sorted({plain_name(name) for block in blocks for name in _linear(block)})
    everywhere = [plain_name(name) for name in _linear(model)]
    for target in settings.targets:
        if not any(f".{name}".endswith(f".{target}") for name in everywhere):
            known = sorted({name.rpartition(".")[2] for name in everywhere})
            raise SettingsError(
                f"model.lora.targets: no linear layer of the {model.config.model_type} is named"
                f" '{target}'",
                did_you_mean(target, known),
            )
    alpha: Any = settings.alpha  # peft says int, and divides
    return LoraConfig(
        r=settings.rank,
        lora_alpha=alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.targets or inside),
        fan_in_fan_out=any(_transposed(part) for part in model.modules()),
        bias="none",
    )


def _linear(module: nn.Module) -> Iterator[str]:
    """Yield the paths of a module's linear layers."""
    for name, part in module.named_modules():
        if (isinstance(part, nn.Linear) or _transposed(part)) and not adapting(f".{name}."):
            yield name.removesuffix(".base_layer")


def _transposed(part: nn.Module) -> bool:
    """Return whether a layer is the linear one of GPT-2, whose weight is [in, out]."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(part, Conv1D)
