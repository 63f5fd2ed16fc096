"""Compiles training graphs.

- `decision.resolve_compile` decides whether torch.compile saves more time than it takes.
- `warmup.warm_up` compiles every declared shape before the first step; `RecompileMonitor` counts
  graphs after that.
- `cache` stores compiled graphs on disk, for several runs.
- `ahead.compile_ahead` fills that cache without training, `parallel` with several processes.
"""
