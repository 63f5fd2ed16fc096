"""Invalid settings are described in the words of run files, whatever pydantic reports."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, Field, ValidationError

from regauge import config
from regauge.commands import _reference
from regauge.config import Settings
from regauge.config.validation import convert_error, find_model, suggest_key
from regauge.system import choices
from regauge.system.errors import SettingsError
from regauge.system.expectations import EXPECTATIONS, format_value
from regauge.training.settings import TaskEntry, TrainSettings

JARGON = re.compile(
    r"[Ii]nput should|valid (dict|tuple|integer|string|number|bool|list|date)|instance of|Tuple|"
    r"after validation|pydantic|Value error|[Vv]alidator|NoneType|Datetimes|Extra inputs|Field req"
)
VALUES = (
    5,
    -1,
    0,
    10**30,
    0.5,
    -0.5,
    float("nan"),
    "zzz",
    "",
    "\ud800",
    True,
    (),
    (1,),
    ("a", "b", "c", "d"),
    ((),),
    {},
    {"zzz": 1},
    {"kind": 1},
    {1: "a"},
    dt.date(2026, 1, 2),
    dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC),
    dt.time(1, 2),
)
"""Values of every type that a run file, an override or a dictionary of Python may hold."""
ERRORS_OF_SCHEMAS = {
    "any": (),
    "bool": ("bool_type",),
    "date": ("date_type", "date_parsing", "date_from_datetime_parsing"),
    "default": (),
    "definitions": (),
    "dict": ("dict_type",),
    "float": ("float_type",),
    "function-after": (),
    "function-before": (),
    "function-wrap": (),
    "int": ("int_type",),
    "literal": (),
    "model": ("model_type",),
    "model-field": (),
    "model-fields": (),
    "no-info": (),
    "nullable": (),
    "str": ("string_type", "string_unicode"),
    "tuple": ("tuple_type",),
    "union": (),
}
"""The errors of each schema of pydantic that the settings use, for values of another type."""
ERRORS_OF_BOUNDS = {
    "ge": "greater_than_equal",
    "gt": "greater_than",
    "le": "less_than_equal",
    "lt": "less_than",
}


BASE = {
    "data": {"path": "data"},
    "task": "clm",
    "model": {"path": "model"},
    "batch": {"rows": 8, "microbatch_rows": 8},
    "stop": {"steps": 1},
    "output": {"folder": "out"},
}


def list_classes() -> list[type[Settings]]:
    """Return the settings classes of all verbs and choices, with the classes of their tables."""
    unvisited: list[type[Settings]] = [TaskEntry, *_reference.settings_roots().values()]
    for folder in _reference.list_folders():
        loaded = (choices.load(folder, name) for name in choices.names(folder))
        unvisited += [choice for choice in loaded if issubclass(choice, Settings)]
    classes: list[type[Settings]] = []
    while unvisited:
        model = unvisited.pop()
        if model not in classes:
            classes.append(model)
            fields = model.model_fields.values()
            tables = (find_model(field.annotation, Settings) for field in fields)
            unvisited += [table for table in tables if table is not None]
    return classes


def list_schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every node of a core schema that has a type."""
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str) and schema["type"] != "definition-ref":
            yield schema
        for key, value in schema.items():
            if key not in {"metadata", "serialization", "expected", "default"}:
                yield from list_schemas(value)
    elif isinstance(schema, list | tuple):
        for item in schema:
            yield from list_schemas(item)


def test_every_error_that_the_settings_can_raise_has_words() -> None:
    schemas = [model.__pydantic_core_schema__ for model in list_classes()]
    nodes = [node for schema in schemas for node in list_schemas(schema)]
    assert len(nodes) > 1000
    unknown = {node["type"] for node in nodes} - ERRORS_OF_SCHEMAS.keys()
    assert not unknown, f"add the errors of these schemas: {unknown}"
    for node in nodes:
        bounds = node.keys() & ERRORS_OF_BOUNDS.keys()
        errors = {*ERRORS_OF_SCHEMAS[node["type"]], *(ERRORS_OF_BOUNDS[bound] for bound in bounds)}
        assert errors <= EXPECTATIONS.keys()


def test_no_message_of_any_key_has_words_of_pydantic() -> None:
    """Each key of each class gets a value of each type; every refusal is one plain line."""
    kinds: set[str] = set()
    count = 0
    for model in list_classes():
        for name in model.model_fields:
            for value in VALUES:
                try:
                    model.model_validate({name: value})
                except SettingsError as error:
                    message = str(error)
                except ValidationError as error:
                    count += 1
                    # Other keys may be missing; the errors of this one are described.
                    problems = [item for item in error.errors() if item["loc"][:1] == (name,)]
                    kinds |= {item["type"] for item in problems}
                    message = describe(error, model, name)
                else:
                    continue
                assert not JARGON.search(message), f"{model.__name__}.{name} = {value!r}: {message}"
                assert "\n" not in message
    assert count > 3000
    expected = {
        "literal_error",
        "too_short",
        "too_long",
        "missing",
        "extra_forbidden",
        "value_error",
    }
    expected |= {"int_type", "float_type", "string_type", "bool_type", "dict_type", "tuple_type"}
    expected |= {"model_type", "greater_than", "greater_than_equal", "less_than", "less_than_equal"}
    expected |= {"string_unicode", "value_error"}
    assert expected <= kinds


def describe(error: ValidationError, model: type[Settings], name: str) -> str:
    """Return the message of the errors of one key."""
    details = [item for item in error.errors() if item["loc"][:1] == (name,)]
    if not details:
        return str(convert_error(error, model, ""))
    line_errors: Any = [
        {key: item[key] for key in ("type", "loc", "input", "ctx") if key in item}
        for item in details
    ]
    part = ValidationError.from_exception_data(model.__name__, line_errors)
    return str(convert_error(part, model, "run.toml"))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"epochs": 3}, "unknown key 'epochs'; did you mean 'stop.epochs'?"),
        (
            {"gradient_accumulation_steps": 4},
            "did you mean 'batch.rows' or 'batch.microbatch_rows'?",
        ),
        ({"optimizer": {"lr": 1.0}}, "unknown key 'optimizer.lr'; did you mean 'learning_rate'?"),
        ({"fp16": True}, "did you mean 'execution.precision=fp16'?"),
        ({"microbatch_rows": 4}, "did you mean 'batch.microbatch_rows' or 'evaluation"),
        ({"accelerator": "gpu"}, "no accelerator named 'gpu'; did you mean 'cuda'?"),
        ({"optimizer": {"schedule": "cosin"}}, "did you mean 'cosine'?"),
        ({"optimizer": {"schedule": 3}}, "'optimizer.schedule' must be a table, got 3"),
        ({"optimizer": {"kind": "rmsprop"}}, "; correct optimizer.kind"),
        ({"optimizer": {"betas": (0.1,)}}, "'optimizer.betas' has too few items, got [0.1]"),
        (
            {"optimizer": {"betas": (0.1, 0.2, 0.3)}},
            "must be a list of at most 2 items, got [0.1, 0.2, 0.3]",
        ),
        ({"stop": {"steps": True}}, "'stop.steps' must be an integer, got true"),
        (
            {"evaluation": {"metrics": ("a.py",)}},
            "'evaluation.metrics.0': 'a.py' is not 'file.py:function'; name a file and a function",
        ),
        (
            {"evaluation": {"metrics": ("metrics.py:a b",)}},
            "'metrics.py:a b' is not 'file.py:function'",
        ),
        (
            {"task": ({"name": "My task", "kind": "clm"},)},
            "'name': 'My task' is not a name; use a to z, 0 to 9, '-' and '_'",
        ),
        ({"stop": {}}, "'stop': a run has one length; set either stop.steps or stop.epochs"),
        ({"execution": {"price": {"as_of": 3}}}, "must be a date such as 2026-01-31, got 3"),
    ],
)
def test_the_message_has_the_words_of_a_run_file(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        config.build(TrainSettings, {**BASE, **tables})
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def _refuse(_: str) -> str:
    raise ValueError("it has no vowel")


class Example(Settings):
    """Settings for messages that no settings of a verb have now."""

    name: Annotated[str, AfterValidator(_refuse)] = "a"
    rates: tuple[Annotated[int | Literal["auto"], Field()], ...] = ()
    tables: dict[str, int] = Field(default={"a": 1}, min_length=1)
    names: tuple[str, ...] = Field(default=("a",), min_length=1)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "xyz"}, "'name': it has no vowel, got 'xyz'; correct name"),
        ({"rates": ("often",)}, "'rates.0' must be an integer or 'auto', got 'often'"),
        ({"tables": {}}, "'tables' must be a table of at least 1 key, got a table; correct tables"),
        ({"names": ()}, "'names' must be a list of at least 1 item, got []; correct names"),
        (3, "the document must be a table, got 3; correct it"),
    ],
)
def test_a_message_has_one_problem_and_one_remedy(table: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Example.model_validate(table)
    assert str(convert_error(caught.value, Example, "")).startswith(message)


def test_the_remedy_of_a_check_is_the_only_one() -> None:
    with pytest.raises(SettingsError) as caught:
        config.build(TrainSettings, {**BASE, "stop": {}}, source="run.toml")
    assert str(caught.value) == (
        "run.toml: 'stop': a run has one length; set either stop.steps or stop.epochs"
    )


def test_the_closest_of_two_values_is_suggested() -> None:
    model = {"path": "a", "dropout_kind": "nativ"}
    with pytest.raises(SettingsError, match=r"got 'nativ'; did you mean 'native'\?$"):
        config.build(TrainSettings, {**BASE, "model": model})


def test_no_setting_has_a_pattern_in_its_message() -> None:
    """A regular expression is no sentence; `require_pattern` names the texts that are permitted."""
    schemas = [model.__pydantic_core_schema__ for model in list_classes()]
    assert not [node for schema in schemas for node in list_schemas(schema) if "pattern" in node]


def test_a_schedule_may_be_the_name_of_its_kind() -> None:
    model = TrainSettings.model_fields["optimizer"].annotation
    assert model is not None
    assert model.model_validate({"schedule": "cosine"}).schedule.kind == "cosine"
    assert config.parse_choice("trackers", "jsonl").kind == "jsonl"


def test_a_key_is_suggested_that_the_table_has() -> None:
    assert suggest_key("warmup", ("warmup_steps",), TrainSettings) == "did you mean 'warmup_steps'?"
    misspelled = suggest_key("lora_alpha", ("lora_alphas", "rank"), TrainSettings)
    assert misspelled == "did you mean 'lora_alphas'?", "not the key of a peer's name"
    known = suggest_key("zzz", ("a", "b"), TrainSettings)
    assert known == "known: a, b"


def test_a_long_value_is_shortened() -> None:
    text = format_value("x" * 1000)
    assert len(text) == 80
    assert text.endswith("…")
    assert format_value((1, (None, True), {"a": 1})) == "[1, [nothing, true], a table]"
