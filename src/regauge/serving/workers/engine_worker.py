"""A worker process's model for computing batches."""

from __future__ import annotations

import os
import time
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from regauge.inference.export.bucket_times import read_bucket_times
from regauge.inference.export.records import TensorRecords, TextRecords, TokenizedTexts
from regauge.serving.wire import encode_message, receive_message
from regauge.system.errors import SettingsError, first_line

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    import numpy as np

    from regauge.inference.export.artifact import Artifact
    from regauge.inference.export.bucket_times import BucketTimes
    from regauge.inference.export.engine import Engine
    from regauge.inference.export.records import Records
    from regauge.models.inference_modules import TextProgram
    from regauge.serving.workers.worker_requests import LoadRequest

MEASUREMENT_SECONDS = 0.5
"""Time for measuring batch shapes if the model comes without measured times."""


class EngineWorker:
    def __init__(self, artifact: Artifact, engine: Engine, times: BucketTimes) -> None:
        self._artifact = artifact
        self._engine = engine
        self._times = times

    @classmethod
    def load(cls, request: LoadRequest) -> EngineWorker:
        """Load, warm up and verify an artifact.

        Raises the errors of `open_model` and `load_engine`, and DataError if the stored parity rows
        are not reproduced.
        """
        from regauge.inference.export.batch_timing import measure_bucket_times
        from regauge.inference.export.engine import load_engine, warm_up
        from regauge.inference.export.parity_rows import check_artifact, compute_rows
        from regauge.inference.export.uncompiled import open_model

        artifact = open_model(request.path, threads=request.threads)
        engine = load_engine(
            artifact,
            batch_invariant=request.batch_invariant,
            threads=request.threads,
            device=request.device,
        )
        warm_up(engine, artifact)
        check_artifact(artifact, partial(compute_rows, engine))
        times = read_bucket_times(artifact)
        if times is None:
            manifest = artifact.manifest
            times = measure_bucket_times(
                engine.runner,
                engine.buckets.shapes,
                artifact.program.inputs,
                seconds=MEASUREMENT_SECONDS,
                has_dynamic_shapes=manifest.compiled.backend.has_dynamic_shapes,
                threads=request.threads or manifest.target.threads,
                chip=artifact.accelerator.model_name(),
            )
        return cls(artifact, engine, times)

    def serve(self, connection: socket.socket) -> None:
        """Answer every batch, in order, until the server closes the socket."""
        connection.sendall(encode_message(self._ready_header()))
        while (message := receive_message(connection)) is not None:
            connection.sendall(self._answer(message.header, message.arrays))

    def close(self) -> None:
        """Do nothing: the model ends with the process."""

    @cached_property
    def _encoder(self) -> TextProgram:
        """The artifact's program in fp32, because a compiled one returns only pooled vectors.

        Raises SettingsError if the model does not encode single texts.
        """
        import torch

        from regauge.models.inference_modules import TextProgram, cast_program
        from regauge.models.modules import Encoder

        program = self._artifact.restore_program()
        if not isinstance(program, TextProgram) or not isinstance(program.module, Encoder):
            problem = f"{self._artifact.origin} does not have an encoder for token vectors"
            raise SettingsError(problem, "use the model of an encoder")
        cast_program(program, torch.float32)
        return program

    def _ready_header(self) -> dict[str, Any]:
        return {
            "type": "ready",
            "pid": os.getpid(),
            "content_sha256": self._artifact.content_sha256,
            "times": self._times.model_dump(),
        }

    def _answer(self, header: dict[str, Any], arrays: Sequence[np.ndarray]) -> bytes:
        """Compute a batch; return the message with outputs or error.

        A batch of type `token_vectors` has the ids of one text.
        """
        try:
            if header["type"] == "token_vectors":
                encoder = self._encoder
                start = time.perf_counter()
                outputs = _compute_token_vectors(encoder, *arrays)
            else:
                start = time.perf_counter()
                records = _build_records(header["texts"], arrays)
                outputs = self._engine.compute_bucket(records, header["length"])
        except Exception as error:  # noqa: BLE001 - the batch fails, and the worker continues
            problem = f"{type(error).__name__}: {first_line(error)}"
            return encode_message({"type": "failure", "id": header["id"], "problem": problem})
        milliseconds = 1e3 * (time.perf_counter() - start)
        answer = {"type": "outputs", "id": header["id"], "milliseconds": milliseconds}
        return encode_message(answer, [outputs])


def _compute_token_vectors(encoder: TextProgram, ids: np.ndarray) -> np.ndarray:
    """Return a text's token vectors, [tokens, width] fp32; `ids` is [tokens]."""
    import torch

    tokens = torch.tensor(ids, dtype=torch.int32)[None]
    lengths = torch.tensor([len(ids)], dtype=torch.int32)
    with torch.inference_mode():
        vectors: np.ndarray = encoder.token_vectors(tokens, lengths)[0].numpy()
    return vectors


def _build_records(num_texts: int, arrays: Sequence[np.ndarray]) -> Records:
    """Return a batch's records: ids and lengths of each text field, then the features."""
    if not num_texts:
        return TensorRecords(arrays)
    count = 2 * num_texts
    texts = [TokenizedTexts(*arrays[index : index + 2]) for index in range(0, count, 2)]
    return TextRecords(texts, arrays[count:])
