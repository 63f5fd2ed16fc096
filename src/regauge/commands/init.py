"""Write a recipe or example run file; without a name, list them.

For example:

    $ regauge init classify --data reviews.csv
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from regauge import commands, config
from regauge.commands._recipes.settings import DESCRIPTIONS, JOBS
from regauge.system import choices
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from cyclopts.completion import CompletionContext

CLUSTER_TABLES = {"launch", "nodes", "strategy"}
"""Tables of a run file for several machines or devices."""


def complete_name(context: CompletionContext) -> dict[str, str]:
    """Return the matching recipes and examples for shell completion."""
    descriptions = DESCRIPTIONS | {
        stem: _read_description(path) for stem, path in _list_examples().items()
    }
    return {
        name: description
        for name, description in descriptions.items()
        if name.startswith(context.incomplete)
    }


def main(
    name: Annotated[
        str | None,
        Parameter(help="Recipe or example name, such as classify.", completer=complete_name),
    ] = None,
    file: Annotated[
        Path | None, Parameter(help="File to write; default: <name>.toml in this folder.")
    ] = None,
    *,
    data: Annotated[
        Path | None, Parameter(help="File with your records; it decides fields and limits.")
    ] = None,
    model: Annotated[
        str | None, Parameter(help="Start model: a folder, a run, or a name on the Hub.")
    ] = None,
    validation: Annotated[
        Path | None, Parameter(help="File with the held-out records; default: a part of --data.")
    ] = None,
    json: commands.AsJson = False,
) -> dict[str, Any]:
    """Write a recipe's run file for your data, or an example; never overwrites a file.

    For example:

        >>> regauge.init("classify", data="reviews.csv")
    """
    examples = _list_examples()
    if name is None:
        answer = {
            "recipes": [
                {"name": recipe, "job": job, "description": DESCRIPTIONS[recipe]}
                for job, recipes in JOBS.items()
                for recipe in recipes
            ],
            "examples": _describe_examples(examples, for_clusters=False),
            "cluster_examples": _describe_examples(examples, for_clusters=True),
        }
        return commands.show(answer, as_json=json)
    if name not in {*DESCRIPTIONS, *examples}:
        remedy = choices.did_you_mean(name, [*DESCRIPTIONS, *examples])
        raise SettingsError(f"no recipe or example '{name}'", remedy)
    target = Path(f"{name}.toml") if file is None else Path(file)
    if name in DESCRIPTIONS:
        from regauge.commands._recipes.settings import write_recipe

        text = write_recipe(name, str(target), data, model, validation)
        description = DESCRIPTIONS[name]
    elif data or model or validation:
        recipes = ", ".join(DESCRIPTIONS)
        raise SettingsError(f"'{name}' is an example, not a recipe", f"choose from: {recipes}")
    else:
        text = examples[name].read_text(encoding="utf-8")
        description = _read_description(examples[name])
    _write_new_file(target, text)
    return commands.show({"path": str(target), "description": description}, as_json=json)


def find_folder() -> Path:
    """Return the example run file folder, in the installed package or in the repository."""
    installed = choices.PACKAGE / "examples"
    return installed if installed.is_dir() else choices.PACKAGE.parent.parent / "runs"


def _list_examples() -> dict[str, Path]:
    return {path.stem: path for path in sorted(find_folder().glob("*.toml"))}


def _describe_examples(examples: dict[str, Path], *, for_clusters: bool) -> list[dict[str, str]]:
    """Return the names and descriptions of the examples for clusters, or of the other ones."""
    return [
        {"name": stem, "description": _read_description(path)}
        for stem, path in examples.items()
        if _needs_cluster(config.read(path)) is for_clusters
    ]


def _needs_cluster(tables: config.Tables) -> bool:
    """Return whether a run file, or a stage of it, uses several nodes or shards a model."""
    stages = (tables, *tables.get("stage", ()))
    return any(CLUSTER_TABLES & stage.keys() for stage in stages)


def _write_new_file(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise SettingsError(f"{path} exists", "name another file to write") from None
    except FileNotFoundError:
        raise SettingsError(f"no folder {path.parent}", "create it, or name another file") from None


def _read_description(path: Path) -> str:
    first_line = path.read_text(encoding="utf-8").partition("\n")[0]
    return first_line.removeprefix("#").strip() if first_line.startswith("#") else ""
