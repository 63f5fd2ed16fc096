"""The program of an artifact again, with its weights: for what does not compile ahead of time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from regauge import choices
from regauge.artifacts.manifest import TOKENIZER
from regauge.artifacts.programs import body, writing
from regauge.models import architectures as models
from regauge.models import sentence_transformers
from regauge.models.dropout import DropoutKeys
from regauge.models.inference_modules import OwnProgram, RankProgram, TextProgram, cast
from regauge.models.init_weights import META, make_buffers
from regauge.models.modules import Classifier, Encoder
from regauge.models.ranker import Form, Ranker
from regauge.models.tensors import dtype_of, put

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from regauge.artifacts.manifest import Manifest
    from regauge.models.io_spec import Fields


def restored(manifest: Manifest, folder: Path, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return the program of an artifact with its weights, in the type that it computes in."""
    if manifest.program.module is not None:
        module, _ = choices.function(manifest.program.module)()
        program: nn.Module = OwnProgram(module)
        cast(program, dtype_of(manifest.compiled.precision))
        program.load_state_dict(dict(weights), strict=False)
        return program.eval()
    model = models.template(folder)
    make_buffers(model)
    with META:
        if manifest.program.fields.ranking is not None:
            program = RankProgram(_ranker(model, folder, manifest.program.fields))
        elif manifest.program.answers == "text":
            program = writing(model, folder.parent / TOKENIZER, manifest.program.width)
        elif manifest.program.answers == "vectors":
            pooling = manifest.program.pooling or sentence_transformers.Pooling()
            program = TextProgram(Encoder(body(model), DropoutKeys(), pooling), "vectors")
        else:
            program = TextProgram(Classifier(model, DropoutKeys()), "scores")
    cast(program, dtype_of(manifest.compiled.precision))
    tied: dict[int, Any] = {}
    for name, value in program.named_parameters(remove_duplicate=False):
        if name in weights:
            tied[id(value)] = torch.nn.Parameter(weights[name], requires_grad=False)
        put(program, name, tied[id(value)])
    for name, _ in list(program.named_buffers()):
        if name in weights:
            put(program, name, weights[name])
    return program.eval()


def _ranker(model: PreTrainedModel, folder: Path, fields: Fields) -> Ranker:
    """Return a ranker without weights for a query with one candidate."""
    ranking = fields.ranking
    if ranking is None:
        raise TypeError("these are not the fields of a ranker")
    other = None
    if ranking.encoders == "apart":
        other = models.template(folder)
        make_buffers(other)
    texts = (ranking.queries, len(fields.texts) - ranking.queries)
    values = (len(fields.numbers), len(fields.categories))
    form = Form(*texts, 1, *values, calibrated=ranking.calibrated)
    scale = [(0.0, 1.0)] * len(fields.numbers)  # the weights have what it was trained with
    return Ranker(model, DropoutKeys(), form, ranking.interactions, scale, documents=other)
