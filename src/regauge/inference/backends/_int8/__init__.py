"""Quantizes linear layers to 8-bit integers; shared by several backends.

The entry point is `quantize.quantize_linear_layers`. `quantize.py` chooses the layers and their
scales by real inputs, `linear.py` contains the quantized layer, and `split.py` splits features with
large values. The layers only quantize and dequantize; the integer kernels belong to ONNX Runtime
and OpenVINO.
"""
