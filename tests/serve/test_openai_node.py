"""The client of OpenAI for Node.js gets the same vectors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from serve.live_server import LiveServer

TEXTS = ["anna lives in oslo", "a", "the café costs 7, or less"]
PACKAGES = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "regauge-tests" / "node"
PROGRAM = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "any", maxRetries: 0 });
const { texts, tokens } = JSON.parse(process.argv[3]);
const embed = async (input, options = {}) => {
  const answer = await client.embeddings.create({ model: "encoder", input, ...options });
  return answer.data.map((item) => Array.from(item.embedding));
};
const models = [];
for await (const model of client.models.list()) models.push(model.id);
const missing = await client.embeddings
  .create({ model: "missing", input: "a" })
  .then(() => "no error", (error) => error.constructor.name + " " + error.status);
console.log(JSON.stringify({
  default: await embed(texts),
  float: await embed(texts, { encoding_format: "float" }),
  short: await embed(texts, { dimensions: 8 }),
  tokens: await embed(tokens),
  models,
  missing,
}));
"""


@pytest.fixture(scope="module")
def node() -> str:
    """Return the program `node`, after the package `openai` is installed."""
    program, npm = shutil.which("node"), shutil.which("npm")
    if program is None or npm is None:
        pytest.skip("node or npm is not installed; the client of OpenAI for Node.js was not tried")
    if not (PACKAGES / "node_modules" / "openai").is_dir():
        PACKAGES.mkdir(parents=True, exist_ok=True)
        install = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(PACKAGES), "openai"]
        subprocess.run(install, check=True, capture_output=True)
    return program


def run_program(node: str, url: str, texts: dict[str, Any]) -> Any:
    """Return the output of the program."""
    path = PACKAGES / "program.mjs"
    path.write_text(PROGRAM)
    command = [node, str(path), url, json.dumps(texts)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_the_node_client_gets_the_same_vectors(
    node: str, server: LiveServer, http: httpx.Client
) -> None:
    expected = np.array(http.post("/embed", json={"inputs": TEXTS}).json())
    rows = http.post("/tokenize", json={"inputs": TEXTS}).json()
    tokens = [[token["id"] for token in row] for row in rows]
    answers = run_program(node, server.url, {"texts": TEXTS, "tokens": tokens})
    for name in ("default", "float", "tokens"):
        np.testing.assert_allclose(answers[name], expected, atol=1e-6)
    short = expected[:, :8] / np.linalg.norm(expected[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(answers["short"], short, atol=1e-6)
    assert answers["models"] == list(server.artifacts)
    assert answers["missing"] == "NotFoundError 404"
