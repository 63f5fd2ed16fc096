"""Rebuilds an artifact's program and loads the weights.

Backends that do not compile ahead of time run or compile this program at load time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from regauge.inference.export.manifest import TOKENIZER
from regauge.inference.export.programs import build_tag_program, build_text_program, strip_head
from regauge.inference.export.trained_programs import build_trained_module
from regauge.models.architectures import build_template, read_generation_config
from regauge.models.dropout import DropoutKeys
from regauge.models.generation.text_generation import build_generation_program
from regauge.models.inference_modules import (
    CustomProgram,
    RankProgram,
    cast_program,
)
from regauge.models.init_weights import META, materialize_buffers
from regauge.models.modules import Classifier, Encoder, TokenClassifier
from regauge.models.ranker import Ranker, RankerShape
from regauge.models.sentence_transformers import Pooling
from regauge.models.tensors import precision_dtype, set_tensor
from regauge.system import choices

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from regauge.inference.export.manifest import ArtifactManifest, ProgramEntry
    from regauge.models.io_spec import InputSpec
    from regauge.models.sentence_transformers import Tokenization


def restore_program(
    manifest: ArtifactManifest, folder: Path, weights: Mapping[str, Tensor]
) -> nn.Module:
    """Return an artifact's program with weights, in the compiled precision.

    `folder` has the architecture. A custom module runs its own code; raises SettingsError if its
    import was not allowed.
    """
    entry = manifest.program
    if entry.module is not None:
        module, _ = choices.load_function(entry.module)()
        program: nn.Module = CustomProgram(module)
        cast_program(program, precision_dtype(manifest.compiled.precision))
        program.load_state_dict(dict(weights), strict=False)
        return program.eval()
    tokenization = entry.tokenization
    if tokenization is None:
        raise TypeError("a text program has no tokenization")
    if entry.task is not None:
        module = build_trained_module(entry.task, folder)
        output: Any = "vectors" if entry.output_kind == "vectors" else "scores"
        program = build_text_program(module, output, tokenization)
        return _load_weights(program, manifest, weights)
    model = build_template(folder)
    materialize_buffers(model)
    with META:
        program = _build_program(model, folder, entry, tokenization)
    return _load_weights(program, manifest, weights)


def _load_weights(
    program: nn.Module, manifest: ArtifactManifest, weights: Mapping[str, Tensor]
) -> nn.Module:
    cast_program(program, precision_dtype(manifest.compiled.precision))
    tied: dict[int, Any] = {}
    for name, value in program.named_parameters(remove_duplicate=False):
        if name in weights:
            tied[id(value)] = torch.nn.Parameter(weights[name], requires_grad=False)
        set_tensor(program, name, tied[id(value)])
    for name, _ in list(program.named_buffers()):
        if name in weights:
            set_tensor(program, name, weights[name])
    return program.eval()


def _build_program(
    model: PreTrainedModel, folder: Path, entry: ProgramEntry, tokenization: Tokenization
) -> nn.Module:
    if entry.fields.ranking is not None:
        return RankProgram(_build_ranker(model, folder, entry.fields))
    if entry.output_kind == "text":
        read_generation_config(model, folder)
        tokenizer, max_new_tokens = folder.parent / TOKENIZER, entry.output_size
        return build_generation_program(model, folder, tokenizer, max_new_tokens, tokenization)
    if entry.output_kind == "entities":
        return build_tag_program(TokenClassifier(model, DropoutKeys()), tokenization)
    if entry.output_kind == "vectors":
        pooling = entry.pooling or Pooling()
        encoder = Encoder(strip_head(model), DropoutKeys(), pooling)
        return build_text_program(encoder, "vectors", tokenization)
    return build_text_program(Classifier(model, DropoutKeys()), "scores", tokenization)


def _build_ranker(model: PreTrainedModel, folder: Path, input_spec: InputSpec) -> Ranker:
    """Return a ranker without weights, for a query with one candidate."""
    ranking = input_spec.ranking
    if ranking is None:
        raise TypeError("input_spec has no ranking")
    document_encoder = None
    if ranking.encoders == "separate":
        document_encoder = build_template(folder)
        materialize_buffers(document_encoder)
    texts = (ranking.num_query_texts, len(input_spec.text_fields) - ranking.num_query_texts)
    values = (len(input_spec.numeric_features), len(input_spec.categorical_features))
    shape = RankerShape(*texts, 1, *values, calibrated=ranking.is_calibrated)
    scale = [(0.0, 1.0)] * len(
        input_spec.numeric_features
    )  # replaced by the trained scale in the weights
    return Ranker(
        model, DropoutKeys(), shape, ranking.interactions, scale, documents=document_encoder
    )
