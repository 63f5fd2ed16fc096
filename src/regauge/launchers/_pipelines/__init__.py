"""The jobs of a pipeline, one for each stage, which schedulers start one after the other."""
