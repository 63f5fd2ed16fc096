"""Names of settings in other systems lead to keys that exist."""

from __future__ import annotations

import pytest

from regauge import choices, peer_names
from regauge.errors import SettingsError
from regauge.verbs import _reference, explain

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
        assert all(peer_names.normalize(name) == name for name in names)
        assert not {*names} & {*choices.names(folder)}
    assert count > 30


@pytest.mark.parametrize(
    ("folder", "name", "choice"),
    [
        ("accelerators", "gpu", "cuda"),
        ("accelerators", "TPU", "xla"),
        ("strategies", "deepspeed-stage-3", "fsdp"),
        ("tasks", "cross-encoder", "rank"),
        ("data/sources", "hf", "huggingface"),
    ],
)
def test_a_choice_is_found_by_its_name_in_other_systems(
    folder: str, name: str, choice: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        choices.load(folder, name)
    assert caught.value.remedy == f"did you mean '{choice}'?"


def test_explain_finds_keys_by_a_part_of_their_name() -> None:
    rows = explain.main("consecutive", json=True)["matches"][0]["matches"]
    assert [row["key"] for row in rows] == ["optimizer.guard.max_consecutive_skips"]
    lora = explain.main("lora", json=True)["matches"][0]
    assert [row["key"] for row in lora["keys"]] == ["rank", "alpha", "dropout", "targets"]


def test_a_printed_table_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regauge.log.stdout._width", 50)
    explain.main("optimizer.schedule")
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("keys:") + 1 : -1]
    assert "  power (number > 0, default 2.0)" in table
    assert len(table) > 10
    assert max(map(len, table)) <= 50
