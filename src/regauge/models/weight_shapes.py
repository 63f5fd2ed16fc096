"""Names and shapes of the weights of models, from a config.json; this module imports no torch.

Plans and dry runs count weights without transformers, whose import takes seconds. Tests compare
them with the modules of transformers. A dry run builds the module unless `list_new_weights` knows
that the configuration is valid and only sets sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.models.default_sizes import DEFAULT_SIZES
from regauge.models.io_spec import ModelHead
from regauge.models.weight_files import store_untied

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.models.architectures import HeadKind
    from regauge.models.settings import Lora, Model

Shapes = dict[str, tuple[int, ...]]
Config = Mapping[str, Any]
NEUTRAL_FIELDS = frozenset(
    {
        "attention_probs_dropout_prob",
        "hidden_dropout_prob",
        "initializer_range",
        "layer_norm_eps",
        "rms_norm_eps",
    }
)
"""Fields of a configuration that change no weight; their values are less than 1."""
TIED, KV_HEADS = "tie_word_embeddings", "num_key_value_heads"
SIZE_KEYS = {
    "distilbert": ("n_layers", "dim", "hidden_dim", "n_heads"),
    "gpt2": ("n_layer", "n_embd", "n_inner", "n_head"),
}
"""Keys of layers, widths and heads, for the model types that do not use those of BERT."""
BERT_KEYS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
VOCABULARY_HEADS = {
    "bert": (
        "cls.predictions.bias",
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
    ),
    "roberta": ("lm_head.bias", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
    "electra": (
        "generator_lm_head.bias",
        "generator_predictions.dense",
        "generator_predictions.LayerNorm",
        "generator_lm_head",
    ),
}
"""Bias, dense layer, norm and layer over the vocabulary of a masked language model's head."""
TABLES = ("embeddings.weight", "embed_tokens.weight", "wte.weight", "wpe.weight")
"""Name endings for embedding tables."""
FOUR_NORMS = ("gemma2", "gemma3_text")
HEAD_NORMS = ("qwen3", "gemma3_text")
KNOWN_HEADS: dict[str, tuple[HeadKind, ...]] = {
    "bert": ("none", "masked", "pairs", "classes", "tokens"),
    "llama": ("causal",),
}
"""Architectures and heads whose weights a dry run counts without the module."""
HAS_DROPOUT = ("bert",)
"""Those of them whose hidden states have dropout."""


class ParamSpec(NamedTuple):
    """The shape of a parameter that is not allocated yet, and whether it is trained."""

    shape: tuple[int, ...]
    requires_grad: bool


class ModelSizes(NamedTuple):
    """The sizes of a transformer that decide its products."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    """Width of a head, which may differ from hidden / heads."""

    @property
    def width(self) -> int:
        """Width of the queries."""
        return self.heads * self.head_dim


class ModelWeights(NamedTuple):
    """The weights of a model by part; a tied matrix is in `embeddings` alone."""

    sizes: ModelSizes
    embeddings: Shapes
    """Embedding tables, with their norm and projection."""
    block: Shapes
    """Weights of one block, by their names in it."""
    block_prefix: str
    final: Shapes
    """The norm after all blocks."""
    head: Shapes
    """Head weights, without `output`."""
    output: Shapes = {}
    """The layer over the vocabulary, which may be tied to the embeddings."""
    is_tied: bool = True
    max_tokens: int | None = None

    @property
    def shapes(self) -> Shapes:
        """All weights by name."""
        blocks = {
            f"{self.block_prefix}{index}.{name}": shape
            for index in range(self.sizes.layers)
            for name, shape in self.block.items()
        }
        return self.embeddings | blocks | self.final | self.head_shapes

    @property
    def head_shapes(self) -> Shapes:
        """Head weights that are not tied."""
        return self.head if self.is_tied else self.head | self.output

    @property
    def tables(self) -> Shapes:
        """The embedding tables."""
        return {name: shape for name, shape in self.embeddings.items() if len(shape) > 1}


def count_elements(shapes: Shapes) -> int:
    """Return the number of elements of all weights."""
    return sum(map(math.prod, shapes.values()))


def read_sizes(config: Config) -> ModelSizes:
    """Return the sizes in a config.json; raises KeyError if one is missing."""
    kind = str(config["model_type"])
    layers_key, hidden_key, ffn_key, heads_key = SIZE_KEYS.get(kind, BERT_KEYS)
    hidden, layers, heads = config[hidden_key], config[layers_key], config[heads_key]
    ffn = config.get(ffn_key) or 4 * hidden if kind == "gpt2" else config[ffn_key]
    kv_heads, head_dim = heads, hidden // heads
    if FAMILIES[kind] is _list_llama:
        kv_heads = config.get(KV_HEADS) or heads
        head_dim = config.get("head_dim") or (256 if kind.startswith("gemma") else head_dim)
    return ModelSizes(layers, hidden, ffn, heads, kv_heads, head_dim)


def list_weights(config: Config, head: ModelHead) -> ModelWeights:
    """Return the weights of a model with a head, from its config.json.

    Raises KeyError if the model type is unknown, or if a size is missing.
    """
    return FAMILIES[config["model_type"]](config, read_sizes(config), head)


def stores_untied_layers(folder: Path, config: Config) -> bool:
    """Return whether a folder stores the tied weights of a model with different values.

    The loader then unties them, whatever config.json says. Returns False for an unknown model type.
    Raises KeyError if a size is missing, and the errors of `store_untied`.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        return False
    weights = list_weights(config, ModelHead("causal" if kind in CAUSAL else "masked"))
    # The second weight of an output layer is a bias, tied to the first weight of the head.
    others = (next(iter(weights.embeddings)), next(iter(weights.head), ""))
    ties = dict(zip(weights.output, others, strict=False)) if weights.is_tied else {}
    return store_untied(folder, ties)


def list_new_weights(
    settings: Model, head: ModelHead, vocab_size: int, pad_id: int
) -> ModelWeights | None:
    """Return the weights of a new model for a tokenizer; None if they are not known here."""
    kind = settings.architecture or ""
    is_plain = settings.lora is None and settings.trainable_layers == "all"
    if not is_plain or head.kind not in KNOWN_HEADS.get(kind, ()):
        return None
    sizes = DEFAULT_SIZES[kind]
    config = {**sizes, "vocab_size": vocab_size, **settings.config}
    neutral = [config.pop(name) for name in NEUTRAL_FIELDS & config.keys()]
    is_known = (
        config.keys() <= {*sizes, *([KV_HEADS] if kind not in HAS_DROPOUT else [])}
        and all(isinstance(value, float) and 0 <= value < 1 for value in neutral)
        and all(_is_valid(name, value) for name, value in config.items())
        and 0 <= pad_id < vocab_size <= config["vocab_size"]
        and not (settings.dropout and kind not in HAS_DROPOUT)
        and _has_equal_heads(config)
    )
    return list_weights({"model_type": kind, **config}, head) if is_known else None


def list_trained(weights: ModelWeights, settings: Model, head: HeadKind) -> dict[str, ParamSpec]:
    """Return all weights by name, with LoRA adapters, and whether each one is trained.

    With `trainable_layers`, the last blocks, the pooler and the head are trained. With LoRA, the
    adapters are trained, and a classifier's pooler and head unless they have adapters.
    """
    shapes, lora = weights.shapes, settings.lora
    if lora is not None:
        layers = dict(_list_linear_layers(weights, lora))
        specs = {
            name: ParamSpec(
                shape,
                head in ("classes", "tokens")
                and name in weights.head_shapes
                and name.rpartition(".")[0] not in layers,
            )
            for name, shape in shapes.items()
        }
        return specs | {
            name: ParamSpec(shape, requires_grad=True)
            for layer, shape in layers.items()
            for name, shape in _list_adapters(layer, shape, lora.rank)
        }
    trained, head_shapes = _list_trained_prefixes(weights, settings), weights.head_shapes
    return {
        name: ParamSpec(shape, name in head_shapes or name.startswith(trained))
        for name, shape in shapes.items()
    }


def _list_trained_prefixes(weights: ModelWeights, settings: Model) -> tuple[str, ...]:
    """Return the starts of the names of the trained weights besides the head."""
    if settings.trainable_layers == "all":
        return ("",)
    count = 0 if settings.trainable_layers == "none" else settings.trainable_layers
    layers = weights.sizes.layers
    return tuple(f"{weights.block_prefix}{index}." for index in range(layers - count, layers))


def _list_linear_layers(weights: ModelWeights, lora: Lora) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and the shapes of the layers with adapters; by default all of the blocks."""
    layers = {
        name.removesuffix(".weight"): shape
        for name, shape in (weights.shapes | weights.output).items()
        if len(shape) > 1 and not name.endswith(TABLES)
    }
    targets = tuple(f".{target}" for target in lora.targets)
    return [
        (name, shape)
        for name, shape in layers.items()
        if (f".{name}".endswith(targets) if targets else name.startswith(weights.block_prefix))
    ]


def _list_adapters(
    layer: str, shape: tuple[int, ...], rank: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Return the two matrices of an adapter. GPT-2 stores a layer as [inputs, outputs]."""
    outputs, inputs = shape[::-1] if ".c_" in layer else shape
    name = f"{layer}.lora_{{}}.default.weight"
    return [(name.format("A"), (rank, inputs)), (name.format("B"), (outputs, rank))]


def _is_valid(name: str, value: object) -> bool:
    return isinstance(value, bool) if name == TIED else type(value) is int and value > 0


def _has_equal_heads(config: dict[str, Any]) -> bool:
    """Return whether the width is divided by the heads, and these by the heads of the keys.

    Positions that rotate need an even width of a head.
    """
    heads = config["num_attention_heads"]
    is_even = TIED not in config or config["hidden_size"] // heads % 2 == 0
    return config["hidden_size"] % heads == heads % config.get(KV_HEADS, heads) == 0 and is_even


def _list_bert(config: Config, sizes: ModelSizes, head: ModelHead) -> ModelWeights:
    kind, hidden, vocab = config["model_type"], sizes.hidden, config["vocab_size"]
    name = "roberta" if kind in ("xlm-roberta", "camembert") else kind
    body = "" if head.kind == "none" else f"{name}."
    width = config.get("embedding_size", hidden) if kind == "electra" else hidden
    tables = {
        "word_embeddings": vocab,
        "position_embeddings": config["max_position_embeddings"],
        "token_type_embeddings": config.get("type_vocab_size", 2),
    }
    embeddings: Shapes = {
        f"{body}embeddings.{table}.weight": (n, width) for table, n in tables.items()
    }
    embeddings |= _norm(f"{body}embeddings.LayerNorm", width)
    if width != hidden:
        embeddings |= _linear(f"{body}embeddings_project", width, hidden)
    block: Shapes = {}
    for layer in ("self.query", "self.key", "self.value", "output.dense"):
        block |= _linear(f"attention.{layer}", hidden, hidden)
    block |= _norm("attention.output.LayerNorm", hidden)
    block |= _linear("intermediate.dense", hidden, sizes.ffn)
    block |= _linear("output.dense", sizes.ffn, hidden) | _norm("output.LayerNorm", hidden)
    return ModelWeights(
        sizes,
        embeddings,
        block,
        f"{body}encoder.layer.",
        {},
        *_list_bert_head(name, head, hidden, width, vocab),
        is_tied=config.get(TIED, True),
        max_tokens=config["max_position_embeddings"],
    )


def _list_bert_head(
    name: str, head: ModelHead, hidden: int, width: int, vocab: int
) -> tuple[Shapes, Shapes]:
    """Return the head of a BERT, RoBERTa or ELECTRA, and its layer over the vocabulary."""
    weights, output = _class_head(head, hidden), Shapes()
    if head.kind == "classes" and name == "bert":
        weights |= _linear("bert.pooler.dense", hidden, hidden)
    elif head.kind == "classes":
        weights = _linear("classifier.dense", hidden, hidden)
        weights |= _linear("classifier.out_proj", hidden, head.outputs)
    elif head.kind in ("masked", "pairs"):
        bias, dense, norm, layer = VOCABULARY_HEADS[name]
        weights = {bias: (vocab,), **_linear(dense, hidden, width), **_norm(norm, width)}
        output = {f"{layer}.weight": (vocab, width), f"{layer}.bias": (vocab,)}
        output = {key: shape for key, shape in output.items() if key not in weights}
    if head.kind == "pairs":
        weights |= _linear("bert.pooler.dense", hidden, hidden)
        weights |= _linear("cls.seq_relationship", hidden, 2)
    return weights, output


def _list_distilbert(config: Config, sizes: ModelSizes, head: ModelHead) -> ModelWeights:
    hidden, body = sizes.hidden, "" if head.kind == "none" else "distilbert."
    embeddings: Shapes = {
        f"{body}embeddings.word_embeddings.weight": (config["vocab_size"], hidden),
        f"{body}embeddings.position_embeddings.weight": (config["max_position_embeddings"], hidden),
    }
    embeddings |= _norm(f"{body}embeddings.LayerNorm", hidden)
    block: Shapes = {}
    for layer in ("q_lin", "k_lin", "v_lin", "out_lin"):
        block |= _linear(f"attention.{layer}", hidden, hidden)
    block |= _norm("sa_layer_norm", hidden) | _linear("ffn.lin1", hidden, sizes.ffn)
    block |= _linear("ffn.lin2", sizes.ffn, hidden) | _norm("output_layer_norm", hidden)
    weights, output = _class_head(head, hidden), Shapes()
    if head.kind == "classes":
        weights |= _linear("pre_classifier", hidden, hidden)
    elif head.kind == "masked":
        weights = {"vocab_projector.bias": (config["vocab_size"],)}
        weights |= _linear("vocab_transform", hidden, hidden) | _norm("vocab_layer_norm", hidden)
        output = {"vocab_projector.weight": (config["vocab_size"], hidden)}
    prefix, is_tied = f"{body}transformer.layer.", config.get(TIED, True)
    return ModelWeights(sizes, embeddings, block, prefix, {}, weights, output, is_tied)


def _list_modernbert(config: Config, sizes: ModelSizes, head: ModelHead) -> ModelWeights:
    """Return the weights; the first block lacks the attention norm, and the last one has another.

    The final norm is therefore not listed.
    """
    hidden, body = sizes.hidden, "" if head.kind == "none" else "model."
    vocab = config["vocab_size"]
    embeddings: Shapes = {
        f"{body}embeddings.tok_embeddings.weight": (vocab, hidden),
        f"{body}embeddings.norm.weight": (hidden,),
    }
    block: Shapes = {
        "attn_norm.weight": (hidden,),
        "attn.Wqkv.weight": (3 * hidden, hidden),
        "attn.Wo.weight": (hidden, hidden),
        "mlp_norm.weight": (hidden,),
        "mlp.Wi.weight": (2 * sizes.ffn, hidden),
        "mlp.Wo.weight": (hidden, sizes.ffn),
    }
    weights, output = _class_head(head, hidden), Shapes()
    if head.kind != "none":
        weights |= {"head.dense.weight": (hidden, hidden), "head.norm.weight": (hidden,)}
    if head.kind == "masked":
        weights["decoder.bias"] = (vocab,)
        output = {"decoder.weight": (vocab, hidden)}
    prefix, is_tied = f"{body}layers.", config.get(TIED, True)
    return ModelWeights(sizes, embeddings, block, prefix, {}, weights, output, is_tied)


def _list_gpt2(config: Config, sizes: ModelSizes, head: ModelHead) -> ModelWeights:
    hidden, ffn, body = sizes.hidden, sizes.ffn, "" if head.kind == "none" else "transformer."
    embeddings: Shapes = {
        f"{body}wte.weight": (config["vocab_size"], hidden),
        f"{body}wpe.weight": (config["n_positions"], hidden),
    }
    block = _norm("ln_1", hidden) | _norm("ln_2", hidden)
    for layer, inputs, outputs in (
        ("attn.c_attn", hidden, 3 * hidden),
        ("attn.c_proj", hidden, hidden),
        ("mlp.c_fc", hidden, ffn),
        ("mlp.c_proj", ffn, hidden),
    ):
        block |= {f"{layer}.weight": (inputs, outputs), f"{layer}.bias": (outputs,)}
    return ModelWeights(
        sizes,
        embeddings,
        block,
        f"{body}h.",
        _norm(f"{body}ln_f", hidden),
        *_list_causal_head(config, head, "classifier", hidden),
        is_tied=config.get(TIED, True),
    )


def _list_llama(config: Config, sizes: ModelSizes, head: ModelHead) -> ModelWeights:
    kind, hidden = config["model_type"], sizes.hidden
    body = "" if head.kind == "none" else "model."
    table: Shapes = {f"{body}embed_tokens.weight": (config["vocab_size"], hidden)}
    kv_width = sizes.kv_heads * sizes.head_dim
    has_bias = config.get("attention_bias", False)
    block: Shapes = {}
    for name, width in {"q": sizes.width, "k": kv_width, "v": kv_width}.items():
        block[f"self_attn.{name}_proj.weight"] = (width, hidden)
        if has_bias or kind == "qwen2":
            block[f"self_attn.{name}_proj.bias"] = (width,)
        if kind in HEAD_NORMS and name != "v":
            block[f"self_attn.{name}_norm.weight"] = (sizes.head_dim,)
    block["self_attn.o_proj.weight"] = (hidden, sizes.width)
    if has_bias:
        block["self_attn.o_proj.bias"] = (hidden,)
    block |= {f"mlp.{name}_proj.weight": (sizes.ffn, hidden) for name in ("gate", "up")}
    block["mlp.down_proj.weight"] = (hidden, sizes.ffn)
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] * (kind in FOUR_NORMS)
    block |= {f"{name}.weight": (hidden,) for name in norms}
    return ModelWeights(
        sizes,
        table,
        block,
        f"{body}layers.",
        {f"{body}norm.weight": (hidden,)},
        *_list_causal_head(config, head, "score", hidden),
        is_tied=config.get(TIED, kind.startswith("gemma")),
        max_tokens=config.get("max_position_embeddings"),
    )


def _list_causal_head(
    config: Config, head: ModelHead, token_head: str, hidden: int
) -> tuple[Shapes, Shapes]:
    """Return the head of a causal model, and its layer over the vocabulary."""
    if head.kind == "causal":
        return {}, {"lm_head.weight": (config["vocab_size"], hidden)}
    if head.kind == "classes":
        return {"score.weight": (head.outputs, hidden)}, {}
    return _linear(token_head, hidden, head.outputs) if head.outputs else {}, {}


def _class_head(head: ModelHead, hidden: int) -> Shapes:
    return _linear("classifier", hidden, head.outputs) if head.outputs else {}


def _linear(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


FAMILIES: Mapping[str, Callable[[Config, ModelSizes, ModelHead], ModelWeights]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra"), _list_bert),
    "distilbert": _list_distilbert,
    "modernbert": _list_modernbert,
    "gpt2": _list_gpt2,
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"), _list_llama
    ),
}
"""The model types of transformers whose weights are known."""
UNGATED = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "gpt2")
"""Model types whose feed-forward layer has one input matrix."""
CAUSAL = frozenset(FAMILIES) - {*UNGATED, "modernbert"} | {"gpt2"}
"""Model types whose tokens attend to earlier ones alone."""
