"""Texts that a program is proved on where nobody names any."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from regauge.accelerators.cpu import Cpu
from regauge.artifacts import candidates
from regauge.artifacts.export_settings import Exporting
from regauge.artifacts.probe_texts import EVERY, SIZES, samples
from regauge.artifacts.programs import Described
from regauge.artifacts.rows import Rows
from regauge.artifacts.sources import OfFolder
from regauge.config import build
from regauge.data.tokenizer import Encoder
from regauge.models import sentence_transformers
from regauge.models.io_spec import Fields
from unit.test_sentence_transformers import model

COUNT = 64
WORDS = ("apple", "river", "zoo")


def test_documentation_is_read_where_nothing_else_is_known() -> None:
    found = samples(None, None, COUNT, Fields())
    [texts] = found.columns
    assert len(texts) == COUNT
    assert found.origin == "documentation of Python's library"


@pytest.mark.parametrize("fields", [Fields(), Fields(limits=(8, 8), texts=("a", "b"))])
def test_most_texts_are_words_of_the_vocabulary(fields: Fields) -> None:
    plain = samples(None, None, COUNT, Fields()).columns[0]
    found = samples(None, None, COUNT, fields, lambda: WORDS)
    assert found.columns == samples(None, None, COUNT, fields, lambda: WORDS).columns
    texts, *others = found.columns
    assert texts[::EVERY] == plain[::EVERY]
    said = [text.split() for at, text in enumerate(texts) if at % EVERY]
    assert {word for words in said for word in words} == set(WORDS)
    assert {len(words) for words in said} == set(SIZES)
    assert len({tuple(words) for words in said if len(words) > 5}) > COUNT // 8
    assert others == [[*texts[1:], texts[0]]] * (len(fields.texts) - 1)
    assert "words of the vocabulary" in found.origin


@pytest.mark.parametrize(("answers", "mixed"), [("vectors", True), ("classes", False)])
def test_what_makes_vectors_is_proved_on_its_own_words(
    answers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, mixed: bool
) -> None:
    monkeypatch.setattr(Encoder, "plain_words", lambda _: list(WORDS))
    folder = model(tmp_path / "model")
    target = {"model": str(folder), "path": str(tmp_path / "to")}
    settings = build(Exporting, {"proof": {"texts": 16}, "target": target})
    subject = OfFolder(folder, settings, None)
    subject.described = replace(subject.described, answers=answers)
    rows, origin = subject.records(settings)
    assert len(rows) == 16
    assert ("words of the vocabulary" in origin) is mixed


@pytest.mark.parametrize(("count", "found"), [(9, 5), (400, 200), (3 * candidates.SAMPLES, 256)])
def test_scales_are_chosen_by_half_of_the_texts_at_most(count: int, found: int) -> None:
    settings = build(Exporting, {"target": {"model": "a", "path": "b"}, "proof": {"bound": 0.01}})
    program = nn.Identity()
    described = Described(program, "vectors", 1, (), sentence_transformers.Reads(tokens=16))
    rows = Rows.of([np.arange(1, 5, dtype=np.int32)] * count)
    work = candidates.Work(settings, described, Cpu(), rows, np.zeros((count, 1)))
    made = work.calibration
    assert sum(len(tokens) for tokens, _ in made.samples) == found
    assert (made.program, made.bound) == (program, 0.01)
    assert work.calibration is made
