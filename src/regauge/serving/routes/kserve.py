"""The Open Inference Protocol, version 2, for KServe and Triton.

Protocol source: https://github.com/kserve/open-inference-protocol. A text is an input with data
type `BYTES`. A model's version is the start of the artifact hash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field
from starlette.responses import Response

from regauge import __version__
from regauge.serving.http_protocol import (
    Call,
    EmptyBody,
    RouteSpec,
    build_json_response,
)
from regauge.serving.open_inference.model_tensors import (
    build_inputs,
    build_outputs,
    build_records,
    describe_inputs,
    describe_outputs,
)
from regauge.serving.open_inference.tensor_protocol import InputTensor, encode_outputs, read_tensors
from regauge.serving.request_body import RequestBody
from regauge.serving.request_errors import (
    InvalidRequestError,
    RequestError,
    UnavailableError,
    UnknownModelError,
)
from regauge.serving.routes.health import find_status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from regauge.serving.loaded_version import LoadedVersion
    from regauge.serving.model_version import Inputs, ModelVersion, Outputs
    from regauge.serving.open_inference.tensor_protocol import OutputTensor
    from regauge.serving.scheduler import Priority

HEADER_LENGTH = "inference-header-content-length"
"""Header with the length of the JSON, if bytes follow it."""
BINARY_TYPE = "application/octet-stream"
VERSION_CHARACTERS = 12
"""How many characters of the artifact hash form the version."""
HIGHEST_PRIORITY = 1
MODEL_PATHS = ("/v2/models/{model:path}/versions/{version}", "/v2/models/{model:path}")
"""Model paths; the more specific one is first."""
CONFIG_TYPES = {"BYTES": "TYPE_STRING"}
"""Data type -> other name in a model's configuration."""


class InferParameters(RequestBody):
    """Request parameters."""

    timeout: int | None = Field(default=None, ge=0)
    """Time limit for the request, in microseconds; 0 keeps the server's limit."""
    priority: int | Literal["interactive", "bulk"] | None = None
    """1 is interactive and a higher number is bulk; 0 leaves the choice to the server."""
    binary_data_output: bool = False
    """Whether outputs are sent as bytes, unless an output says otherwise."""
    truncate: bool = False
    """Whether texts may be truncated; by default the setting `serve.overflow` decides."""
    prompt_name: str | None = None
    """Name of a prompt of the model to prepend."""


class OutputParameters(RequestBody):
    """Parameters of a requested output."""

    binary_data: bool | None = None
    """Whether it is sent as bytes."""
    classification: int | None = None
    """Number of best classes, which is refused."""
    shared_memory_region: str | None = None
    """Shared memory region, which is refused."""


class RequestedOutput(RequestBody):
    """A requested output."""

    name: str
    """Output name, as in the model's metadata."""
    parameters: OutputParameters = OutputParameters()
    """How it is sent."""


class InferBody(RequestBody):
    """Body of an inference request."""

    id: str | None = None
    """Request identifier, repeated in the answer."""
    parameters: InferParameters = InferParameters()
    """How to serve the request."""
    inputs: list[InputTensor] = Field(min_length=1)
    """Model inputs."""
    outputs: list[RequestedOutput] | None = None
    """Requested outputs; by default all."""

    @classmethod
    def parse(cls, raw_body: bytes, headers: Mapping[str, str]) -> Self:
        return super().parse(raw_body[: _json_length(headers, raw_body)], headers)


def format_kserve_error(error: RequestError) -> tuple[int, dict[str, Any]]:
    return error.status, {"error": error.message}


async def _show_server(call: Call[EmptyBody]) -> Response:
    del call
    extensions = ["binary_tensor_data", "model_configuration"]
    return build_json_response(
        {"name": "regauge", "version": __version__, "extensions": extensions}
    )


async def _show_live(call: Call[EmptyBody]) -> Response:
    del call
    return build_json_response({"live": True})


async def _show_ready(call: Call[EmptyBody]) -> Response:
    _, status = find_status(call.context)
    is_ready = status == 200  # noqa: PLR2004
    return build_json_response({"ready": is_ready}, status=status)


async def _show_model_ready(call: Call[EmptyBody]) -> Response:
    models, name = call.context.models, call.request.path_params["model"]
    version = models.find(call.choose_name(name)).current
    if version is None and not models.is_lazy:
        raise UnavailableError(f"model '{name}' is not loaded")
    if version is not None:
        _check_version(call, version)
        if not version.worker_pids:
            raise UnavailableError(f"model '{name}' does not have a ready worker")
    return build_json_response({"name": name, "ready": True})


async def _show_model(call: Call[EmptyBody]) -> Response:
    name = call.request.path_params["model"]
    async with call.use_model(name) as model:
        _check_version(call, model)
        document = {
            "name": name,
            "versions": [_name_version(model)],
            "platform": f"regauge_{model.artifact.manifest.compiled.backend.kind}",
            "inputs": [spec.to_document() for spec in describe_inputs(model.program)],
            "outputs": [spec.to_document() for spec in describe_outputs(model.program)],
        }
    return build_json_response(document)


async def _show_config(call: Call[EmptyBody]) -> Response:
    name = call.request.path_params["model"]
    async with call.use_model(name) as model:
        _check_version(call, model)
        document = {
            "name": name,
            "platform": "",
            "backend": f"regauge_{model.artifact.manifest.compiled.backend.kind}",
            "max_batch_size": 0,
            "input": [
                spec.to_config(CONFIG_TYPES.get(spec.datatype, f"TYPE_{spec.datatype}"))
                for spec in describe_inputs(model.program)
            ],
            "output": [
                spec.to_config(CONFIG_TYPES.get(spec.datatype, f"TYPE_{spec.datatype}"))
                for spec in describe_outputs(model.program)
            ],
        }
    return build_json_response(document)


async def _infer(call: Call[InferBody]) -> Response:
    body, name = call.body, call.request.path_params["model"]
    _check_options(body)
    length = _json_length(call.request.headers, call.raw_body)
    tensors = read_tensors(body.inputs, call.raw_body[length:])
    async with call.use_model(name) as model:
        _check_version(call, model)
        names = [spec.name for spec in describe_outputs(model.program)]
        for output in body.outputs or ():
            if output.name not in names:
                problem = f"unknown output '{output.name[:80]}'; the model has {', '.join(names)}"
                raise InvalidRequestError(problem)
        outputs, inputs = await _compute(call, model, tensors)
        outputs.check_failures()
        document = {"model_name": name, "model_version": _name_version(model)}
        tensors_out = await call.context.run_in_thread(build_outputs, model, outputs.values, inputs)
    if body.id is not None:
        document["id"] = body.id
    return _build_response(document, _select_outputs(body, tensors_out))


async def _compute(
    call: Call[InferBody], model: ModelVersion, tensors: Mapping[str, np.ndarray]
) -> tuple[Outputs, Inputs | None]:
    """Return the outputs for a request's tensors, and its texts if the model reads them."""
    parameters = call.body.parameters
    timeout = parameters.timeout / 1e6 if parameters.timeout else None
    priority = _read_priority(parameters.priority)
    if model.program.tokenization is None:
        if parameters.truncate or parameters.prompt_name is not None:
            raise InvalidRequestError(
                "the model reads tensors: truncate and prompt_name are for texts"
            )
        records = build_records(model.program, tensors)
        options = call.build_options(len(records), priority=priority, timeout_seconds=timeout)
        return await model.compute_tensors(records, options), None
    inputs = build_inputs(model.program, tensors, parameters.prompt_name, parameters.truncate)
    options = call.build_options(inputs.num_records, priority=priority, timeout_seconds=timeout)
    return await model.compute(inputs, options), inputs


def _select_outputs(
    body: InferBody, outputs: Sequence[OutputTensor]
) -> list[tuple[OutputTensor, bool]]:
    """Return the requested outputs, and whether each is sent as bytes."""
    default = body.parameters.binary_data_output
    if not body.outputs:
        return [(output, default) for output in outputs]
    by_name = {output.name: output for output in outputs}
    return [
        (
            by_name[item.name],
            default if item.parameters.binary_data is None else item.parameters.binary_data,
        )
        for item in body.outputs
    ]


def _build_response(
    document: dict[str, Any], outputs: Sequence[tuple[OutputTensor, bool]]
) -> Response:
    body, length = encode_outputs(document, outputs)
    if length is None:
        return Response(body, media_type="application/json")
    return Response(body, headers={HEADER_LENGTH: str(length)}, media_type=BINARY_TYPE)


def _json_length(headers: Mapping[str, str], raw_body: bytes) -> int:
    """Return the length of a body's JSON; raises InvalidRequestError."""
    text = headers.get(HEADER_LENGTH)
    if text is None:
        return len(raw_body)
    if not (text.isascii() and text.isdecimal()) or int(text[:20]) > len(raw_body):
        raise InvalidRequestError(f"{HEADER_LENGTH} is not a length within the body")
    return int(text)


def _check_options(body: InferBody) -> None:
    parameters = [item.parameters for item in body.outputs or ()]
    regions = [item.parameters.shared_memory_region for item in body.inputs]
    if any([*regions, *(item.shared_memory_region for item in parameters)]):
        raise InvalidRequestError("shared memory is not supported; send the values")
    if any(item.classification for item in parameters):
        raise InvalidRequestError("classification is not supported; request 'probabilities'")


def _check_version(call: Call[Any], model: LoadedVersion) -> None:
    """Raise UnknownModelError if a request is for another version."""
    version = call.request.path_params.get("version")
    if version is not None and version != _name_version(model):
        problem = f"the model does not have version '{version[:80]}'; it has {_name_version(model)}"
        raise UnknownModelError(problem)


def _name_version(model: LoadedVersion) -> str:
    return model.content_sha256[:VERSION_CHARACTERS]


def _read_priority(priority: int | str | None) -> Priority | None:
    """Return a request's priority, or None if the server decides."""
    if not priority:
        return None
    return "interactive" if priority in {HIGHEST_PRIORITY, "interactive"} else "bulk"


ROUTES: tuple[RouteSpec[Any], ...] = (
    RouteSpec("GET", "/v2", _show_server, EmptyBody, "Describe the server."),
    RouteSpec("GET", "/v2/health/live", _show_live, EmptyBody, "Return 200."),
    RouteSpec("GET", "/v2/health/ready", _show_ready, EmptyBody, "Return 200 if ready."),
    *(
        spec
        for path in MODEL_PATHS
        for spec in (
            RouteSpec("GET", f"{path}/ready", _show_model_ready, EmptyBody, "Return 200 if ready."),
            RouteSpec("GET", f"{path}/config", _show_config, EmptyBody, "Describe for Triton."),
            RouteSpec("POST", f"{path}/infer", _infer, InferBody, "Return the outputs of a model."),
        )
    ),
    *(RouteSpec("GET", path, _show_model, EmptyBody, "Describe a model.") for path in MODEL_PATHS),
)
