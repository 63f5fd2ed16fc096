"""Selects an artifact's text engine, loads it, and compares its answers."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regauge.inference.export.engine import load_engine
from regauge.inference.export.records import Records, TextRecords
from regauge.models.generation.text_generation import NO_TOKEN, GenerationProgram
from regauge.models.init_weights import META
from regauge.models.settings import Generation
from regauge.serving.text_generation import vllm_engine
from regauge.serving.text_generation.static_engine import StaticTextEngine
from regauge.serving.text_generation.text_requests import TextRequest
from regauge.system.errors import DataError, RegaugeError, SettingsError, first_line
from regauge.system.log import logger

if TYPE_CHECKING:
    from regauge.inference.export.artifact import Artifact
    from regauge.serving.text_generation.paged_engine import PagedTextEngine
    from regauge.serving.text_generation.settings import TextServing
    from regauge.serving.text_generation.text_requests import TextEngine

PROBE_LENGTHS = (7, 3)
"""Token counts of the prompts whose logits are compared."""
PROBE_TOKENS = 3
"""New tokens per prompt."""
MEASURED_TOKENS = 8
"""Maximum new tokens of each answer whose time is measured."""
MIN_TOLERANCE = 1e-3
"""Maximum difference of logits, relative to the largest logit, in fp32."""
ROUNDING_STEPS = 8
"""The same for other dtypes, in rounding steps."""
START_ERRORS = (
    ImportError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    MemoryError,
)
"""Raised by transformers if it, or the architecture, does not support continuous batching."""


class UnsupportedModelError(RegaugeError):
    """Continuous batching computes other logits than the model."""


def load_text_engine(
    artifact: Artifact, settings: TextServing, *, threads: int | None = None, device: int = 0
) -> TextEngine:
    """Load a causal model's artifact and return its text engine.

    If transformers' continuous batching does not support the model, answers are generated in static
    batches, with a warning. Raises SettingsError if the artifact does not generate text, or if the
    configured engine cannot run.
    """
    kind = artifact.manifest.program.output_kind
    if kind != "text":
        raise SettingsError(f"the model returns {kind}, not generated text", "serve a causal model")
    if settings.engine == "vllm":
        vllm_engine.check_usable(artifact.accelerator)
    engine = load_engine(artifact, batch_invariant=False, threads=threads, device=device)
    program: Any = getattr(engine.runner, "program", None)
    if not isinstance(program, GenerationProgram):
        problem = "a model on several devices cannot be served"
        raise SettingsError(problem, "export it for one device")
    if settings.engine != "transformers" and not vllm_engine.find_obstacle(artifact.accelerator):
        return _load_vllm(program, settings)
    try:
        return _load_paged(program, settings)
    except (UnsupportedModelError, *START_ERRORS) as error:
        logger.warning(
            "Continuous batching is off, answers are generated in static batches: %s",
            first_line(error),
        )
        return StaticTextEngine(artifact, engine.runner, program, settings)


def _load_vllm(program: GenerationProgram, settings: TextServing) -> TextEngine:
    """Save the model for vLLM in a temporary folder, which vLLM reads when it starts."""
    with tempfile.TemporaryDirectory() as name:
        model: Any = program.model
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        model.config.tie_word_embeddings = head.weight is embeddings.weight
        model.save_pretrained(name)
        model.to(META)  # vLLM loads the weights into its own model
        return vllm_engine.VllmTextEngine(program, Path(name), settings)


def _load_paged(program: GenerationProgram, settings: TextServing) -> PagedTextEngine:
    """Return an engine with continuous batching, after comparing logits.

    Raises UnsupportedModelError, or an error from transformers.
    """
    if obstacle := program.batching_obstacle:
        raise UnsupportedModelError(obstacle, "no action is needed")
    from regauge.serving.text_generation.paged_engine import PagedTextEngine

    attention = program.model.config._attn_implementation  # noqa: SLF001 - no public name
    try:
        engine = PagedTextEngine(program, settings)
        _compare_logits(engine, program)
    except BaseException:
        program.model.set_attn_implementation(attention)
        raise
    return engine


def _compare_logits(engine: PagedTextEngine, program: GenerationProgram) -> None:
    """Raise UnsupportedModelError if a batch of two prompts has other logits than the model."""
    generator = np.random.default_rng(0)
    options = Generation(max_new_tokens=PROBE_TOKENS)
    prompts: dict[str, list[int]] = {}
    for number, length in enumerate(PROBE_LENGTHS):
        tokens = generator.integers(0, engine.limits.vocabulary, length, dtype=np.int32)
        prompts[str(number)] = tokens.tolist()
        engine.add(TextRequest(str(number), tokens, options))
    engine.sampler.records = True
    tolerance = max(MIN_TOLERANCE, ROUNDING_STEPS * torch.finfo(program.model.dtype).eps)
    while engine.has_work:
        events = engine.step()
        for state, logits in zip(engine.sampler.states, _get_logits(engine), strict=False):
            expected = engine.compute_logits(prompts[state.request_id])[-1]
            difference = float((logits - expected).abs().max() / expected.abs().max())
            if not difference <= tolerance:
                problem = f"the logits differ by {difference:.2g} from the model's"
                raise UnsupportedModelError(problem, "no action is needed")
        for event in events:
            if event.finish_reason == "error":
                raise UnsupportedModelError(event.message, "no action is needed")
            if event.token is not None:
                prompts[event.request_id].append(event.token)
    engine.sampler.records = False
    engine.sampler.recorded = None


def _get_logits(engine: PagedTextEngine) -> torch.Tensor:
    if engine.sampler.recorded is None:
        raise TypeError("no step was computed")
    return engine.sampler.recorded


def generate_tokens(engine: TextEngine, generation: Generation, records: Records) -> np.ndarray:
    """Return the answers to prompts, [records, max_new_tokens] fp32, NO_TOKEN after the end.

    Raises DataError if the engine fails to answer a prompt.
    """
    if not isinstance(records, TextRecords):
        raise TypeError("the rows of a model that generates text are texts")
    [texts] = records.texts
    for index, prompt in enumerate(np.split(texts.ids, np.cumsum(texts.lengths)[:-1])):
        engine.add(TextRequest(str(index), prompt, generation, index))
    answers: list[list[int]] = [[] for _ in range(len(records))]
    while engine.has_work:
        for event in engine.step():
            if event.finish_reason == "error":
                raise DataError(event.message, "export the artifact again on this machine")
            if event.token is not None:
                answers[int(event.request_id)].append(event.token)
    tokens = np.full((len(records), generation.max_new_tokens or 1), NO_TOKEN, np.float32)
    for row, answer in zip(tokens, answers, strict=True):
        row[: len(answer)] = answer
    return tokens


def measure_step_seconds(engine: TextEngine) -> float:
    """Return the time per token of each answer while all places are taken."""
    prompt = np.arange(PROBE_LENGTHS[0], dtype=np.int32)
    for index in range(engine.limits.max_running):
        request = TextRequest(str(index), prompt, Generation(max_new_tokens=MEASURED_TOKENS))
        engine.add(request)
    start, num_tokens = time.perf_counter(), 0
    while engine.has_work:
        num_tokens += sum(event.token is not None for event in engine.step())
    seconds = time.perf_counter() - start
    return seconds * engine.limits.max_running / max(1, num_tokens)
