"use strict";

const DELAY_MILLISECONDS = 100; // after the last key, until a query is sent
const NUM_RESULTS = 10;
const RETRY_SECONDS = { min: 1, max: 30 };
const BUSY_STATUSES = [429, 503];

const form = document.getElementById("form");
const input = document.getElementById("query");
const list = document.getElementById("results");
const statusLine = document.getElementById("status");
const hint = document.getElementById("hint");

let timer = 0;
let request = new AbortController(); // the newest request; every earlier one is aborted

/** A failed search; it is repeated after some seconds if `retrySeconds` is set. */
class SearchError extends Error {
  constructor(message, retrySeconds = null) {
    super(message);
    this.retrySeconds = retrySeconds;
  }
}

/** Drop the current request and search for the text of the input after a delay. */
function schedule(milliseconds) {
  clearTimeout(timer);
  request.abort();
  const query = normalize(input.value);
  if (query === "") {
    rememberQuery("");
    clearResults();
    showStatus("");
    return;
  }
  timer = setTimeout(() => search(query), milliseconds);
}

async function search(query) {
  const current = new AbortController();
  request = current;
  list.setAttribute("aria-busy", "true");
  try {
    const answer = await fetchResults(query, current.signal);
    if (!current.signal.aborted) showResults(answer);
  } catch (error) {
    if (!current.signal.aborted) showError(query, error);
  }
  if (request === current) list.removeAttribute("aria-busy");
}

async function fetchResults(query, signal) {
  const parameters = new URLSearchParams({ q: query, k: NUM_RESULTS });
  let response;
  try {
    response = await fetch(`search?${parameters}`, { signal });
  } catch {
    throw new SearchError("The server cannot be reached.", 3);
  }
  if (response.ok) return response.json();
  if (BUSY_STATUSES.includes(response.status)) {
    throw new SearchError("The server is busy.", readRetrySeconds(response));
  }
  throw new SearchError(await describeFailure(response));
}

/** Return the seconds of the header Retry-After, within limits. */
function readRetrySeconds(response) {
  const seconds = Number.parseFloat(response.headers.get("Retry-After"));
  const { min, max } = RETRY_SECONDS;
  return Number.isFinite(seconds) ? Math.min(max, Math.max(min, seconds)) : min;
}

async function describeFailure(response) {
  try {
    const { error } = await response.json();
    const message = typeof error === "string" ? error : error.message;
    if (message) return `The search failed: ${message}`;
  } catch {
    // The response is no JSON.
  }
  return `The search failed with status ${response.status}.`;
}

function showError(query, error) {
  clearResults();
  if (!(error instanceof SearchError)) {
    showStatus("The answer of the server cannot be read.", true);
  } else if (error.retrySeconds === null) {
    showStatus(error.message, true);
  } else {
    showStatus(`${error.message} Trying again…`, true);
    timer = setTimeout(() => search(query), 1000 * error.retrySeconds);
  }
}

function showResults(answer) {
  rememberQuery(answer.query);
  const focused = list.contains(document.activeElement);
  list.replaceChildren(...answer.results.map(buildItem));
  if (focused) input.focus();
  const count = answer.results.length;
  const noun = count === 1 ? "result" : "results";
  const total = answer.documents.toLocaleString("en");
  const milliseconds = Math.max(1, Math.round(answer.milliseconds));
  showStatus(count ? `${count} ${noun} from ${total} documents in ${milliseconds} ms` : "No results.");
  hint.hidden = count > 0;
}

/** Return the list item of a result; texts are never parsed as HTML. */
function buildItem(result) {
  const item = document.createElement("li");
  const link = document.createElement("a");
  link.append(...splitTitle(result.title));
  link.setAttribute("aria-label", result.title); // possible line breaks are not read as spaces
  link.href = result.link ?? `documents/${result.id}`;
  link.rel = "noreferrer";
  const score = document.createElement("span");
  score.className = "score";
  score.textContent = result.score.toFixed(3);
  score.title = "Similarity: the dot product of the vectors";
  const texts = Object.values(result.texts).map((content) => {
    const text = document.createElement("p");
    text.className = "text";
    text.textContent = content;
    return text;
  });
  item.append(link, score, ...texts);
  return item;
}

/** Return the parts of a title, with a possible line break after each dot, slash and underscore. */
function splitTitle(title) {
  const parts = title.match(/[^._/]+[._/]*|[._/]+/g) ?? [];
  return parts.flatMap((part) => [part, document.createElement("wbr")]);
}

function clearResults() {
  list.replaceChildren();
  hint.hidden = false;
}

function showStatus(message, failed = false) {
  statusLine.textContent = message;
  statusLine.classList.toggle("failed", failed);
}

function normalize(text) {
  return text.trim().replace(/\s+/g, " ");
}

/** Keep the query in the address, so that reload and the back button restore it. */
function rememberQuery(query) {
  const address = new URL(location.href);
  if (query) address.searchParams.set("q", query);
  else address.searchParams.delete("q");
  try {
    history.replaceState(null, "", address);
  } catch {
    // Some browsers limit how often a page may change its address.
  }
}

function clearQuery() {
  input.value = "";
  input.focus();
  schedule(0);
}

/** Move the focus by one element of: the input, then the links of the results. */
function moveFocus(step) {
  const stops = [input, ...list.querySelectorAll("a")];
  const index = stops.indexOf(document.activeElement) + step;
  stops[Math.min(stops.length - 1, Math.max(0, index))].focus();
}

function handleKey(event) {
  if (event.isComposing || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const isOnStop = event.target === input || list.contains(event.target);
  if (event.key === "Escape") clearQuery();
  else if (event.key === "ArrowDown" && isOnStop) moveFocus(1);
  else if (event.key === "ArrowUp" && isOnStop) moveFocus(-1);
  else return;
  event.preventDefault();
}

input.addEventListener("input", () => schedule(DELAY_MILLISECONDS));
form.addEventListener("submit", (event) => {
  event.preventDefault();
  schedule(0);
});
document.addEventListener("keydown", handleKey);
window.addEventListener("online", () => schedule(0));

input.focus();
if (input.value === "") input.value = new URLSearchParams(location.search).get("q") ?? "";
schedule(0);
