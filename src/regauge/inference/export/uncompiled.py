"""Models that were not exported: a run or a model's folder, used like an artifact.

The program runs in fp32 on the best accelerator of this machine, by default without compilation.
Nothing proves its batch invariance. The imports of transformers and of the settings of a run are
left to the functions that need them: an artifact loads without both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from regauge import accelerators, config
from regauge.inference.backends import check_usable
from regauge.inference.export.artifact import Artifact, is_artifact, open_artifact
from regauge.inference.export.buckets import build_buckets, resolve_buckets
from regauge.inference.export.export_settings import BucketSettings, TextSettings
from regauge.inference.export.manifest import (
    ArtifactManifest,
    Compilation,
    TargetMachine,
    WeightsOrigin,
)
from regauge.models.inference_modules import named_tensors
from regauge.models.settings import GREEDY, Generation
from regauge.registry.model_reference import locate_model
from regauge.system.errors import SettingsError
from regauge.system.hub import hash_model, resolve_model
from regauge.system.log import logger
from regauge.system.processes import available_cores

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from regauge.inference.backends import Backend
    from regauge.inference.export.programs import ProgramSpec
    from regauge.inference.export.sources import TrainedTask

DEFAULT_TEXT = TextSettings()


@dataclass(frozen=True)
class UncompiledModel(Artifact):
    """A model's folder with the manifest that an artifact of it would have."""

    needs_proof: ClassVar[bool] = False
    path: str = ""
    """The path that was named: a run, a folder or a name on the hub."""
    text: TextSettings = DEFAULT_TEXT
    """How the model reads a text."""
    loaded_specs: list[ProgramSpec] = field(default_factory=list, repr=False)
    """The program with its weights, if it is loaded and was not used yet."""

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer, which is that of the model."""
        return self.folder

    @property
    def content_sha256(self) -> str:
        """The hash of the names and hashes of the files that the model is loaded from."""
        return hash_model(self.folder)

    def load_weights(self) -> Mapping[str, Tensor]:
        """Return the weights and buffers by name, on the CPU."""
        return {name: value.detach() for name, value in named_tensors(self._load_program()).items()}

    def restore_program(self) -> nn.Module:
        """Return the program with its weights."""
        program = self._load_program()
        self.loaded_specs.clear()
        return program

    def check_target(self) -> None:
        """Do nothing, because the manifest describes this machine."""

    def _load_program(self) -> nn.Module:
        if not self.loaded_specs:
            self.loaded_specs.append(_load_spec(self.path, self.folder, self.text))
        return self.loaded_specs[0].program


def open_model(
    path: str,
    generation: Generation = GREEDY,
    *,
    text: TextSettings | None = None,
    backend: Backend | None = None,
    threads: int | None = None,
    keep_weights: bool = True,
) -> Artifact:
    """Return the artifact of a path, or the model of a run, of a folder or of a hub name.

    A path such as `registry/qa@production` is a version in a model registry; its files are
    verified.

    `text`, `backend` and `threads` are for models that are no artifacts. With `keep_weights`, the
    weights of such a model stay in memory until its program is built. Raises the errors of
    `open_artifact`, and SettingsError if there is no model.
    """
    path = locate_model(path)
    if backend is None and is_artifact(Path(path)):
        if text is not None:
            problem = f"{path} is an artifact, whose text settings are fixed"
            raise SettingsError(problem, "remove `text`, or export the model again with it")
        return open_artifact(path, generation)
    folder, text = resolve_model(path), text or DEFAULT_TEXT
    spec = _load_spec(path, folder, text)
    manifest = _build_manifest(path, spec, backend, threads or available_cores())
    specs = [spec] if keep_weights else []
    model = UncompiledModel(folder, manifest, generation, path=path, text=text, loaded_specs=specs)
    model.program  # noqa: B018 - raises SettingsError
    return model


def recommend_export(artifact: Artifact) -> None:
    """Log that a model runs uncompiled, and the command that compiles it."""
    if isinstance(artifact, UncompiledModel):
        path, backend = artifact.path, artifact.manifest.compiled.backend.kind
        is_run = (Path(path) / config.SAVED_RUN).is_file()
        command = f"regauge export {path}" if is_run else f"regauge export --model {path}"
        message = "%s runs uncompiled (%s fp32); for speed, run: %s --to ARTIFACT"
        logger.info(message, path, backend, command)


def find_trained_task(run: Path) -> TrainedTask | None:
    """Return the task of a run, or the first one of several; None if its dataset is missing."""
    from regauge.inference.export.sources import TrainedTask
    from regauge.training.settings import TrainSettings

    tables = config.read_saved_run(run)
    task_config = config.build(TrainSettings, tables).task_configs[0]
    dataset = Path(task_config.data.path)
    if not dataset.is_dir():
        warning = "dataset %s is missing: the fields and token limits of the task are unknown"
        logger.warning(warning, dataset)
        return None
    return TrainedTask(task_config.task, dataset)


def _load_spec(path: str, folder: Path, text: TextSettings) -> ProgramSpec:
    """Return the program of a folder; a run reads the fields of its task."""
    from regauge.inference.export.sources import build_source_spec

    run = Path(path)
    trained = find_trained_task(run) if (run / config.SAVED_RUN).is_file() else None
    return build_source_spec(folder, text, trained)


def _build_manifest(
    path: str, spec: ProgramSpec, backend: Backend | None, threads: int
) -> ArtifactManifest:
    accelerator = accelerators.resolve(None, quiet=True)
    backend = backend or config.parse_choice("backends", "eager")
    check_usable(backend, accelerator)
    if backend.is_ahead_of_time:
        problem = f"backend '{backend.kind}' runs only what 'regauge export' has compiled"
        raise SettingsError(problem, "export the model, or use backend 'eager' or 'torch-compile'")
    if spec.output_kind == "text" and not backend.supports_loops:
        problem = f"backend '{backend.kind}' runs no loops, so it cannot generate text"
        raise SettingsError(problem, "use backend 'eager'")
    buckets = resolve_buckets(BucketSettings(), spec.max_tokens, on_host=accelerator.on_host)
    shapes = build_buckets(buckets, spec.max_tokens, has_dynamic_shapes=backend.has_dynamic_shapes)
    return ArtifactManifest(
        format=config.FORMAT,
        program=spec.manifest_entry,
        compiled=Compilation(precision="fp32", backend=backend, versions=backend.versions()),
        target=TargetMachine(
            accelerator=accelerator.kind, chip=accelerator.model_name(), threads=threads
        ),
        buckets=shapes,
        origin=WeightsOrigin(path=path, sha256=""),
        files={},
    )
