"""Artifacts: compiled models with evidence that their outputs match fp32.

`export.export_artifact` compiles candidates (`candidates`), compares them with fp32 (`quality`,
`batch_invariance`), times them and writes the best one. `artifact.open_artifact` verifies the
files; `engine.Engine` computes batches in the shapes from `buckets`. `model.load` is the Python
interface: texts in, arrays out. `preprocess` and `postprocess` convert records to tensors and
outputs to columns.
"""
