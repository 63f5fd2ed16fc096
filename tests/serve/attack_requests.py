"""Raw requests of a hostile client: malformed, oversized, truncated and slow ones."""

from __future__ import annotations

import gzip
import json
import random
import socket
from collections.abc import Callable
from typing import NamedTuple

PATHS = ("/embed", "/v1/embeddings", "/rerank", "/predict", "/similarity", "/tokenize", "/decode")
GOOD = b'{"inputs": "w5"}'
RARELY = 0.3


class Attack(NamedTuple):
    """A hostile connection: bytes to send, and what follows them."""

    name: str
    parts: list[bytes]
    """Sent one after the other."""
    half_closes: bool = False
    """Whether the client then closes its side only."""
    leaves: bool = False
    """Whether the client then leaves without reading."""
    is_slow: bool = False
    """Whether the client then waits until the server ends the connection."""


def build_post(body: bytes, path: str = "/embed", *headers: bytes) -> bytes:
    """Return a request with a body."""
    lines = [f"POST {path} HTTP/1.1".encode(), b"Host: x", *headers]
    if not any(header.lower().startswith((b"content-length", b"transfer")) for header in headers):
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def draw_attack(draw: random.Random) -> Attack:
    """Return a random attack of a random kind."""
    name, build = draw.choice(KINDS)
    return build(draw)._replace(name=name)


def _bytes(draw: random.Random, count: int) -> bytes:
    return draw.randbytes(draw.randint(1, count))


def _send(*parts: bytes, **flags: bool) -> Attack:
    return Attack("", list(parts), **flags)


def _garbage(draw: random.Random) -> Attack:
    return _send(_bytes(draw, 2000), half_closes=draw.random() < 0.5)


def _request_line(draw: random.Random) -> Attack:
    method = draw.choice([b"GET", b"FOO", b"", b"POST\0", b"PRI", b"CONNECT", b"\xff\xfe"])
    version = draw.choice([b"HTTP/1.1", b"HTTP/9.9", b"HTTP/1", b"", b"HTTP/1.1\0", b"SIP/2.0"])
    path = draw.choice([b"/", b"*", b"", b"/\0", b"http://other/", b"/%zz", b"/" + b"a" * 9000])
    return _send(method + b" " + path + b" " + version + b"\r\nHost: x\r\n\r\n", half_closes=True)


def _path_traversal(draw: random.Random) -> Attack:
    prefix = draw.choice(["/", "/v1/models/", "/search/", "/static/", "/docs/", "/embed/"])
    middle = draw.choice(["../" * 9, "..%2f" * 9, "%2e%2e/" * 9, "....//" * 9, "..\\" * 9])
    target = draw.choice(["etc/passwd", "etc/passwd%00.html", "proc/self/environ"])
    head = f"GET {prefix}{middle}{target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    return _send(head.encode())


def _header_bomb(draw: random.Random) -> Attack:
    count, size = draw.choice([(3000, 10), (20, 5000), (1, 100_000)])
    headers = b"".join(b"X-%d: %s\r\n" % (index, b"a" * size) for index in range(count))
    end = draw.choice([b"\r\n", b""])
    return _send(b"GET /health HTTP/1.1\r\nHost: x\r\n" + headers + end, half_closes=True)


def _bad_header(draw: random.Random) -> Attack:
    header = draw.choice(
        [
            b"Content-Length: -1",
            b"Content-Length: 99999999999999999999",
            b"Content-Length: 0x10",
            b"Content-Length: 5, 6",
            b"Transfer-Encoding: identity",
            b"Transfer-Encoding: xchunked",
            b"Regauge-Timeout-Ms: nan",
            b"Regauge-Timeout-Ms: -5",
            b"Regauge-Timeout-Ms: 1e999",
            b"Regauge-Priority: \xff",
            b"Authorization: \xff\xfe",
            b"Accept: " + _bytes(draw, 50).replace(b"\n", b"").replace(b"\r", b""),
            b"No colon",
            b" folded: header",
            b"Expect: 100-continue",
            b"Upgrade: websocket\r\nConnection: upgrade",
            b"Content-Encoding: gzip",
            b"Content-Type: text/html",
        ]
    )
    request = build_post(GOOD, draw.choice(PATHS), header)
    return _send(request, half_closes=draw.random() < RARELY)


def _conflicting_lengths(draw: random.Random) -> Attack:
    headers = draw.choice(
        [
            (b"Content-Length: 16", b"Content-Length: 4"),
            (b"Content-Length: 16", b"Transfer-Encoding: chunked"),
            (b"Transfer-Encoding: chunked", b"Content-Length: 3"),
        ]
    )
    return _send(build_post(GOOD, "/embed", *headers), half_closes=draw.random() < RARELY)


def _chunked_garbage(draw: random.Random) -> Attack:
    chunk = draw.choice(
        [
            b"zz\r\n" + GOOD,
            b"ffffffffffffffff\r\n" + GOOD,
            b"-1\r\n" + GOOD,
            b"10;" + b"x" * 5000 + b"\r\n" + GOOD,
            b"5\r\n" + GOOD,
            b"10\r\n" + GOOD + b"\r\n",
            _bytes(draw, 200),
        ]
    )
    head = build_post(b"", draw.choice(PATHS), b"Transfer-Encoding: chunked")
    return _send(head, chunk, half_closes=draw.random() < RARELY)


def _truncated_body(draw: random.Random) -> Attack:
    request = build_post(GOOD, draw.choice(PATHS))
    cut = draw.randint(1, len(request) - 1)
    return _send(request[:cut], half_closes=True, leaves=draw.random() < 0.5)


def _deep_json(draw: random.Random) -> Attack:
    depth = draw.choice([100, 1000, 30_000, 100_000])
    opening, closing = draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
    middle = b"1" if opening != b"[" else b""
    body = b'{"inputs": ' + opening * depth + middle + closing * depth + b"}"
    return _send(build_post(body, draw.choice(PATHS)))


def _odd_values(draw: random.Random) -> Attack:
    value = draw.choice(
        [
            "1" * 5000, "1e999", "-1", "NaN", "Infinity", "null", "true", "{}", "[]", '""', "[[]]",
            "[null]", '[1, "a"]', "[[1], [2.5]]", "[99999999999999999999]", "[-1]", "[[999999]]",
            r'"\ud800"', r'["\udfff\ud800"]', r'"\u0000"', '"\0"', '[["w5", "w6", "w7"]]', "[[[]]]",
            json.dumps("\u202e\u0301" * 500), json.dumps(["w5"] * 3000), json.dumps("a" * 100_000),
        ]
    )  # fmt: skip
    key = draw.choice(["inputs", "input", "texts", "query", "ids", "dimensions", "model", "prompt"])
    body = draw.choice(['{"%s": %s}', '{"inputs": "w5", "%s": %s}', '{"%s": %s, "inputs": "w5"}'])
    return _send(build_post((body % (key, value)).encode(), draw.choice(PATHS)))


def _invalid_utf8(draw: random.Random) -> Attack:
    text = draw.choice([b"\xff\xfe", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"])
    return _send(build_post(b'{"inputs": "' + text + b'"}', draw.choice(PATHS)))


def _broken_json(draw: random.Random) -> Attack:
    body = draw.choice([b"", b"{", b'{"inputs": ', b"null", b"[]", b"\0" * 100, _bytes(draw, 300)])
    return _send(build_post(body, draw.choice(PATHS)))


def _pipelined_requests(draw: random.Random) -> Attack:
    requests = [build_post(GOOD) for _ in range(draw.randint(2, 20))]
    requests.insert(draw.randrange(len(requests)), b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    if draw.random() < 0.5:
        requests.append(_bytes(draw, 100))
    return _send(b"".join(requests), half_closes=True, leaves=draw.random() < 0.3)


def _oversized_body(draw: random.Random) -> Attack:
    """Return a body over the 200 kB that the server of these tests accepts."""
    size = draw.choice([200_001, 5_000_000, 10**15])
    body = b" " * min(size, 300_000)
    request = build_post(body, "/embed", b"Content-Length: %d" % size)
    return _send(request, half_closes=draw.random() < RARELY)


def _many_keys(draw: random.Random) -> Attack:
    keys = b",".join(b'"%d": 1' % number for number in range(draw.choice([5000, 15_000])))
    return _send(build_post(b'{"inputs": "w5", ' + keys + b"}", draw.choice(PATHS)))


def _compressed_bomb(draw: random.Random) -> Attack:
    """Return a few kilobytes that become many megabytes."""
    content = gzip.compress(draw.choice([b" ", b"[", b'{"inputs": "']) * 3_000_000)
    cut = draw.choice([len(content), len(content) // 2])
    return _send(build_post(content[:cut], draw.choice(PATHS), b"Content-Encoding: gzip"))


def _other_protocol(draw: random.Random) -> Attack:
    """Return the start of HTTP/2, TLS, or a web socket."""
    upgrade = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: "
    start = draw.choice(
        [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(200),
            upgrade + b"websocket\r\nSec-WebSocket-Version: 13\r\n\r\n" + draw.randbytes(50),
            upgrade + b"h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
        ]
    )
    return _send(start, half_closes=True)


def _endless_chunks(draw: random.Random) -> Attack:
    """Return chunks without an end, of which each is valid."""
    head = build_post(b"", draw.choice(PATHS), b"Transfer-Encoding: chunked")
    return _send(head, b"1\r\n \r\n" * draw.choice([1, 5000]), is_slow=True)


def _slow_headers(draw: random.Random) -> Attack:
    return _send(b"POST /embed HTTP/1.1\r\nHost: ", b"x" * draw.randint(1, 9), is_slow=True)


def _slow_body(draw: random.Random) -> Attack:
    request = build_post(GOOD)
    cut = request.index(b"\r\n\r\n") + 4 + draw.randint(0, 9)
    return _send(request[:cut], is_slow=True)


def _silent(draw: random.Random) -> Attack:
    return _send(is_slow=draw.random() < 0.5, leaves=True)


KINDS: list[tuple[str, Callable[[random.Random], Attack]]] = [
    (function.__name__.strip("_"), function)
    for function in (
        _garbage, _request_line, _path_traversal, _header_bomb, _bad_header, _conflicting_lengths,
        _chunked_garbage, _truncated_body, _deep_json, _odd_values, _invalid_utf8, _broken_json,
        _pipelined_requests, _oversized_body, _many_keys, _compressed_bomb, _other_protocol,
        _endless_chunks, _slow_headers, _slow_body, _silent,
    )
]  # fmt: skip


def run_attack(address: tuple[str, int], attack: Attack, timeout_seconds: float) -> bytes:
    """Run an attack; return what the server answered."""
    answer = bytearray()
    with socket.create_connection(address, timeout=timeout_seconds) as connection:
        try:
            for part in attack.parts:
                connection.sendall(part)
            if attack.leaves and not attack.is_slow:
                return b""
            if attack.half_closes:
                connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(65536):
                answer += data
                if not attack.is_slow and not attack.half_closes and has_whole_answer(answer):
                    break
        except TimeoutError:
            raise
        except OSError:  # the server has ended the connection
            pass
    return bytes(answer)


def has_whole_answer(data: bytearray) -> bool:
    """Return whether an answer with a length is complete."""
    head, separator, body = bytes(data).partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(separator and lengths) and len(body) >= int(lengths[0].partition(b":")[2])
