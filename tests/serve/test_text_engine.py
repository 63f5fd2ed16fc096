"""Text engines: answers equal those of `regauge generate`, in every batch."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers import models as tokenizer_models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from regauge.accelerators.cpu import Cpu
from regauge.data.tokenizer import LoadedTokenizer
from regauge.inference.export.artifact import Artifact
from regauge.inference.export.preprocess import Preprocessor
from regauge.inference.export.text_stream import AnswerText
from regauge.inference.export.uncompiled import open_model
from regauge.models.io_spec import InputSpec
from regauge.models.sentence_transformers import Tokenization
from regauge.models.settings import Generation
from regauge.serving.text_generation import paged_attention, prompt_slices, vllm_engine
from regauge.serving.text_generation.engine_choice import load_text_engine
from regauge.serving.text_generation.paged_engine import MAX_FAILURES, PagedTextEngine
from regauge.serving.text_generation.settings import TextServing
from regauge.serving.text_generation.static_engine import StaticTextEngine
from regauge.serving.text_generation.text_requests import TextEngine, TextRequest, TokenEvent
from regauge.system.errors import DataError, SettingsError
from serve import reference
from serve.writers import END_ID, MAX_TOKENS, VOCABULARY, write_model

GREEDY = Generation(max_new_tokens=14)
DRAWN = Generation(max_new_tokens=14, temperature=0.9, top_p=0.9, top_k=40, seed=5)
SERVING = TextServing(engine="transformers", max_running_requests=16)


def draw_prompts(count: int, max_length: int = 60) -> list[np.ndarray]:
    draw = np.random.default_rng(count)
    lengths = draw.integers(1, max_length + 1, count)
    return [draw.integers(5, VOCABULARY, length, dtype=np.int32) for length in lengths]


PROMPTS = draw_prompts(16)


def make_requests(
    generation: Generation = GREEDY, prompts: Sequence[np.ndarray] = tuple(PROMPTS)
) -> list[TextRequest]:
    return [
        TextRequest(str(number), prompt, generation, number)
        for number, prompt in enumerate(prompts)
    ]


class Collector:
    """Runs an engine and collects its events."""

    def __init__(self, engine: TextEngine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, TokenEvent] = {}
        self.num_steps = 0

    def step(self) -> list[TokenEvent]:
        events = self.engine.step()
        self.num_steps += 1
        for event in events:
            tokens = self.tokens.setdefault(event.request_id, [])
            if event.token is not None:
                assert event.request_id not in self.ends
                tokens.append(event.token)
            if event.finish_reason is not None:
                assert event.request_id not in self.ends
                self.ends[event.request_id] = event
        return events

    def run(self, requests: Sequence[TextRequest] = (), join_steps: int = 0) -> list[list[int]]:
        """Return the answers of requests, of which one joins every few steps, or all at once."""
        waiting = list(requests)
        while waiting or self.engine.has_work:
            while waiting and (not join_steps or self.num_steps % join_steps == 0):
                self.engine.add(waiting.pop(0))
                if join_steps:
                    break
            self.step()
        return [self.tokens[request.request_id] for request in requests]

    def reasons(self) -> set[str | None]:
        return {event.finish_reason for event in self.ends.values()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Artifact]:
    """Return a function that opens a model of a kind."""
    folders: dict[str, Path] = {}

    def open_kind(kind: str = "llama", **generation: Any) -> Artifact:
        name = f"{kind}{generation}"
        if name not in folders:
            folders[name] = write_model(tmp_path_factory.mktemp(kind), kind, **generation)
        return open_model(str(folders[name]), threads=1)

    return open_kind


@pytest.fixture(scope="module")
def expect(models: Callable[..., Artifact]) -> Callable[..., list[list[int]]]:
    """Return a function with the answers of `regauge generate`, which are computed once."""

    @cache
    def generate(generation: Generation, kind: str = "llama", **options: Any) -> list[list[int]]:
        return reference.generate(models(kind, **options), PROMPTS, generation)

    return generate


@pytest.fixture
def load(models: Callable[..., Artifact]) -> Iterator[Callable[..., Any]]:
    """Return a function that loads the engine of a model, which is closed after the test."""
    engines: list[TextEngine] = []

    def load_kind(
        kind: str = "llama", serving: TextServing = SERVING, **generation: Any
    ) -> TextEngine:
        engines.append(load_text_engine(models(kind, **generation), serving, threads=1))
        return engines[-1]

    yield load_kind
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("generation", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_answers_equal_those_of_generate(
    expect: Callable[..., Any], load: Callable[..., Any], kind: str, generation: Generation
) -> None:
    expected = expect(generation, kind)
    assert len({tuple(tokens) for tokens in expected}) > 10
    engine = load(kind)
    assert isinstance(engine, PagedTextEngine)
    requests = make_requests(generation)
    assert Collector(engine).run(requests) == expected
    assert Collector(engine).run(requests, join_steps=3) == expected
    alone = [Collector(engine).run([request])[0] for request in requests[:4]]
    assert alone == expected[:4]


def test_requests_join_a_running_batch_and_leave_it_at_their_end(load: Callable[..., Any]) -> None:
    collector = Collector(load())
    first, second, *_ = make_requests()
    collector.engine.add(first)
    for _ in range(5):
        collector.step()
    assert collector.engine.num_running == 1
    short = TextRequest("short", second.prompt, Generation(max_new_tokens=2))
    collector.engine.add(short)
    names = [{event.request_id for event in collector.step()} for _ in range(2)]
    assert names == [{first.request_id, "short"}] * 2
    assert (collector.ends["short"].finish_reason, collector.engine.num_running) == ("length", 1)


def test_options_of_requests_in_one_batch_are_their_own(
    expect: Callable[..., Any], load: Callable[..., Any]
) -> None:
    options = [
        GREEDY,
        DRAWN,
        Generation(max_new_tokens=7, temperature=1.5, seed=2),
        Generation(max_new_tokens=12, temperature=0.5, top_k=3, seed=9),
    ]
    requests = [
        TextRequest(str(number), prompt, options[number % 4], number)
        for number, prompt in enumerate(PROMPTS)
    ]
    answers = Collector(load()).run(requests)
    for index, generation in enumerate(options):
        expected = expect(generation)
        assert answers[index::4] == expected[index::4]


def test_an_end_token_ends_an_answer_and_is_not_part_of_it(load: Callable[..., Any]) -> None:
    collector = Collector(load("mistral"))
    answers = collector.run(make_requests())
    stopped = [
        answers[int(name)]
        for name, event in collector.ends.items()
        if event.finish_reason == "stop"
    ]
    assert collector.reasons() == {"stop", "length"}
    assert all(len(answer) < 14 and END_ID not in answer for answer in stopped)


@pytest.mark.parametrize("generation", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_the_generation_configuration_of_the_model_applies(
    expect: Callable[..., Any], load: Callable[..., Any], generation: Generation
) -> None:
    options = {"repetition_penalty": 1.8, "min_new_tokens": 4}
    expected = expect(generation, "mistral", **options)
    assert expected != expect(generation, "mistral")
    assert Collector(load("mistral", **options)).run(make_requests(generation)) == expected


def test_the_answer_limit_of_the_model_is_the_default(models: Callable[..., Artifact]) -> None:
    program = models("llama", max_new_tokens=9).program
    assert (program.output_size, program.answer_tokens) == (9, 9)
    assert models("llama", max_new_tokens=1000).program.output_size == MAX_TOKENS // 2
    assert (models().program.output_size, models().program.answer_tokens) == (64, None)


@pytest.mark.parametrize("generation", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_an_answer_ends_after_a_stop_string_of_the_model(
    models: Callable[..., Artifact],
    expect: Callable[..., Any],
    load: Callable[..., Any],
    generation: Generation,
) -> None:
    whole = expect(generation)
    decode = LoadedTokenizer(models().tokenizer_folder).decode
    stop = decode(whole[0][2:4])
    options = {"stop_strings": stop, "prompt_lookup_num_tokens": 3}
    lengths = [
        next((end for end in range(len(row) + 1) if stop in decode(row[:end])), len(row))
        for row in whole
    ]
    assert lengths[0] <= 4 < max(lengths)
    expected = [row[:length] for row, length in zip(whole, lengths, strict=True)]
    assert expect(generation, **options) == expected
    collector = Collector(load(**options))
    assert collector.run(make_requests(generation)) == expected
    assert collector.ends["0"].finish_reason == "stop"


def test_answers_are_the_same_if_the_cache_is_too_small_for_all(
    expect: Callable[..., Any], load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = SERVING.model_copy(update={"kv_cache_tokens": 160, "max_batch_tokens": 32})
    engine = load(serving=serving)
    manager = engine._processor.offloading_manager
    offload, calls = manager.offload_requests, []
    monkeypatch.setattr(manager, "offload_requests", lambda: calls.append(offload()) or calls[-1])
    assert Collector(engine).run(make_requests(DRAWN)) == expect(DRAWN)
    assert any(calls)


def test_requests_wait_no_longer_if_those_with_the_memory_are_cancelled(
    expect: Callable[..., Any], load: Callable[..., Any]
) -> None:
    serving = SERVING.model_copy(update={"kv_cache_tokens": 160, "max_batch_tokens": 32})
    collector = Collector(load(serving=serving))
    engine: Any = collector.engine
    scheduler = engine._processor.scheduler
    for request in make_requests(GREEDY):
        collector.engine.add(request)
    while not scheduler.block_new_requests:
        collector.step()
    for name in list(scheduler.active_requests):
        collector.engine.cancel(name)
    for _ in range(1000):
        collector.step()
    answers = [collector.tokens[str(number)] for number in range(16)]
    cancelled = [collector.ends[str(number)].finish_reason == "cancelled" for number in range(16)]
    assert any(cancelled)
    for answer, expected, is_cancelled in zip(answers, expect(GREEDY), cancelled, strict=True):
        assert answer == (expected[: len(answer)] if is_cancelled else expected)


def test_equal_prefixes_are_computed_once(
    models: Callable[..., Artifact], load: Callable[..., Any]
) -> None:
    start = np.resize(PROMPTS[0], 56)
    prompts = [np.append(start, np.int32(last)) for last in range(10, 14)]
    serving = SERVING.model_copy(update={"max_batch_tokens": 16, "max_running_requests": 1})
    counts = []
    for share in (True, False):
        collector = Collector(load(serving=serving.model_copy(update={"share_prefixes": share})))
        answers = collector.run(make_requests(GREEDY, prompts))
        assert answers == reference.generate(models(), prompts, GREEDY)
        counts.append(collector.num_steps)
    assert counts[0] < counts[1]


def read_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_the_memory_of_the_cache_is_taken_when_it_is_used(
    expect: Callable[..., Any], load: Callable[..., Any]
) -> None:
    load()
    before = read_resident_bytes()
    engine = load(serving=SERVING.model_copy(update={"kv_cache_tokens": 1 << 20}))
    cache: Any = engine._processor.cache
    assert cache.cache_tensor.numel() > 256e6
    assert Collector(engine).run(make_requests(GREEDY)) == expect(GREEDY)
    assert read_resident_bytes() - before < 100e6


def test_ended_requests_keep_a_share_of_the_cache_and_the_newest_prefix(
    models: Callable[..., Artifact], load: Callable[..., Any]
) -> None:
    engine = load(serving=SERVING.model_copy(update={"kv_cache_tokens": 1600}))
    prompts = [np.resize(prompt, 60) for prompt in draw_prompts(12)]
    answers = [Collector(engine).run(make_requests(GREEDY, [prompt]))[0] for prompt in prompts]
    assert answers == reference.generate(models(), prompts, GREEDY)
    cache: Any = engine._processor.cache
    [allocator] = cache.cache_allocators.values()
    cache.pool.try_to_free_sectors()
    assert cache.num_blocks == 50
    assert cache.num_blocks - cache.pool.num_free_sectors == 50 // 8
    lengths = [len(allocator.match_prefix_blocks(prompt.tolist())) for prompt in prompts]
    assert lengths == [0] * 9 + [1] * 3
    assert engine.cache_blocks == (0, 50)
    engine.add(TextRequest("running", prompts[0], GREEDY))
    engine.step()
    assert engine.cache_blocks == (2, 50)


def test_answers_get_a_token_in_each_step_beside_a_long_prompt(
    models: Callable[..., Artifact], load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_slices, "MIN_TOKENS", 8)
    monkeypatch.setattr(prompt_slices, "BUSY_FACTOR", 1.0)
    collector = Collector(load(serving=SERVING.model_copy(update={"max_step_seconds": 1e-9})))
    prompts = [*(prompt[:5] for prompt in PROMPTS[:3]), np.resize(PROMPTS[3], 60)]
    *running, long = make_requests(GREEDY, prompts)
    for request in running:
        collector.engine.add(request)
    collector.step()
    collector.step()
    collector.engine.add(long)
    num_steps = 0
    while long.request_id not in collector.tokens:
        names = [event.request_id for event in collector.step() if event.token is not None]
        assert set(names) >= {request.request_id for request in running} - collector.ends.keys()
        num_steps += 1
    assert num_steps == 60 // 8 + 1
    assert len(collector.ends) < len(running)
    assert collector.run() == []
    answers = [collector.tokens[str(number)] for number in range(4)]
    assert answers == reference.generate(models(), prompts, GREEDY)
    alone = Collector(collector.engine)
    alone.engine.add(TextRequest("alone", prompts[-1][::-1].copy(), GREEDY))
    assert [event.request_id for event in alone.step()] == ["alone"]


@pytest.mark.parametrize("answer_seconds", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("token_seconds", [1e-5, 0.001, 0.01])
def test_a_step_with_a_slice_takes_the_set_time_or_three_times_that_of_one_without(
    answer_seconds: float, token_seconds: float
) -> None:
    slices = prompt_slices.PromptSlices(512, 0.25)
    slices.record_step(0, 224, 224 * token_seconds)
    slices.record_step(3, 0, answer_seconds)
    for _ in range(20):
        count = slices.count_tokens(3)
        seconds = answer_seconds + (count - 3) * token_seconds
        slices.record_step(3, count - 3, seconds)
        limit = max(0.25, 3 * answer_seconds)
        assert seconds == pytest.approx(limit, rel=0.2) or count in {35, 512}
        assert seconds <= limit * 1.001 or count == 35
    assert slices.count_tokens(0) == 512


@pytest.mark.parametrize(
    ("prompt", "count", "problem"),
    [
        ([], 5, "is empty"),
        ([VOCABULARY], 5, "token id is outside"),
        ([-1], 5, "token id is outside"),
        ([7] * MAX_TOKENS, 1, "reads 128 in all"),
        ([7] * 100, 29, "the answer up to 29"),
    ],
)
def test_a_request_outside_of_the_limits_is_refused(
    load: Callable[..., Any], prompt: list[int], count: int, problem: str
) -> None:
    engine = load()
    with pytest.raises(DataError, match=problem):
        engine.add(TextRequest("a", np.array(prompt, np.int32), Generation(max_new_tokens=count)))
    assert not engine.has_work


def test_a_cancelled_request_frees_its_place(load: Callable[..., Any]) -> None:
    serving = SERVING.model_copy(update={"max_running_requests": 2})
    collector = Collector(load(serving=serving))
    requests = make_requests()[:4]
    for request in requests:
        collector.engine.add(request)
    collector.step()
    assert (collector.engine.num_running, collector.engine.num_waiting) == (2, 2)
    collector.engine.cancel("0")
    collector.engine.cancel("3")
    collector.engine.cancel("unknown")
    events = collector.step()
    assert {event.request_id for event in events if event.token is not None} == {"1", "2"}
    assert [event[2] for event in events if event.request_id in {"0", "3"}] == ["cancelled"] * 2
    collector.run()
    assert {name: event.finish_reason for name, event in collector.ends.items()} == {
        "0": "cancelled",
        "1": "length",
        "2": "length",
        "3": "cancelled",
    }


def poison(engine: Any, token: int, value: float = torch.nan) -> None:
    """Let the embedding of a token be a value."""
    with torch.no_grad():
        engine._model.get_input_embeddings().weight[token] = value


def test_a_request_with_nan_fails_alone(
    expect: Callable[..., Any], load: Callable[..., Any]
) -> None:
    expected = expect(GREEDY)
    poisoned = 2  # an end token, which no other prompt or answer has
    engine = load()
    poison(engine, poisoned)
    requests = make_requests()
    bad = np.array([9, poisoned, 11], np.int32)
    collector = Collector(engine)
    collector.run([*requests[:8], TextRequest("bad", bad, GREEDY), *requests[8:]])
    assert [collector.tokens[str(number)] for number in range(16)] == expected
    assert collector.ends["bad"].finish_reason == "error"
    assert "not finite" in collector.ends["bad"].message
    assert collector.tokens["bad"] == []


def test_a_request_whose_step_fails_ends_alone(
    expect: Callable[..., Any],
    load: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = expect(GREEDY)
    engine = load()
    bad_token = 2
    embed = engine._model.get_input_embeddings().forward

    def fail(ids: torch.Tensor) -> torch.Tensor:
        if (ids == bad_token).any():
            raise RuntimeError("no kernel for this token")
        return embed(ids)

    monkeypatch.setattr(engine._model.get_input_embeddings(), "forward", fail)
    collector = Collector(engine)
    requests = make_requests()
    for request in requests[:8]:
        engine.add(request)
    for _ in range(4):
        collector.step()
    bad = np.array([9, bad_token, 11], np.int32)
    collector.run([TextRequest("bad", bad, GREEDY), *requests[8:]])
    assert [collector.tokens[str(number)] for number in range(16)] == expected
    assert (collector.ends["bad"].finish_reason, collector.ends["bad"].message) == (
        "error",
        "no kernel for this token",
    )


def test_an_engine_that_always_fails_raises(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(engine._processor, "_generation_step", fail)
    collector = Collector(engine)
    with pytest.raises(RuntimeError, match="the device is lost"):
        collector.run(make_requests())
    assert len(collector.ends) == MAX_FAILURES - 1


def test_other_logits_turn_continuous_batching_off(
    expect: Callable[..., Any],
    load: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    build_mask = paged_attention._build_mask
    monkeypatch.setattr(
        paged_attention, "_build_mask", lambda *args: torch.ones_like(build_mask(*args))
    )
    with caplog.at_level(logging.WARNING):
        engine = load()
    assert isinstance(engine, StaticTextEngine)
    assert "Continuous batching is off, answers are generated in static batches" in caplog.text
    for generation in (GREEDY, DRAWN):
        expected = expect(generation)
        assert Collector(engine).run(make_requests(generation)) == expected


def test_beams_are_generated_in_static_batches(
    expect: Callable[..., Any], load: Callable[..., Any]
) -> None:
    engine = load("llama", num_beams=3)
    assert isinstance(engine, StaticTextEngine)
    expected = expect(GREEDY, "llama", num_beams=3)[:4]
    assert expected != expect(GREEDY)[:4]
    num_passes: list[int] = []
    engine.on_progress = lambda: num_passes.append(1)
    assert Collector(engine).run(make_requests()[:4]) == expected
    assert len(num_passes) >= max(map(len, expected))  # a long answer is not taken for a hang


def test_static_batches_have_equal_options_and_fail_alone(load: Callable[..., Any]) -> None:
    engine = load("llama", num_beams=3)
    requests = [*make_requests(GREEDY)[:3], *make_requests(DRAWN)[3:5]]
    for request in requests:
        engine.add(request)
    engine.cancel("1")
    collector = Collector(engine)
    names = [{event.request_id for event in collector.step()} for _ in range(2)]
    assert names == [{"0", "1", "2"}, {"3", "4"}]
    assert collector.ends["1"].finish_reason == "cancelled"
    poisoned = requests[0].prompt.copy()
    engine._waiting["bad"] = TextRequest("bad", poisoned + np.int32(VOCABULARY), GREEDY)
    engine.add(requests[0])
    collector.ends.clear()
    collector.run()
    reasons = {name: event.finish_reason for name, event in collector.ends.items()}
    assert reasons == {"bad": "error", "0": "length"}


def test_vllm_is_refused_without_its_device(models: Callable[..., Artifact]) -> None:
    with pytest.raises(SettingsError, match="does not run on the accelerator 'cpu'; set serve"):
        load_text_engine(models(), TextServing(engine="vllm"), threads=1)


def test_vllm_is_refused_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cpu, "generation_engines", ("vllm",))
    assert vllm_engine.find_obstacle(Cpu()) == "the package vllm is not installed"


@pytest.mark.parametrize("size", [1, 3, 25])
def test_a_long_answer_is_decoded_as_a_whole(size: int) -> None:
    text = "naïve 文字 🙂 text " * 30
    tokens = list(text.encode())
    lengths: list[int] = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return bytes(ids).decode(errors="replace")

    answer = AnswerText(decode, Generation())
    parts = [answer.add(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    assert "".join([*parts, answer.finish()]) == text
    assert not any("\ufffd" in part for part in parts)
    assert max(lengths) < len(tokens) / 4
    assert answer.num_tokens == len(tokens)


def test_a_stop_text_ends_an_answer_between_two_windows() -> None:
    tokens = list(b"0123456789" * 3 + b"END and more")
    answer = AnswerText(lambda ids: bytes(ids).decode(), Generation(stop=("END", "9E")))
    parts = [answer.add([token]) for token in tokens]
    assert "".join(parts) == "0123456789" * 2 + "012345678"
    assert answer.has_stopped
    assert answer.finish() == ""


@pytest.mark.parametrize("text", ["say 寿司 now 🚀", "🚀寿", "naïve 👩‍👩‍👧\n\nok" * 3, "plain"])
@pytest.mark.parametrize("num_missing", [0, 1, 2, 4])
def test_streamed_bytes_equal_the_text_decoded_by_transformers(
    tmp_path: Path, text: str, num_missing: int
) -> None:
    """A byte can change the text of earlier bytes: transformers decodes a run of bytes at once."""
    folder = write_byte_fallback_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids = ids[: len(ids) - num_missing]
    tokenization = Tokenization(max_length=99, convention="transformers")
    preprocessor = Preprocessor(folder, tokenization, InputSpec())
    answer = preprocessor.build_answer(Generation())
    parts = [answer.add([token]) for token in ids]
    assert "".join([*parts, answer.finish()]) == tokenizer.decode(ids)
    assert not any("\ufffd" in part for part in parts)


def write_byte_fallback_tokenizer(folder: Path) -> Path:
    """Write a tokenizer like Llama's: letters, and bytes for all other characters."""
    letters = "▁abcdefghijklmnopqrstuvwxyz"
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    role = {"unk_token": "<unk>"}
    tokenizer = Tokenizer(
        tokenizer_models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, **role)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **role).save_pretrained(folder)
    return folder
