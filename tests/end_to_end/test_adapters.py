"""LoRA adapters load with peft's automatic classes, and equal the merged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from distributed import datasets
from distributed.runs import settings
from libraries import record_warnings
from regauge.cli import main
from regauge.system import processes
from regauge.training.run import attempt

peft = pytest.importorskip("peft", reason="not proved here: adapters, which need peft")

ADAPTERS = {"rank": 4, "alpha": 16.0}
PEFT_WARNING = "`is_gradient_checkpointing` is deprecated"
"""A call of peft that transformers warns of, with any adapter."""
CASES = {
    "clm": (datasets.write_packed, "AutoPeftModelForCausalLM", "AutoModelForCausalLM"),
    "llama": (datasets.write_packed, "AutoPeftModelForCausalLM", "AutoModelForCausalLM"),
    "mlm": (datasets.write_packed, "AutoPeftModel", "AutoModelForMaskedLM"),
    "classify": (
        datasets.write_pairs,
        "AutoPeftModelForSequenceClassification",
        "AutoModelForSequenceClassification",
    ),
}
STARTS = {**{task: task for task in CASES}, "new head": "mlm"}
"""Task of the adapters, or a classifier's new head -> task of the run that they start from."""


@pytest.mark.parametrize("case", STARTS)
def test_adapters_load_with_the_automatic_classes_of_peft(case: str, tmp_path: Path) -> None:
    task = case if case in CASES else "classify"
    write, adapted_class, merged_class = CASES[task]
    data = write(tmp_path / "data")
    first, second = tmp_path / "first", tmp_path / "second"
    first_data = CASES[STARTS[case]][0](tmp_path / "first-data")
    start: dict[str, Any] = {"stop": {"steps": 2}}
    if case == "new head":
        start["model"] = {"config": {"max_position_embeddings": 64}}
    attempt(settings(first, first_data, STARTS[case], **start), processes.World())
    model = {"path": str(first), "lora": ADAPTERS, "dropout": 0.0}
    changes: dict[str, Any] = {"stop": {"steps": 4}, "optimizer": {"learning_rate": 0.05}}
    attempt(settings(second, data, task, model=model, **changes), processes.World())
    target = tmp_path / "adapter"
    assert main(["export", str(second), "--format", "peft", "--to", str(target)]) == 0
    tokens = torch.arange(5, 29).view(2, 12)
    options = {"num_labels": 3} if task == "classify" else {}
    with record_warnings() as messages:
        adapted = getattr(peft, adapted_class).from_pretrained(target, **options).eval()
    others = [line for line in messages if PEFT_WARNING not in line]
    assert ["LOAD REPORT" in line for line in others] == [True] * (case == "new head")
    merged = getattr(transformers, merged_class).from_pretrained(second / "model").eval()
    base = getattr(transformers, merged_class).from_pretrained(first / "model", **options).eval()
    with torch.no_grad():
        expected = merged(tokens).logits
        torch.testing.assert_close(adapted(tokens).logits, expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(base(tokens).logits, expected, atol=1e-3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    assert (
        tokenizer("w7 w9").input_ids
        == transformers.AutoTokenizer.from_pretrained(second / "model")("w7 w9").input_ids
    )


def test_adapters_of_random_weights_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = datasets.write_packed(tmp_path / "data")
    changes = {"model": {"lora": ADAPTERS}, "stop": {"steps": 1}}
    attempt(settings(tmp_path / "run", data, "llama", **changes), processes.World())
    export = ["export", str(tmp_path / "run"), "--format", "peft", "--to", str(tmp_path / "a")]
    assert main(export) == 2
    assert "belong to random weights, which are in no folder" in capsys.readouterr().err


TIED = {
    "llama": ("lm_head", "q_proj"),
    "clm": ("lm_head", "c_attn"),
    "mlm": ("predictions.decoder", "query"),
}
"""Task -> adapted layers, among them the output layer, which is tied to the embeddings."""


@pytest.mark.parametrize("task", TIED)
def test_an_adapter_of_a_tied_output_layer_unties_the_merged_model(
    task: str, tmp_path: Path
) -> None:
    """The reference is peft, unmerged; a checkpoint gives the same model."""
    write, adapted_class, merged_class = CASES[task]
    data, first, second = write(tmp_path / "data"), tmp_path / "first", tmp_path / "second"
    tied = {"model": {"config": {"tie_word_embeddings": True}}, "stop": {"steps": 1}}
    attempt(settings(first, data, task, **tied), processes.World())
    lora = {**ADAPTERS, "targets": TIED[task]}
    changes: dict[str, Any] = {
        "model": {"path": str(first), "lora": lora, "dropout": 0.0},
        "stop": {"steps": 2},
        "output": {"checkpoint": {"every_steps": 2}},
        "optimizer": {"learning_rate": 0.05},
    }
    attempt(settings(second, data, task, **changes), processes.World())
    again = tmp_path / "again"
    command = ["export", str(second), "export.step=2", "--format", "hf", "--to", str(again)]
    assert main(command) == 0
    tokens = torch.arange(5, 29).view(2, 12)
    with record_warnings(), torch.no_grad():
        adapted = getattr(peft, adapted_class).from_pretrained(second / "adapter").eval()
        expected = adapted(tokens).logits
    for folder in (second / "model", again):
        merged = getattr(transformers, merged_class).from_pretrained(folder).eval()
        embeddings, output = merged.get_input_embeddings(), merged.get_output_embeddings()
        assert not torch.equal(embeddings.weight, output.weight)
        with torch.no_grad():
            torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-5, atol=1e-5)
