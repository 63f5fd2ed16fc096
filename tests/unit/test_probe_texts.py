"""The texts for parity checks if the settings name no source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import nn

from regauge.accelerators.cpu import Cpu
from regauge.config import build
from regauge.data.tokenizer import LoadedTokenizer
from regauge.inference.export import candidates
from regauge.inference.export.export_settings import ExportSettings
from regauge.inference.export.probe_texts import (
    DOCUMENTATION_INTERVAL,
    WORD_COUNTS,
    select_probe_texts,
)
from regauge.inference.export.programs import ProgramSpec, build_text_spec
from regauge.inference.export.records import TextRecords
from regauge.inference.export.sources import ModelFolder
from regauge.models.io_spec import InputSpec
from regauge.models.sentence_transformers import Tokenization
from unit.test_sentence_transformers import write_model

COUNT = 64
WORDS = ("apple", "river", "zoo")


def test_docstrings_are_the_default() -> None:
    probe = select_probe_texts(None, None, COUNT, InputSpec())
    [texts] = probe.columns
    assert len(texts) == COUNT
    assert probe.origin == "docstrings of Python's standard library"


@pytest.mark.parametrize(
    "input_spec", [InputSpec(), InputSpec(max_lengths=(8, 8), text_fields=("a", "b"))]
)
def test_most_texts_are_random_words_of_the_vocabulary(input_spec: InputSpec) -> None:
    plain = select_probe_texts(None, None, COUNT, InputSpec()).columns[0]
    probe = select_probe_texts(None, None, COUNT, input_spec, lambda: WORDS)
    assert probe.columns == select_probe_texts(None, None, COUNT, input_spec, lambda: WORDS).columns
    texts, *others = probe.columns
    assert texts[::DOCUMENTATION_INTERVAL] == plain[::DOCUMENTATION_INTERVAL]
    random_texts = [
        text.split() for index, text in enumerate(texts) if index % DOCUMENTATION_INTERVAL
    ]
    assert {word for words in random_texts for word in words} == set(WORDS)
    assert {len(words) for words in random_texts} == set(WORD_COUNTS)
    assert len({tuple(words) for words in random_texts if len(words) > 5}) > COUNT // 8
    assert others == [[*texts[1:], texts[0]]] * (len(input_spec.text_fields) - 1)
    assert "random words of the vocabulary" in probe.origin


@pytest.mark.parametrize(
    ("output_kind", "has_random_words"), [("vectors", True), ("classes", False)]
)
def test_only_encoders_are_checked_on_random_words(
    output_kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_random_words: bool
) -> None:
    monkeypatch.setattr(LoadedTokenizer, "list_words", lambda _: list(WORDS))
    folder = write_model(tmp_path / "model")
    target = {"model": str(folder), "to": str(tmp_path / "to")}
    settings = build(ExportSettings, {"parity": {"num_texts": 16}, "export": target})
    source = ModelFolder(folder, settings, None)
    entry = source.spec.entry.model_copy(update={"output_kind": output_kind})
    source.spec = ProgramSpec(source.spec.program, entry)
    records, probe = source.build_parity_records(settings)
    assert len(records) == 16
    assert ("random words of the vocabulary" in probe.origin) is has_random_words


@pytest.mark.parametrize(
    ("count", "num_texts"), [(9, 5), (400, 200), (3 * candidates.MAX_CALIBRATION_TEXTS, 256)]
)
def test_at_most_half_of_the_texts_are_for_calibration(count: int, num_texts: int) -> None:
    settings = build(
        ExportSettings, {"export": {"model": "a", "to": "b"}, "parity": {"max_loss": 0.01}}
    )
    program = nn.Identity()
    tokenization = Tokenization(max_length=16)
    spec = build_text_spec(program, "vectors", 1, tokenization, InputSpec())
    records = TextRecords.from_lists([np.arange(1, 5, dtype=np.int32)] * count)
    context = candidates.ExportContext(settings, spec, Cpu(), records, np.zeros((count, 1)))
    calibration = context.calibration
    assert sum(len(tokens) for tokens, _ in calibration.samples) == num_texts
    assert (calibration.program, calibration.max_quality_loss) == (program, 0.01)
    assert context.calibration is calibration
