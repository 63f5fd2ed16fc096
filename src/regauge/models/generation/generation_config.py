"""Token ids in config.json and generation_config.json.

transformers stops generating at the end tokens in generation_config.json. Nothing here imports
torch or transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.models.tokenizer_convention import COPY_REMEDY, write_json
from regauge.system.hub import CONFIG, GENERATION_CONFIG
from regauge.system.json_files import find_json, read_json

if TYPE_CHECKING:
    from pathlib import Path

_EOS, _PAD = "eos_token_id", "pad_token_id"


class TokenIds(NamedTuple):
    """Token ids named in a model configuration."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int


def list_token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Return the ids in a field that is one id, a list of ids, or None."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def read_end_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the end tokens in generation_config.json; empty if it names none."""
    document = find_json(folder / GENERATION_CONFIG, COPY_REMEDY) or {}
    return list_token_ids(document.get(_EOS))


def read_max_new_tokens(folder: Path) -> int | None:
    """Return the maximum tokens per answer in generation_config.json; None if it sets none."""
    count = (find_json(folder / GENERATION_CONFIG, COPY_REMEDY) or {}).get("max_new_tokens")
    return count if isinstance(count, int) and count > 0 else None


def write_token_ids(folder: Path, ids: TokenIds, *, has_fixed_padding: bool = False) -> None:
    """Write a run's special token ids to config.json.

    With `has_fixed_padding`, the padding id stays, because positions depend on it.
    """
    values = _describe_ids(ids)
    if has_fixed_padding:
        del values[_PAD]
    write_json(folder / CONFIG, {**read_json(folder / CONFIG, COPY_REMEDY), **values})


def write_generation_config(folder: Path, ids: TokenIds, start: Path | None) -> None:
    """Write generation_config.json with a run's special token ids.

    Other values come from `start`, the folder of the initial weights, if it has the file.
    """
    values = find_json(start / GENERATION_CONFIG, COPY_REMEDY) if start is not None else None
    write_json(folder / GENERATION_CONFIG, {**(values or {}), **_describe_ids(ids)})


def _describe_ids(ids: TokenIds) -> dict[str, Any]:
    eos = list(ids.eos) if len(ids.eos) > 1 else next(iter(ids.eos), None)
    return {"bos_token_id": ids.bos, _EOS: eos, _PAD: ids.pad}
