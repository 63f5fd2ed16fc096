"""Builds a trained model's program: the module for a backend to compile, with its inputs.

A model comes from a folder (encoder, classifier or causal model), from a ranking run, or from a
function that returns a custom module. `restore` builds a program again from an artifact.
"""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from regauge.data import chat_templates
from regauge.data.tokenizer import LoadedTokenizer, read_truncation_side
from regauge.inference.export.manifest import ProgramEntry
from regauge.models import architectures, sentence_transformers, tokenizer_convention
from regauge.models.dropout import DropoutKeys
from regauge.models.generation.generation_config import read_max_new_tokens
from regauge.models.generation.text_generation import (
    build_generation_program,
    find_generation_limit,
)
from regauge.models.inference_modules import (
    DTYPES,
    CustomProgram,
    TagProgram,
    TextProgram,
)
from regauge.models.io_spec import (
    ROWS,
    InputSpec,
    TensorSpec,
    program_inputs,
    read_class_names,
)
from regauge.models.modules import Classifier, Encoder, TextModule, TokenClassifier
from regauge.models.sentence_transformers import (
    HeadActivation,
    Pooling,
    SentenceEncoder,
    Tokenization,
)
from regauge.models.settings import DEFAULT_NEW_TOKENS
from regauge.models.weights import read_weights
from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError, SettingsError, first_line

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from regauge.inference.export.export_settings import TextSettings
    from regauge.models.io_spec import OutputKind
    from regauge.models.tokenizer_convention import Convention


UNSUPPORTED_HEADS = (
    "ForQuestionAnswering",
    "ForQuestionAnsweringSimple",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
)
"""Class name endings for outputs that are neither vectors nor text classes."""
ONE_TEXT = InputSpec()
"""A record with a single text of any name."""


class ProgramSpec(NamedTuple):
    """A program and its description."""

    program: nn.Module
    """In evaluation mode, fp32, on the CPU."""
    entry: ProgramEntry
    """The manifest's `program` table."""

    @property
    def max_tokens(self) -> int:
        """Longest text in tokens; 1 if the program reads tensors."""
        return self.entry.tokenization.max_length if self.entry.tokenization else 1


def build_text_spec(
    program: nn.Module,
    output_kind: OutputKind,
    output_size: int,
    tokenization: Tokenization,
    input_spec: InputSpec,
    **options: Any,
) -> ProgramSpec:
    """Return a program that reads texts; `options` are further keys of the manifest's table."""
    entry = ProgramEntry(
        output_kind=output_kind,
        output_size=output_size,
        inputs=program_inputs(input_spec),
        tokenization=tokenization,
        fields=input_spec,
        **options,
    )
    return ProgramSpec(program, entry)


def build_folder_spec(
    folder: Path, settings: TextSettings, trained: InputSpec | None = None
) -> ProgramSpec:
    """Return the program for a transformers or sentence-transformers folder.

    `settings` override the folder's files. `trained` is the input spec of the run that wrote the
    folder; texts are then tokenized as in the run. Raises SettingsError if weights are missing or
    do not fit the architecture.
    """
    model = architectures.load_model(folder)
    _check_encoder(folder, model)
    _check_vocabulary(folder, model)
    is_classifier = architectures.is_classifier(model)
    encoder_files = None if is_classifier else sentence_transformers.read_if_present(folder)
    tokenization = _read_tokenization(folder, trained)
    if settings.pair_fields is not None and (trained is not None or not is_classifier):
        problem = "text.pair_fields is only for the folder of a classifier, without a run"
        raise SettingsError(problem, "remove it")
    if is_classifier:
        return _build_classifier_spec(folder, model, settings, tokenization, trained)
    if encoder_files is None and not settings.pooling:
        if architectures.is_token_classifier(model):
            return _build_tagger_spec(folder, model, settings, trained)
        if is_causal_lm(model):
            return _build_generation_spec(folder, model, settings, trained)
        _check_head(folder, model)
    pooling = _resolve_pooling(encoder_files, settings)
    encoder = Encoder(strip_head(model), DropoutKeys(), pooling)
    _load_dense_layers(encoder, pooling, folder)
    tokenization = resolve_tokenization(folder, tokenization, settings, encoder.max_tokens, trained)
    input_spec = trained or ONE_TEXT
    tokenization = _resolve_token_types(folder, encoder.model, tokenization, input_spec)
    program = build_text_program(encoder, "vectors", tokenization)
    width = _measure_width(program)
    return build_text_spec(program, "vectors", width, tokenization, input_spec, pooling=pooling)


def _build_classifier_spec(
    folder: Path,
    model: PreTrainedModel,
    settings: TextSettings,
    tokenization: Tokenization | None,
    trained: InputSpec | None,
) -> ProgramSpec:
    input_spec = trained or ONE_TEXT
    if settings.pair_fields is not None:
        input_spec = InputSpec(text_fields=settings.pair_fields, is_pair=True)
    if settings.pooling or settings.normalize is not None:
        problem = f"{folder} is a classifier, which does not return vectors"
        raise SettingsError(problem, "remove text.pooling and text.normalize")
    classifier = Classifier(model, DropoutKeys())
    tokenization = resolve_tokenization(
        folder, tokenization, settings, classifier.max_tokens, trained
    )
    tokenization = _resolve_token_types(folder, model, tokenization, input_spec)
    width: int = model.config.num_labels  # type: ignore[assignment]
    return build_text_spec(
        build_text_program(classifier, "scores", tokenization),
        "classes" if width > 1 else "values",
        width,
        tokenization,
        input_spec,
        labels=read_class_names(model.config.id2label),
        activation=_read_activation(folder, model, tokenization),
    )


def _build_tagger_spec(
    folder: Path, model: PreTrainedModel, settings: TextSettings, trained: InputSpec | None
) -> ProgramSpec:
    input_spec = trained or ONE_TEXT
    module = TokenClassifier(model, DropoutKeys())
    tokenization = resolve_tokenization(folder, None, settings, module.max_tokens, trained)
    tokenization = _resolve_token_types(folder, model, tokenization, input_spec)
    return build_text_spec(
        build_tag_program(module, tokenization),
        "entities",
        TagProgram.NUMBERS_PER_TOKEN * tokenization.max_length,
        tokenization,
        input_spec,
        labels=read_class_names(model.config.id2label),
    )


def _read_activation(
    folder: Path, model: PreTrainedModel, tokenization: Tokenization
) -> HeadActivation:
    """Return the function applied to a head's outputs; only third-party folders declare one."""
    num_labels: int = model.config.num_labels  # type: ignore[assignment]
    if tokenization.convention != "regauge":
        return sentence_transformers.read_head_activation(folder, num_labels)
    if model.config.problem_type == "multi_label_classification":
        return "sigmoid"
    return "softmax" if num_labels > 1 else "identity"


def _check_head(folder: Path, model: PreTrainedModel) -> None:
    name = architectures.class_name(model)
    if name.endswith(UNSUPPORTED_HEADS):
        problem = f"'{folder}' is a {name}, whose head is not supported"
        raise SettingsError(problem, 'set text.pooling, such as ["mean"], for vectors without it')


def _check_encoder(folder: Path, model: PreTrainedModel) -> None:
    name = architectures.class_name(model)
    if model.config.is_encoder_decoder and not name.endswith("EncoderModel"):
        problem = f"'{folder}' is a {name}, an encoder with a decoder"
        raise SettingsError(problem, "name the folder of an encoder or of a causal model")


def _check_vocabulary(folder: Path, model: PreTrainedModel) -> None:
    if not (folder / "tokenizer.json").is_file():
        return
    embeddings: Any = model.get_input_embeddings()
    entries, rows = LoadedTokenizer(folder).info.vocab_size, embeddings.weight.shape[0]
    if entries > rows:
        problem = f"the tokenizer of '{folder}' has {entries} entries, but its model has {rows}"
        raise SettingsError(problem, "copy the tokenizer of the model again, or resize the model")


def is_causal_lm(model: PreTrainedModel) -> bool:
    """Return whether a model is a causal language model, which predicts the next token."""
    return architectures.class_name(model).endswith(("ForCausalLM", "LMHeadModel"))


def build_text_program(
    module: TextModule, output: Literal["vectors", "scores"], tokenization: Tokenization
) -> TextProgram:
    """Return an encoder's or classifier's program in evaluation mode."""
    if tokenization.has_token_types is not None:
        module.has_token_types = tokenization.has_token_types
    return TextProgram(module, output).eval()


def build_tag_program(module: TokenClassifier, tokenization: Tokenization) -> TagProgram:
    """Return a token classifier's program in evaluation mode."""
    return TagProgram(build_text_program(module, "scores", tokenization)).eval()


def _build_generation_spec(
    folder: Path, model: PreTrainedModel, settings: TextSettings, trained: InputSpec | None
) -> ProgramSpec:
    """Return a causal model's program; with a chat template a text is a user message."""
    input_spec = trained or ONE_TEXT
    max_tokens = input_spec.max_row_tokens(find_generation_limit(model))
    declared = read_max_new_tokens(folder)
    default = declared or DEFAULT_NEW_TOKENS
    if max_tokens is not None:
        default = max(min(default, max_tokens // 2), 1)
    max_new_tokens = settings.max_new_tokens or default
    if max_tokens is not None:
        largest = max_tokens - tokenizer_convention.MIN_TOKENS
        max_tokens -= max_new_tokens
        if max_tokens < tokenizer_convention.MIN_TOKENS:
            problem = f"text.max_new_tokens = {max_new_tokens} leaves no room for a text"
            raise SettingsError(problem, f"set at most {largest}")
    tokenization = resolve_tokenization(folder, None, settings, max_tokens, trained)
    input_format: Any = "chat" if chat_templates.has_template(folder) else "completion"
    tokenization = tokenization.model_copy(update={"input_format": input_format})
    tokenization = _resolve_token_types(folder, model, tokenization, input_spec)
    program = build_generation_program(model, folder, folder, max_new_tokens, tokenization)
    options = {"answer_tokens": settings.max_new_tokens or declared}
    return build_text_spec(
        program.eval(), "text", max_new_tokens, tokenization, input_spec, **options
    )


def build_module_spec(path: str, module: nn.Module, examples: Mapping[str, Tensor]) -> ProgramSpec:
    """Return a custom module as a program; `examples` are the inputs by name.

    Raises DataError if the module fails on the examples, or if a dtype is not supported.
    """
    program = CustomProgram(module.eval().float())
    dtype_names = {dtype: name for name, dtype in DTYPES.items()}
    if not 0 < len(examples) <= CustomProgram.MAX_INPUTS:
        problem = f"'{path}' returns {len(examples)} examples"
        remedy = f"return 1 to {CustomProgram.MAX_INPUTS}, one for each input tensor"
        raise DataError(problem, remedy)
    for name, value in examples.items():
        if value.dtype not in dtype_names:
            problem = f"'{path}': {name} is {value.dtype}"
            raise DataError(problem, f"convert it to one of {', '.join(DTYPES)}")
    inputs = tuple(
        TensorSpec.model_validate(
            {"name": name, "shape": (ROWS, *value.shape[1:]), "dtype": dtype_names[value.dtype]}
        )
        for name, value in examples.items()
    )
    try:
        with torch.no_grad():
            output = program(*examples.values())
    except Exception as error:
        problem = f"'{path}': {type(module).__name__} fails on its examples: {first_line(error)}"
        raise DataError(problem, "correct the module or its examples") from error
    entry = ProgramEntry(
        output_kind="tensor", output_size=output.shape[1], inputs=inputs, module=path
    )
    return ProgramSpec(program, entry)


def read_vocab_size(folder: Path) -> int:
    config: Any = architectures.build_template(folder).config
    count: int = config.vocab_size
    return count


def strip_head(model: PreTrainedModel) -> PreTrainedModel:
    base: Any = model.base_model
    stripped: PreTrainedModel = base
    return stripped


def _read_tokenization(folder: Path, trained: InputSpec | None) -> Tokenization | None:
    """Return a sentence-transformers folder's tokenization; None for another folder.

    A trained model's tokenization has the folder's prompts and the run's limit.
    """
    if not sentence_transformers.is_sentence_transformer(folder):
        return None
    tokenization = sentence_transformers.read_tokenization(folder)
    limit = trained.max_row_tokens(tokenization.max_length) if trained else None
    if limit is None:
        return tokenization
    return Tokenization(max_length=limit, prompts=tokenization.prompts)


def _resolve_pooling(encoder_files: SentenceEncoder | None, settings: TextSettings) -> Pooling:
    """Return the pooling from the settings, else the folder, else the default."""
    pooling = encoder_files.pooling if encoder_files else Pooling()
    overrides = {
        "modes": settings.pooling or pooling.modes,
        "normalize": pooling.normalize if settings.normalize is None else settings.normalize,
    }
    return pooling.model_copy(update=overrides)


def resolve_tokenization(
    folder: Path,
    tokenization: Tokenization | None,
    settings: TextSettings,
    positions: int | None,
    trained: InputSpec | None,
) -> Tokenization:
    """Return the tokenization from the settings, else the folder, within the model's limit.

    `positions` is the model's number of position embeddings; None means no limit.
    """
    limit = trained.max_row_tokens(positions) if trained else positions
    tokens = settings.max_seq_length or (
        tokenization.max_length if tokenization else trained and limit
    )
    tokens = tokens or tokenizer_convention.max_tokens(folder, limit)
    if limit is not None and tokens > limit:
        if settings.max_seq_length is not None:
            problem = (
                f"text.max_seq_length = {settings.max_seq_length},"
                f" but the model has {limit} positions"
            )
            raise SettingsError(problem, f"set at most {limit}")
        tokens = limit
    updates: dict[str, Any] = {
        "max_length": tokens,
        "truncation_side": read_truncation_side(folder),
        "special_tokens": "read",
    }
    if settings.prompts:
        updates["prompts"] = settings.prompts
    if settings.default_prompt is not None:
        updates["default_prompt"] = settings.default_prompt
    convention: Convention = "regauge" if trained else tokenizer_convention.read_convention(folder)
    default = Tokenization(max_length=tokens, convention=convention)
    resolved = (tokenization or default).model_copy(update=updates)
    if resolved.default_prompt is not None and resolved.default_prompt not in resolved.prompts:
        remedy = did_you_mean(resolved.default_prompt, tuple(resolved.prompts))
        raise SettingsError(f"no prompt is called '{resolved.default_prompt}'", remedy)
    return resolved


def _resolve_token_types(
    folder: Path, model: PreTrainedModel, tokenization: Tokenization, input_spec: InputSpec
) -> Tokenization:
    """Set whether a third-party model gets token types.

    A model gets them if it takes them and the tokenizer returns them. Raises SettingsError for
    types other than 0, and 1 for the second text in a pair.
    """
    num_types = getattr(model.config, "type_vocab_size", None)
    if tokenization.convention == "regauge":
        return tokenization
    takes_types = "token_type_ids" in signature(model.forward).parameters
    has_types = (
        takes_types and num_types not in {0, 1} and tokenizer_convention.reads_token_types(folder)
    )
    if has_types:
        num_texts = 2 if input_spec.is_pair else 1
        types = LoadedTokenizer(folder).list_token_types(num_texts)
        if types != sorted(types) or not set(types) <= set(range(num_texts)):
            kind = "pair" if input_spec.is_pair else "text"
            problem = f"the tokenizer of {folder} gives a {kind} the token types {types}"
            raise SettingsError(problem, "choose a model with types 0, and 1 for a second text")
    return tokenization.model_copy(update={"has_token_types": has_types})


def _measure_width(program: nn.Module) -> int:
    """Return the numbers per output; hidden states may be wider or narrower than the layers."""
    with torch.no_grad():
        output: Tensor = program(
            *(torch.ones(shape, dtype=torch.int32) for shape in ((1, 1), (1,)))
        )
    return output.shape[1]


def _load_dense_layers(module: Encoder, pooling: Pooling, folder: Path) -> None:
    for layer, dense in zip(module.pool.dense, pooling.dense, strict=True):
        weights = read_weights(folder / dense.folder)
        try:
            layer.load_state_dict({name.removeprefix("linear."): weights[name] for name in weights})
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            problem = f"{folder / dense.folder} does not fit its layer: {reason}"
            raise SettingsError(problem, "copy the folder again") from None
