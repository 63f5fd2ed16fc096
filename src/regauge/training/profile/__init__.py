"""Profiling of training steps.

Entry point: the hook `profiler.StepProfiler`, which profiles a few steps with torch's profiler.

- `trace` reads its Chrome trace.
- `breakdown` sums the time by kind of work and by module.
- `advice` compares the rates with the peak of the chip, and recommends changes.
"""
