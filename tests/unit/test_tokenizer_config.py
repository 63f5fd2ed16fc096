"""Special tokens of tokenizers that leave them to the class of their model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from regauge.data.tokenizer import LoadedTokenizer, copy_tokenizer
from regauge.data.tokenizer_config import CONFIG, ROLES, read_tokenizer_config
from regauge.system.errors import DataError
from tokenizer_families import write_tokenizer

FAMILIES = ("bert", "roberta", "gpt2")
GPT2_ROLES = {"bos_token", "eos_token", "unk_token"}


def write_unnamed(family: str, folder: Path, **config: str | int) -> Path:
    """Write a tokenizer as older versions of transformers published it, without roles."""
    write_tokenizer(family, folder)
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def list_roles(config: dict[str, str]) -> dict[str, str]:
    return {key: token for key, token in config.items() if key.removesuffix("_token") in ROLES}


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_are_those_of_the_class_of_the_model(family: str, tmp_path: Path) -> None:
    named = LoadedTokenizer(write_tokenizer(family, tmp_path / "named"))
    source = write_unnamed(family, tmp_path / "source", model_max_length=64)
    AutoConfig.for_model(family).save_pretrained(source)
    assert LoadedTokenizer(source).info == named.info
    reference = AutoTokenizer.from_pretrained(source)
    assert list_roles(read_tokenizer_config(source)) == reference.special_tokens_map


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_names_the_roles(family: str, tmp_path: Path) -> None:
    source = write_unnamed(family, tmp_path / "source", model_max_length=64)
    AutoConfig.for_model(family).save_pretrained(source)
    copy_tokenizer(source, tmp_path / "copy")
    assert not (tmp_path / "copy" / "config.json").exists()
    config = json.loads((tmp_path / "copy" / CONFIG).read_text())
    assert config == {**read_tokenizer_config(source), "model_max_length": 64}
    assert LoadedTokenizer(tmp_path / "copy").info == LoadedTokenizer(source).info


def test_the_class_of_the_tokenizer_is_enough(tmp_path: Path) -> None:
    source = write_unnamed("gpt2", tmp_path / "source", tokenizer_class="GPT2Tokenizer")
    assert list_roles(read_tokenizer_config(source)) == dict.fromkeys(GPT2_ROLES, "<|endoftext|>")


def test_a_role_that_is_declared_as_missing_stays_missing(tmp_path: Path) -> None:
    source = write_tokenizer("gpt2", tmp_path / "source")
    (source / CONFIG).write_text('{"tokenizer_class": "GPT2Tokenizer", "pad_token": null}')
    assert LoadedTokenizer(source).eos_token_id is None


def test_an_added_token_that_the_vocabulary_lacks_is_refused(tmp_path: Path) -> None:
    source = write_tokenizer("bert", tmp_path / "source")
    config = json.loads((source / CONFIG).read_text())
    size = len(json.loads((source / "tokenizer.json").read_text())["model"]["vocab"])
    config["added_tokens_decoder"] = {str(size): {"content": "<tool>", "special": True}}
    (source / CONFIG).write_text(json.dumps(config))
    with pytest.raises(DataError, match=rf"adds the token '<tool>' with id {size}, .* save it"):
        LoadedTokenizer(source)
