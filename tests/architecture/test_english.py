"""Docstrings, messages, docs and README use plain words and short sentences."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from architecture.tree import ROOT, Source, sources

MAX_SENTENCE_WORDS = 30
PHRASES = {
    name: re.compile(rf"\b(?:{words})\b", re.IGNORECASE)
    for name, words in (
        ("of", "of"),
        ("that", "that"),
        ("its", "its"),
        ("is no", "(?<!there )(?:is|are|has|have) no"),
        ("where", "where"),
        ("what", "what"),
        ("told", "tells?|told|says?|said"),
    )
}
"""Phrases whose frequency is limited."""
DOCSTRING_LIMITS = {"of": 19, "that": 10, "its": 6, "is no": 0, "where": 3, "what": 3, "told": 0.5}
PAGE_LIMITS = {"of": 14, "that": 6, "its": 3, "is no": 0.1, "where": 1, "what": 1, "told": 0.1}
"""Largest frequency of each phrase per 1,000 words."""
OTHERS = (
    "torch.distributed, pydantic and httpx: of 12 to 18, that 3 to 9, its 0 to 3, is no 0 to 0.8"
)
PRIVATE = re.compile(
    r"\b(tells?|told|says?|said|goes on|go on|going on|lies|lie beside|stands beside|comes to|"
    r"in turns|as is|those of|that which|so many|others'|of one's own)\b",
    re.IGNORECASE,
)
"""Phrases for which the field has a word: log, report, continue, resume, equal, alternating, ..."""
MESSAGE_CALLS = {"info", "warning", "error", "debug", "print"}
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md")
REFERENCE = "docs/reference/settings.md"
"""Generated from docstrings, which are measured themselves."""


@dataclass(frozen=True)
class Text:
    """A docstring, or the prose of a page, with its location."""

    location: str
    text: str

    @property
    def words(self) -> list[str]:
        return re.findall(r"[a-z']+", self.text.lower())


def prose(markdown: str) -> str:
    """Return a page without code, tables, headings and addresses of links."""
    text = FENCE.sub("", markdown)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^\s*(\||#).*$", "", text, flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", text)


def docstrings(source: Source) -> Iterator[Text]:
    """Yield the documentation of a file: of modules, classes, functions, fields and constants."""
    for node in ast.walk(source.tree):
        constant = node.value if isinstance(node, ast.Expr) else None
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
            yield Text(f"{source.path}:{constant.lineno}", constant.value)


def pages() -> Iterator[Text]:
    """Yield the prose of every page of documentation."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            name = str(path.relative_to(ROOT))
            if name != REFERENCE:
                yield Text(name, prose(path.read_text(encoding="utf-8")))


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text; lists and indented examples end one."""
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"^ {4,}.*$", "", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*|]|\n\s*\d+\. ", text):
        yield from re.split(r"(?<=[.:;!?])\s+", " ".join(paragraph.split()))


def long_sentences(text: Text) -> list[str]:
    """Return the sentences of a text that are too long."""
    return [
        f"{text.location}: {len(sentence.split())} words: {sentence[:90]}"
        for sentence in sentences(text.text)
        if len(re.findall(r"[A-Za-z']+", sentence)) > MAX_SENTENCE_WORDS
    ]


def messages(source: Source) -> Iterator[Text]:
    """Yield the strings that a file gives to errors, the log and the terminal."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if not (name.endswith("Error") or name in MESSAGE_CALLS):
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield Text(f"{source.path}:{part.lineno}", part.value)


def private_phrases(text: Text) -> list[str]:
    """Return the private phrases of a message."""
    return [
        f"{text.location}: {match[0]!r} in {text.text!r}" for match in PRIVATE.finditer(text.text)
    ]


def count_phrases(texts: list[Text]) -> dict[str, float]:
    """Return the frequency of each limited phrase per 1,000 words."""
    num_words = max(1, sum(len(text.words) for text in texts))
    return {
        name: 1000 * sum(len(pattern.findall(text.text)) for text in texts) / num_words
        for name, pattern in PHRASES.items()
    }


def excesses(
    frequencies: dict[str, float], limits: dict[str, float] = DOCSTRING_LIMITS
) -> list[str]:
    """Return the phrases that are more frequent than their limits."""
    return [
        f"{name}: {frequencies[name]:.2f} per 1,000 words, at most {limit}"
        for name, limit in limits.items()
        if frequencies[name] > limit
    ]


def summarize(frequencies: dict[str, float]) -> str:
    """Return the frequencies as a line."""
    return ", ".join(f"{name} {frequency:.1f}" for name, frequency in frequencies.items())


def test_docstrings_use_plain_words(report: Callable[[str], None]) -> None:
    frequencies = count_phrases([text for source in sources() for text in docstrings(source)])
    report(f"docstrings per 1,000 words: {summarize(frequencies)} ({OTHERS})")
    assert not excesses(frequencies)


def test_pages_use_plain_words(report: Callable[[str], None]) -> None:
    frequencies = count_phrases(list(pages()))
    report(f"docs and README per 1,000 words: {summarize(frequencies)}")
    assert not excesses(frequencies, PAGE_LIMITS)


def test_sentences_are_short() -> None:
    texts = [text for source in sources() for text in docstrings(source)] + list(pages())
    problems = [line for text in texts for line in long_sentences(text)]
    assert not problems, "\n".join(problems)


def test_messages_use_the_words_of_the_field() -> None:
    problems = [
        line for source in sources() for text in messages(source) for line in private_phrases(text)
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("text", ["the name of the file of a run", "what is said", "it is no run"])
def test_excessive_phrases_are_detected(text: str) -> None:
    assert excesses(count_phrases([Text("a", text)]))
    assert not excesses(count_phrases([Text("a", "Returns None if there is no file.")]))


def test_a_long_sentence_is_detected() -> None:
    assert long_sentences(Text("a", "word " * 31 + "."))
    assert not long_sentences(Text("a", "word " * 20 + ". " + "word " * 20 + "."))


@pytest.mark.parametrize("message", ["the run goes on", "told to stop", "it lies in a folder"])
def test_a_private_phrase_is_detected(message: str) -> None:
    text = f"raise SettingsError({message!r}, 'do it')"
    assert [
        line for part in messages(Source("regauge/a.py", text)) for line in private_phrases(part)
    ]
