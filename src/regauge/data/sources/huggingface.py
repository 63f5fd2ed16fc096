"""A dataset of the Hugging Face hub by its name, or a folder that holds one.

Its files are read as those of the sources of their forms are: nothing is kept on this machine, no
code of a dataset runs, and the library `datasets` is not needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from regauge.choices import did_you_mean
from regauge.config import choose
from regauge.data.sources import Piece, Source, _files, _splits
from regauge.errors import DataError, RegaugeError, TransientError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from huggingface_hub.hf_api import DatasetInfo

    from regauge.data.sources import Found

SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""What `save_to_disk` writes beside its files, and above the folders of several splits."""
CONVERTED = "refs/convert/parquet"
"""Where the hub keeps what it has converted by itself."""


class HuggingFace(Source):
    """Rows of a split; its text and number columns are the fields."""

    name: str
    """A name on the hub, such as "org/name", or a folder."""
    subset: str = ""
    """Which subset, where there are several; the hub also calls it a configuration."""
    split: str = "train"
    """Which split; what is held out of it is for the table `split` of the run file to say."""
    revision: str | None = None
    """A branch, a tag or a commit on the hub; none given is the newest."""
    columns: tuple[str, ...] = ()
    """Columns to read; none given means every text and number column."""

    def elsewhere(self) -> str:
        """Return the name on the hub, where it is none of a folder."""
        return "" if Path(self.name).is_dir() else f"the dataset '{self.name}' of the hub"

    def fields(self) -> tuple[str, ...]:
        """Return the named columns, if any."""
        return self.columns

    def pieces(self) -> tuple[Piece, ...]:
        """Return the pieces of the split's files."""
        try:
            here = Path(self.name).is_dir()
            found = self._in_folder(Path(self.name)) if here else self._on_hub()
        except DataError as error:
            raise error.within(f"the dataset '{self.name}'") from None
        forms = {_splits.form(file.name) for file in found}
        if len(forms) > 1:
            problem = f"the dataset '{self.name}' holds files of {' and '.join(sorted(forms))}"
            raise DataError(problem, f"choose one of them: source.kind = '{min(forms)}'")
        return self._reader(found[0].name).divide(found)

    def read(self, piece: Piece) -> Iterator[Found]:
        """Yield what the source of the files' form does."""
        return self._reader(piece.files[0]).read(piece)

    def _reader(self, file: str) -> _files.FileSource:
        kind = _splits.form(file)
        table: dict[str, Any] = {"kind": kind, "files": (file,)}
        table |= {"document": "line"} if kind == "text" else {"columns": self.columns}
        return cast("_files.FileSource", choose("data/sources", table))

    def _in_folder(self, folder: Path) -> list[_files.File]:
        """Return the split's files in a folder of this machine."""
        if self.revision:
            raise DataError("a folder has no revisions", "leave source.revision out")
        if (folder / SAVED_SPLITS).exists():
            known = [str(split) for split in _document(folder / SAVED_SPLITS, "splits")]
            if self.split not in known:
                remedy = did_you_mean(self.split, known)
                raise DataError(f"there is no split '{self.split}'", remedy)
            folder /= self.split
        if (folder / SAVED).exists():
            return self._saved(folder)
        paths = (path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in paths]
        chosen = _splits.chosen(names, _configs(folder / "README.md"), self.subset, self.split)
        return [_files.local(folder / name) for name in chosen]

    def _saved(self, folder: Path) -> list[_files.File]:
        """Return the files of a dataset that `save_to_disk` wrote."""
        if self.subset:
            raise DataError("a saved dataset has no subsets", "leave source.subset out")
        split = _document(folder / SAVED, "_split")
        if split not in {None, self.split}:
            raise DataError(f"it is the split '{split}'", f"set source.split = '{split}'")
        files = [folder / item["filename"] for item in _document(folder / SAVED, "_data_files")]
        if gone := [path for path in files if not path.is_file()]:
            raise DataError(f"{gone[0]} is gone", "save it again")
        return [_files.local(path) for path in files]

    def _on_hub(self) -> list[_files.File]:
        """Return the split's files on the hub, of one commit."""
        about = self._about(self.revision)
        names = [file.rfilename for file in about.siblings or ()]
        if any(map(_splits.form, names)):
            configs = getattr(about.card_data, "configs", None) or []
            chosen = _splits.chosen(names, configs, self.subset, self.split)
        else:
            about = self._about(CONVERTED)
            names = [file.rfilename for file in about.siblings or ()]
            chosen = _splits.converted(names, self.subset, self.split)
        facts = {file.rfilename: file for file in about.siblings or ()}
        root = f"hf://datasets/{self.name}@{about.sha}"
        return [
            _files.File(f"{root}/{name}", facts[name].size or 0, str(facts[name].blob_id))
            for name in chosen
        ]

    def _about(self, revision: str | None) -> DatasetInfo:
        """Return what the hub says of a revision that may be read."""
        from huggingface_hub import HfApi

        api = HfApi()
        try:
            about = api.dataset_info(self.name, revision=revision, files_metadata=True)
            if about.gated:
                api.auth_check(self.name, repo_type="dataset")
        except Exception as error:  # noqa: BLE001 - it has errors of its own, and of its client
            raise self._refused(error, revision, api.endpoint) from None
        return about

    def _refused(self, error: Exception, revision: str | None, hub: str) -> RegaugeError:
        from huggingface_hub import errors

        log_in = "run 'hf auth login', or set HF_TOKEN"
        said = str(error).strip().partition("\n")[0]
        if isinstance(error, errors.HFValidationError):
            return DataError("neither a folder nor a name on the hub", "correct source.name")
        if isinstance(error, errors.GatedRepoError):
            where = f"{hub}/datasets/{self.name}"
            return DataError("it is gated", f"accept its conditions at {where}, then {log_in}")
        if isinstance(error, errors.RepositoryNotFoundError):
            problem = f"neither a folder nor a dataset that {hub} shows you"
            return DataError(problem, f"correct source.name; for a private one {log_in}")
        if isinstance(error, errors.RevisionNotFoundError):
            if revision == CONVERTED:
                return DataError("no file of it can be read", "name one with files of data")
            return DataError(f"there is no revision '{revision}'", "correct source.revision")
        return TransientError(
            f"the dataset '{self.name}': the hub {hub} does not answer as it should: {said}",
            "see the network (HF_ENDPOINT, HTTPS_PROXY) and run again, or name a folder",
        )


def _document(path: Path, key: str) -> Any:
    """Return a value of a file that `save_to_disk` wrote."""
    try:
        return json.loads(path.read_text())[key]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} has no '{key}'", "save the dataset again") from None


def _configs(path: Path) -> list[dict[str, Any]]:
    """Return the subsets that the head of a README describes."""
    from huggingface_hub import metadata_load

    try:
        head = metadata_load(path) if path.exists() else None
    except Exception as error:  # noqa: BLE001 - errors of the library below it
        said = str(error).partition("\n")[0]
        raise DataError(f"the head of {path} is no YAML: {said}", "correct it there") from None
    return (head or {}).get("configs") or []
