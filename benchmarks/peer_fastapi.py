"""Serves a model with sentence-transformers and FastAPI, on OpenAI's route for embeddings.

The style `plain` is the usual endpoint: each request calls `encode` in a thread of FastAPI. The
style `batched` collects the texts of waiting requests and encodes them together.

    python benchmarks/peer_fastapi.py MODEL PORT [--style plain|batched] [--rows N]
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

STYLES = ("plain", "batched")


class EmbeddingRequest(BaseModel):
    """The body of a request; other keys are ignored."""

    input: str | list[str]
    model: str = ""

    @property
    def texts(self) -> list[str]:
        """The texts of the request."""
        return [self.input] if isinstance(self.input, str) else self.input


def main() -> None:
    """Serve the model until SIGTERM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("--style", choices=STYLES, default="plain")
    parser.add_argument("--rows", type=int, default=64, help="most texts that are encoded together")
    options = parser.parse_args()
    model = SentenceTransformer(str(options.model), device="cpu")
    model.encode(["a text"])
    build_app = build_plain_app if options.style == "plain" else build_batched_app
    app = build_app(model, options.model.name, options.rows)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


def build_plain_app(model: SentenceTransformer, name: str, _: int) -> FastAPI:
    """Return the application that encodes each request by itself."""
    app = FastAPI()

    @app.post("/v1/embeddings")
    def embed(request: EmbeddingRequest) -> dict[str, Any]:
        return build_answer(model.encode(request.texts), name)

    add_routes(app, name)
    return app


def build_batched_app(model: SentenceTransformer, name: str, rows: int) -> FastAPI:
    """Return the application that encodes the texts of waiting requests together."""
    waiting: asyncio.Queue[tuple[list[str], asyncio.Future[np.ndarray]]] = asyncio.Queue()

    @asynccontextmanager
    async def run_batcher(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(encode_forever())
        yield
        task.cancel()

    async def encode_forever() -> None:
        while True:
            batch = [await waiting.get()]
            while not waiting.empty() and sum(len(texts) for texts, _ in batch) < rows:
                batch.append(waiting.get_nowait())
            texts = [text for part, _ in batch for text in part]
            vectors = await asyncio.to_thread(model.encode, texts, batch_size=rows)
            for part, answer in batch:
                if not answer.cancelled():
                    answer.set_result(vectors[: len(part)])
                vectors = vectors[len(part) :]

    app = FastAPI(lifespan=run_batcher)

    @app.post("/v1/embeddings")
    async def embed(request: EmbeddingRequest) -> dict[str, Any]:
        answer: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        await waiting.put((request.texts, answer))
        return build_answer(await answer, name)

    add_routes(app, name)
    return app


def add_routes(app: FastAPI, name: str) -> None:
    """Add the routes of health and of the model's name."""

    @app.get("/health")
    def check_health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model"}]}


def build_answer(vectors: np.ndarray, name: str) -> dict[str, Any]:
    """Return an answer of OpenAI's route; `vectors` is [texts, width]."""
    rows = [
        {"object": "embedding", "index": index, "embedding": vector.tolist()}
        for index, vector in enumerate(vectors)
    ]
    return {"object": "list", "data": rows, "model": name}


if __name__ == "__main__":
    main()
