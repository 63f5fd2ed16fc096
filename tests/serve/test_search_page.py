"""The search page in a real browser, and its routes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette

from browser import DESKTOP, Browser, open_browser
from regauge.serving.api_keys import ApiKeys
from regauge.serving.http_protocol import ServerContext, build_route
from regauge.serving.request_errors import InferenceError, OverloadedError
from regauge.serving.routes.search import CACHED_QUERIES, list_routes
from regauge.serving.routes.tei import format_tei_error
from regauge.serving.search.search_index import SearchIndex
from regauge.serving.search.search_service import VersionSearch
from regauge.serving.search.search_settings import SearchSettings
from regauge.serving.server_metrics import ServerMetrics
from regauge.serving.settings import Serve
from serve.vectors import build_artifact, embed_words, write_vectors

NARROW = 320
WIDTH = 64
ATTACK = "<script>document.title='attacked'</script><img src=x onerror=document.title='attacked'>"
DOCUMENTS = [
    ("json.dumps", "Serialize an object to a JSON text."),
    ("json.loads", "Deserialize a JSON text to an object."),
    ("shutil.rmtree", "Recursively delete a directory tree."),
    ("os.remove", "Remove a file. If the path is a directory, an error is raised."),
    ("statistics.mean", "Return the arithmetic mean of numbers.\n\nIf there are none, fail."),
    ("attack", f"A text with {ATTACK} inside of it."),
    ("very_long_name." * 12 + "end", "A title without a break must not widen the page."),
    *((f"counting.number_{number}", f"The number {number} in words.") for number in range(20)),
]


@dataclass
class Service:
    """The search service, with a model that can be slow, busy or broken."""

    index: SearchIndex
    settings: SearchSettings
    queries: list[str] = field(default_factory=list)
    """The texts that were embedded."""
    failures: list[Exception] = field(default_factory=list)
    """Errors of the next queries."""
    gates: dict[str, threading.Event] = field(default_factory=dict)
    """Queries that wait for an event."""

    version: str = "first"

    @contextlib.asynccontextmanager
    async def use(self) -> AsyncIterator[VersionSearch]:
        yield VersionSearch(self.version, self.index, self.embed_query)

    async def embed_query(self, text: str) -> np.ndarray:
        self.queries.append(text)
        if self.failures:
            raise self.failures.pop(0)
        if text in self.gates:
            await asyncio.to_thread(self.gates[text].wait)
        return embed_words(text, WIDTH)


@dataclass
class Site:
    """A running server."""

    url: str
    service: Service


@contextlib.contextmanager
def run_server(service: Service, port: int = 0) -> Iterator[str]:
    """Serve the routes on the loopback interface; yield the address."""
    anything: Any = service
    settings = Serve(artifacts={"model": "folder"})
    context = ServerContext(settings, anything, ServerMetrics(), ApiKeys([]), anything)
    routes = [build_route(context, spec, format_tei_error) for spec in list_routes(anything)]
    application = Starlette(routes=routes)
    options = uvicorn.Config(application, lifespan="off", ws="none", log_level="critical")
    server = uvicorn.Server(options)
    with socket.create_server(("127.0.0.1", port)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="site")
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}/"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SearchIndex]:
    folder = tmp_path_factory.mktemp("vectors")
    artifact = build_artifact(folder / "artifact", WIDTH)
    names, texts = zip(*DOCUMENTS, strict=True)
    vectors = np.stack([embed_words(text, WIDTH) for text in texts])
    links = ["https://docs.python.org/3/library/json.html", *[None] * (len(texts) - 1)]
    write_vectors(folder / "out", artifact, vectors, {"name": names, "text": texts, "url": links})
    settings = SearchSettings(vectors=str(folder / "out"))
    with SearchIndex.open(settings, artifact) as opened:
        yield opened


@pytest.fixture
def service(index: SearchIndex) -> Service:
    return Service(index, SearchSettings(vectors="out", max_query_characters=200))


@pytest.fixture
def site(service: Service) -> Iterator[Site]:
    with run_server(service) as url:
        yield Site(url, service)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as tab:
        tab.call("Accessibility.enable")
        yield tab


def test_a_search_returns_ranked_results(site: Site) -> None:
    response = httpx.get(site.url + "search", params={"q": " delete a \n directory ", "k": 3})
    assert response.status_code == 200
    assert response.headers["cache-control"] == "no-store"
    document = response.json()
    assert document["query"] == "delete a directory"
    assert (document["documents"], document["exact"]) == (len(DOCUMENTS), True)
    assert document["milliseconds"] > 0
    assert [result["rank"] for result in document["results"]] == [1, 2, 3]
    best = document["results"][0]
    assert (best["title"], best["link"], best["id"]) == ("shutil.rmtree", None, 2)
    assert best["texts"] == {"text": DOCUMENTS[2][1]}
    assert len(httpx.get(site.url + "search?q=json").json()["results"]) == 10


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "q is missing or empty; set it to the text to search for"),
        ({"q": " \t "}, "q is missing or empty"),
        ({"q": "x" * 201}, "q has 201 characters; send at most 200"),
        ({"q": "x", "k": "0"}, "k is '0'; set a whole number from 1 to 100"),
        ({"q": "x", "k": "101"}, "k is '101'"),
        ({"q": "x", "k": "-1"}, "k is '-1'"),
        ({"q": "x", "k": "1.5"}, "k is '1.5'"),
        ({"q": "x", "k": "²"}, "k is '²'"),
        ({"q": "x", "k": "9" * 5000}, "k is '99999999999999999999'"),
        ({"q": "x", "k": ""}, "k is ''"),
    ],
)
def test_invalid_parameters_are_refused(
    site: Site, parameters: dict[str, str], message: str
) -> None:
    response = httpx.get(site.url + "search", params=parameters)
    assert response.status_code == 422
    assert message in response.json()["error"]
    assert site.service.queries == []


def test_texts_of_any_script_are_queries(site: Site) -> None:
    for query in ("número 日本語 🙂", "%00", "\x00", "a&k=3"):
        response = httpx.get(site.url + "search", params={"q": query})
        assert (response.status_code, response.json()["query"]) == (200, query)
    assert httpx.get(site.url + "search?q=%ff").status_code == 200


def test_a_repeated_query_is_computed_once(site: Site) -> None:
    with httpx.Client(base_url=site.url) as client:
        first = client.get("search?q=json").json()
        again = client.get("search?q=json").json()
        assert again["results"] == first["results"]
        assert site.service.queries == ["json"]
        client.get("search?q=json&k=2")
        assert site.service.queries == ["json", "json"]
        for number in range(CACHED_QUERIES):
            client.get(f"search?q={number}")
        client.get("search?q=json")
        assert site.service.queries.count("json") == 3


def test_another_model_version_computes_a_query_again(site: Site) -> None:
    for version in ("first", "second", "second"):
        site.service.version = version
        httpx.get(site.url + "search?q=json")
    assert site.service.queries == ["json", "json"]


def test_a_failed_query_is_not_remembered(site: Site) -> None:
    site.service.failures.append(OverloadedError("busy", retry_after=2))
    response = httpx.get(site.url + "search?q=json")
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")
    assert httpx.get(site.url + "search?q=json").status_code == 200


@pytest.mark.parametrize("path", ["", "search.css", "search.js", "documents/5"])
def test_pages_may_load_only_their_own_files(site: Site, path: str) -> None:
    response = httpx.get(site.url + path)
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("number", ["27", "99999999999999999999999", "-1", "x"])
def test_an_unknown_document_is_not_an_error_of_the_server(site: Site, number: str) -> None:
    assert httpx.get(site.url + f"documents/{number}").status_code == 404


STATUS = "document.getElementById('status').textContent"
TITLES = "[...document.querySelectorAll('#results a')].map(link => link.textContent)"


def search_for(browser: Browser, site: Site, query: str, width: int = DESKTOP) -> None:
    browser.open(site.url, width)
    browser.type(query)
    browser.wait_for(f"{STATUS}.includes('results from')")


def check_silence(browser: Browser, site: Site) -> None:
    """Check that the page had no error and loaded nothing from elsewhere."""
    assert browser.events_of("Runtime.exceptionThrown") == []
    assert browser.events_of("Runtime.consoleAPICalled") == []
    assert browser.events_of("Log.entryAdded") == []
    urls = [request["request"]["url"] for request in browser.events_of("Network.requestWillBeSent")]
    assert [url for url in urls if not url.startswith((site.url, "data:"))] == []


def test_results_appear_while_a_user_types(browser: Browser, site: Site) -> None:
    search_for(browser, site, "delete a directory")
    browser.wait_for(f"{TITLES}[0] === 'shutil.rmtree'")
    assert len(browser.value(TITLES)) == 10
    score = browser.value("document.querySelector('#results .score').textContent")
    assert 0.3 < float(score) < 1
    assert site.service.queries[-1] == "delete a directory"
    assert browser.value("location.search") == "?q=delete+a+directory"
    check_silence(browser, site)


def test_a_query_is_sent_after_a_pause(browser: Browser, site: Site) -> None:
    browser.open(site.url, DESKTOP)
    assert browser.value("document.activeElement.id") == "query"
    code = """
    for (const text of ["j", "js", "jso", "json"]) {
      document.getElementById("query").value = text;
      document.getElementById("query").dispatchEvent(new Event("input"));
    }
    """
    browser.value(code)
    browser.wait_for(f"{STATUS}.includes('results from')")
    assert site.service.queries == ["json"]


def test_links_lead_to_the_address_or_to_a_page_of_the_document(
    browser: Browser, site: Site
) -> None:
    search_for(browser, site, "object to json text")
    links = dict(
        browser.value("[...document.querySelectorAll('#results a')].map(a => [a.text, a.href])")
    )
    assert links["json.dumps"] == "https://docs.python.org/3/library/json.html"
    assert links["json.loads"] == site.url + "documents/1"


def test_the_keyboard_moves_opens_and_clears(browser: Browser, site: Site) -> None:
    search_for(browser, site, "arithmetic mean of numbers")
    focused = "document.activeElement.textContent"
    browser.press("ArrowDown")
    assert browser.value(focused) == browser.value(f"{TITLES}[0]") == "statistics.mean"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert browser.value(outline) == "solid"
    browser.press("ArrowDown")
    assert browser.value(focused) == browser.value(f"{TITLES}[1]")
    browser.press("ArrowUp")
    browser.press("ArrowUp")
    assert browser.value("document.activeElement.id") == "query"
    assert browser.value(outline) == "solid"
    browser.press("ArrowUp")
    assert browser.value("document.activeElement.id") == "query"
    browser.press("ArrowDown")
    browser.press("Enter")
    loaded = "document.readyState === 'complete'"
    browser.wait_for(f"{loaded} && document.querySelector('.fields dd') !== null")
    assert browser.value("location.pathname") == "/documents/4"
    assert browser.value("document.querySelector('h1').textContent") == "statistics.mean"
    text = browser.value("document.querySelector('.fields dd').innerText")
    assert text == "Return the arithmetic mean of numbers.\n\nIf there are none, fail."
    browser.value("history.back()")
    browser.wait_for(f"document.getElementById('query') !== null && {TITLES}.length === 10")
    assert browser.value("document.getElementById('query').value") == "arithmetic mean of numbers"
    browser.value("document.querySelector('#results a').focus()")
    browser.press("Escape")
    assert browser.value("document.activeElement.id") == "query"
    assert browser.value("document.getElementById('query').value") == ""
    assert browser.value(TITLES) == []
    assert browser.value("location.search") == ""


def test_a_late_answer_of_an_earlier_query_is_dropped(browser: Browser, site: Site) -> None:
    gate = site.service.gates["slow"] = threading.Event()
    browser.open(site.url, DESKTOP)
    browser.type("slow")
    browser.wait_for("document.getElementById('results').ariaBusy === 'true'")
    browser.value("document.getElementById('query').value = ''")
    browser.type("delete")
    browser.wait_for(f"{STATUS}.includes('results from')")
    titles = browser.value(TITLES)
    gate.set()
    aborted = [event["canceled"] for event in browser.events_of("Network.loadingFailed")]
    assert aborted
    assert all(aborted)
    assert browser.value(TITLES) == titles
    assert titles[0] == "shutil.rmtree"
    check_silence(browser, site)


def test_a_busy_server_is_asked_again(browser: Browser, site: Site) -> None:
    site.service.failures.append(OverloadedError("busy", retry_after=1))
    browser.open(site.url, DESKTOP)
    browser.type("json")
    browser.wait_for(f"{STATUS} === 'The server is busy. Trying again…'")
    assert browser.value("document.getElementById('status').className") == "failed"
    browser.wait_for(f"{STATUS}.includes('results from')")
    assert browser.value("document.getElementById('status').className") == ""
    assert site.service.queries == ["json", "json"]


def test_a_failure_is_shown_and_the_next_query_works(browser: Browser, site: Site) -> None:
    site.service.failures.append(InferenceError("the model failed"))
    browser.open(site.url, DESKTOP)
    browser.type("json")
    browser.wait_for(f"{STATUS} === 'The search failed: the model failed'")
    browser.value("send = fetch; fetch = async () => new Response('not JSON', {status: 424}); 0")
    browser.type(" is")
    browser.wait_for(f"{STATUS} === 'The search failed with status 424.'")
    browser.value("fetch = send; 0")
    browser.type(" text")
    browser.wait_for(f"{STATUS}.includes('results from')")
    browser.value("document.getElementById('query').removeAttribute('maxlength')")
    browser.call("Input.insertText", text="x" * 300)
    browser.wait_for(f"{STATUS} === 'The search failed: q has 312 characters; send at most 200'")


def test_a_lost_connection_is_shown_until_the_server_is_back(
    browser: Browser, service: Service
) -> None:
    with run_server(service) as url:
        browser.open(url, DESKTOP)
    browser.type("json")
    browser.wait_for(f"{STATUS} === 'The server cannot be reached. Trying again…'")
    with run_server(service, int(url.rstrip("/").rpartition(":")[2])):
        browser.wait_for(f"{STATUS}.includes('results from')")
        browser.open("about:blank", DESKTOP)


def test_texts_are_never_run_as_code(browser: Browser, site: Site) -> None:
    search_for(browser, site, "a text with <img src=x onerror=document.title='attacked'> inside")
    browser.wait_for(f"{TITLES}[0] === 'attack'")
    assert ATTACK in browser.value("document.querySelector('#results .text').textContent")
    assert browser.value("document.querySelectorAll('main script, main img').length") == 0
    assert browser.value("document.title") == "Search · Regauge"
    check_silence(browser, site)
    browser.open(site.url + "documents/5", DESKTOP)
    assert browser.value("document.title") == "attack · Regauge"
    assert ATTACK in browser.value("document.body.textContent")
    assert browser.value("document.querySelectorAll('script, img').length") == 0
    browser.open(site.url + "?q=<img src=x onerror=document.title='attacked'>", DESKTOP)
    browser.wait_for(f"{STATUS}.includes('results from')")
    assert browser.value("document.title") == "Search · Regauge"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [NARROW, DESKTOP])
def test_pages_fit_their_window(
    browser: Browser, site: Site, tmp_path: Path, width: int, scheme: str
) -> None:
    for path in ("?q=a title without a break must not widen the page", "documents/6"):
        browser.open(site.url + path, width, scheme)
        browser.wait_for(f"document.querySelector('dl') || {STATUS}.includes('results from')")
        browser.value("document.querySelector('a').focus()")
        assert browser.value("innerWidth") == width
        assert browser.value("document.documentElement.scrollWidth") <= width
        name = path.partition("?")[0].replace("/", "-") or "search"
        browser.save_screenshot(tmp_path / f"{name}-{width}-{scheme}.png")
    colors = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (colors == "rgb(251, 250, 247)") == (scheme == "light")


def test_a_screen_reader_gets_names_and_the_number_of_results(browser: Browser, site: Site) -> None:
    search_for(browser, site, "json text")
    elements = browser.list_accessible()
    roles = {role for role, _ in elements}
    assert {"search", "searchbox", "status", "list", "listitem", "link", "main"} <= roles
    assert ("searchbox", "Search by meaning") in elements
    assert ("list", "Results") in elements
    assert ("heading", "Search") in elements
    live = "document.getElementById('status').getAttribute('role')"
    assert browser.value(live) == "status"
    count = browser.value(f"{STATUS}.split(' ').slice(0, 2).join(' ')")
    assert count == "10 results"
    links = [name for role, name in elements if role == "link"]
    assert links == browser.value(TITLES)


def test_colors_have_enough_contrast(browser: Browser, site: Site) -> None:
    """WCAG 2.2 AA requires a ratio of 4.5 for texts."""
    code = """
    (() => {
      const parse = (color) => color.match(/[0-9.]+/g).map(Number).slice(0, 3);
      const curve = (share) => share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
      const linear = (value) => curve(value / 255);
      const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
      const paper = light(parse(getComputedStyle(document.body).backgroundColor));
      return [...document.querySelectorAll("p, a, label, .score, .mark span")].map((element) => {
        const ink = light(parse(getComputedStyle(element).color));
        return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
      });
    })()
    """
    for scheme in ("light", "dark"):
        browser.open(site.url + "?q=json", DESKTOP, scheme)
        browser.wait_for(f"{STATUS}.includes('results from')")
        ratios = browser.value(code)
        assert len(ratios) > 20
        assert min(ratios) >= 4.5
