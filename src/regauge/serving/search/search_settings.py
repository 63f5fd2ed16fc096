"""The search page's settings; this module does not import torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from regauge.config import Settings


class SearchSettings(Settings):
    """The search page: nearest neighbors among vectors written by `predict`."""

    vectors: str
    """Output folder of `predict`, in `parquet` format."""
    title_field: str | None = None
    """Kept field with a result's title; by default `title`, `name` or `summary`."""
    link_field: str | None = None
    """Kept field with a result's `http` or `https` address; by default `url` or `link`. A result
    without an address links to a page with the kept fields."""
    text_fields: tuple[str, ...] = ()
    """Kept fields shown in a result; by default all texts but title and link."""
    max_results: int = Field(default=100, ge=1, le=1000)
    """Maximum results per query."""
    max_query_characters: int = Field(default=1000, ge=1)
    """Maximum characters per query."""
    max_text_characters: int = Field(default=400, ge=1)
    """Maximum characters of a text in a result; longer texts are cut."""
    approximate: Literal["auto", "never"] = "auto"
    """`auto` uses a faiss index if faiss is installed and there are at least `min_approximate_rows`
    vectors; `never` compares a query with every vector."""
    min_approximate_rows: int = Field(default=200_000, ge=1)
    """Number of vectors from which `auto` uses a faiss index."""
    probes: int = Field(default=64, ge=1)
    """faiss clusters compared with a query; more are slower and find more."""
    index_folder: str | None = None
    """Folder for files derived from the vectors; by default `search` in the vector folder."""
    allow_other_artifact: bool = False
    """Whether the vectors may come from another artifact, such as an export of the same model for
    another machine."""
