"""The text-embeddings-inference API: vectors, scores and classes for texts.

Schema source: https://huggingface.github.io/text-embeddings-inference/.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, Field

from regauge import __version__
from regauge.inference.export.postprocess import build_columns
from regauge.serving.http_protocol import (
    Call,
    EmptyBody,
    RouteSpec,
    build_json_response,
    build_output_response,
)
from regauge.serving.model_version import BATCH_SIZE, Inputs, scale_to_length_1
from regauge.serving.request_body import RequestBody
from regauge.serving.request_errors import (
    FieldError,
    InvalidRequestError,
    RequestError,
)
from regauge.serving.routes.openai import TokenIds, shorten_vectors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.responses import Response

    from regauge.data.tokenizer import Side
    from regauge.models.io_spec import OutputKind
    from regauge.serving.model_version import ModelVersion, Outputs

Texts = Annotated[list[str], Field(fail_fast=True)]
Pair = Annotated[list[str], Field(min_length=1, max_length=2)]
ERROR_KINDS = {
    403: "Validation",
    404: "Validation",
    405: "Validation",
    408: "Validation",
    413: "Validation",
    415: "Validation",
    422: "Validation",
    424: "Backend",
    429: "Overloaded",
    503: "Unhealthy",
}
"""Status -> error type; others are `Backend`."""
PAIR_TEXTS = 2
RANKER_KINDS: tuple[OutputKind, ...] = ("values", "scores")
PREDICTED_KINDS: tuple[OutputKind, ...] = ("classes", *RANKER_KINDS, "entities")
SIDES: dict[str | None, Side] = {"left": "left", "Left": "left", "right": "right", "Right": "right"}
"""Spellings of `truncation_direction`; the capitals are those of text-embeddings-inference."""
TOKEN_BYTES = 1 << 20
"""Maximum body of routes for tokens, whose answers are many times as large."""


class ModelBody(RequestBody):
    """Key in every body."""

    model: str | None = None
    """Model name; by default the first model for this route."""


class TruncationOptions(RequestBody):
    """How texts are prompted and truncated."""

    truncate: bool = False
    """Whether texts may be truncated; by default the setting `serve.overflow` decides."""
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
    """Side on which texts are truncated; by default as in the model's tokenizer."""
    prompt_name: str | None = None
    """Name of a prompt of the model to prepend."""

    @property
    def truncation_side(self) -> Side | None:
        """The side in lowercase."""
        return SIDES.get(self.truncation_direction)


class TextsBody(ModelBody, TruncationOptions):
    """Keys in the bodies with texts to compute."""


class EmbedAllBody(TextsBody):
    """Body of `/embed_all`."""

    inputs: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)] = Field(
        union_mode="left_to_right"
    )
    """A text, several texts, the tokens of a text, or the tokens of several texts."""


class EmbedBody(EmbedAllBody):
    """Body of `/embed`."""

    normalize: bool | None = None
    """Whether vectors have length 1; by default as the model was evaluated."""
    dimensions: int | None = Field(default=None, ge=1)
    """Vector width: the first numbers, normalized again unless `normalize` is false."""


class RerankBody(TextsBody):
    """Body of `/rerank`."""

    query: str
    """Text to rank the others for."""
    texts: Texts
    """Texts to rank."""
    raw_scores: bool = False
    """Whether scores are the model's numbers, without activation."""
    return_text: bool = False
    """Whether the answer contains the texts."""


class PredictBody(TextsBody):
    """Body of `/predict`."""

    inputs: str | Texts | Annotated[list[Pair], Field(fail_fast=True)] = Field(
        union_mode="left_to_right"
    )
    """A text, a pair of texts, or a list of texts and pairs, each in a separate list."""
    raw_scores: bool = False
    """Whether scores are the model's numbers, without softmax or sigmoid."""


class SimilarityInputs(RequestBody):
    """Texts for `/similarity`."""

    source_sentence: str
    """Text to compare the others with."""
    sentences: Texts = Field(min_length=1)
    """Texts to compare."""


class SimilarityBody(ModelBody):
    """Body of `/similarity`."""

    inputs: SimilarityInputs
    """Texts."""
    parameters: TruncationOptions = TruncationOptions()
    """Options."""


class AnyBody(ModelBody):
    """Body of `/`: that of `/embed`, `/predict`, `/similarity` or `/rerank`."""

    model_config = ConfigDict(extra="ignore")  # the other route's body has the other keys

    forms: ClassVar[tuple[type[RequestBody], ...]] = (
        EmbedBody,
        PredictBody,
        SimilarityBody,
        RerankBody,
    )

    inputs: Any = None
    """Model inputs."""
    query: Any = None
    """Text to rank the others for."""
    texts: Any = None
    """Texts to rank."""


class TokenizeBody(ModelBody):
    """Body of `/tokenize`."""

    inputs: str | Texts = Field(union_mode="left_to_right")
    """A text, or several texts."""
    add_special_tokens: bool = True
    """Whether the tokens around a text are included."""
    prompt_name: str | None = None
    """Name of a prompt of the model to prepend."""


class DecodeBody(ModelBody):
    """Body of `/decode`."""

    ids: TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)] = Field(
        union_mode="left_to_right"
    )
    """Tokens of one text, or of several texts."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out."""


def format_tei_error(error: RequestError) -> tuple[int, dict[str, Any]]:
    kind = ERROR_KINDS.get(error.status, "Backend")
    return error.status, {"error": error.message, "error_type": kind}


async def answer_by_model(call: Call[AnyBody]) -> Response:
    """Answer `/`: the vectors, scores or classes the model returns for this body."""
    body = call.body
    if body.query is not None or body.texts is not None:
        return await rerank(call.with_body(RerankBody, call.raw_body))
    if isinstance(body.inputs, dict):
        return await compare(call.with_body(SimilarityBody, call.raw_body))
    async with call.use_model(body.model) as model:
        returns_vectors = model.program.output_kind == "vectors"
    if returns_vectors:
        return await embed(call.with_body(EmbedBody, call.raw_body))
    return await predict(call.with_body(PredictBody, call.raw_body))


async def embed(call: Call[EmbedBody]) -> Response:
    """Answer `/embed`: a vector per text, or null for a failed one."""
    body = call.body
    inputs = _read_embed_inputs(body)
    options = call.build_options(inputs.num_records)
    async with call.use_model(body.model, ("vectors",)) as model:
        outputs = await model.compute(inputs, options)
        vectors = _normalize(model, outputs.values, requested=body.normalize)
    vectors = shorten_vectors(vectors, body.dimensions, normalizes=body.normalize is not False)
    _check_records(call, outputs)
    rows: Any = np.ascontiguousarray(vectors)
    if outputs.failures:
        rows = [None if index in outputs.failures else row for index, row in enumerate(vectors)]
    return build_output_response(call.context, rows, outputs)


async def embed_all(call: Call[EmbedAllBody]) -> Response:
    """Answer `/embed_all`: a vector per token of each text, special tokens included."""
    body = call.body
    inputs = _read_embed_inputs(body)
    options = call.build_options(inputs.num_records)
    async with call.use_model(body.model, ("vectors",)) as model:
        vectors = await model.compute_token_vectors(inputs, options)
    return build_json_response(vectors)


async def rerank(call: Call[RerankBody]) -> Response:
    """Answer `/rerank`: index and score of each text, best first."""
    body = call.body
    options = call.build_options(len(body.texts))
    columns = [[body.query] * len(body.texts), body.texts]
    async with call.use_model(body.model, RANKER_KINDS, PAIR_TEXTS) as model:
        if len(model.program.fields.text_fields) != PAIR_TEXTS:
            raise InvalidRequestError("the model does not score pairs of texts, so it cannot rank")
        outputs = await model.compute(_build_inputs(body, columns), options)
        scores = _read_scores(model, outputs.values, is_raw=body.raw_scores)
    _check_records(call, outputs)
    items: list[dict[str, Any]] = [
        {"index": int(index), "score": scores[index]}
        | ({"text": body.texts[index]} if body.return_text else {})
        for index in np.argsort(-scores, kind="stable")
        if int(index) not in outputs.failures
    ]
    for index, problem in outputs.failures.items():
        items.append({"index": index, "score": None, "error": problem})
    return build_output_response(call.context, items, outputs)


async def predict(call: Call[PredictBody]) -> Response:
    """Answer `/predict`: each text's classes with scores, best first."""
    body = call.body
    async with call.use_model(body.model, PREDICTED_KINDS) as model:
        columns, is_single = _read_predict_inputs(body, model)
        options = call.build_options(len(columns[0]))
        inputs = _build_inputs(body, columns)
        outputs = await model.compute(inputs, options)
        build = partial(_build_predictions, is_raw=body.raw_scores)
        rows = await call.context.run_in_thread(build, model, outputs.values, inputs)
    _check_records(call, outputs)
    answers = [None if index in outputs.failures else row for index, row in enumerate(rows)]
    return build_output_response(call.context, answers[0] if is_single else answers, outputs)


async def compare(call: Call[SimilarityBody]) -> Response:
    """Answer `/similarity`: each text's cosine with the first one."""
    body = call.body
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    options = call.build_options(len(texts))
    inputs = _build_inputs(body.parameters, [texts])
    async with call.use_model(body.model, ("vectors",)) as model:
        outputs = await model.compute(inputs, options)
    outputs.check_failures()
    vectors = scale_to_length_1(outputs.values)
    return build_output_response(call.context, vectors[1:] @ vectors[0], outputs)


async def _tokenize(call: Call[TokenizeBody]) -> Response:
    body = call.body
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    call.build_options(len(texts))
    async with call.use_model(body.model) as model:
        tokens = await model.describe_tokens(
            texts, body.prompt_name, add_special_tokens=body.add_special_tokens
        )
    return build_json_response(tokens)


async def _decode(call: Call[DecodeBody]) -> Response:
    ids: Any = call.body.ids
    lists = [ids] if ids and isinstance(ids[0], int) else ids
    call.build_options(len(lists))
    async with call.use_model(call.body.model) as model:
        decode = partial(
            model.preprocessor.decode_ids, skip_special_tokens=call.body.skip_special_tokens
        )
        texts: list[str] = await call.context.run_in_thread(list, map(decode, lists))
    return build_json_response(texts)


async def _show_info(call: Call[EmptyBody]) -> Response:
    models = call.context.models
    slot = models.find(call.choose_name(call.request.query_params.get("model")))
    async with models.use(slot) as model:
        document = model.describe()
    queue = call.context.settings.queue
    return build_json_response(
        {
            "model_id": slot.name,
            BATCH_SIZE: queue.max_request_records,
            **document,
            "auto_truncate": call.context.settings.overflow == "truncate",
            "version": __version__,
        }
    )


def _read_embed_inputs(body: EmbedAllBody) -> Inputs:
    inputs = Inputs.from_field("inputs", body.inputs, body.prompt_name, truncate=body.truncate)
    return inputs._replace(truncation_side=body.truncation_side)


def _build_inputs(options: TruncationOptions, columns: Sequence[Sequence[str]]) -> Inputs:
    return Inputs(
        columns,
        prompt=options.prompt_name,
        truncate=options.truncate,
        truncation_side=options.truncation_side,
    )


def _read_predict_inputs(body: PredictBody, model: ModelVersion) -> tuple[list[list[str]], bool]:
    """Return a column per text field, and whether the answer is for a single record.

    A flat list of two texts is a pair if the model reads pairs, and otherwise two records.
    """
    num_texts = max(1, len(model.program.fields.text_fields))
    values: Any = body.inputs
    is_single = isinstance(values, str)
    if is_single:
        values = [[values]]
    elif values and isinstance(values[0], str):
        is_single = num_texts == PAIR_TEXTS or len(values) == 1
        values = [values] if is_single else [[text] for text in values]
    if any(len(record) != num_texts for record in values):
        raise InvalidRequestError(f"the model reads {num_texts} texts per record")
    return [list(column) for column in zip(*values, strict=True)] or [[]], is_single


def _build_predictions(
    model: ModelVersion, values: np.ndarray, inputs: Inputs, *, is_raw: bool
) -> list[Any]:
    program = model.program
    if program.output_kind == "entities":
        if is_raw:
            raise FieldError("the scores of entities are probabilities only", "raw_scores")
        columns: Any = build_columns(program, "float32", values, words=model.find_words(inputs))
        return list(columns["entities"].to_pylist())
    if program.output_kind == "classes":
        scores = values
        if not is_raw:
            scores = np.asarray(build_columns(program, "float32", values)["probabilities"])
        labels = program.labels or tuple(f"LABEL_{index}" for index in range(scores.shape[1]))
        return [
            [{"score": row[index], "label": labels[index]} for index in np.argsort(-row)]
            for row in scores
        ]
    name = program.output_kind.removesuffix("s")
    return [
        [{"score": score, "label": name}] for score in _read_scores(model, values, is_raw=is_raw)
    ]


def _read_scores(model: ModelVersion, values: np.ndarray, *, is_raw: bool) -> np.ndarray:
    if is_raw:
        return values[:, 0]
    [scores] = build_columns(model.program, "float32", values).values()
    return np.asarray(scores)


def _check_records(call: Call[Any], outputs: Outputs) -> None:
    """Raise InferenceError for a failed record, unless the server reports it in its place."""
    if not call.context.settings.item_errors:
        outputs.check_failures()


def _normalize(model: ModelVersion, vectors: np.ndarray, *, requested: bool | None) -> np.ndarray:
    """Return vectors with length 1, or as the model was evaluated."""
    if requested is None or requested == model.is_normalized:
        return vectors
    if model.is_normalized:
        raise InvalidRequestError("the vectors of this model have length 1; omit normalize")
    return scale_to_length_1(vectors)


ROUTES: tuple[RouteSpec[Any], ...] = (
    RouteSpec("POST", "/", answer_by_model, AnyBody, "Return what the model computes."),
    RouteSpec("POST", "/embed", embed, EmbedBody, "Return vectors of texts."),
    RouteSpec("POST", "/embed_all", embed_all, EmbedAllBody, "Return vectors of all tokens."),
    RouteSpec("POST", "/rerank", rerank, RerankBody, "Rank texts for a query."),
    RouteSpec("POST", "/predict", predict, PredictBody, "Return classes of texts."),
    RouteSpec("POST", "/similarity", compare, SimilarityBody, "Compare a text with others."),
    RouteSpec(
        "POST", "/tokenize", _tokenize, TokenizeBody, "Return the tokens of texts.", TOKEN_BYTES
    ),
    RouteSpec("POST", "/decode", _decode, DecodeBody, "Return the texts of tokens.", TOKEN_BYTES),
    RouteSpec(
        "GET",
        "/info",
        _show_info,
        EmptyBody,
        "Describe a model and its limits.",
        query=("model",),
    ),
)
