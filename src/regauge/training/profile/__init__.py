"""Profiles training steps.

Entry point: the hook `profiler.StepProfiler`, which profiles a few steps with torch's profiler.

- `trace` reads the profiler's Chrome trace.
- `breakdown` sums the time by kind of work and by module.
- `advice` compares the rates with the chip's peak, and recommends changes.
"""
