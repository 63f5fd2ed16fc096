"""One graph for each shape of the ladder, compiled ahead for the cores of Inferentia and Trainium.

Written to the documentation of the Neuron SDK 2.27 to 2.31, and not run on its hardware. The SDK
of Inf1 is archived and needs torch 1.13: with any torch that Regauge takes it is not available.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from regauge import choices
from regauge.accelerators import Availability
from regauge.backends import Backend, Job, Payload, Runner, Site
from regauge.errors import SettingsError

if TYPE_CHECKING:
    from regauge.accelerators import Accelerator, Precision
    from regauge.backends import Level, Quantized
    from regauge.backends._neuron import Plan

DEVICE = Path("/dev/neuron0")
GENERATIONS = ("inf2", "trn1", "trn2")
"""What compiled graphs are for, as the accelerator's features name it."""
FIRST = "cpu"
"""As what torch sees Inf1: graphs take tensors of the host and give them back there."""
FAST_MATH = {
    ("matmult", "bf16"): "fp32-cast-matmult-bf16",
    ("matmult", "fp16"): "fp32-cast-matmult-fp16",
    ("all", "bf16"): "fp32-cast-all",
    ("all", "fp16"): "fp32-cast-all-fp16",
}
"""What the compiler of Inf1 calls what is narrowed to what (neuron-cc's reference)."""


class Neuron(Backend):
    """Traced graphs, weights beside them; several cores share rows, weights, or layers."""

    symbolic: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = (
        "torch",
        "torch_neuronx",
        "neuronx_cc",
        "neuronx_distributed",
        "torch_neuron",
        "neuron_cc",
    )

    cores: int = Field(default=1, ge=1)
    """NeuronCores that compute a batch: the first of those that the process sees."""
    share: Literal["rows", "weights", "layers"] = "rows"
    """What they share: `weights` by tensor parallelism, `layers` as a pipeline (Inf1 alone)."""
    weights: Literal["beside", "inside"] = "beside"
    """Whether a graph can be given other weights; `inside` was faster in some releases."""
    auto_cast: Literal["none", "matmult", "all"] = "none"
    """Which fp32 operations the compiler may narrow."""
    auto_cast_type: Literal["bf16", "fp16", "tf32"] = "bf16"
    """What they are narrowed to."""
    optlevel: Literal[1, 2, 3] = 2
    """Effort of the compiler."""
    model_type: Literal["transformer", "generic", "unet-inference"] = "transformer"
    """Which optimisations the compiler prefers."""
    flags: tuple[str, ...] = ()
    """More arguments of the compiler, such as `--enable-fast-loading-neuron-binaries`."""

    @classmethod
    def available(cls) -> Availability:
        if not _first():
            found: Availability = choices.load("accelerators", "neuron").available()
            return found
        try:
            ours, theirs = version("torch"), version("torch_neuron")
        except PackageNotFoundError as error:
            return Availability(0, f"{error.name} is not installed as a package")
        wanted = ".".join(theirs.split(".")[:2])
        if ours.split(".")[:2] != wanted.split("."):
            return Availability(0, f"torch_neuron needs torch {wanted}, here is {ours}")
        if not DEVICE.exists():
            return Availability(0, f"the Neuron driver shows no device ({DEVICE})")
        return Availability(2, f"torch_neuron {theirs} and {DEVICE}")

    def fits(self, accelerator: Accelerator) -> str | None:
        first = _first()
        kind = FIRST if first else "neuron"
        if accelerator.kind != kind:
            return f"it compiles for {kind}, not for {accelerator.kind}"
        if self.share == "layers" and not first:
            return "cores share layers on Inf1 alone"
        if self.share == "weights" and first:
            return "cores do not share weights on Inf1"
        if self.share == "weights" and importlib.util.find_spec("neuronx_distributed") is None:
            return "neuronx_distributed is not installed, by which cores share weights"
        return None

    def forms(self, accelerator: Accelerator) -> tuple[tuple[Precision, Quantized], ...]:
        return (("fp32", "no"),) if _first() else super().forms(accelerator)

    def needs(self, site: Site, level: Level | None) -> frozenset[str]:
        """Return the kind of device and its generation; raises SettingsError where it is unknown.

        Of Inf1 nothing tells more than that its package and its driver are there.
        """
        super().needs(site, level)
        kind = site.accelerator.kind
        return frozenset({kind} if _first() else {kind, _generation(site.accelerator)})

    def export(self, job: Job, site: Site, folder: Path) -> None:
        """Write the graphs; raises SettingsError for rows or heads that cores cannot share."""
        from regauge.backends import _neuron

        plan = self._plan(site.accelerator)
        if _first():
            _neuron.export_first(job, plan, folder)
        elif self.share == "weights":
            _neuron.export_divided(job, plan, folder)
        else:
            _neuron.export_traced(job, plan, folder)

    def load(self, payload: Payload, site: Site) -> Runner:
        """Return what computes a payload; every graph has been computed once."""
        from regauge.backends import _neuron
        from regauge.backends._static import Static

        plan = self._plan(site.accelerator)
        if _first():
            compute = _neuron.load_first(payload, plan)
        elif self.share == "weights":
            compute = _neuron.load_divided(payload, plan)
        else:
            compute = _neuron.load_traced(payload, plan)
        return Static(payload.inputs, payload.shapes, compute, lambda: 0).warmed()

    def _plan(self, accelerator: Accelerator) -> Plan:
        from regauge.backends._neuron import Plan

        if _first():
            replicas = self.cores if self.share == "rows" else 1
            return Plan(self._flags_of_first(), replicas, inside=True)
        flags = self._flags(_generation(accelerator))
        return Plan(flags, self.cores, inside=self.weights == "inside")

    def _flags(self, target: str) -> tuple[str, ...]:
        """Return the arguments of neuronx-cc, in the order of its reference."""
        return (
            *("--target", target),
            *("--model-type", self.model_type),
            *("--auto-cast", self.auto_cast),
            *(("--auto-cast-type", self.auto_cast_type) if self.auto_cast != "none" else ()),
            *("--optlevel", str(self.optlevel)),
            *self.flags,
        )

    def _flags_of_first(self) -> tuple[str, ...]:
        """Return the arguments of neuron-cc, which has neither levels nor types of models."""
        how = FAST_MATH.get((self.auto_cast, self.auto_cast_type))
        if how is None and self.auto_cast != "none":
            problem = f"Inf1 does not narrow to {self.auto_cast_type}"
            raise SettingsError(problem, "set auto_cast_type to bf16 or fp16")
        pipeline = ("--neuroncore-pipeline-cores", str(self.cores))
        return (
            *("--fast-math", how or "none"),
            *(pipeline if self.share == "layers" else ()),
            *self.flags,
        )


def _first() -> bool:
    """Return whether what is installed is the SDK of Inf1, the first generation."""
    neuronx, neuron = map(importlib.util.find_spec, ("torch_neuronx", "torch_neuron"))
    return neuronx is None and neuron is not None


def _generation(accelerator: Accelerator) -> str:
    """Return which generation of chips is compiled for; raises SettingsError if none is known."""
    found = accelerator.features() & set(GENERATIONS)
    if not found:
        problem = "nothing says for which generation of instance is compiled"
        raise SettingsError(problem, f"set accelerator.target to one of {', '.join(GENERATIONS)}")
    return min(found)
