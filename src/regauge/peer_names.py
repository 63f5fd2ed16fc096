"""Names of settings in other training systems, with the settings of Regauge that replace them.

Messages about unknown keys and `regauge explain` read this table. Choices list their own names in
other systems, as `peer_names` of their class. A setting is a key, such as
`stop.epochs`, or a key with its value, such as `execution.precision=fp16`.
"""

from __future__ import annotations

from typing import NamedTuple

_TRAINER = {
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.epsilon",
    "attn_implementation": "model.attention",
    "bf16": "execution.precision=bf16",
    "cache_dir": "data.path",
    "class_weight": "task.class_weights",
    "dataloader_num_workers": "data.workers",
    "dataloader_prefetch_factor": "data.prefetch_steps",
    "dataset_config_name": "source.subset",
    "dataset_name": "source",
    "ddp_timeout": "execution.timeout_seconds",
    "deepspeed": "strategy",
    "disable_tqdm": "output.trackers",
    "do_eval": "evaluation.every_steps",
    "do_sample": "generation.temperature",
    "early_stopping_patience": "stop.patience",
    "early_stopping_threshold": "stop.min_delta",
    "earlystoppingcallback": "stop.patience",
    "eval_batch_size": "evaluation.microbatch_rows",
    "eval_dataset": "validation.source",
    "eval_steps": "evaluation.every_steps",
    "eval_strategy": "evaluation.every_steps",
    "evaluation_strategy": "evaluation.every_steps",
    "fp16": "execution.precision=fp16",
    "fsdp": "strategy=fsdp",
    "gradient_accumulation_steps": "batch.rows batch.microbatch_rows",
    "gradient_checkpointing": "execution.activation_checkpointing",
    "greater_is_better": "output.checkpoint.best_mode",
    "group_by_length": "task.max_buckets",
    "id2label": "task.class_names",
    "label2id": "task.class_names",
    "label_column": "task.label",
    "label_smoothing_factor": "task.label_smoothing",
    "learning_rate": "optimizer.learning_rate",
    "load_best_model_at_end": "output.final_model=best",
    "logging_dir": "output.trackers",
    "logging_steps": "output.log_every_steps",
    "lr_scheduler_type": "optimizer.schedule.kind",
    "max_eval_samples": "evaluation.rows",
    "max_grad_norm": "optimizer.max_grad_norm",
    "max_length": "rows.length rows.fields",
    "max_new_tokens": "generation.max_new_tokens text.max_new_tokens",
    "max_seq_length": "rows.length rows.fields",
    "max_steps": "stop.steps",
    "metric_for_best_model": "output.checkpoint.best_metric",
    "mlm_probability": "task.mlm_probability",
    "model_name_or_path": "model.path",
    "num_labels": "task.classes",
    "num_train_epochs": "stop.epochs",
    "optim": "optimizer.kind",
    "output_dir": "output.folder",
    "per_device_eval_batch_size": "evaluation.microbatch_rows",
    "per_device_train_batch_size": "batch.microbatch_rows batch.rows",
    "problem_type": "task.problem_type",
    "report_to": "output.trackers",
    "resume_from_checkpoint": "output.folder",
    "run_name": "output.folder",
    "save_only_model": "output.checkpoint.keep_last",
    "save_steps": "output.checkpoint.every_steps",
    "save_strategy": "output.checkpoint.every_steps",
    "save_total_limit": "output.checkpoint.keep_last",
    "seed": "seed",
    "stop_strings": "generation.stop",
    "temperature": "generation.temperature",
    "test_file": "evaluate.source",
    "test_size": "split.heldout_fraction",
    "text_column": "rows.text",
    "tf32": "execution.precision=tf32",
    "tokenizer_name": "tokenizer.path",
    "top_k": "generation.top_k",
    "top_p": "generation.top_p",
    "torch_compile": "execution.compile",
    "train_batch_size": "batch.rows",
    "train_dataset": "source",
    "train_file": "source.files",
    "use_cpu": "accelerator=cpu",
    "validation_file": "validation.source",
    "validation_split_percentage": "split.heldout_fraction",
    "wandb_entity": "output.trackers=wandb",
    "wandb_project": "output.trackers=wandb",
    "warmup_ratio": "optimizer.schedule.warmup_steps",
    "warmup_steps": "optimizer.schedule.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
}
_SENTENCE_TRANSFORMERS = {
    "batch_sampler": "task.negatives_group_size",
    "default_prompt_name": "text.default_prompt",
    "distance_metric": "task.distance",
    "evaluation_steps": "evaluation.every_steps",
    "evaluator": "evaluation.every_steps",
    "loss": "task",
    "matryoshka_dims": "task.matryoshka_dims",
    "max_seq_length": "rows.fields text.max_seq_length",
    "mini_batch_size": "batch.microbatch_rows",
    "normalize_embeddings": "text.normalize",
    "output_path": "output.folder",
    "pooling_mode": "task.pooling text.pooling",
    "prompts": "text.prompts",
    "scale": "task.temperature",
    "train_loss": "task",
    "triplet_margin": "task.margin",
    "warmup_steps": "optimizer.schedule.warmup_steps",
}
_TRL_AND_PEFT = {
    "alpha": "model.lora.alpha",
    "beta": "task.beta",
    "dpo_beta": "task.beta",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_r": "model.lora.rank",
    "loss_type": "task",
    "peft_config": "model.lora",
    "r": "model.lora.rank",
    "ref_model": "model.path",
    "target_modules": "model.lora.targets",
    "use_peft": "model.lora",
}
_AXOLOTL = {
    "adapter": "model.lora",
    "base_model": "model.path",
    "base_model_config": "model.config",
    "chat_template": "rows.chat_template",
    "dataset_prepared_path": "data.path",
    "datasets": "source",
    "early_stopping_patience": "stop.patience",
    "eval_sample_packing": "rows.layout=packed",
    "evals_per_epoch": "evaluation.every_steps",
    "flash_attention": "model.attention",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_r": "model.lora.rank",
    "lora_target_linear": "model.lora.targets",
    "lora_target_modules": "model.lora.targets",
    "lr_scheduler": "optimizer.schedule.kind",
    "micro_batch_size": "batch.microbatch_rows",
    "num_epochs": "stop.epochs",
    "optimizer": "optimizer.kind",
    "sample_packing": "rows.layout=packed",
    "saves_per_epoch": "output.checkpoint.every_steps",
    "sdp_attention": "model.attention",
    "sequence_len": "rows.length",
    "test_datasets": "validation.source",
    "tokenizer_config": "tokenizer.path",
    "unfrozen_parameters": "model.trainable_layers",
    "val_set_size": "split.heldout_fraction",
    "wandb_entity": "output.trackers=wandb",
    "wandb_project": "output.trackers=wandb",
}
_LITGPT = {
    "checkpoint_dir": "model.path",
    "data.val_split_fraction": "split.heldout_fraction",
    "devices": "execution.processes",
    "eval.interval": "evaluation.every_steps",
    "eval.max_iters": "evaluation.rows",
    "eval.max_new_tokens": "evaluation.samples.max_new_tokens",
    "logger_name": "output.trackers",
    "lora_r": "model.lora.rank",
    "num_nodes": "execution.nodes.count",
    "out_dir": "output.folder",
    "precision": "execution.precision",
    "tokenizer_dir": "tokenizer.path",
    "train.epochs": "stop.epochs",
    "train.global_batch_size": "batch.rows",
    "train.log_interval": "output.log_every_steps",
    "train.lr_warmup_steps": "optimizer.schedule.warmup_steps",
    "train.max_norm": "optimizer.max_grad_norm",
    "train.max_seq_length": "rows.length",
    "train.max_steps": "stop.steps",
    "train.max_tokens": "stop.tokens",
    "train.micro_batch_size": "batch.microbatch_rows",
    "train.min_lr": "optimizer.schedule.min_lr_ratio",
    "train.save_interval": "output.checkpoint.every_steps",
}
_LIGHTNING = {
    "16_mixed": "execution.precision=fp16",
    "32_true": "execution.precision=fp32",
    "accelerator": "accelerator",
    "accumulate_grad_batches": "batch.rows batch.microbatch_rows",
    "bf16_mixed": "execution.precision=bf16",
    "check_val_every_n_epoch": "evaluation.every_steps",
    "ckpt_path": "output.folder",
    "default_root_dir": "output.folder",
    "devices": "execution.processes",
    "early_stopping": "stop.patience",
    "enable_checkpointing": "output.checkpoint",
    "every_n_train_steps": "output.checkpoint.every_steps",
    "gradient_clip_val": "optimizer.max_grad_norm",
    "limit_val_batches": "evaluation.rows",
    "log_every_n_steps": "output.log_every_steps",
    "logger": "output.trackers",
    "max_epochs": "stop.epochs",
    "max_steps": "stop.steps",
    "max_time": "stop.seconds",
    "min_delta": "stop.min_delta",
    "monitor": "output.checkpoint.best_metric",
    "num_nodes": "execution.nodes.count",
    "patience": "stop.patience",
    "precision": "execution.precision",
    "profiler": "profile",
    "save_top_k": "output.checkpoint.keep_last",
    "strategy": "strategy",
    "val_check_interval": "evaluation.every_steps",
}
_TORCH = {
    "batch_size": "batch.rows",
    "betas": "optimizer.betas",
    "bfloat16": "execution.precision=bf16",
    "clip_grad_norm_": "optimizer.max_grad_norm",
    "eps": "optimizer.epsilon",
    "float16": "execution.precision=fp16",
    "float32": "execution.precision=fp32",
    "lr": "optimizer.learning_rate",
    "master_addr": "execution.nodes.endpoint",
    "max_restarts": "execution.supervision.max_attempts_per_step",
    "momentum": "optimizer.betas",
    "nnodes": "execution.nodes.count",
    "nproc_per_node": "execution.processes",
    "num_threads": "execution.threads",
    "num_workers": "data.workers",
    "param_groups": "optimizer.lr_multipliers",
    "rdzv_backend": "execution.nodes.rendezvous",
    "rdzv_endpoint": "execution.nodes.endpoint",
    "weight_decay": "optimizer.weight_decay",
}
_COMMON = {
    "adamw": "optimizer.kind=adamw",
    "amp": "execution.precision",
    "attention": "model.attention",
    "batch": "batch",
    "best": "output.checkpoint.best_metric",
    "checkpoint": "output.checkpoint",
    "checkpoints": "output.checkpoint",
    "class_weights": "task.class_weights",
    "classes": "task.classes",
    "compile": "execution.compile",
    "cpu": "accelerator=cpu",
    "dataset": "data.path",
    "ddp": "strategy=ddp",
    "delimiter": "source.delimiter",
    "device": "accelerator",
    "dropout": "model.dropout",
    "dtype": "execution.precision",
    "early_stop": "stop.patience",
    "early_stopping": "stop.patience",
    "epochs": "stop.epochs",
    "eval_dataset_name": "validation.source",
    "eval_file": "validation.source",
    "freeze": "model.trainable_layers",
    "freeze_backbone": "model.trainable_layers",
    "freeze_encoder": "model.trainable_layers",
    "frozen": "model.trainable_layers",
    "gpu": "accelerator",
    "gpus": "execution.processes",
    "grad_accum": "batch.rows batch.microbatch_rows",
    "grad_clip": "optimizer.max_grad_norm",
    "gradient_accumulation": "batch.rows batch.microbatch_rows",
    "gradient_clipping": "optimizer.max_grad_norm",
    "half": "execution.precision=fp16",
    "hard_negatives": "task.negatives",
    "hidden_size": "model.config",
    "label": "task.label",
    "label_names": "task.class_names",
    "label_smoothing": "task.label_smoothing",
    "labels": "task.label",
    "lora": "model.lora",
    "lora_rank": "model.lora.rank",
    "lr_schedule": "optimizer.schedule.kind",
    "max_len": "rows.length rows.fields",
    "max_tokens": "stop.tokens",
    "metric": "output.checkpoint.best_metric",
    "mixed_precision": "execution.precision",
    "model_name": "model.path",
    "model_path": "model.path",
    "nodes": "execution.nodes.count",
    "num_hidden_layers": "model.config",
    "num_processes": "execution.processes",
    "out": "output.folder",
    "output_folder": "output.folder",
    "pooling": "task.pooling text.pooling",
    "price": "execution.price",
    "quantization": "candidates.quantization",
    "scheduler": "optimizer.schedule.kind",
    "seq_len": "rows.length",
    "sequence_length": "rows.length",
    "steps": "stop.steps",
    "temperature": "task.temperature",
    "test_data": "evaluate.source",
    "test_split": "split.heldout_fraction",
    "threads": "execution.threads",
    "trackers": "output.trackers",
    "unfreeze": "model.trainable_layers",
    "val_file": "validation.source",
    "val_fraction": "split.heldout_fraction",
    "validation": "validation.source",
    "validation_data": "validation.source",
    "validation_split": "split.heldout_fraction",
    "vocab_size": "tokenizer.vocab_size",
    "wandb": "output.trackers=wandb",
    "warmup": "optimizer.schedule.warmup_steps",
    "workers": "data.workers",
    "world_size": "execution.processes",
}

PEERS = {
    "Trainer": _TRAINER,
    "sentence-transformers": _SENTENCE_TRANSFORMERS,
    "TRL and peft": _TRL_AND_PEFT,
    "axolotl": _AXOLOTL,
    "litgpt": _LITGPT,
    "Lightning": _LIGHTNING,
    "torch": _TORCH,
    "": _COMMON,
}
"""The settings of each system by their names there; several settings are separated by spaces."""

_QUANTIZED = "weights are not quantized in training"
_DECODING = "answers are greedy or sampled by temperature, top_k and top_p"
_HUB = "nothing is uploaded; export the model, and upload its folder"
ABSENT = {
    "bnb_4bit_compute_dtype": _QUANTIZED,
    "bnb_4bit_quant_type": _QUANTIZED,
    "hub_model_id": _HUB,
    "length_penalty": _DECODING,
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "neftune_noise_alpha": "embeddings get no noise",
    "no_repeat_ngram_size": _DECODING,
    "num_beams": _DECODING,
    "push_to_hub": _HUB,
    "qlora": _QUANTIZED,
    "repetition_penalty": _DECODING,
}
"""Settings of other systems that have no counterpart, with the reason."""


class PeerSetting(NamedTuple):
    """A setting of another system, and the settings of Regauge that replace it."""

    peer: str
    """The other system; empty if the name is used in several."""
    name: str
    settings: tuple[str, ...]
    """Keys, or keys with values such as `execution.precision=fp16`."""


def list_settings() -> tuple[PeerSetting, ...]:
    """Return the settings of all other systems that have a counterpart."""
    return tuple(
        PeerSetting(peer, name, tuple(settings.split()))
        for peer, names in PEERS.items()
        for name, settings in names.items()
    )


def find_settings(word: str) -> tuple[str, ...]:
    """Return the settings that replace a setting of another system; empty if it is unknown.

    A flag such as `--num-train-epochs` has the name of its key. Of a dotted name, the last part is
    enough.
    """
    name = normalize(word)
    matches = [item for item in list_settings() if name in (item.name, item.name.split(".")[-1])]
    return tuple(dict.fromkeys(setting for item in matches for setting in item.settings))


def find_absence(word: str) -> str | None:
    """Return why a setting of another system has no counterpart; None if it is unknown."""
    return ABSENT.get(normalize(word))


def normalize(word: str) -> str:
    """Return a flag or a key in lower case, with underscores."""
    return word.lstrip("-").replace("-", "_").lower()
