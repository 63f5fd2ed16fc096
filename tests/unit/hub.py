"""A hub on loopback: what the real one answers of datasets, as far as they are read."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from unit.web import Handler, Web, serving

SHA = "0123456789abcdef0123456789abcdef01234567"
CONVERTED_SHA = SHA[::-1]
TOKEN = "hf_good"  # noqa: S105 - of nothing
REPOSITORY = re.compile(
    r"/(?:api/)?datasets/(?P<name>[^/]+/[^/]+)"
    r"(?:/(?P<what>revision|auth-check|tree|resolve)(?:/(?P<rest>.*))?)?"
)


class Hub(Handler):
    """Answers for folders `<folder>/<organisation>/<name>`; one named gated* needs the token.

    What the hub converted lies in `.converted` there, as another commit.
    """

    def answer(self, *, body: bool) -> None:
        found = REPOSITORY.fullmatch(self.path.partition("?")[0])
        folder = self.web.folder / (found["name"] if found else "none")
        if found is None or not folder.is_dir():
            self._refuse(401, "RepoNotFound")
            return
        revision, _, file = unquote(found["rest"] or "main").partition("/")
        sha, root = SHA, folder
        if revision in {CONVERTED_SHA, "refs"}:
            sha, root = CONVERTED_SHA, folder / ".converted"
        if found["what"] in {"resolve", "auth-check"} and not self._may(folder):
            self._refuse(403, "GatedRepo")
        elif found["what"] == "auth-check":
            self._json({})
        elif not root.is_dir() or revision not in {"main", "refs", sha}:
            self._refuse(404, "RevisionNotFound")
        elif found["what"] == "resolve":
            self.tell(root / file, {"X-Repo-Commit": sha}, body=body)
        elif found["what"] == "tree":
            self._json(_listing(root, root / file, deep="recursive=true" in self.path.lower()))
        else:
            self._about(found["name"], root, sha)

    def _about(self, name: str, root: Path, sha: str) -> None:
        card = root / ".card.json"
        files = [_entry(root, item) for item in _names(root)]
        siblings = [
            {"rfilename": file["path"], "size": file["size"], "blobId": file["oid"]}
            for file in files
        ]
        about = {
            "id": name,
            "sha": sha,
            "gated": "auto" if "gated" in name else False,
            "cardData": json.loads(card.read_text()) if card.exists() else None,
            "siblings": siblings,
        }
        self._json(about)

    def _may(self, folder: Path) -> bool:
        return "gated" not in folder.name or self.headers["Authorization"] == f"Bearer {TOKEN}"

    def _json(self, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"{code} as the hub says it")
        self.send_header("Content-Length", "0")
        self.end_headers()


def _names(folder: Path) -> list[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in paths if not path.parts[0].startswith("."))


def _listing(root: Path, folder: Path, *, deep: bool) -> list[dict[str, Any]]:
    paths = sorted(folder.rglob("*") if deep else folder.glob("*"))
    names = [path.relative_to(root).as_posix() for path in paths]
    return [_entry(root, name) for name in names if not name.startswith(".")]


def _entry(folder: Path, name: str) -> dict[str, Any]:
    if (folder / name).is_dir():
        return {"type": "directory", "path": name, "oid": name}
    data = (folder / name).read_bytes()
    oid = hashlib.sha1(data, usedforsecurity=False).hexdigest()
    return {"type": "file", "path": name, "size": len(data), "oid": oid}


@contextmanager
def hub(folder: Path) -> Iterator[Web]:
    """Serve the datasets of a folder."""
    with serving(folder, Hub) as found:
        yield found
