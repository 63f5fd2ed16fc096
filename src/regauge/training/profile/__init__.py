"""Profiling of training steps: traces, a breakdown of the time, and advice.

Entry point: `profiler.watching`.
"""
