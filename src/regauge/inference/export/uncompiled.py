"""Models that were not exported: a run or a model folder, used like an artifact.

The program runs in fp32 on this machine's best accelerator, by default without compilation. Nothing
proves its batch invariance. Functions import transformers and a run's settings only when they need
them: an artifact loads without both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from regauge import accelerators, config
from regauge.config.output_files import SAVED_RUN
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

DEFAULT_TEXT = TextSettings()


@dataclass(frozen=True)
class UncompiledModel(Artifact):
    """A model folder with the manifest an artifact would have."""

    needs_proof: ClassVar[bool] = False
    path: str = ""
    """The named path: a run, a folder or a hub name."""
    text: TextSettings = DEFAULT_TEXT
    loaded_specs: list[ProgramSpec] = field(default_factory=list, repr=False)
    """The program with weights, if loaded and not used yet."""

    @property
    def tokenizer_folder(self) -> Path:
        """The model folder, which has the tokenizer."""
        return self.folder

    @property
    def content_sha256(self) -> str:
        """Hash of the model files' names and hashes."""
        return hash_model(self.folder)

    @property
    def weights_file(self) -> None:
        """None: the program's weights have other names than the model's."""

    def load_weights(self) -> Mapping[str, Tensor]:
        from regauge.models.inference_modules import named_tensors

        return {name: value.detach() for name, value in named_tensors(self._load_program()).items()}

    def restore_program(self) -> nn.Module:
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
    """Open the artifact at a path, or the model in a run, a folder or on the hub.

    A path such as `registry/qa@production` is a version in a model registry; its files are
    verified.

    `text`, `backend` and `threads` are for models other than artifacts. With `keep_weights`, such a
    model's weights stay in memory until the program is built. Raises the errors from
    `open_artifact`, and SettingsError for a missing model.
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
    """Log that a model runs uncompiled, and the command to compile it."""
    if isinstance(artifact, UncompiledModel):
        path, backend = artifact.path, artifact.manifest.compiled.backend.kind
        is_run = (Path(path) / SAVED_RUN).is_file()
        command = f"regauge export {path}" if is_run else f"regauge export --model {path}"
        message = "%s runs uncompiled (%s fp32); for speed, run: %s --to ARTIFACT"
        logger.info(message, path, backend, command)


def _load_spec(path: str, folder: Path, text: TextSettings) -> ProgramSpec:
    from regauge.inference.export.sources import build_source_spec
    from regauge.inference.export.trained_task import find_task_with_dataset

    run = Path(path)
    trained = find_task_with_dataset(run) if (run / SAVED_RUN).is_file() else None
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
    if spec.entry.output_kind == "text" and not backend.supports_loops:
        problem = f"backend '{backend.kind}' cannot run loops, so it cannot generate text"
        raise SettingsError(problem, "use backend 'eager'")
    buckets = resolve_buckets(BucketSettings(), spec.max_tokens, on_host=accelerator.on_host)
    shapes = build_buckets(buckets, spec.max_tokens, has_dynamic_shapes=backend.has_dynamic_shapes)
    return ArtifactManifest(
        format=config.FORMAT,
        program=spec.entry,
        compiled=Compilation(precision="fp32", backend=backend, versions=backend.versions()),
        target=TargetMachine(
            accelerator=accelerator.kind, chip=accelerator.model_name(), threads=threads
        ),
        buckets=shapes,
        origin=WeightsOrigin(path=path, sha256=""),
        files={},
    )
