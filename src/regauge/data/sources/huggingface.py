"""A dataset of the Hugging Face hub by its name, or a folder that contains one.

Its files are read by the source of their format. Nothing is stored on this machine, no code of a
dataset is executed, and the library `datasets` is not needed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from regauge.config import parse_choice
from regauge.data.sources import Piece, Source, _files, _splits
from regauge.data.sources._splits import DEFAULT
from regauge.data.sources._suffixes import find_source_kind
from regauge.data.sources._tables import find_names
from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError, RegaugeError, TransientError
from regauge.system.json_files import read_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from huggingface_hub.hf_api import DatasetInfo

    from regauge.data.sources import SourceItem

STATE_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"
"""Files that `save_to_disk` writes: in the folder of a split, and above several splits."""
CONVERTED_REVISION = "refs/convert/parquet"
"""The revision with the Parquet files that the hub creates from other formats."""


class HuggingFace(Source):
    """Rows of a split; its columns are the fields."""

    peer_names: ClassVar[tuple[str, ...]] = ("datasets", "hf", "hub")

    name: str
    """Name on the hub, such as "org/name", or a folder."""
    subset: str = ""
    """Subset, if there are several; the hub also calls it a configuration."""
    split: str = "train"
    """Split of the Hub dataset; the run file's `split` table defines the held-out rows."""
    revision: str | None = None
    """Branch, tag or commit on the hub; by default the newest commit."""
    columns: tuple[str, ...] = ()
    """Columns to read; by default all but those of binary data."""

    def remote_location(self) -> str:
        """Return the dataset's name on the hub, unless it is a local folder."""
        return "" if Path(self.name).is_dir() else f"the dataset '{self.name}' of the hub"

    def field_names(self) -> tuple[str, ...]:
        return self.columns

    def list_pieces(self) -> tuple[Piece, ...]:
        try:
            is_local = Path(self.name).is_dir()
            files = self._list_folder(Path(self.name)) if is_local else self._list_hub()
        except DataError as error:
            raise error.add_location(f"the dataset '{self.name}'") from None
        kinds = {find_source_kind(file.name) for file in files}
        if len(kinds) > 1:
            problem = f"the dataset '{self.name}' has files of {' and '.join(sorted(kinds))}"
            raise DataError(problem, f"choose one format; set source.kind = '{min(kinds)}'")
        return self._build_source(files[0].name).divide_files(files)

    def read(self, piece: Piece) -> Iterator[SourceItem]:
        """Yield the items that the source of the file's format reads."""
        return self._build_source(piece.files[0]).read(piece)

    def class_names(self, piece: Piece) -> dict[str, tuple[str, ...]]:
        """Return the names of the features of type ClassLabel, in the files or in the README."""
        names = self._build_source(piece.files[0]).class_names(piece)
        return names or _read_class_names(self._read_dataset_info(piece.files[0]), self.subset)

    def _read_dataset_info(self, file: str) -> Any:
        """Return the table `dataset_info` of the README next to a file, or None."""
        if not self.remote_location():
            return _read_metadata(Path(self.name) / "README.md").get("dataset_info")
        from huggingface_hub import constants

        commit = file.removeprefix(f"hf://datasets/{self.name}@").partition("/")[0]
        return _fetch_dataset_info(self, commit, constants.ENDPOINT)

    def _build_source(self, file: str) -> _files.FileSource:
        kind = find_source_kind(file)
        table: dict[str, Any] = {"kind": kind, "files": (file,)}
        options = {"text": {"document": "line"}, "conll": {}}
        table |= options.get(kind, {"columns": self.columns})
        return cast("_files.FileSource", parse_choice("data/sources", table))

    def _list_folder(self, folder: Path) -> list[_files.InputFile]:
        if self.revision:
            raise DataError("a folder has no revisions", "remove source.revision")
        if (folder / SPLITS_FILE).exists():
            known = [str(split) for split in _read_value(folder / SPLITS_FILE, "splits")]
            if self.split not in known:
                remedy = did_you_mean(self.split, known)
                raise DataError(f"it has no split '{self.split}'", remedy)
            folder /= self.split
        if (folder / STATE_FILE).exists():
            return self._list_saved(folder)
        paths = (path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in paths]
        selected = _splits.select_files(
            names,
            _read_metadata(folder / "README.md").get("configs") or [],
            self.subset,
            self.split,
        )
        return [_files.stat_file(folder / name) for name in selected]

    def _list_saved(self, folder: Path) -> list[_files.InputFile]:
        if self.subset:
            raise DataError("a saved dataset has no subsets", "remove source.subset")
        split = _read_value(folder / STATE_FILE, "_split")
        if split not in {None, self.split}:
            raise DataError(f"it is the split '{split}'", f"set source.split = '{split}'")
        files = [
            folder / item["filename"] for item in _read_value(folder / STATE_FILE, "_data_files")
        ]
        if missing := [path for path in files if not path.is_file()]:
            raise DataError(f"{missing[0]} is missing", "save the dataset again")
        return [_files.stat_file(path) for path in files]

    def _list_hub(self) -> list[_files.InputFile]:
        info = self.fetch_info(self.revision)
        names = [file.rfilename for file in info.siblings or ()]
        if any(map(find_source_kind, names)):
            configs = getattr(info.card_data, "configs", None) or []
            selected = _splits.select_files(names, configs, self.subset, self.split)
        else:
            info = self.fetch_info(CONVERTED_REVISION)
            names = [file.rfilename for file in info.siblings or ()]
            selected = _splits.select_converted_files(names, self.subset, self.split)
        by_name = {file.rfilename: file for file in info.siblings or ()}
        root = f"hf://datasets/{self.name}@{info.sha}"
        return [
            _files.InputFile(f"{root}/{name}", by_name[name].size or 0, str(by_name[name].blob_id))
            for name in selected
        ]

    def fetch_info(self, revision: str | None) -> DatasetInfo:
        """Return the hub's metadata of a revision; raises an error if it may not be read."""
        from huggingface_hub import HfApi

        api = HfApi()
        try:
            info = api.dataset_info(self.name, revision=revision, files_metadata=True)
            if info.gated:
                api.auth_check(self.name, repo_type="dataset")
        except Exception as error:  # noqa: BLE001 - the library and its HTTP client raise many types
            raise self._translate_error(error, revision, api.endpoint) from None
        return info

    def _translate_error(
        self, error: Exception, revision: str | None, endpoint: str
    ) -> RegaugeError:
        from huggingface_hub import errors

        log_in = "run 'hf auth login', or set HF_TOKEN"
        message = str(error).strip().partition("\n")[0]
        if isinstance(error, errors.HFValidationError):
            return DataError("not a folder and not a valid name on the hub", "correct source.name")
        if isinstance(error, errors.GatedRepoError):
            url = f"{endpoint}/datasets/{self.name}"
            return DataError("it is gated", f"accept its conditions at {url}, then {log_in}")
        if isinstance(error, errors.RepositoryNotFoundError):
            problem = f"not a folder and not a dataset that is visible on {endpoint}"
            return DataError(problem, f"correct source.name; for a private dataset {log_in}")
        if isinstance(error, errors.RevisionNotFoundError):
            if revision == CONVERTED_REVISION:
                return DataError("it has no data file in a known format", "choose another dataset")
            return DataError(f"it has no revision '{revision}'", "correct source.revision")
        return TransientError(
            f"the dataset '{self.name}': cannot read from {endpoint}: {message}",
            "check the network (HF_ENDPOINT, HTTPS_PROXY) and run again, or use a local folder",
        )


def _read_value(path: Path, key: str) -> Any:
    document = read_json(path, "save the dataset again")
    if key not in document:
        raise DataError(f"{path} has no '{key}'", "save the dataset again")
    return document[key]


@cache
def _fetch_dataset_info(source: HuggingFace, commit: str, _endpoint: str) -> Any:
    """Return the table `dataset_info` of a commit on the hub; None if its README has none."""
    return getattr(source.fetch_info(commit).card_data, "dataset_info", None)


def _read_metadata(path: Path) -> dict[str, Any]:
    from huggingface_hub import metadata_load

    try:
        metadata = metadata_load(path) if path.exists() else None
    except Exception as error:  # noqa: BLE001 - the YAML library raises many types
        message = str(error).partition("\n")[0]
        raise DataError(
            f"the metadata of {path} is not valid YAML: {message}", "correct that file"
        ) from None
    return metadata or {}


def _read_class_names(dataset_info: Any, subset: str) -> dict[str, tuple[str, ...]]:
    """Return the names of the features of type ClassLabel, by field.

    `dataset_info` is the table of a README's metadata, or a list of tables with `config_name`:
    https://huggingface.co/docs/hub/datasets-cards. Entries of another shape are skipped.
    """
    tables = dataset_info if isinstance(dataset_info, list) else [dataset_info]
    tables = [table for table in tables if isinstance(table, dict)]
    name = subset or DEFAULT
    matches = [table for table in tables if table.get("config_name", name) == name]
    if not matches and not subset and len(tables) == 1:
        matches = tables
    features = matches[0].get("features") if matches else None
    names: dict[str, tuple[str, ...]] = {}
    for feature in features if isinstance(features, list) else ():
        if isinstance(feature, dict) and (texts := find_names(feature)):
            names[str(feature.get("name"))] = texts
    return names
