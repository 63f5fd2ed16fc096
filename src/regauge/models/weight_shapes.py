"""Names and shapes of the weights of new BERT and Llama models; this module imports no torch.

A dry run counts them without transformers, whose import takes seconds. A test compares them with
the modules of transformers. A model with any other configuration than sizes is not known here, and
neither is one that may be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.models.default_sizes import DEFAULT_SIZES

if TYPE_CHECKING:
    from regauge.models.architectures import HeadKind
    from regauge.models.io_spec import ModelHead
    from regauge.models.settings import Model

Shapes = dict[str, tuple[int, ...]]
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


class ModelWeights(NamedTuple):
    """The weights of a model by name, all of them trained, and the sizes that decide its FLOPs."""

    shapes: Shapes
    tables: tuple[str, ...]
    """Names of the embedding tables."""
    block_prefix: str
    """Prefix of the weight names of all blocks."""
    num_blocks: int
    attention_width: int
    max_tokens: int


class Family(NamedTuple):
    """The models of one architecture."""

    list_weights: Callable[[dict[str, Any], ModelHead], ModelWeights]
    heads: tuple[HeadKind, ...]
    has_dropout: bool
    """Whether hidden states have dropout."""
    fields: tuple[str, ...] = ()
    """Fields of the configuration besides those of `DEFAULT_SIZES`."""


def list_weights(
    settings: Model, head: ModelHead, vocab_size: int, pad_id: int
) -> ModelWeights | None:
    """Return the weights of a new model for a tokenizer; None if they are not known here."""
    architecture = settings.architecture or ""
    family = FAMILIES.get(architecture)
    is_plain = settings.lora is None and settings.trainable_layers == "all"
    if family is None or not is_plain or head.kind not in family.heads:
        return None
    config = {**DEFAULT_SIZES[architecture], "vocab_size": vocab_size, **settings.config}
    neutral = [config.pop(name) for name in NEUTRAL_FIELDS & config.keys()]
    is_known = (
        config.keys() <= {*DEFAULT_SIZES[architecture], *family.fields}
        and all(isinstance(value, float) and 0 <= value < 1 for value in neutral)
        and all(_is_valid(name, value) for name, value in config.items())
        and 0 <= pad_id < vocab_size <= config["vocab_size"]
        and not (settings.dropout and not family.has_dropout)
        and _has_equal_heads(config)
    )
    return family.list_weights(config, head) if is_known else None


def _is_valid(name: str, value: object) -> bool:
    return isinstance(value, bool) if name == TIED else type(value) is int and value > 0


def _has_equal_heads(config: dict[str, Any]) -> bool:
    """Return whether the width is divided by the heads, and these by the heads of the keys.

    Positions that rotate need an even width of a head.
    """
    heads = config["num_attention_heads"]
    is_even = TIED not in config or config["hidden_size"] // heads % 2 == 0
    return config["hidden_size"] % heads == heads % config.get(KV_HEADS, heads) == 0 and is_even


def _list_bert(config: dict[str, Any], head: ModelHead) -> ModelWeights:
    width, inner = config["hidden_size"], config["intermediate_size"]
    body = "" if head.kind == "none" else "bert."
    embeddings, blocks = f"{body}embeddings", f"{body}encoder.layer."
    rows = {
        f"{embeddings}.word_embeddings": config["vocab_size"],
        f"{embeddings}.position_embeddings": config["max_position_embeddings"],
        f"{embeddings}.token_type_embeddings": config["type_vocab_size"],
    }
    tables: Shapes = {f"{name}.weight": (number, width) for name, number in rows.items()}
    shapes = tables | _norm(f"{embeddings}.LayerNorm", width)
    for index in range(config["num_hidden_layers"]):
        block = f"{blocks}{index}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= _linear(f"{block}.attention.{name}", width, width)
        shapes |= _norm(f"{block}.attention.output.LayerNorm", width)
        shapes |= _linear(f"{block}.intermediate.dense", width, inner)
        shapes |= _linear(f"{block}.output.dense", inner, width)
        shapes |= _norm(f"{block}.output.LayerNorm", width)
    if head.kind in ("pairs", "classes"):
        shapes |= _linear(f"{body}pooler.dense", width, width)
    if head.kind in ("masked", "pairs"):
        shapes["cls.predictions.bias"] = (config["vocab_size"],)
        shapes |= _linear("cls.predictions.transform.dense", width, width)
        shapes |= _norm("cls.predictions.transform.LayerNorm", width)
    if head.kind == "pairs":
        shapes |= _linear("cls.seq_relationship", width, 2)
    if head.outputs:
        shapes |= _linear("classifier", width, head.outputs)
    return _complete(config, shapes, tuple(tables), blocks)


def _list_llama(config: dict[str, Any], _: ModelHead) -> ModelWeights:
    width, inner = config["hidden_size"], config["intermediate_size"]
    table, blocks = "model.embed_tokens.weight", "model.layers."
    heads = config["num_attention_heads"]
    kv_width = width // heads * config.get(KV_HEADS, heads)
    projections = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width, "o_proj": width}
    shapes: Shapes = {table: (config["vocab_size"], width), "model.norm.weight": (width,)}
    for index in range(config["num_hidden_layers"]):
        block = f"{blocks}{index}"
        for name, outputs in projections.items():
            shapes[f"{block}.self_attn.{name}.weight"] = (outputs, width)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{block}.mlp.{name}.weight"] = (inner, width)
        shapes[f"{block}.mlp.down_proj.weight"] = (width, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{block}.{name}.weight"] = (width,)
    if not config[TIED]:
        shapes["lm_head.weight"] = shapes[table]
    return _complete(config, shapes, (table,), blocks)


def _complete(
    config: dict[str, Any], shapes: Shapes, tables: tuple[str, ...], block_prefix: str
) -> ModelWeights:
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    return ModelWeights(
        shapes, tables, block_prefix, layers, width, config["max_position_embeddings"]
    )


def _linear(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


FAMILIES = {
    "bert": Family(_list_bert, ("none", "masked", "pairs", "classes", "tokens"), has_dropout=True),
    "llama": Family(_list_llama, ("causal",), has_dropout=False, fields=(KV_HEADS,)),
}
"""The architectures that are known here."""
