"""Sampling: the filters of transformers, draws that depend on their key alone, stop texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import logits_process

from regauge.config import build
from regauge.data.randomness import draw_uniform
from regauge.inference.export.buckets import SAMPLED_ROWS, fix_rows, select_buckets
from regauge.inference.export.engine import Engine
from regauge.inference.export.generator import add_draws
from regauge.inference.export.manifest import Bucket, ProgramEntry
from regauge.inference.export.records import TextRecords
from regauge.models.generation.sampling import filter_logits, select_tokens
from regauge.models.generation.text_generation import NO_TOKEN, GenerationProgram
from regauge.models.sentence_transformers import Tokenization
from regauge.models.settings import Generation
from regauge.system.errors import SettingsError

VOCABULARY, NEW_TOKENS, LENGTH = 40, 6, 8


def random_logits(rows: int, vocabulary: int = 50) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return 3 * torch.randn(rows, vocabulary, generator=generator)


def keep_nucleus(logits: np.ndarray, top_p: float) -> set[int]:
    """Return the tokens of the nucleus by its definition (Holtzman et al., 2020)."""
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    size = int(np.searchsorted(np.cumsum(probabilities[order]), top_p)) + 1
    return set(order[:size].tolist())


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.7, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.8), (1.3, 20, 0.6), (0.5, 1, 0.9), (2.0, 99, 0.99)],
)
def test_filters_equal_transformers_and_the_definitions(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = random_logits(16)
    generation = Generation(temperature=temperature, top_k=top_k, top_p=top_p)
    filtered = filter_logits(logits, generation)
    expected: Any = logits_process.TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = logits_process.TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = logits_process.TopPLogitsWarper(top_p)(None, expected)
    assert torch.equal(filtered.isinf(), expected.isinf())
    finite = ~filtered.isinf()
    torch.testing.assert_close(filtered[finite], expected[finite], atol=1e-5, rtol=0)
    for row, scores in zip(logits.double().numpy() / temperature, filtered, strict=True):
        ranked = set(np.argsort(-row)[: top_k or None].tolist())
        inside = np.where(np.isin(np.arange(len(row)), list(ranked)), row, -np.inf)
        allowed = keep_nucleus(inside, top_p) if top_p < 1 else ranked
        assert set(torch.isfinite(scores).nonzero()[:, 0].tolist()) == allowed


def test_tokens_are_selected_with_their_probabilities() -> None:
    logits = random_logits(1, 12)
    count = 20_000
    draws = torch.linspace(0, 1, count + 1)[:-1]
    tokens = select_tokens(logits.expand(count, -1), draws)
    frequencies = torch.bincount(tokens, minlength=12) / count
    assert (frequencies - logits[0].softmax(-1)).abs().max() <= 1.01 / count


def test_excluded_tokens_are_never_selected() -> None:
    logits = torch.full((3, 6), -torch.inf)
    logits[:, 2], logits[:, 4] = 0.0, 1.0
    draws = torch.tensor([0.0, 0.5, 1 - 2**-23])
    assert select_tokens(logits, draws).tolist() == [2, 4, 4]


def test_draws_are_uniform_and_depend_on_every_part_of_the_key() -> None:
    records, tokens = np.arange(2000)[:, None], np.arange(10)[None]
    draws = draw_uniform(1, 0, records, tokens)
    assert draws.dtype == np.float32
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.01
    counts = np.histogram(draws, 20, (0, 1))[0]
    assert abs(counts - 1000).max() < 5 * 1000**0.5
    for other in (draw_uniform(2, 0, records, tokens), draw_uniform(1, 1, records, tokens)):
        assert abs(np.corrcoef(draws.ravel(), other.ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(draws[:, 0], draws[:, 1])[0, 1]) < 0.1
    assert np.array_equal(draw_uniform(1, 0, records[500:], tokens), draws[500:])


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"temperature": 0, "top_p": 0.9}, "top_p has no effect at temperature 0; set temperature"),
        ({"temperature": 0, "top_k": 3}, "top_k has no effect at temperature 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p"),
        ({"temperature": float("nan")}, "temperature"),
        ({"stop": ("",)}, "stop"),
    ],
)
def test_options_without_effect_are_refused(table: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        build(Generation, table)


@pytest.mark.parametrize("part", [{"top_p": 0.9}, {"top_k": 3}])
def test_a_part_of_the_tokens_is_drawn_at_temperature_1(part: dict[str, Any]) -> None:
    assert build(Generation, part) == build(Generation, {"temperature": 1.0, **part})
    assert not build(Generation, {"top_p": 1.0, "top_k": 0}).is_sampled


def test_a_text_ends_at_its_first_stop_text() -> None:
    generation = Generation(stop=("###", "\nUser:"))
    assert generation.cut_text("yes\nUser: no ###") == "yes"
    assert generation.cut_text("yes ## User:") == "yes ## User:"
    assert Generation().cut_text("yes ###") == "yes ###"


def test_a_longer_answer_leaves_less_room_for_the_prompt() -> None:
    tokenization = Tokenization(max_length=10, input_format="completion")
    entry = ProgramEntry(output_kind="text", output_size=6, inputs=(), tokenization=tokenization)
    longer = entry.with_generation(Generation(max_new_tokens=9, temperature=1.0))
    assert longer.tokenization is not None
    assert (longer.output_size, longer.tokenization.max_length) == (9, 7)
    assert longer.inputs[-1].shape == ("rows", 9)
    shorter = entry.with_generation(Generation(max_new_tokens=2))
    assert shorter.tokenization == tokenization
    with pytest.raises(SettingsError, match=r"= 14 leaves no room for a prompt; set at most 13"):
        entry.with_generation(Generation(max_new_tokens=14))
    vectors = ProgramEntry(output_kind="vectors", output_size=6, inputs=())
    with pytest.raises(SettingsError, match="returns vectors, not generated text; remove the"):
        vectors.with_generation(Generation(seed=1))


@pytest.mark.parametrize(("temperature", "invariant"), [(1.0, True), (1.0, False), (0.0, True)])
def test_batches_of_drawn_texts_have_one_number_of_rows(
    *, temperature: float, invariant: bool
) -> None:
    shapes = tuple(Bucket(length=length, batch_sizes=(64, 32, 1)) for length in (4, 8))
    backend = SimpleNamespace(has_dynamic_shapes=True)
    compiled = SimpleNamespace(backend=backend)
    manifest = SimpleNamespace(buckets=shapes, compiled=compiled, batch_invariance=None)
    generation = Generation(temperature=temperature)
    artifact: Any = SimpleNamespace(manifest=manifest, generation=generation)
    buckets = select_buckets(artifact, batch_invariant=invariant)
    lengths = np.array([8] * 11 + [3] * 2)
    rows = [batch.num_rows for batch in buckets.make_batches(lengths)]
    is_fixed = temperature > 0 and invariant
    assert rows == ([SAMPLED_ROWS] * 3 if is_fixed else [11, 2])
    halved = [batch.num_rows for batch in buckets.make_batches(lengths, halvings=1)]
    assert halved == ([SAMPLED_ROWS // 2] * 4 if is_fixed else [11, 2])


def build_program(**declared: Any) -> GenerationProgram:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        weight.data *= 8  # so that tokens differ in probability
    for name, value in declared.items():
        setattr(model.generation_config, name, value)
    program = GenerationProgram(model, NEW_TOKENS, 0, (3,))
    program.requires_grad_(requires_grad=False)
    return program


def random_records(count: int) -> TextRecords:
    rng = np.random.default_rng(3)
    lists = [rng.integers(4, VOCABULARY, rng.integers(1, LENGTH + 1)) for _ in range(count)]
    return TextRecords.from_lists([ids.astype(np.int32) for ids in lists])


def generate(
    program: GenerationProgram, records: TextRecords, numbers: np.ndarray, seed: int = 0
) -> np.ndarray:
    """Return the tokens of records with these numbers, in batches of fixed rows."""
    generation = Generation(temperature=1.2, top_k=30, seed=seed, max_new_tokens=NEW_TOKENS)
    program.options = generation
    selected = records.select(numbers)
    drawn = add_draws(selected, generation, numbers, count=NEW_TOKENS)
    buckets = fix_rows([Bucket(length=LENGTH, batch_sizes=(64,))], SAMPLED_ROWS)

    def run(*inputs: np.ndarray) -> Tensor:
        output: Tensor = program(*map(torch.from_numpy, inputs))
        return output

    runner: Any = run
    with torch.no_grad():
        return Engine(runner, buckets, NEW_TOKENS).compute(drawn)


TOKENS = torch.tensor([[5, 6, 7], [5, VOCABULARY - 1, 7], [8, 9, 4]], dtype=torch.int32)
LENGTHS = torch.full((3,), 3, dtype=torch.int32)


@pytest.mark.parametrize("declared", [{}, {"num_beams": 3}, {"repetition_penalty": 1.3}])
def test_only_rows_with_finite_logits_have_tokens(declared: dict[str, Any]) -> None:
    program, tokens = build_program(**declared), TOKENS.clone()
    with torch.no_grad():
        whole = program(tokens, LENGTHS)
        used = {*tokens.flatten().tolist(), *whole.flatten().tolist()}
        tokens[1, 1] = poisoned = next(token for token in range(4, VOCABULARY) if token not in used)
        program.model.get_input_embeddings().weight[poisoned] = torch.nan
        damaged = program(tokens, LENGTHS)
    assert torch.equal(damaged[[0, 2]], whole[[0, 2]])
    assert damaged[1].isnan().all()


def test_logits_after_the_end_of_a_row_do_not_count() -> None:
    """The row is padded until the others end, and the padding gives NaN."""
    program = build_program()
    with torch.no_grad():
        first, second = program(TOKENS, LENGTHS)[2, :2].long().tolist()
        assert first != second
        program.end_ids = (second,)
        program.model.get_input_embeddings().weight[[0, VOCABULARY - 1]] = torch.nan
        ended = program(TOKENS[[2, 1]], LENGTHS[:2])
    assert ended[0].tolist() == [first] + [NO_TOKEN] * (NEW_TOKENS - 1)
    assert ended[1].isnan().all()


@pytest.mark.parametrize("declared", [{}, {"repetition_penalty": 1.3}])
def test_drawn_tokens_do_not_depend_on_other_records(declared: dict[str, Any]) -> None:
    program, records = build_program(**declared), random_records(37)
    numbers = np.arange(37)
    sizes: set[int] = set()
    model: Any = program.model
    hook = model.lm_head.register_forward_hook(lambda _, inputs, __: sizes.add(len(inputs[0])))
    together = generate(program, records, numbers)
    hook.remove()
    assert sizes == {1 if declared else SAMPLED_ROWS}, "the shape depends on other records"
    assert len(np.unique(together, axis=0)) > 30
    for part in (numbers[::-1].copy(), numbers[5:6], numbers[20:31], numbers[::4].copy()):
        assert np.array_equal(generate(program, records, part), together[part])
    assert not np.array_equal(generate(program, records, numbers, seed=1), together)


def test_logits_of_a_row_have_the_same_bits_in_every_batch_of_fixed_rows() -> None:
    program, records = build_program(), random_records(SAMPLED_ROWS)
    calls: list[Tensor] = []
    model: Any = program.model

    def record_logits(_module: Any, _inputs: Any, output: Tensor) -> None:
        calls.append(output[:, -1])

    hook = model.lm_head.register_forward_hook(record_logits)
    order = np.random.default_rng(0).permutation(SAMPLED_ROWS)
    generate(program, records, np.arange(SAMPLED_ROWS))
    first = calls[0]
    by_length = np.argsort(-records.lengths, kind="stable")
    calls.clear()
    generate(program, records, order[:5])
    hook.remove()
    shuffled = order[:5][np.argsort(-records.lengths[order[:5]], kind="stable")]
    for position, number in enumerate(shuffled):
        earlier = int(np.flatnonzero(by_length == number)[0])
        assert torch.equal(calls[0][position], first[earlier])


def test_frequencies_of_drawn_tokens_follow_the_model() -> None:
    program = build_program()
    program.options = Generation(temperature=0.8, max_new_tokens=1)
    tokens = torch.tensor([[5, 6, 7]], dtype=torch.int32)
    model: Any = program.model
    with torch.no_grad():
        expected = (model(tokens.long()).logits[0, -1] / 0.8).softmax(-1)
        draws = torch.linspace(0, 1, 513)[:-1, None]
        rows = program(tokens.expand(512, -1), torch.full((512,), 3), draws)[:, 0]
    rows[rows == NO_TOKEN] = 3  # the end token
    frequencies = torch.bincount(rows.long(), minlength=VOCABULARY) / 512
    assert (frequencies - expected).abs().max() < 2 / 512


def test_sampling_ignores_beams_and_draws_are_required() -> None:
    program = build_program(num_beams=3)
    program.options = Generation(temperature=1.0, max_new_tokens=2)
    tokens, lengths = torch.tensor([[5, 6]], dtype=torch.int32), torch.tensor([2])
    with pytest.raises(TypeError, match="needs draws"):
        program(tokens, lengths)
    assert program(tokens, lengths, torch.zeros(1, 2)).shape == (1, 2)


def test_empty_rows_end_at_once_and_change_no_other_row() -> None:
    program = build_program()
    tokens = torch.tensor([[5, 6, 7], [0, 0, 0], [8, 9, 0]], dtype=torch.int32)
    lengths = torch.tensor([3, 0, 2])
    calls: list[int] = []
    hook = program.model.register_forward_hook(lambda *_: calls.append(1))
    rows = program(tokens, lengths)
    assert len(calls) == NEW_TOKENS
    alone = [program(tokens[row : row + 1, :3], lengths[row : row + 1]) for row in (0, 2)]
    assert torch.equal(rows[[0, 2]], torch.cat(alone))
    calls.clear()
    program(tokens[1:2], lengths[1:2])
    hook.remove()
    assert len(calls) == 1


def test_generation_ends_when_every_row_has_a_stop_text() -> None:
    program: Any = build_program()
    prompts = torch.arange(4, 37, dtype=torch.int32).view(11, 3)
    whole = program(prompts, torch.full((11,), 3)).long()
    texts = [[f"<{token}>" for token in row] for row in whole.tolist()]
    open_rows = [row for row in range(11) if NO_TOKEN not in whole[row, :4].tolist()]
    first, second = next(
        (first, second)
        for first in open_rows
        for second in open_rows
        if texts[first][1] not in (texts[first][0], *texts[second][:3])
        and texts[second][2] not in (*texts[first], *texts[second][:2])
    )
    stops = (texts[first][1], texts[second][2])
    program.options = Generation(max_new_tokens=NEW_TOKENS, stop=stops)
    program.decode = lambda ids: "".join(f"<{token}>" for token in ids)
    calls: list[int] = []
    hook = program.model.register_forward_hook(lambda *_: calls.append(1))
    stopped = program(prompts[[first, second]], torch.tensor([3, 3]))
    hook.remove()
    assert len(calls) == 3, "the longer answer has three tokens"
    for row, (number, count) in enumerate(((first, 2), (second, 3))):
        assert stopped[row, :count].tolist() == whole[number, :count].tolist()
        assert set(stopped[row, count:].tolist()) == {NO_TOKEN}
