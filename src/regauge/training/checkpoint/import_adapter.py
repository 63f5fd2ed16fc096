"""Merges a peft adapter of any kind into its base model, with peft."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from regauge.models.architectures import LOAD_OPTIONS, no_pooler_argument, silence_transformers
from regauge.models.lora import adapts_tied_layers
from regauge.models.tensors import find_tied_weights
from regauge.models.weights import list_file_weights, untie
from regauge.system.errors import SettingsError, first_line
from regauge.system.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS, resolve_model
from regauge.system.json_files import read_json

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn
    from transformers import PreTrainedModel

AUTO_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "FEATURE_EXTRACTION": "AutoModel",
}
"""peft's task name -> class of the base model."""
CLASS_HEADS = ("score.weight", "classifier.weight", "classifier.out_proj.weight")
"""Weights with a row per class."""
WEIGHT_PREFIX = "base_model.model."
PROBE_TOKENS = 8
TOLERANCE = 1e-3
"""Largest difference of the merged model, relative to the largest output."""


def load_merged(origin: Path) -> tuple[PreTrainedModel, Path]:
    """Return an adapter folder's merged model in fp32, and the folder of its base model.

    Raises SettingsError if the base model is missing or of another shape, and if the merged model
    would differ from the adapter.
    """
    table = read_json(origin / ADAPTER_CONFIG, "copy the folder again")
    name, kind = table.get("base_model_name_or_path"), table.get("peft_type")
    if not name:
        problem = f"{origin / ADAPTER_CONFIG} names no base model"
        raise SettingsError(problem, "set base_model_name_or_path there")
    base = resolve_model(str(name))
    stored = {
        key.removeprefix(WEIGHT_PREFIX): weight.shape
        for key, weight in list_file_weights(origin / ADAPTER_WEIGHTS).items()
    }
    try:
        from peft import PeftModel
    except ImportError:
        problem = "an adapter needs peft, which is not installed"
        raise SettingsError(problem, "pip install 'regauge[lora]'") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say of tied weights is handled below
        model = _load_base(base, table, stored)
        try:
            adapted: Any = PeftModel.from_pretrained(model, str(origin)).eval().float()
            if adapts_tied_layers(find_tied_weights(adapted)):
                untie(adapted)
            expected = _probe(adapted)
            merged: PreTrainedModel = adapted.merge_and_unload()
        except (AttributeError, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
            problem = f"peft cannot merge the {kind} adapter of {origin}: {first_line(error)}"
            raise SettingsError(problem, "merge it with the library that trained it") from None
    if merged.get_output_embeddings() is not None:
        output: Any = merged.get_output_embeddings()
        if output.weight is not merged.get_input_embeddings().weight:
            untie(merged)
    if (_probe(merged) - expected).abs().max() > TOLERANCE * expected.abs().max():
        problem = f"the {kind} adapter of {origin} computes other outputs after merging"
        raise SettingsError(problem, "merge it with the library that trained it")
    return merged, base


def _load_base(
    base: Path, table: dict[str, Any], stored: dict[str, tuple[int, ...]]
) -> PreTrainedModel:
    """Return the base model in the class of the adapter; the adapter may have its head."""
    import transformers

    silence_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(base)
    except (OSError, ValueError) as error:
        raise _unreadable_error(base, error) from None
    mapping, task = table.get("auto_mapping") or {}, table.get("task_type")
    own_class = (config.architectures or ["AutoModel"])[0]
    name = AUTO_CLASSES.get(str(task)) or mapping.get("base_model_class") or own_class
    model_class = getattr(transformers, name, None)
    if model_class is None:
        problem = f"the adapter needs the class '{name}', which transformers does not have"
        raise SettingsError(problem, f"correct {ADAPTER_CONFIG}")
    options: dict[str, Any] = no_pooler_argument(model_class)
    if name == "AutoModel":
        options = no_pooler_argument(model_class._model_mapping[type(config)])  # noqa: SLF001
    labels = [stored[head][0] for head in CLASS_HEADS if head in stored]
    if labels and labels[0] != config.num_labels:
        options["num_labels"] = labels[0]
    try:
        model, info = model_class.from_pretrained(
            base,
            **LOAD_OPTIONS,
            **options,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError) as error:
        raise _unreadable_error(base, error) from None
    mismatched = {key for key, *_ in info["mismatched_keys"]}
    if missing := {*info["missing_keys"], *mismatched} - stored.keys():
        problem = f"neither the adapter nor '{base}' has the weight '{min(missing)}'"
        raise SettingsError(problem, f"name the adapter's base model in {ADAPTER_CONFIG}")
    loaded: PreTrainedModel = model
    return loaded


def _unreadable_error(base: Path, error: Exception) -> SettingsError:
    problem = f"the adapter's base model '{base}' cannot be read: {first_line(error)}"
    return SettingsError(problem, "correct base_model_name_or_path")


@torch.no_grad()
def _probe(model: nn.Module) -> Tensor:
    """Return the outputs for a few tokens, [1, tokens or classes, ...]."""
    outputs = model(input_ids=torch.arange(PROBE_TOKENS)[None])
    values: Tensor = outputs[0]
    return values.float()
