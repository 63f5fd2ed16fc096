"""How a text becomes tokens and its tokens a vector, as sentence-transformers' folders describe it.

Nothing here imports torch: what is described is computed in `pooling.py`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from regauge.choices import did_you_mean
from regauge.config import Settings
from regauge.errors import SettingsError
from regauge.models import tokenizer_convention
from regauge.models.hub import CONFIG, WANTED
from regauge.models.tokenizer_convention import FEWEST, Manner, read_json, write_json

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
LIMITS = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_mpnet_config.json")
"""Files that say how long a text may be; which one depends on how old the folder is."""
Mode = Literal["mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
FLAGS: dict[str, Mode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Older folders have a flag for each; vectors of several stand behind each other in this order."""
ACTIVATIONS = {"Tanh": "tanh", "Identity": "identity", "ReLU": "relu", "GELU": "gelu"}
Activation = Literal["tanh", "identity", "relu", "gelu"]


class Dense(Settings):
    """A linear layer behind the pooling."""

    inputs: int
    """Width of what comes in."""
    outputs: int
    """Width of what comes out."""
    bias: bool = True
    """Whether something is added."""
    activation: Activation = "tanh"
    """What is applied to it."""
    folder: str
    """Where its weights lie in a folder of sentence-transformers."""


class Pooling(Settings):
    """How the last hidden states of a text become one vector."""

    modes: tuple[Mode, ...] = Field(default=("mean",), min_length=1)
    """What is taken of them; several stand behind each other."""
    dense: tuple[Dense, ...] = ()
    """Layers behind that."""
    normalized: bool = True
    """Whether vectors have length 1."""


class Reads(Settings):
    """How a text becomes tokens."""

    tokens: int = Field(ge=FEWEST)
    """Most tokens of a text, with the special ones around it; what is beyond is cut off."""
    prompts: dict[str, str] = {}
    """Texts that are put before a text, by name."""
    prompt: str | None = None
    """Name of the one that is used unless another is named."""
    lowercase: bool = False
    """Whether a text is written small before the tokenizer sees it."""
    ends: Literal["closed", "open", "chat"] = "closed"
    """Whether a text ends in special tokens, goes on, or stands in a chat template."""
    manner: Manner = "regauge"
    """Whose: here "[SEP]" in a text is letters, and a text ends in a token that says so."""

    def before(self, name: str | None = None) -> str:
        """Return what is put before each text: the named prompt, or the one that is used anyway.

        Raises SettingsError for a name that is not known.
        """
        wanted = name or self.prompt
        if wanted is None:
            return ""
        if wanted not in self.prompts:
            known = tuple(self.prompts)
            remedy = did_you_mean(wanted, known) if known else "the artifact has none"
            raise SettingsError(f"no prompt is called '{wanted}'", remedy)
        return self.prompts[wanted]


class Sentences(Settings):
    """A text encoder's folder, described."""

    reads: Reads
    pooling: Pooling = Pooling()


def described(folder: Path) -> bool:
    """Return whether a folder is one of sentence-transformers."""
    return (folder / MODULES).is_file()


def told(folder: Path) -> Sentences | None:
    """Return what a folder says, or None for one that is none of sentence-transformers.

    Raises SettingsError for what is not known here.
    """
    return read(folder) if described(folder) else None


def read(folder: Path) -> Sentences:
    """Return what a folder of sentence-transformers says; SettingsError for what is not known here.

    Known are a transformer, a pooling, linear layers and a normalisation, in this order.
    """
    modules = _modules(folder)
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    expected = ["Transformer", "Pooling", *["Dense"] * kinds.count("Dense")]
    normalized = kinds[-1:] == ["Normalize"]
    if kinds != expected + ["Normalize"] * normalized or modules[0]["path"] not in {"", "."}:
        problem = f"{folder} is made of {', '.join(kinds)}"
        raise SettingsError(problem, "name one of Transformer, Pooling, Dense …, Normalize")
    dense = tuple(
        _dense(folder / module["path"], module["path"])
        for module in modules
        if module["type"].endswith(".Dense")
    )
    modes = _modes(folder / modules[1]["path"] / CONFIG)
    return Sentences(
        reads=reads(folder), pooling=Pooling(modes=modes, dense=dense, normalized=normalized)
    )


def reads(folder: Path) -> Reads:
    """Return how texts become tokens in a folder of sentence-transformers, of any kind."""
    found = [read_json(folder / name) for name in LIMITS if (folder / name).is_file()]
    limit = found[0] if found else {}
    told = read_json(folder / PROMPTS) if (folder / PROMPTS).is_file() else {}
    prompts = told.get("prompts") or {}
    default = told.get("default_prompt_name")
    return Reads(
        tokens=limit.get("max_seq_length") or tokenizer_convention.most_tokens(folder),
        prompts=prompts,
        prompt=default if default in prompts else None,
        lowercase=bool(limit.get("do_lower_case")),
        manner=tokenizer_convention.of(folder),
    )


def copy(folder: Path, target: Path) -> None:
    """Add what a folder of sentence-transformers says of its vectors to a transformers folder.

    Raises SettingsError for what is not known here.
    """
    read(folder)
    for name in (MODULES, PROMPTS, *LIMITS):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    for module in _modules(folder)[1:]:
        (target / module["path"]).mkdir(exist_ok=True)
        for pattern in WANTED:
            for file in (folder / module["path"]).glob(pattern):
                shutil.copyfile(file, target / module["path"] / file.name)


def write(folder: Path, sentences: Sentences, width: int) -> None:
    """Add what sentence-transformers reads to a transformers folder; `width` is the model's.

    Weights of layers behind the pooling are not known here: their folders are made and described.
    """
    parts = [("", "Transformer"), ("1_Pooling", "Pooling")]
    parts += [(dense.folder, "Dense") for dense in sentences.pooling.dense]
    if sentences.pooling.normalized:
        parts.append((f"{len(parts)}_Normalize", "Normalize"))
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, (path, kind) in enumerate(parts)
    ]
    for path, _ in parts[1:]:
        (folder / path).mkdir(exist_ok=True)
    for dense in sentences.pooling.dense:
        write_json(folder / dense.folder / CONFIG, _layer(dense))
    reads = sentences.reads
    modes = sentences.pooling.modes
    write_json(folder / MODULES, modules)
    pooling: dict[str, Any] = {flag: mode in modes for flag, mode in FLAGS.items()}
    if _flagged(pooling) != modes:
        pooling = {"pooling_mode": list(modes)}  # flags have an order of their own
    write_json(folder / "1_Pooling" / CONFIG, {"word_embedding_dimension": width, **pooling})
    write_json(
        folder / LIMITS[0], {"max_seq_length": reads.tokens, "do_lower_case": reads.lowercase}
    )
    told = {"prompts": reads.prompts, "default_prompt_name": reads.prompt} if reads.prompts else {}
    write_json(folder / PROMPTS, {"similarity_fn_name": "cosine", **told})
    if reads.manner != tokenizer_convention.USUAL:
        tokenizer_convention.mark(folder)


def _modules(folder: Path) -> Any:
    """Return what a folder is made of, in folders of its own."""
    found = read_json(folder / MODULES)
    for module in found:
        if Path(module["path"]).is_absolute() or ".." in Path(module["path"]).parts:
            problem = f"{folder / MODULES} names '{module['path']}', outside of its folder"
            raise SettingsError(problem, "do not use it")
    return found


def _modes(path: Path) -> tuple[Mode, ...]:
    table = read_json(path)
    if table.get("include_prompt", True) is not True:
        problem = f"{path} leaves the prompt out of the pooling"
        raise SettingsError(problem, "name a model that pools all tokens")
    named = table.get("pooling_mode")
    if named is None:
        return _flagged(table) or ("mean",)
    modes = (named,) if isinstance(named, str) else tuple(named)
    for mode in modes:
        if mode not in FLAGS.values():
            known = tuple(FLAGS.values())
            raise SettingsError(f"{path} has a pooling '{mode}'", did_you_mean(mode, known))
    return modes


def _flagged(table: dict[str, Any]) -> tuple[Mode, ...]:
    return tuple(mode for flag, mode in FLAGS.items() if table.get(flag))


def _dense(folder: Path, path: str) -> Dense:
    table = read_json(folder / CONFIG)
    activation = str(table.get("activation_function", "Tanh")).rpartition(".")[2]
    odd = activation not in ACTIVATIONS or table.get("use_residual")
    if odd or table.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        problem = f"{folder} is a layer of a kind that is not known here"
        raise SettingsError(problem, f"name one with {', '.join(ACTIVATIONS)} and no residual")
    known = ACTIVATIONS[activation]
    return Dense.model_validate(
        {
            "inputs": table["in_features"],
            "outputs": table["out_features"],
            "bias": table.get("bias", True),
            "activation": known,
            "folder": path,
        }
    )


def _layer(dense: Dense) -> dict[str, Any]:
    (activation,) = (theirs for theirs, ours in ACTIVATIONS.items() if ours == dense.activation)
    return {
        "in_features": dense.inputs,
        "out_features": dense.outputs,
        "bias": dense.bias,
        "activation_function": f"torch.nn.{activation}",
    }
