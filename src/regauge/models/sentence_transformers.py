"""Reads and writes the configuration files in sentence-transformers folders.

They describe text tokenization and hidden state pooling. `pooling.py` computes the pooling; nothing
here imports torch.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from regauge.config import Settings
from regauge.models import tokenizer_convention
from regauge.models.tokenizer_convention import COPY_REMEDY, MIN_TOKENS, Convention, write_json
from regauge.system.choices import did_you_mean
from regauge.system.errors import SettingsError
from regauge.system.hub import CONFIG, MODEL_FILE_PATTERNS
from regauge.system.json_files import (
    DocumentShape,
    check_shape,
    find_json,
    read_json,
    read_json_list,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

MODULES_FILE, PROMPTS_FILE = "modules.json", "config_sentence_transformers.json"
LIMIT_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_mpnet_config.json",
)
"""Files with the maximum text length; the name depends on the age of the folder."""
NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})
BUILT_IN_PROMPTS = ("query", "document")
"""Prompt names that sentence-transformers defines as empty."""
TEXT_MODULE = {
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "modality_config.text.method": "forward",
    "modality_config.text.method_output_name": "last_hidden_state",
}
"""Values that the hidden state module may declare in its limits file."""
UNSUPPORTED_TEXT_KEYS = ("processing_kwargs", "query_length", "document_length", "query_expansion")
"""Keys in the same file that change how a text is tokenized."""
PoolingMode = Literal["mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
MODE_FLAGS: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Flags in older folders; several modes are concatenated in this order."""
ACTIVATIONS = {"Tanh": "tanh", "Identity": "identity", "ReLU": "relu", "GELU": "gelu"}
Activation = Literal["tanh", "identity", "relu", "gelu"]
HeadActivation = Literal["softmax", "sigmoid", "identity"]
"""Function applied to a classification head's outputs."""


class DenseLayer(Settings):
    """A linear layer after the pooling."""

    in_features: int
    """Input width."""
    out_features: int
    """Output width."""
    bias: bool = True
    """Whether the layer has a bias."""
    activation: Activation = "tanh"
    """Activation function."""
    folder: str
    """Subfolder with its weights."""


class Pooling(Settings):
    """Pools a text's last hidden states to one vector."""

    modes: tuple[PoolingMode, ...] = Field(default=("mean",), min_length=1)
    """Pooling modes; several are concatenated."""
    dense: tuple[DenseLayer, ...] = ()
    """Dense layers after the pooling."""
    normalize: bool = True
    """Whether vectors are normalized to length 1."""
    truncate_dim: int | None = Field(default=None, ge=1)
    """How many numbers of each vector to keep after normalization; None keeps all."""


class Tokenization(Settings):
    """How texts are converted to tokens."""

    max_length: int = Field(ge=MIN_TOKENS)
    """Maximum tokens per text, special tokens included; longer texts are truncated."""
    prompts: dict[str, str] = {}
    """Name -> prompt that can be prepended to a text."""
    default_prompt: str | None = None
    """Name of the default prompt."""
    lowercase: bool = False
    """Whether a text is lowercased before tokenization."""
    input_format: Literal["text", "completion", "chat"] = "text"
    """`text`: special tokens end the text; `completion`: the text is continued; `chat`: a chat
    template is applied."""
    truncation_side: Literal["left", "right"] = "right"
    """The side on which longer texts are truncated; prompts of `completion` and `chat` are
    always truncated on the left."""
    special_tokens: Literal["guessed", "read"] = "guessed"
    """`read` from the post-processor of the tokenizer; older versions guessed those around "a"."""
    has_token_types: bool | None = None
    """Whether the model gets token types; None if its architecture decides."""
    convention: Convention = "regauge"
    """`regauge`: "[SEP]" in a text is plain text; `transformers`: its tokenizer decides."""

    def prompt_text(self, name: str | None = None) -> str:
        """Return the named prompt, or the default one; empty if there is none.

        Raises SettingsError for an unknown name.
        """
        name = name or self.default_prompt
        if name is None:
            return ""
        if name not in self.prompts:
            options = tuple(self.prompts)
            remedy = did_you_mean(name, options) if options else "the artifact has none"
            raise SettingsError(f"no prompt is called '{name}'", remedy)
        return self.prompts[name]


class SentenceEncoder(Settings):
    """A sentence-transformers folder's description."""

    tokenization: Tokenization
    pooling: Pooling = Pooling()


class ModuleShape(DocumentShape):
    """Entry in `modules.json`."""

    type: str
    path: str


class LimitsShape(DocumentShape):
    """The file with the maximum text length."""

    max_seq_length: Annotated[int, Field(ge=MIN_TOKENS)] | Literal[0] | None = None


class PromptsShape(DocumentShape):
    """The file with the prompts."""

    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None


class PoolingShape(DocumentShape):
    """Pooling configuration."""

    pooling_mode: str | list[str] | None = None


class DenseShape(DocumentShape):
    """Dense layer configuration."""

    in_features: int
    out_features: int
    bias: bool = True


def is_sentence_transformer(folder: Path) -> bool:
    return (folder / MODULES_FILE).is_file()


def read_if_present(folder: Path) -> SentenceEncoder | None:
    """Return a folder's description, or None if it is not in sentence-transformers format.

    Raises SettingsError if it has an unsupported module.
    """
    return read_sentence_encoder(folder) if is_sentence_transformer(folder) else None


def read_sentence_encoder(folder: Path) -> SentenceEncoder:
    """Return the description of a sentence-transformers folder.

    Supported modules are Transformer, Pooling, Dense and Normalize, in this order. Raises
    SettingsError for all others.
    """
    modules = _read_modules(folder)
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    expected = ["Transformer", "Pooling", *["Dense"] * kinds.count("Dense")]
    normalized = kinds[-1:] == ["Normalize"]
    if kinds != expected + ["Normalize"] * normalized:
        problem = f"unsupported modules in {folder}: {', '.join(kinds)}"
        raise SettingsError(problem, "choose a model of Transformer, Pooling, Dense …, Normalize")
    if modules[0]["path"] not in {"", "."}:
        problem = f"the weights of {folder} are in its folder '{modules[0]['path']}'"
        raise SettingsError(problem, "save it again with sentence-transformers 2 or later")
    dense = tuple(
        _read_dense(folder / module["path"], module["path"])
        for module in modules
        if module["type"].endswith(".Dense")
    )
    _check_text_module(folder)
    modes = _read_modes(folder / modules[1]["path"] / CONFIG)
    truncate_dim = _read_optional(folder / PROMPTS_FILE, PromptsShape).get("truncate_dim")
    return SentenceEncoder(
        tokenization=read_tokenization(folder),
        pooling=Pooling(modes=modes, dense=dense, normalize=normalized, truncate_dim=truncate_dim),
    )


def read_tokenization(folder: Path) -> Tokenization:
    """Return the tokenization of a sentence-transformers folder with any modules.

    Raises SettingsError if the default prompt is not defined.
    """
    limits = _read_text_config(folder)
    prompt_config = _read_optional(folder / PROMPTS_FILE, PromptsShape)
    prompts = {name: text or "" for name, text in (prompt_config.get("prompts") or {}).items()}
    default = prompt_config.get("default_prompt_name")
    if default is not None and default not in {*prompts, *BUILT_IN_PROMPTS}:
        problem = f"{folder / PROMPTS_FILE} has no prompt '{default}', its default prompt"
        raise SettingsError(problem, "add it to prompts, or remove default_prompt_name")
    return Tokenization(
        max_length=limits.get("max_seq_length") or tokenizer_convention.max_tokens(folder),
        prompts=prompts,
        default_prompt=default if default in prompts else None,
        lowercase=bool(limits.get("do_lower_case")),
        convention=tokenizer_convention.read_convention(folder),
    )


def read_head_activation(folder: Path, num_labels: int) -> HeadActivation:
    """Return the function that a folder declares for its classification head's outputs.

    A multi-label classifier has a sigmoid. sentence-transformers stores a cross-encoder's function.
    Otherwise it is softmax for several classes; for one, the sigmoid that sentence-transformers and
    transformers apply, or the identity for a regression. Raises SettingsError for other functions.
    """
    config = read_json(folder / CONFIG, COPY_REMEDY)
    if config.get("problem_type") == "multi_label_classification":
        return "sigmoid"
    path = (
        _read_optional(folder / PROMPTS_FILE, PromptsShape).get("activation_fn")
        or (config.get("sentence_transformers") or {}).get("activation_fn")
        or config.get("sbert_ce_default_activation_function")
    )
    default = "Identity" if config.get("problem_type") == "regression" else "Sigmoid"
    name = str(path or (default if num_labels == 1 else "Identity")).rpartition(".")[2]
    if name == "Identity":  # sentence-transformers stores it for several classes, too
        return "softmax" if num_labels > 1 else "identity"
    if name != "Sigmoid":
        problem = f"{folder} declares the unsupported activation_fn '{path}'"
        raise SettingsError(problem, "set it to torch.nn.Sigmoid or torch.nn.Identity there")
    return "sigmoid"


def copy_description(folder: Path, target: Path) -> None:
    """Copy the files of sentence-transformers, without the model, to a transformers folder.

    Raises SettingsError if a module is not supported.
    """
    read_sentence_encoder(folder)
    for name in (MODULES_FILE, PROMPTS_FILE, *LIMIT_FILES):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    for module in _read_modules(folder)[1:]:
        (target / module["path"]).mkdir(exist_ok=True)
        for pattern in MODEL_FILE_PATTERNS:
            for file in (folder / module["path"]).glob(pattern):
                shutil.copyfile(file, target / module["path"] / file.name)


def write_description(
    folder: Path,
    encoder: SentenceEncoder,
    width: int,
    model_arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> None:
    """Add sentence-transformers files to a transformers folder; `width` is the model's.

    `model_arguments` are the arguments with which transformers builds the model. Dense layer
    folders get a configuration; the caller writes their weights.
    """
    parts = [("", "Transformer"), ("1_Pooling", "Pooling")]
    parts += [(dense.folder, "Dense") for dense in encoder.pooling.dense]
    if encoder.pooling.normalize:
        parts.append((f"{len(parts)}_Normalize", "Normalize"))
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, (path, kind) in enumerate(parts)
    ]
    for path, _ in parts[1:]:
        (folder / path).mkdir(exist_ok=True)
    for dense in encoder.pooling.dense:
        write_json(folder / dense.folder / CONFIG, _dense_config(dense))
    tokenization, modes = encoder.tokenization, encoder.pooling.modes
    write_json(folder / MODULES_FILE, modules)
    pooling: dict[str, Any] = {flag: mode in modes for flag, mode in MODE_FLAGS.items()}
    if _modes_from_flags(pooling) != modes:
        pooling = {"pooling_mode": list(modes)}  # flags have a fixed order
    write_json(folder / "1_Pooling" / CONFIG, {"word_embedding_dimension": width, **pooling})
    limits: dict[str, Any] = {
        "max_seq_length": tokenization.max_length,
        "do_lower_case": tokenization.lowercase,
    }
    if model_arguments:
        limits["model_args"] = dict(model_arguments)
    write_json(folder / LIMIT_FILES[0], limits)
    prompt_config: dict[str, Any] = {"similarity_fn_name": "cosine"}
    if encoder.pooling.truncate_dim is not None:
        prompt_config["truncate_dim"] = encoder.pooling.truncate_dim
    if tokenization.prompts:
        prompt_config["prompts"] = tokenization.prompts
        prompt_config["default_prompt_name"] = tokenization.default_prompt
    write_json(folder / PROMPTS_FILE, prompt_config)
    if tokenization.convention != tokenizer_convention.DEFAULT_CONVENTION:
        tokenizer_convention.write_convention(folder)


def _read_optional(path: Path, shape: type[DocumentShape]) -> dict[str, Any]:
    """Return a document with a shape; empty if the file does not exist."""
    document = find_json(path, COPY_REMEDY)
    if document is None:
        return {}
    check_shape(document, path, COPY_REMEDY, shape)
    return document


def _read_text_config(folder: Path) -> dict[str, Any]:
    documents = (_read_optional(folder / name, LimitsShape) for name in LIMIT_FILES)
    return next((document for document in documents if document), {})


def _check_text_module(folder: Path) -> None:
    """Raise SettingsError if a folder needs anything but the hidden states of all its tokens."""
    config = _read_text_config(folder)
    text = (config.get("modality_config") or {}).get("text", {})
    declared = {
        "transformer_task": config.get("transformer_task"),
        "module_output_name": config.get("module_output_name"),
        "modality_config.text.method": text.get("method"),
        "modality_config.text.method_output_name": text.get("method_output_name"),
        **{key: config.get(key) for key in UNSUPPORTED_TEXT_KEYS},
    }
    for key, value in declared.items():
        if value and value != TEXT_MODULE.get(key):
            problem = f"{folder} declares the unsupported {key} = {value!r}"
            raise SettingsError(
                problem, "choose a model that pools the last hidden states of texts"
            )


def _read_modules(folder: Path) -> list[dict[str, Any]]:
    modules = read_json_list(folder / MODULES_FILE, COPY_REMEDY)
    for module in modules:
        check_shape(module, folder / MODULES_FILE, COPY_REMEDY, ModuleShape)
        if Path(module["path"]).is_absolute() or ".." in Path(module["path"]).parts:
            problem = f"{folder / MODULES_FILE} names '{module['path']}', outside of its folder"
            raise SettingsError(problem, "do not use it")
    return modules


def _read_modes(path: Path) -> tuple[PoolingMode, ...]:
    table = read_json(path, COPY_REMEDY, PoolingShape)
    if table.get("include_prompt", True) is not True:
        problem = f"{path} excludes the prompt from the pooling"
        raise SettingsError(problem, "name a model that pools all tokens")
    value = table.get("pooling_mode")
    if value is None:
        return _modes_from_flags(table) or ("mean",)
    modes = (value,) if isinstance(value, str) else tuple(value)
    for mode in modes:
        if mode not in MODE_FLAGS.values():
            remedy = did_you_mean(mode, tuple(MODE_FLAGS.values()))
            raise SettingsError(f"{path} has an unknown pooling '{mode}'", remedy)
    return modes


def _modes_from_flags(table: dict[str, Any]) -> tuple[PoolingMode, ...]:
    return tuple(mode for flag, mode in MODE_FLAGS.items() if table.get(flag))


def _read_dense(folder: Path, path: str) -> DenseLayer:
    table = read_json(folder / CONFIG, COPY_REMEDY, DenseShape)
    activation = str(table.get("activation_function", "Tanh")).rpartition(".")[2]
    is_unsupported = activation not in ACTIVATIONS or table.get("use_residual")
    input_name = table.get("module_input_name", "sentence_embedding")
    if is_unsupported or input_name != "sentence_embedding":
        problem = f"{folder} is an unsupported dense layer"
        options = ", ".join(ACTIVATIONS)
        raise SettingsError(problem, f"choose a model with {options} and no residual")
    return DenseLayer.model_validate(
        {
            "in_features": table["in_features"],
            "out_features": table["out_features"],
            "bias": table.get("bias", True),
            "activation": ACTIVATIONS[activation],
            "folder": path,
        }
    )


def _dense_config(dense: DenseLayer) -> dict[str, Any]:
    (activation,) = (name for name, value in ACTIVATIONS.items() if value == dense.activation)
    return {
        "in_features": dense.in_features,
        "out_features": dense.out_features,
        "bias": dense.bias,
        "activation_function": f"torch.nn.{activation}",
    }
