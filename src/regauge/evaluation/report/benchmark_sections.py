"""The sections of a report on benchmarks: of training, of artifacts and of servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from regauge.evaluation.report import inference_section, scaling_section, serving_section

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.evaluation.report.inference_section import InferenceSection
    from regauge.evaluation.report.scaling_section import ScalingSection
    from regauge.evaluation.report.serving_section import ServingSection
    from regauge.run_folders.run_folder import RunFolder


class BenchmarkSections(NamedTuple):
    """The benchmarks of some runs."""

    training: tuple[ScalingSection, ...]
    inference: tuple[InferenceSection, ...]
    serving: tuple[ServingSection, ...]

    @property
    def summary(self) -> tuple[str, ...]:
        """The results in sentences."""
        return (
            *(sentence for section in self.inference for sentence in section.summary),
            *(sentence for section in self.serving for sentence in section.summary),
        )


def build_benchmark_sections(runs: Sequence[RunFolder]) -> BenchmarkSections:
    """Return the sections of the benchmarks of runs."""
    documents = [(run.benchmark, run.name) for run in runs]
    return BenchmarkSections(
        tuple(filter(None, (scaling_section.build_scaling_section(*pair) for pair in documents))),
        tuple(
            filter(None, (inference_section.build_inference_section(*pair) for pair in documents))
        ),
        tuple(filter(None, (serving_section.build_serving_section(*pair) for pair in documents))),
    )
