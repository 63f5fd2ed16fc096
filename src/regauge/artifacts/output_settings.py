"""The settings of the output of a `predict` job, free of torch and pyarrow."""

from __future__ import annotations

from typing import Literal

from regauge.config import Settings

Dtype = Literal["float16", "float32", "int8", "binary"]


class Written(Settings):
    """What is written of each record."""

    folder: str
    """Folder of the answers; one job owns it, on one machine or several."""
    format: Literal["parquet", "npy"] = "parquet"
    """A table, or an array of vectors with the other fields in a table beside it."""
    dtype: Dtype = "float16"
    """Numbers of a vector: `int8` has a scale for each vector, `binary` the signs, eight a byte."""
    keep: Literal["others"] | tuple[str, ...] = "others"
    """Fields of a record that stand beside its answer; by default all but its texts."""
