"""Generates text with one library, as an alternating program.

Each turn times a prompt, and then the tokens of 1, 4 and 16 streams. The prompts are new random
tokens in each turn, so that no cache of prefixes applies; they are equal in all programs. The
choice of tokens is greedy.

    python benchmarks/turn_generate.py FOLDER MODEL --style STYLE [--tokens N]

MODEL is a model folder or artifact, a folder of OpenVINO's, or a GGUF file, as the style needs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from turns import Turn

from regauge.accelerators.cpu import Cpu
from regauge.system.processes import available_cores

PROMPT_TOKENS, STREAM_PROMPT_TOKENS = 512, 32
"""Tokens of the prompt that is timed, and of the prompt of each stream."""
STREAMS = (1, 4, 16)
VOCABULARY = 49152
MAX_STREAM_TOKENS = 1024
"""Tokens that llama.cpp keeps for each stream."""
OnStep = Callable[[int], object]
"""Gets the number of streams with a new token after each step."""
Generate = Callable[[np.ndarray, int, OnStep], object]
"""Function from prompts, [streams, tokens], the number of new tokens of each, and a callback."""


class Library(NamedTuple):
    """A loaded model with what its tokens are computed from."""

    generate: Generate
    precision: str
    weight_bytes: int
    """Bytes of the weights as the library keeps them, with a tied embedding counted once."""


def main() -> None:
    """Time all numbers of streams in each turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--style", choices=STYLES, required=True)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a stream")
    options = parser.parse_args()
    library, number = STYLES[options.style](options.model), 0
    turn = Turn(options.folder, Cpu())
    turn.wait()
    while True:
        rates = _time_turn(library.generate, options.tokens, np.random.default_rng(number))
        turn.stop()
        facts = {"precision": library.precision, "weight_bytes": library.weight_bytes}
        turn.end(count=PROMPT_TOKENS + sum(STREAMS) * options.tokens, rates=rates, **facts)
        number += 1


def _time_turn(generate: Generate, count: int, generator: np.random.Generator) -> dict[str, float]:
    """Return the tokens per second of the prompt, and of each number of streams."""
    prompt = generator.integers(VOCABULARY, size=(1, PROMPT_TOKENS))
    began = time.perf_counter()
    [end] = _time_steps(generate, prompt, 1)
    rates = {"prefill": PROMPT_TOKENS / (end - began)}
    for streams in STREAMS:
        prompts = generator.integers(VOCABULARY, size=(streams, STREAM_PROMPT_TOKENS))
        times = _time_steps(generate, prompts, count)
        rates[str(streams)] = streams * (len(times) - 1) / (times[-1] - times[0])
    return rates


def _time_steps(generate: Generate, prompts: np.ndarray, count: int) -> list[float]:
    """Return the ends of the steps in which all streams get a token; others compute prompts."""
    times = []

    def on_step(num_tokens: int) -> None:
        if num_tokens == len(prompts):
            times.append(time.perf_counter())

    generate(prompts, count, on_step)
    return times


def load_regauge(path: Path) -> Library:
    """Load the text engine of a worker of `regauge serve`, with default settings."""
    from regauge.inference.export.uncompiled import open_model
    from regauge.models.settings import Generation
    from regauge.serving.text_generation.engine_choice import load_text_engine
    from regauge.serving.text_generation.settings import TextServing
    from regauge.serving.text_generation.text_requests import TextRequest

    artifact = open_model(str(path))
    engine: Any = load_text_engine(artifact, TextServing())

    def generate(prompts: np.ndarray, count: int, on_step: OnStep) -> None:
        for index, prompt in enumerate(prompts.astype(np.int32)):
            engine.add(TextRequest(str(index), prompt, Generation(max_new_tokens=count)))
        while engine.has_work:
            on_step(sum(event.token is not None for event in engine.step()))

    return Library(generate, *_describe_weights(engine._program.model))  # noqa: SLF001


def load_transformers(path: Path, **options: Any) -> Library:
    """Load a model for `generate`."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, **options).eval()

    def generate(prompts: np.ndarray, count: int, on_step: OnStep) -> None:
        def stop_never(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            on_step(len(ids))
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.from_numpy(prompts)
        options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, stopping_criteria=[stop_never], **options)

    return Library(generate, *_describe_weights(model))


def load_openvino(path: Path) -> Library:
    """Load the continuous batching of openvino-genai."""
    import openvino as ov
    import openvino_genai

    engine = openvino_genai.ContinuousBatchingPipeline(
        path, openvino_genai.SchedulerConfig(), "CPU"
    )
    precision = ov.Core().get_property("CPU", "INFERENCE_PRECISION_HINT").to_string()
    is_bf16 = precision == "bf16"

    def generate(prompts: np.ndarray, count: int, on_step: OnStep) -> None:
        options = openvino_genai.GenerationConfig(max_new_tokens=count, ignore_eos=True)
        handles = [
            engine.add_request(index, ov.Tensor(prompt[None]), options)
            for index, prompt in enumerate(prompts)
        ]
        while engine.has_non_finished_requests():
            engine.step()
            on_step(sum(handle.can_read() and bool(handle.read()) for handle in handles))

    file_bytes = (path / "openvino_model.bin").stat().st_size
    return Library(generate, precision, file_bytes // 2 if is_bf16 else file_bytes)


def load_llama_cpp(path: Path) -> Library:
    """Load a GGUF file in llama.cpp, with a sequence for each stream."""
    import llama_cpp

    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_seq_max = STREAMS[-1] * MAX_STREAM_TOKENS, STREAMS[-1]
    options.n_threads = options.n_threads_batch = available_cores()
    context = llama_cpp.llama_init_from_model(model, options)
    batch = llama_cpp.llama_batch_init(PROMPT_TOKENS, 0, 1)

    def compute(rows: np.ndarray, position: int) -> np.ndarray:
        """Return the next token of each stream after its tokens, [streams, tokens]."""
        length = rows.shape[1]
        batch.n_tokens = rows.size
        for index, token in enumerate(rows.ravel().tolist()):
            stream, offset = divmod(index, length)
            batch.token[index], batch.pos[index] = token, position + offset
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, stream
            batch.logits[index] = offset == length - 1
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        last = range(length - 1, rows.size, length)
        logits = [llama_cpp.llama_get_logits_ith(context, index) for index in last]
        tokens = [np.ctypeslib.as_array(row, (VOCABULARY,)).argmax() for row in logits]
        return np.array(tokens)[:, None]

    def generate(prompts: np.ndarray, count: int, on_step: OnStep) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), 1)
        rows, position = prompts, 0
        for _ in range(count):
            start, position = position, position + rows.shape[1]
            rows = compute(rows, start)
            on_step(len(rows))

    kind = path.stem.rpartition(".")[2]
    return Library(generate, kind, llama_cpp.llama_model_size(model))


def _describe_weights(model: Any) -> tuple[str, int]:
    """Return the precision of a torch model, and the bytes of its weights."""
    precision = {"float32": "fp32", "bfloat16": "bf16"}[str(model.dtype).removeprefix("torch.")]
    return precision, sum(weight.nbytes for weight in model.parameters())


STYLES: dict[str, Callable[[Path], Library]] = {
    "regauge": load_regauge,
    "regauge-bf16": load_regauge,
    "default": load_transformers,
    "bf16": partial(load_transformers, dtype="bfloat16"),
    "openvino": load_openvino,
    "llama.cpp": load_llama_cpp,
    "llama.cpp-packaged": load_llama_cpp,
}


if __name__ == "__main__":
    main()
