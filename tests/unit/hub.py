"""A local stand-in for the Hugging Face hub, with the endpoints that are used for datasets."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from unit.web import Handler, Web, serve_folder

SHA = "0123456789abcdef0123456789abcdef01234567"
CONVERTED_SHA = SHA[::-1]
TOKEN = "hf_good"  # noqa: S105 - of nothing
REPOSITORY = re.compile(
    r"/(?:api/)?datasets/(?P<name>[^/]+/[^/]+)"
    r"(?:/(?P<what>revision|auth-check|tree|resolve)(?:/(?P<rest>.*))?)?"
)


class Hub(Handler):
    """Serves folders `<folder>/<organisation>/<name>`; a name with `gated` needs the token.

    Converted files are stored in `.converted` and belong to another commit.
    """

    def respond(self, *, body: bool) -> None:
        match = REPOSITORY.fullmatch(self.path.partition("?")[0])
        folder = self.web.folder / (match["name"] if match else "none")
        if match is None or not folder.is_dir():
            self._send_error(401, "RepoNotFound")
            return
        revision, _, file = unquote(match["rest"] or "main").partition("/")
        sha, root = SHA, folder
        if revision in {CONVERTED_SHA, "refs"}:
            sha, root = CONVERTED_SHA, folder / ".converted"
        if match["what"] in {"resolve", "auth-check"} and not self._has_access(folder):
            self._send_error(403, "GatedRepo")
        elif match["what"] == "auth-check":
            self._send_json({})
        elif not root.is_dir() or revision not in {"main", "refs", sha}:
            self._send_error(404, "RevisionNotFound")
        elif match["what"] == "resolve":
            self.send_file(root / file, {"X-Repo-Commit": sha}, body=body)
        elif match["what"] == "tree":
            self._send_json(
                _list_entries(root, root / file, deep="recursive=true" in self.path.lower())
            )
        else:
            self._send_info(match["name"], root, sha)

    def _send_info(self, name: str, root: Path, sha: str) -> None:
        card = root / ".card.json"
        files = [_describe_entry(root, item) for item in _list_names(root)]
        siblings = [
            {"rfilename": file["path"], "size": file["size"], "blobId": file["oid"]}
            for file in files
        ]
        info = {
            "id": name,
            "sha": sha,
            "gated": "auto" if "gated" in name else False,
            "cardData": json.loads(card.read_text()) if card.exists() else None,
            "siblings": siblings,
        }
        self._send_json(info)

    def _has_access(self, folder: Path) -> bool:
        return "gated" not in folder.name or self.headers["Authorization"] == f"Bearer {TOKEN}"

    def _send_json(self, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"{code} in the hub's words")
        self.send_header("Content-Length", "0")
        self.end_headers()


def _list_names(folder: Path) -> list[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in paths if not path.parts[0].startswith("."))


def _list_entries(root: Path, folder: Path, *, deep: bool) -> list[dict[str, Any]]:
    paths = sorted(folder.rglob("*") if deep else folder.glob("*"))
    names = [path.relative_to(root).as_posix() for path in paths]
    return [_describe_entry(root, name) for name in names if not name.startswith(".")]


def _describe_entry(folder: Path, name: str) -> dict[str, Any]:
    if (folder / name).is_dir():
        return {"type": "directory", "path": name, "oid": name}
    data = (folder / name).read_bytes()
    oid = hashlib.sha1(data, usedforsecurity=False).hexdigest()
    return {"type": "file", "path": name, "size": len(data), "oid": oid}


@contextmanager
def serve_hub(folder: Path) -> Iterator[Web]:
    """Serve the datasets of a folder."""
    with serve_folder(folder, Hub) as web:
        yield web
