"""Import of weights from torch, DeepSpeed and transformers; no code in a file is executed."""

from __future__ import annotations

import argparse
import json
import pickle
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from transformers import BertConfig, BertForMaskedLM, BertModel

from distributed.conftest import runs, worlds
from regauge.cli import main
from regauge.models import architectures
from regauge.models.settings import Model
from regauge.models.weights import list_weights, match_weights
from regauge.system.errors import SettingsError
from regauge.training.checkpoint import unpickle

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.world import World

__all__ = ["runs", "worlds"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
DIMENSIONS = ["model.architecture=bert", *(f"model.config.{key}={n}" for key, n in SIZES.items())]


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """Return the state dict of a BERT with its pooling layer, as transformers names it."""
    torch.manual_seed(1)
    state_dict: dict[str, Tensor] = BertModel(BertConfig(**SIZES)).state_dict()
    return state_dict


def import_weights(origin: Path, *options: str) -> dict[str, Tensor]:
    target = origin.parent / "imported"
    assert main(["import", str(origin), "--to", str(target), *DIMENSIONS, *options]) == 0
    return load_file(target / "model.safetensors")


def test_a_dry_run_refuses_an_existing_folder(
    tmp_path: Path, weights: dict[str, Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(weights, tmp_path / "weights.pt")
    target = tmp_path / "imported"
    command = ["import", str(tmp_path / "weights.pt"), "--to", str(target), *DIMENSIONS]
    assert main([*command, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(target)
    target.mkdir()
    (target / "notes.txt").touch()
    assert main([*command, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert f"{target} exists" in error
    assert main(command) == 2
    assert capsys.readouterr().err == error


def assert_same(imported: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    """Compare bitwise; the pooling layer is not imported, because no task trains it."""
    assert imported.keys() == {name for name in weights if not name.startswith("pooler.")}
    assert all(torch.equal(value, weights[name].float()) for name, value in imported.items())


def write_deepspeed(folder: Path, weights: dict[str, Tensor], name: str = "mp_rank_00") -> Path:
    """Write the model states of DeepSpeed 0.19's `save_checkpoint`, without optimizer shards."""
    document: dict[str, Any] = {
        "module": weights,
        "buffer_names": [],
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(96, 32)}}, "param_groups": []},
        "param_shapes": [{name: value.shape for name, value in weights.items()}],
        "lr_scheduler": None,
        "sparse_tensor_module_names": set(),
        "global_steps": 7,
        "ds_config": {"train_batch_size": 8, "zero_optimization": {"stage": 1}},
        "ds_version": "0.19.8",
    }
    step = folder / "global_step7"
    step.mkdir(parents=True, exist_ok=True)
    (folder / "latest").write_text("global_step7")
    torch.save(document, step / f"{name}_model_states.pt")
    return folder


# Supported formats


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (["a.b", "c"], ""),
        (["state_dict.a.b", "state_dict.c", "epoch"], "state_dict."),
        (["model.module.a.b", "model.module.c", "optimizer.state.0.c"], "model.module."),
        (["bert.a.b", "bert.c", "cls.bias", "cls.c"], "bert."),
        (["a.b.a.b", "a.b.c", "a.b"], "a.b."),
    ],
)
def test_the_prefix_of_parameter_names_is_detected(names: list[str], prefix: str) -> None:
    assert unpickle.find_prefix(names, ["a.b", "c"]) == prefix


@pytest.mark.full
def test_a_state_dict_is_imported_with_any_prefix(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    nested = {"_orig_mod": {f"module.{name}": value for name, value in weights.items()}}
    torch.save({"model": nested, "epoch": 3, "cls.bias": torch.zeros(96)}, tmp_path / "w.pt")
    assert_same(import_weights(tmp_path / "w.pt"), weights)


WRAPPED = {
    "torch.compile": ("", "_orig_mod."),
    "DDP": ("", "module."),
    "compiled layers": (r"layer\.\d+\.", "_orig_mod."),
    "recomputed layers": (r"layer\.\d+\.", "_checkpoint_wrapped_module."),
    "sharded attention": (r"attention\.", "_fsdp_wrapped_module."),
}
"""The part of a name behind which a wrapper adds its own part."""


def wrap(weights: dict[str, Tensor], parent: str, wrapper: str) -> dict[str, Tensor]:
    """Return weights by the names that they have in a wrapped model."""
    pattern = f"({parent})" if parent else "^()"
    return {
        re.sub(pattern, rf"\1{wrapper}", name, count=1): value for name, value in weights.items()
    }


@pytest.mark.full
@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_are_left_out_of_names(
    name: str, tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    wrapped = wrap(weights, *WRAPPED[name])
    assert wrapped.keys() != weights.keys()
    torch.save({"model": wrapped}, tmp_path / "w.pt")
    assert_same(import_weights(tmp_path / "w.pt"), weights)
    folder, target = tmp_path / "hf", tmp_path / "from-folder"
    BertConfig(**SIZES, architectures=["BertModel"]).save_pretrained(folder)
    save_file(wrapped, folder / "model.safetensors")
    assert main(["import", str(folder), "--to", str(target)]) == 0
    imported = load_file(target / "model.safetensors")
    assert all(torch.equal(imported[key], weights[key]) for key in weights)
    match = match_weights(architectures.load_model(target), list_weights(folder), str(folder))
    assert not match.missing
    assert not match.unexpected


@pytest.mark.full
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_distributed_checkpoint_of_torch_is_imported(
    tmp_path: Path, worlds: Callable[[int], World], weights: dict[str, Tensor], size: int
) -> None:
    save_file(weights, tmp_path / "source.safetensors")
    worlds(size).run("save_with_torch", SIZES, tmp_path / "source.safetensors", tmp_path / "dcp")
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == size
    assert_same(import_weights(tmp_path / "dcp"), weights)


@pytest.mark.full
def test_a_deepspeed_checkpoint_is_imported(
    tmp_path: Path, weights: dict[str, Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    halves = {name: value.bfloat16() for name, value in weights.items()}
    assert_same(import_weights(write_deepspeed(tmp_path / "ds", halves)), halves)
    assert "holds bfloat16" in capsys.readouterr().err


@pytest.mark.full
def test_shards_without_a_configuration_are_imported(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    names = sorted(weights)
    (tmp_path / "w").mkdir()
    for number, part in enumerate((names[:9], names[9:]), 1):
        shard = {name: weights[name] for name in part}
        save_file(shard, tmp_path / "w" / f"model-0000{number}-of-00002.safetensors")
    assert_same(import_weights(tmp_path / "w"), weights)


@pytest.mark.full
def test_a_pickle_of_transformers_is_read_only_by_import(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    folder, target = tmp_path / "hf", tmp_path / "imported"
    BertConfig(**SIZES, architectures=["BertModel"]).save_pretrained(folder)
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(SettingsError, match="are a pickle; run: regauge import"):
        architectures.load_model(folder)
    with pytest.raises(SettingsError, match="are a pickle; run: regauge import"):
        architectures.build_model(Model(path=str(folder)), "none", SIZES["vocab_size"], seed=0)
    assert main(["import", str(folder), "--to", str(target)]) == 0
    imported = load_file(target / "model.safetensors")
    assert all(torch.equal(imported[name], weights[name]) for name in weights)


def test_a_pickle_under_another_name_is_not_read(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    BertConfig(**SIZES, architectures=["BertModel"]).save_pretrained(tmp_path)
    torch.save(weights, tmp_path / "other.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "other.bin")}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(SettingsError, match=r"no file named model\.safetensors"):
        architectures.load_model(tmp_path)


@pytest.mark.full
def test_the_names_and_buffers_of_older_versions_are_imported(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in weights.items()
    }  # fmt: skip
    assert len(old.keys() - weights.keys()) == 10
    torch.save({**old, "embeddings.position_ids": torch.arange(32)[None]}, tmp_path / "w.pt")
    assert_same(import_weights(tmp_path / "w.pt"), weights)


@pytest.mark.parametrize("is_tied", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_stored_output_layer_is_imported(tmp_path: Path, *, is_tied: bool) -> None:
    """The reference is transformers: a layer that differs from the embeddings is kept."""
    folder = tmp_path / "hf"
    model = BertForMaskedLM(BertConfig(**SIZES))
    decoder = model.cls.predictions.decoder.weight.detach().clone() + (0 if is_tied else 1)
    values = {**model.state_dict(), "cls.predictions.decoder.weight": decoder}
    torch.save(values, tmp_path / "w.pt")
    model.config.save_pretrained(folder)
    save_file({name: value.clone() for name, value in values.items()}, folder / "model.safetensors")
    import_weights(tmp_path / "w.pt", "weights.head=masked")
    imported = BertForMaskedLM.from_pretrained(tmp_path / "imported")
    expected = BertForMaskedLM.from_pretrained(folder)
    tokens = torch.arange(9)[None]
    torch.testing.assert_close(imported(tokens).logits, expected(tokens).logits, rtol=0, atol=0)
    assert imported.config.tie_word_embeddings == is_tied


# Refused weights


def refuse_import(
    origin: Path, capsys: pytest.CaptureFixture[str], *options: str, code: int = 64
) -> str:
    """Return the error line of a refused import, which writes nothing."""
    target = origin.parent / "imported"
    assert main(["import", str(origin), "--to", str(target), *DIMENSIONS, *options]) == code
    assert not target.exists()
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.full
def test_one_of_two_sets_of_weights_is_chosen_by_prefix(
    tmp_path: Path, weights: dict[str, Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    averages = {name: value + 1 for name, value in weights.items()}
    torch.save({"model": weights, "ema": averages}, tmp_path / "w.pt")
    message = refuse_import(tmp_path / "w.pt", capsys)
    assert "behind 'ema.' and 'model.'" in message
    assert "set weights.prefix" in message
    assert_same(import_weights(tmp_path / "w.pt", "weights.prefix=ema."), averages)


@pytest.mark.full
def test_weights_of_another_model_are_refused(
    tmp_path: Path, weights: dict[str, Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"step": 3}, tmp_path / "none.pt")
    with pytest.raises(ValueError, match="it holds no tensors"):
        unpickle.main(tmp_path / "none.pt", "", None, None)
    with pytest.raises(ValueError, match="none of its 2 tensors is this model's"):
        unpickle.find_prefix(["layer.weight", "layer.bias"], weights)
    part = {name: value for name, value in weights.items() if "layer.1" not in name}
    torch.save(part, tmp_path / "part.pt")
    assert "lacks 'encoder.layer.1" in refuse_import(tmp_path / "part.pt", capsys)
    more = weights | {"encoder.layer.2.bias": torch.ones(2)}
    torch.save(more, tmp_path / "more.pt")
    assert "has 'encoder.layer.2.bias', which is unknown" in refuse_import(
        tmp_path / "more.pt", capsys
    )


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["zero_pp_rank_0_mp_rank_00", "zero_pp_rank_1_mp_rank_00"], "the ranks of ZeRO-3"),
        (["mp_rank_00", "mp_rank_01"], "2 tensor-parallel ranks"),
    ],
)
def test_partitioned_deepspeed_weights_are_refused(
    tmp_path: Path,
    weights: dict[str, Tensor],
    capsys: pytest.CaptureFixture[str],
    names: list[str],
    problem: str,
) -> None:
    for name in names:
        write_deepspeed(tmp_path / "ds", weights, name)
    message = refuse_import(tmp_path / "ds", capsys)
    assert problem in message


def test_an_empty_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no weights of a known format" in refuse_import(tmp_path / "empty", capsys)


# Hostile files


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (str(self.path),)


def test_a_hostile_pickle_has_no_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "w.pt").write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    torch.save({"weight": Hostile(tmp_path / "ran")}, tmp_path / "z.pt")
    for name in ("w.pt", "z.pt"):
        assert "cannot be imported" in refuse_import(tmp_path / name, capsys)
    assert not (tmp_path / "ran").exists()


@pytest.mark.full
def test_an_object_next_to_the_weights_is_named(
    tmp_path: Path, weights: dict[str, Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"model": weights, "args": argparse.Namespace(lr=1e-3)}, tmp_path / "w.pt")
    message = refuse_import(tmp_path / "w.pt", capsys)
    assert "w.pt cannot be imported: w.pt contains argparse.Namespace, which is code" in message


@pytest.mark.parametrize(
    "location", ["whole file", pytest.param("planner data", marks=pytest.mark.full)]
)
def test_hostile_metadata_has_no_effect(
    tmp_path: Path, weights: dict[str, Tensor], capsys: pytest.CaptureFixture[str], location: str
) -> None:
    folder = tmp_path / "dcp"
    dcp.save(dict(weights), checkpoint_id=folder, no_dist=True)
    file = folder / unpickle.METADATA_FILE
    hostile: Any = Hostile(tmp_path / "ran")
    if location == "planner data":
        metadata = pickle.loads(file.read_bytes())  # noqa: S301 - written two lines above
        metadata.planner_data = hostile
        hostile = metadata
    file.write_bytes(pickle.dumps(hostile))
    assert "it would call pathlib" in refuse_import(folder, capsys)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch.serialization", "load"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"),
        ("torch.distributed.checkpoint.filesystem", "pickle"),
    ],
)
def test_metadata_may_only_name_metadata_classes(module: str, name: str) -> None:
    text = b"\x80\x04" + b"".join(
        b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name)
    )
    with pytest.raises(pickle.UnpicklingError, match="it would call"):
        unpickle.read_metadata(text + b"\x93.")


def test_metadata_of_the_installed_torch_is_read(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    dcp.save({"model": weights, "step": 3}, checkpoint_id=tmp_path / "a", no_dist=True)
    metadata = unpickle.read_metadata((tmp_path / "a" / unpickle.METADATA_FILE).read_bytes())
    assert isinstance(metadata, Metadata)
    assert set(metadata.state_dict_metadata) == {f"model.{name}" for name in weights} | {"step"}


MEMBER_BY_GETATTR = b"cbuiltins\ngetattr\n(c{module}\n{name}\nV{attribute}\ntR."
"""A pickle of `getattr(module.name, "attribute")`."""


def pickle_attribute(name: str, attribute: str) -> bytes:
    """Return the pickle of an attribute of a class in torch's metadata module."""
    text = MEMBER_BY_GETATTR.decode()
    return text.format(module=Metadata.__module__, name=name, attribute=attribute).encode()


def test_a_member_of_an_enumeration_may_be_an_attribute() -> None:
    """Python 3.11.0 to 3.11.3 pickle members in this way."""
    data = pickle_attribute("_MEM_FORMAT_ENCODING", "TORCH_CONTIGUOUS_FORMAT")
    with pytest.raises(TypeError, match="holds a _MEM_FORMAT_ENCODING"):
        unpickle.read_metadata(data)
    with pytest.raises(pickle.UnpicklingError, match="it would read the attribute '__init__'"):
        unpickle.read_metadata(pickle_attribute("Metadata", "__init__"))
