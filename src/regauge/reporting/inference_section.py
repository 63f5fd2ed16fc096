"""A benchmark of inference in words: a row for each artifact, batch and length, and pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge.results import formatting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Document = dict[str, Any]
Row = dict[str, str]
PERCENTILES = (50, 90, 95, 99)
"""Of latencies, in the documents of a benchmark and in words."""
NOT_SERVED = "not served"
ARTIFACT = "artifact"


@dataclass(frozen=True)
class Told:
    """One table in words."""

    title: str
    rows: tuple[Row, ...]
    wide: tuple[str, ...] = ()
    """Columns that a terminal has no room for."""

    @property
    def narrow(self) -> list[Row]:
        """The rows as they fit a terminal: the only artifact that there is need not be named."""
        alone = len({row.get(ARTIFACT) for row in self.rows}) == 1 and len(self.rows) > 1
        passed = {*self.wide, *([ARTIFACT] if alone else [])}
        return [
            {name: cell for name, cell in row.items() if name not in passed} for row in self.rows
        ]


@dataclass(frozen=True)
class Inferences:
    """One benchmark."""

    title: str
    tables: tuple[Told, ...]
    verdict: tuple[str, ...]
    """A sentence for each pair that was set side by side."""
    sentences: tuple[str, ...]
    """How it was measured, and what each figure is."""
    document: Document


def told(document: Document, name: str = "") -> Inferences | None:
    """Return what a benchmark of inference says, or None where it is none of that."""
    if document.get("measured") != "inference" or not document.get("rows"):
        return None
    title = f"Inference{': ' if name else ''}{name}"
    tables = (*_beside(document), _closed(document), *_open(document), _artifacts(document))
    verdict = tuple(_verdict(each) for each in _pairs(document))
    return Inferences(title, tables, verdict, tuple(_sentences(document)), document)


def milliseconds(value: float | None) -> str:
    """Return a latency in three digits: 0.42, 8.31, 72.9, 343, 1,204."""
    if value is None:
        return formatting.UNKNOWN
    for least, digits in ((100, 0), (10, 1)):
        if round(value, digits) >= least:
            return f"{value:,.{digits}f}"
    return f"{value:.2f}"


def place(document: Document, row: Mapping[str, Any]) -> str:
    """Return the batch x length of a row, after its model where there are several."""
    models = {each["name"]: each["model"] for each in document["artifacts"]}
    where = f"{row['rows']} x {row['length']}"
    model = models.get(row.get("artifact") or row.get("first"))
    return f"{model}, {where}" if len(set(models.values())) > 1 else where


def in_order(document: Document) -> list[Document]:
    """Return the rows with the artifacts of one batch and length beside each other."""
    places = list(dict.fromkeys((row["rows"], row["length"]) for row in document["rows"]))
    names = [each["name"] for each in document["artifacts"]]
    return sorted(
        document["rows"],
        key=lambda row: (places.index((row["rows"], row["length"])), names.index(row["artifact"])),
    )


def _heading(document: Document) -> str:
    several = len({each["model"] for each in document["artifacts"]}) > 1
    return "model, batch x length" if several else "batch x length"


def _closed(document: Document) -> Told:
    """Return the figures of requests that follow each other."""
    heading = _heading(document)
    rows = tuple(
        {
            heading: place(document, row),
            ARTIFACT: row["artifact"],
            **_latencies(row["closed"]),
            "p50 from, to": ", ".join(map(milliseconds, row["closed"]["spread_p50_ms"])),
            "inferences/s": f"{row['closed']['inferences_per_second']:,.4g}",
            "tokens/s": f"{row['closed']['tokens_per_second']:,.0f}",
            "of peak": formatting.share(row["closed"]["peak_share"]),
            "joules": _joules(row["closed"]),
            "$ per 1M": formatting.dollars(row["closed"]["usd_per_million_inferences"]),
        }
        for row in in_order(document)
    )
    return Told("One request after the other", rows, ("p50 from, to", "tokens/s", "joules"))


def _latencies(figures: Mapping[str, Any]) -> Row:
    """Return the percentiles; one that was not served is told from one that is not known."""
    lost = 100 * (figures.get("not_served") or 0.0)
    found = {}
    for percent in PERCENTILES:
        value = figures[f"p{percent}_ms"]
        never = value is None and lost > 100 - percent
        found[f"p{percent} ms"] = NOT_SERVED if never else milliseconds(value)
    return found


def _joules(closed: Mapping[str, Any]) -> str:
    value = closed["joules_per_inference"]
    bound = "at most " if closed["joules_are"] == "at most" else ""
    return formatting.UNKNOWN if value is None else f"{bound}{value:.3g}"


def _open(document: Document) -> Iterator[Told]:
    """Yield the figures of requests that come when they come, where there were any."""
    heading = _heading(document)
    rows = tuple(
        {
            heading: place(document, row),
            ARTIFACT: row["artifact"],
            "rate": "given" if came["share"] is None else f"{came['share']:.0%}",
            "requests/s": f"{came['requests_per_second']:,.4g}",
            **_latencies(came),
            "not served": formatting.share(came["not_served"]),
            "$ per 1M": formatting.dollars(came["usd_per_million_inferences"]),
        }
        for row in in_order(document)
        for came in row["open"]
    )
    if rows:
        title = "Poisson arrivals, latency from the moment of arrival"
        yield Told(title, rows, ("$ per 1M",))


def _artifacts(document: Document) -> Told:
    """Return what was found of each artifact as a whole."""
    rows = tuple(
        {
            ARTIFACT: each["name"],
            "model": each["model"],
            "computed by": f"{each['computed_by']}, {_threads(each['machine'])}",
            "ready after": formatting.duration(each["ready"]["seconds"]),
            "of it loading": formatting.duration(each["ready"]["load_seconds"]),
            "warm-up": formatting.duration(each["ready"]["warmup_seconds"]),
            "memory": _bytes(each["memory_bytes"]),
            "chip": each["chip"],
            "$ an hour": _hourly(each["price"]),
            "of": each["date"],
        }
        for each in document["artifacts"]
    )
    wide = ("of it loading", "warm-up", "$ an hour", "of")
    return Told("From start to ready, and memory", rows, wide)


def _threads(machine: Mapping[str, Any]) -> str:
    count = machine["threads"]
    return "1 thread" if count == 1 else f"{count} threads"


def _bytes(value: int | None) -> str:
    return formatting.UNKNOWN if value is None else f"{value / 1e6:,.0f} MB"


def _hourly(price: Mapping[str, Any] | None) -> str:
    return formatting.UNKNOWN if price is None else f"{price['usd_per_hour']:g}"


def _pairs(document: Document) -> list[list[Document]]:
    """Return the ratios of each pair."""
    found: dict[tuple[str, str], list[Document]] = {}
    for each in document["beside"]:
        found.setdefault((each["first"], each["second"]), []).append(each)
    return list(found.values())


def _beside(document: Document) -> Iterator[Told]:
    """Yield a table for each pair: both figures and their ratio, of latency, rate and dollars."""
    closed = {
        (row["artifact"], row["rows"], row["length"]): row["closed"] for row in document["rows"]
    }
    heading = _heading(document)
    for pair in _pairs(document):
        first, second = pair[0]["first"], pair[0]["second"]
        rows = []
        for each in pair:
            where = each["rows"], each["length"]
            two = closed[first, *where], closed[second, *where]
            rows.append(
                {
                    heading: place(document, each),
                    "p50 ms": _two(two, "p50_ms", milliseconds),
                    "latency": _times(each["latency"]) + (" *" if each["overlap"] else ""),
                    "inferences/s": _two(two, "inferences_per_second", lambda n: f"{n:,.4g}"),
                    "rate": _times(each["inferences_per_second"]),
                    "$ per 1M": _two(two, "usd_per_million_inferences", formatting.dollars),
                    "cost": _times(each["usd"]),
                }
            )
        yield Told(f"{first} / {second}, with the second by the first", tuple(rows))


def _two(figures: Sequence[Mapping[str, Any]], key: str, word: Any) -> str:
    """Return both figures of a pair, and one word where neither is known."""
    found = [word(each[key]) for each in figures]
    return " / ".join(found if any(each[key] is not None for each in figures) else found[:1])


def _times(value: float | None) -> str:
    return formatting.UNKNOWN if value is None else f"x {value:.2f}"


def _verdict(pair: Sequence[Document]) -> str:
    """Return in one sentence how much longer or shorter the second of a pair takes."""
    first, second = pair[0]["first"], pair[0]["second"]
    times = sorted(each["latency"] for each in pair if each["latency"] is not None)
    if not times:
        return f"How long {second} takes beside {first} is unknown."
    between = f"{times[0]:.2f}"
    if f"{times[-1]:.2f}" != between:
        between += f" to {times[-1]:.2f}"
    shapes = "one batch and length" if len(times) == 1 else f"{len(times)} batches and lengths"
    told = f"{second} takes {between} times as long as {first} for a request, over {shapes}"
    unsure = sum(bool(each["overlap"]) for each in pair)
    return f"{told}{f'; of {unsure} the turns of both overlap' if unsure else ''}."


def _sentences(document: Document) -> Iterator[str]:
    """Yield how it was measured, and the formula or source of each figure."""
    formulas = document["formulas"]
    turns = "one turn" if document["turns"] == 1 else f"{document['turns']} turns in alternation"
    yield (
        f"Medians of {turns}, {document['seconds']:g} s for each batch and length, each turn in a "
        f"process of its own, {document['date']}. Percentiles: {formulas['percentiles_ms']}."
    )
    if any(each["overlap"] for each in document["beside"]):
        yield "*: turns of both overlap, so that the difference may be noise."
    yield f"Arrivals: {formulas['open']}."
    yield (
        f"Inference: {formulas['inference']}. Inferences/s: {formulas['inferences_per_second']}. "
        "Tokens are real ones."
    )
    peaks = dict.fromkeys(
        f"{each['peak_flops_per_second']:.4g} FLOP/s, {each['peak_source']}"
        if each["peak_flops_per_second"]
        else f"of {each['name']} unknown"
        for each in document["artifacts"]
    )
    flops = formulas["flops_per_inference"]
    yield f"Of peak: {formulas['peak_share']}; FLOPs: {flops}. Peak: {'; '.join(peaks)}."
    yield f"Joules: {formulas['joules_per_inference']}. {_powers(document)}."
    yield f"Dollars: {formulas['usd_per_million_inferences']}. Price: {_prices(document)}."
    ready, memory = formulas["ready_seconds"], formulas["memory_bytes"]
    yield f"Ready: {ready}. Memory: {memory}."


def _powers(document: Document) -> str:
    found = dict.fromkeys(
        f"{each['tdp_watts']:g} W, {each['tdp_source']}"
        if each["tdp_watts"]
        else f"of {each['name']} unknown"
        for each in document["artifacts"]
    )
    return f"Thermal design power: {'; '.join(found)}"


def _prices(document: Document) -> str:
    """Return the price of each machine, with who says it, and when."""
    found = []
    for each in document["artifacts"]:
        price = each["price"]
        if price is None:
            found.append(f"of {each['name']} unknown, set execution.price")
            continue
        kind = f"{price['instance']}, " if price["instance"] else ""
        day = f", {price['as_of']}" if price["as_of"] else ""
        old = f"; {price['remark']}" if price["remark"] else ""
        found.append(f"{kind}{price['usd_per_hour']:g} USD an hour ({price['source']}{day}){old}")
    return "; ".join(dict.fromkeys(found))
