"""Models: transformers architectures with heads, pooling, adapters and reproducible dropout.

`architectures.build_model` builds a transformers model; `modules` wraps it for each task, `ranker`
for ranking, `multitask` for several tasks, and `custom` adapts user modules. `init_weights` gives a
module its initial weights; `weights`, `hub` and `sentence_transformers` read and write model
folders. `losses`, `attention`, `attention_masks`, `dropout`, `pooling` and `lora` are model parts.
`inference_modules` and `io_spec` define the programs that backends compile.

May import `data` and `config`. `settings`, `io_spec`, `hub`, `tokenizer_convention` and
`sentence_transformers` do not import torch.
"""
