"""From text to the rows of a step: sources, tokenizer, packing, shards, order, loader, shapes."""
