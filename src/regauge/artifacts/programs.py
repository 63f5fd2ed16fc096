"""Programs of trained models: out of a run's or anyone's folder, and out of an artifact again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from regauge.artifacts.manifest import Program
from regauge.choices import did_you_mean
from regauge.data import chat_templates
from regauge.data.tokenizer import Encoder as Tokens
from regauge.errors import DataError, SettingsError, plain
from regauge.models import architectures as models
from regauge.models import sentence_transformers
from regauge.models import tokenizer_convention as manners
from regauge.models.dropout import DropoutKeys
from regauge.models.inference_modules import (
    TYPES,
    OwnProgram,
    RankProgram,
    TextProgram,
    WriteProgram,
)
from regauge.models.init_weights import META, initial_weights, materialize
from regauge.models.io_spec import ROWS, Fields, Input, of_texts
from regauge.models.modules import CausalLanguageModel, Classifier, Encoder
from regauge.models.settings import Model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from regauge.artifacts.export_settings import Text
    from regauge.data.dataset import Manifest as DataManifest
    from regauge.models.io_spec import Answers
    from regauge.tasks import Task


FIELDS = Fields()


@dataclass(frozen=True)
class Described:
    """A program with what an artifact says of it."""

    program: nn.Module
    """In evaluation mode, fp32, on the CPU."""
    answers: Answers
    width: int
    inputs: tuple[Input, ...]
    reads: sentence_transformers.Reads | None = None
    fields: Fields = FIELDS
    pooling: sentence_transformers.Pooling | None = None
    labels: tuple[str, ...] = ()
    """Names of the classes, where they have any."""
    module: str | None = None
    """Import path of what makes a module of one's own."""

    @property
    def texts(self) -> sentence_transformers.Reads:
        """How texts are read; raises SettingsError where none are."""
        if self.reads is None:
            raise SettingsError("this program reads no texts", "name a model's folder")
        return self.reads

    @property
    def longest(self) -> int:
        """The most tokens of a text; 1 where nothing is read but tensors."""
        return self.reads.tokens if self.reads else 1

    @property
    def told(self) -> Program:
        """What an artifact says of it."""
        return Program(
            answers=self.answers,
            width=self.width,
            inputs=self.inputs,
            reads=self.reads,
            fields=self.fields,
            pooling=self.pooling,
            labels=self.labels,
            module=self.module,
        )


def of_folder(folder: Path, wanted: Text, trained: Fields | None = None) -> Described:
    """Return the program of a transformers folder or of one of sentence-transformers.

    `wanted` is asked instead of what the folder says; `trained` is what the run that left it read
    of a record, and texts are then read as the run did. Raises SettingsError for weights that are
    absent, or an architecture that does not fit.
    """
    model = models.load(folder)
    classifying = models.classifies(model)
    found = None if classifying else sentence_transformers.told(folder)
    told = (
        sentence_transformers.reads(folder)
        if sentence_transformers.described(folder) and trained is None
        else None
    )
    fields = trained or FIELDS
    if wanted.pair is not None:
        if trained is not None or not classifying:
            problem = "text.pair is for the folder of a classifier, without a run"
            raise SettingsError(problem, "leave it out")
        fields = Fields(texts=wanted.pair, joined=True)
    if classifying:
        classifier = Classifier(model, DropoutKeys())
        if wanted.pooling or wanted.normalized is not None:
            problem = f"{folder} is a classifier's, which makes no vectors"
            raise SettingsError(problem, "leave text.pooling and text.normalized out")
        reads = _reads(folder, told, wanted, classifier.longest, trained)
        width: int = model.config.num_labels  # type: ignore[assignment]
        program = TextProgram(classifier, "scores").eval()
        answers: Answers = "classes" if width > 1 else "values"
        labels = _labels(model)
        return Described(
            program, answers, width, of_texts(fields), reads, fields=fields, labels=labels
        )
    if found is None and not wanted.pooling and is_writer(model):
        return _writer(folder, model, wanted, trained)
    pooling = _pooling(found, wanted)
    encoder = Encoder(body(model), DropoutKeys(), pooling)
    _read_dense(encoder, pooling, folder)
    reads = _reads(folder, told, wanted, encoder.longest, trained)
    program = TextProgram(encoder, "vectors").eval()
    width = _width(model, pooling)
    return Described(program, "vectors", width, of_texts(fields), reads, fields, pooling)


def is_writer(model: PreTrainedModel) -> bool:
    """Return whether a model says each next token of a text."""
    return models.class_name(model).endswith(("ForCausalLM", "LMHeadModel"))


def writing(model: PreTrainedModel, folder: Path, most: int) -> WriteProgram:
    """Return the program of a model that goes on with texts; `folder` has its tokenizer."""
    facts = Tokens(folder).facts
    config: Any = model.config
    told = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = {end for end in (*told, facts.separator) if end is not None}
    return WriteProgram(model, most, facts.pad, tuple(sorted(ends)))


def _writer(
    folder: Path, model: PreTrainedModel, wanted: Text, trained: Fields | None
) -> Described:
    """Return the program of a model that goes on with a text, or answers a request."""
    most = wanted.answer_tokens
    fields = trained or FIELDS
    room = fields.longest(CausalLanguageModel(model, DropoutKeys()).longest)
    if room is not None:
        room -= most
        if room < manners.FEWEST:
            problem = f"text.answer_tokens = {most} leaves no room for a text"
            raise SettingsError(problem, f"set at most {room + most - manners.FEWEST}")
    reads = _reads(folder, None, wanted, room, trained)
    ends: Any = "chat" if chat_templates.has_template(folder) else "open"
    reads = reads.model_copy(update={"ends": ends})
    program = writing(model, folder, most).eval()
    return Described(program, "text", most, of_texts(fields), reads, fields)


def of_ranker(folder: Path, task: Task, manifest: DataManifest) -> Described:
    """Return the program of a ranker that was trained on a dataset.

    Raises SettingsError for one that reads no text.
    """
    fields = task.fields(manifest)
    if not fields.texts:
        raise SettingsError(f"the ranker of {folder} reads no text", "rank by its features alone")
    wanted = Model(path=str(folder))
    with META:
        module = task.module(wanted, manifest, seed=0)
    materialize(module, initial_weights(module, wanted, seed=0))
    ranker: Any = module.eval()
    ranker.form = ranker.form._replace(candidates=1)
    reads = sentence_transformers.Reads(tokens=max(fields.limits))
    return Described(RankProgram(ranker), "scores", 1, of_texts(fields), reads, fields)


def of_module(path: str, module: nn.Module, given: Mapping[str, Tensor]) -> Described:
    """Return a module of one's own as a program; `given` are examples of what it takes, by name.

    Raises DataError for one that does not take them, or answers with no tensor.
    """
    program = OwnProgram(module.eval().float())
    kinds = {dtype: name for name, dtype in TYPES.items()}
    if not 0 < len(given) <= OwnProgram.MOST:
        problem = f"'{path}' gives {len(given)} examples"
        raise DataError(problem, f"give 1 to {OwnProgram.MOST}, one for each tensor that it takes")
    for name, value in given.items():
        if value.dtype not in kinds:
            problem = f"'{path}': {name} is {value.dtype}"
            raise DataError(problem, f"give it as one of {', '.join(TYPES)}")
    inputs = tuple(
        Input.model_validate(
            {"name": name, "shape": (ROWS, *value.shape[1:]), "dtype": kinds[value.dtype]}
        )
        for name, value in given.items()
    )
    try:
        with torch.no_grad():
            output = program(*given.values())
    except Exception as error:
        problem = f"'{path}': {type(module).__name__} fails on its examples: {plain(error)}"
        raise DataError(problem, "correct it there") from error
    return Described(program, "tensor", output.shape[1], inputs, module=path)


def vocabulary(folder: Path) -> int:
    """Return how many words a model of a folder knows."""
    config: Any = models.template(folder).config
    count: int = config.vocab_size
    return count


def body(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model without the head of a task, which makes no vectors."""
    body: Any = model.base_model
    found: PreTrainedModel = body
    return found


def _labels(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of a model's classes; those that transformers makes up say nothing."""
    names: dict[Any, str] = model.config.id2label or {}
    every = tuple(str(names[number]) for number in sorted(names))
    return () if all(name.startswith("LABEL_") for name in every) else every


def _pooling(
    told: sentence_transformers.Sentences | None, wanted: Text
) -> sentence_transformers.Pooling:
    found = told.pooling if told else sentence_transformers.Pooling()
    asked = {
        "modes": wanted.pooling or found.modes,
        "normalized": found.normalized if wanted.normalized is None else wanted.normalized,
    }
    return found.model_copy(update=asked)


def _reads(
    folder: Path,
    told: sentence_transformers.Reads | None,
    wanted: Text,
    places: int | None,
    trained: Fields | None,
) -> sentence_transformers.Reads:
    """Return how a model reads texts: as is asked, else as is told, and no longer than it can.

    `places` is how many tokens the model has places for.
    """
    limit = trained.longest(places) if trained else places
    tokens = wanted.tokens or (told.tokens if told else trained and limit)
    tokens = tokens or manners.most_tokens(folder, limit)
    if limit is not None and tokens > limit:
        if wanted.tokens is not None:
            problem = f"text.tokens = {wanted.tokens}, and the model has {limit} positions"
            raise SettingsError(problem, f"set at most {limit}")
        tokens = limit
    given = {"prompts": wanted.prompts} if wanted.prompts else {}
    named = {"prompt": wanted.prompt} if wanted.prompt is not None else {}
    manner: manners.Manner = "regauge" if trained else manners.of(folder)
    reads = (told or sentence_transformers.Reads(tokens=tokens, manner=manner)).model_copy(
        update={"tokens": tokens, **given, **named}
    )
    if reads.prompt is not None and reads.prompt not in reads.prompts:
        remedy = did_you_mean(reads.prompt, tuple(reads.prompts))
        raise SettingsError(f"no prompt is called '{reads.prompt}'", remedy)
    return reads


def _width(model: PreTrainedModel, pooling: sentence_transformers.Pooling) -> int:
    if pooling.dense:
        return pooling.dense[-1].outputs
    width: int = model.config.hidden_size
    return width * len(pooling.modes)


def _read_dense(module: Encoder, pooling: sentence_transformers.Pooling, folder: Path) -> None:
    """Read the weights of the layers behind a pooling."""
    from regauge.models import weights as folders

    for layer, dense in zip(module.pool.dense, pooling.dense, strict=True):
        found = folders.whole(folder / dense.folder)
        try:
            layer.load_state_dict({name.removeprefix("linear."): found[name] for name in found})
        except RuntimeError as error:
            problem = f"{folder / dense.folder} does not fit: {str(error).splitlines()[-1].strip()}"
            raise SettingsError(problem, "copy the folder again") from None
