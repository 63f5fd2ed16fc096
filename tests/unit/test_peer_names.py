"""Names of settings in other systems lead to keys that exist."""

from __future__ import annotations

import re

import pytest

from regauge import cli
from regauge.commands import _reference, explain
from regauge.config import peer_names
from regauge.config.validation import suggest_key
from regauge.system import choices
from regauge.system.errors import SettingsError
from regauge.system.wording import join_alternatives, normalize_key
from regauge.training.settings import TrainSettings

WORDS = (
    *("epochs", "lr", "warmup", "lora", "fp16", "max_length", "num_labels", "gpu", "max_steps"),
    *("gradient_accumulation", "save_steps", "eval_steps", "batch_size", "num_train_epochs"),
    *("per_device_train_batch_size", "learning_rate", "accumulate_grad_batches"),
    *("micro_batch_size", "sequence_len", "val_set_size"),
)
SETTINGS = sorted({name for item in peer_names.list_settings() for name in item.settings})


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_of_the_table_exists(setting: str) -> None:
    key, _, value = setting.partition("=")
    documents = explain.find_keys(key)
    assert documents, f"{key} is no key"
    if value and (names := [row["choice"] for row in documents[0].get("choices", ())]):
        assert value in names
    elif value and key != "source.kind":
        assert (
            any(f'"{value}"' in document["type"] for document in documents) or key == "rows.layout"
        )


def test_the_table_covers_six_systems_and_the_words_of_the_field() -> None:
    peers = {item.peer for item in peer_names.list_settings()}
    expected = {"Trainer", "sentence-transformers", "axolotl", "litgpt", "Lightning", "torch"}
    assert expected <= peers
    for word in WORDS:
        assert peer_names.find_settings(word), word
        assert not explain.main(word, json=True)["matches"][0].get("matches")


def test_a_flag_and_a_dotted_name_are_found() -> None:
    assert peer_names.find_settings("--num-train-epochs") == ("stop.epochs",)
    assert peer_names.find_settings("train.save_interval") == ("output.checkpoint.every_steps",)
    assert peer_names.find_settings("SAVE_INTERVAL") == ("output.checkpoint.every_steps",)
    assert peer_names.find_settings("zzz") == ()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("early_stopping_patience", ["stop.patience"]),
        ("EarlyStoppingCallback", ["stop.patience"]),
        ("early_stopping", ["stop.patience"]),
        ("early-stopping-threshold", ["stop.min_delta"]),
        ("validation_file", ["validation.source"]),
        ("eval_dataset", ["validation.source"]),
        ("eval_dataset_name", ["validation.source"]),
        ("test_datasets", ["validation.source"]),
        ("test_file", ["evaluate.source"]),
        ("do_sample", ["generation.temperature"]),
        ("top_k", ["generation.top_k"]),
        ("top_p", ["generation.top_p"]),
        (
            "max_new_tokens",
            [
                "generation.max_new_tokens",
                "text.max_new_tokens",
                "evaluation.samples.max_new_tokens",
            ],
        ),
        ("temperature", ["generation.temperature", "task.temperature"]),
        ("label_smoothing_factor", ["task.label_smoothing"]),
        ("class_weight", ["task.class_weights"]),
        ("class_weights", ["task.class_weights"]),
        ("problem_type", ["task.problem_type"]),
        ("report_to", ["output.trackers"]),
        ("wandb_project", ["output.trackers=wandb"]),
        ("wandb_entity", ["output.trackers=wandb"]),
        ("dpo_beta", ["task.beta"]),
        ("beta", ["task.beta"]),
        ("ref_model", ["model.path"]),
        ("loss_type", ["task"]),
        ("lora_r", ["model.lora.rank"]),
        ("r", ["model.lora.rank"]),
        ("target_modules", ["model.lora.targets"]),
        ("use_peft", ["model.lora"]),
        ("freeze", ["model.trainable_layers"]),
        ("freeze_encoder", ["model.trainable_layers"]),
        ("unfrozen_parameters", ["model.trainable_layers"]),
    ],
)
def test_an_unknown_key_and_explain_name_the_same_settings(name: str, settings: list[str]) -> None:
    assert [*peer_names.find_settings(name)] == settings
    names = [f"'{setting}'" for setting in settings]
    assert suggest_key(name, ("a", "b"), TrainSettings) == (
        f"did you mean {join_alternatives(names)}?"
    )
    documents = explain.main(name, json=True)["matches"]
    keys = {re.sub(r" \(.+\)", "", doc.get("use") or doc["key"]) for doc in documents}
    assert keys == {*settings}


@pytest.mark.parametrize("name", peer_names.list_absences())
def test_a_setting_without_a_counterpart_is_named_with_the_reason(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = peer_names.find_absence(name)
    assert not peer_names.find_settings(name)
    assert suggest_key(name, ("a", "b"), TrainSettings) == f"remove it, because {reason}"
    with pytest.raises(
        SettingsError, match=f"'{name}' from other systems does not have a counterpart"
    ):
        explain.main(name)
    assert cli.main(["train", "run.toml", f"--{name.replace('_', '-')}", "4"]) == 2
    assert f"remove it, because {reason}" in capsys.readouterr().err


def test_the_names_of_choices_are_unique_in_their_folder() -> None:
    count = 0
    for folder in _reference.list_folders():
        names = [
            name
            for choice in choices.names(folder)
            for name in getattr(choices.load(folder, choice), "peer_names", ())
        ]
        count += len(names)
        assert len(set(names)) == len(names)
        assert all(normalize_key(name) == name for name in names)
        assert not {*names} & {*choices.names(folder)}
    assert count > 30


@pytest.mark.parametrize(
    ("folder", "name", "choice"),
    [
        ("accelerators", "gpu", "cuda"),
        ("accelerators", "TPU", "tpu"),
        ("strategies", "deepspeed-stage-3", "fsdp"),
        ("tasks", "cross-encoder", "rank"),
        ("tasks", "token-classification", "tokens"),
        ("tasks", "ner", "tokens"),
        ("tasks", "DPOTrainer", "dpo"),
        ("tasks", "CoSENTLoss", "similarity"),
        ("tasks", "CosineSimilarityLoss", "similarity"),
        ("tasks", "TripletLoss", "triplet"),
        ("tasks", "MSELoss", "distill"),
        ("tasks", "MultipleNegativesRankingLoss", "contrastive"),
        ("tasks", "InfoNCE", "contrastive"),
        ("tasks", "text-classification", "classify"),
        ("tasks", "SequenceClassification", "classify"),
        ("tasks", "SFTTrainer", "sft"),
        ("trackers", "weights-and-biases", "wandb"),
        ("data/sources", "hf", "huggingface"),
    ],
)
def test_a_choice_is_found_by_its_name_in_other_systems(
    folder: str, name: str, choice: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        choices.load(folder, name)
    assert caught.value.remedy == f"did you mean '{choice}'?"
    titles = [document.get("choice") for document in explain.main(name, json=True)["matches"]]
    assert f"{folder}/{choice}" in titles


def test_explain_finds_keys_by_a_part_of_their_name() -> None:
    rows = explain.main("consecutive", json=True)["matches"][0]["matches"]
    assert [row["key"] for row in rows] == ["optimizer.guard.max_consecutive_skips"]
    lora = explain.main("lora", json=True)["matches"][0]
    assert [row["key"] for row in lora["keys"]] == ["rank", "alpha", "dropout", "targets"]


def test_a_printed_table_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regauge.system.log.stdout._width", 50)
    explain.main("optimizer.schedule")
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("keys:") + 1 : -1]
    assert "  power (number > 0, default 2.0)" in table
    assert len(table) > 10
    assert max(map(len, table)) <= 50
