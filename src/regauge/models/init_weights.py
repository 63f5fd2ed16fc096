"""Initial weights, one at a time: drawn from a seed, or read from a folder.

A model is first built on torch's meta device, which allocates no memory. A drawn weight depends
only on the seed, its module name and its shape: not on other weights, the processes or the
strategy. So each process draws or reads the parts that it keeps, and needs memory for only one
whole weight more.
"""

from __future__ import annotations

import copy
import hashlib
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regauge.data.randomness import hash_keys
from regauge.models import dual_encoder, heads, multitask
from regauge.models.tensors import bit_sum, find_tied_weights, set_tensor
from regauge.models.weights import StoredWeight, base_weight_name, list_weights, match_weights
from regauge.system.errors import SettingsError
from regauge.system.hub import resolve_model
from regauge.system.wording import format_clause

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PreTrainedModel

    from regauge.models.settings import Model

META = torch.device("meta")
CPU = torch.device("cpu")
HASH_BYTES = 7
"""Bytes used from a module name's hash, so that it fits a positive int64."""


WeightSource = Tensor | StoredWeight
"""One whole weight, in memory or in a file; a slice reads some of its rows."""


class InitialWeights:
    """A module's initial weights, by name; may be iterated repeatedly.

    `module` is a template on the meta device, which must not be used elsewhere. `sources` are the
    weights to read instead of draw, by name.
    """

    def __init__(self, module: nn.Module, seed: int, sources: Mapping[str, WeightSource]) -> None:
        self._modules: dict[str, Any] = dict(module.named_modules())
        self.tied_names = find_tied_weights(module)
        """Names of each weight that has several; the first one is yielded."""
        self._seed = seed
        self._sources = sources
        self.warnings: tuple[str, ...] = ()
        """Messages for the user about missing and unused weights."""
        self.bit_sums: dict[str, int] = {}
        """Weight name -> sum of its bits over all processes; set when the weights are used."""

    def module(self, name: str) -> Any:
        """Return a submodule of the template."""
        return self._modules[name]

    def __iter__(self) -> Iterator[tuple[str, WeightSource]]:
        visited: set[int] = set()
        for module_name, module in self._modules.items():
            weights = {
                name: value
                for name, value in module.named_parameters(recurse=False)
                if id(value) not in visited
            }
            visited |= {id(value) for value in weights.values()}
            full_names = {name: f"{module_name}.{name}".removeprefix(".") for name in weights}
            drawn = {
                name: value
                for name, value in weights.items()
                if full_names[name] not in self._sources
            }
            values = self._draw(module_name, module, drawn) if drawn else {}
            for name, full_name in full_names.items():
                yield full_name, values[name] if name in drawn else self._sources[full_name]

    @torch.no_grad()
    def _draw(
        self, module_name: str, module: nn.Module, weights: Mapping[str, nn.Parameter]
    ) -> dict[str, Tensor]:
        """Draw one module's weights by the rules of transformers or of the module.

        All other weights stay on the meta device, where rules are ignored. Restores the state of
        torch's default generator.
        """
        generator = torch.default_generator
        state = generator.get_state()
        try:
            for name, value in weights.items():
                setattr(module, name, nn.Parameter(torch.empty_like(value, device=CPU)))
            generator.manual_seed(self._module_seed(module_name))
            with CPU:
                self._apply_init_rules(module_name)
            return {name: getattr(module, name).data for name in weights}
        finally:
            for name, value in weights.items():
                setattr(module, name, value)
            generator.set_state(state)

    def _module_seed(self, name: str) -> int:
        """Return a module's seed, from its name inside the transformers model."""
        roots = (root for root, _ in _find_roots(self._modules) if _is_inside(name, root))
        root = next(roots, "")
        inner_name = base_weight_name(f"{name}.").removeprefix(f"{root}.").removesuffix(".")
        digest = hashlib.sha256(inner_name.encode()).digest()[:HASH_BYTES]
        return int(hash_keys(self._seed, int.from_bytes(digest))) >> 1

    def _apply_init_rules(self, name: str) -> None:
        """Apply a module's rules, then those of its enclosing modules, to the weights in memory."""
        enclosing = list(_enclosing_modules(name, self._modules))
        if not any(model for _, model in enclosing):
            self._modules[name].reset_parameters()
        for module, model in enclosing:
            if model is not None:
                model._init_weights(module)  # noqa: SLF001 - transformers' rules
            if hasattr(module, "reset_lora_parameters"):  # peft's rule for both weights
                for adapter in module.lora_A:
                    module.reset_lora_parameters(adapter, True)  # noqa: FBT003 - peft's signature


def build_initial_weights(module: nn.Module, settings: Model, seed: int) -> InitialWeights:
    """Return the initial weights of a module on the meta device.

    Raises SettingsError if the weights at `settings.path` belong to another model.
    """
    template = copy.deepcopy(module)
    if settings.path is None or settings.weights == "random":
        return InitialWeights(template, seed, {})
    folder = resolve_model(settings.path)
    sources: dict[str, WeightSource] = {}
    missing: list[str] = []
    unexpected: list[set[str]] = []
    roots = list(_find_roots(dict(template.named_modules())))
    for root, model in roots:
        stored = list_weights(dual_encoder.encoder_folder(folder, root))
        match = match_weights(model, stored, settings.path)
        names = {base_weight_name(name): name for name, _ in model.named_parameters()}
        prefix = f"{root}." if root else ""
        sources |= {f"{prefix}{names[name]}": weight for name, weight in match.sources.items()}
        missing += match.missing
        untrained = [
            name for name in match.missing if not model.get_parameter(names[name]).requires_grad
        ]
        if untrained and settings.lora is not None:
            raise SettingsError(
                f"'{settings.path}' has no '{untrained[0]}', and adapters would not train it",
                "name a model with that head, or train without model.lora",
            )
        unexpected.append(set(match.unexpected))
    for task, task_module in multitask.modules_by_task(template).items():
        head = heads.find_head_weights(task_module, folder)
        prefix = multitask.weight_prefix(task)
        sources |= {f"{prefix}{name}": weight for name, weight in head.items()}
    weights = InitialWeights(template, seed, sources)
    unused = sorted(set.intersection(*unexpected))
    weights.warnings = tuple(_format_warnings(settings.path, missing, unused))
    uses_documents = any(dual_encoder.is_document_encoder(root) for root, _ in roots)
    if dual_encoder.has_document_encoder(folder) and not uses_documents:
        weights.warnings += (f"'{settings.path}' has a document encoder that is not used",)
    return weights


def materialize(module: nn.Module, weights: InitialWeights) -> None:
    """Replace a module's meta weights by its initial weights on the CPU."""
    values = {name: source[:] for name, source in weights}
    tied_names = {name: others for name, *others in find_tied_weights(module)}
    for name, value in values.items():
        old = module.get_parameter(name)
        parameter = nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad)
        for tied_name in (name, *tied_names.get(name, ())):
            set_tensor(module, tied_name, parameter)
        weights.bit_sums[name] = int(bit_sum(parameter))


def materialize_buffers(model: PreTrainedModel) -> None:
    """Compute a model's meta buffers on the CPU, by transformers' rules.

    Raises SettingsError if the architecture lacks a rule for one of them.
    """
    buffers: dict[str, Tensor] = {}
    for name, old in model.named_buffers(remove_duplicate=False):
        if old.is_meta:
            buffers[name] = torch.full_like(old, _unset_value(old.dtype), device=CPU)
            set_tensor(model, name, buffers[name])
    modules = dict(model.named_modules())
    with torch.no_grad(), CPU:
        for name in reversed(modules):
            module, nearest_model = next(_enclosing_modules(name, modules))
            nearest_model._init_weights(module)  # noqa: SLF001 - transformers' rules
    for name, value in buffers.items():
        unset = value.isnan() if value.is_floating_point() else value == _unset_value(value.dtype)
        if value.numel() and value.dtype != torch.bool and bool(unset.all()):
            kind = model.config.model_type
            problem = f"architecture '{kind}' does not initialize its buffer '{name}'"
            raise SettingsError(problem, "choose another model")


def _unset_value(dtype: torch.dtype) -> float | int | bool:
    """Return a value that no initialization rule sets a whole buffer to."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).min


def _enclosing_modules(name: str, modules: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield a module and its enclosing modules, innermost first.

    Each comes with the nearest transformers model around it, or None.
    """
    components = name.split(".") if name else []
    paths = ["", *accumulate(components, lambda outer, inner: f"{outer}.{inner}")]
    models = [modules[path] if _has_rules(modules[path]) else None for path in paths]
    nearest: list[Any] = list(
        accumulate(models, lambda outer, inner: outer if inner is None else inner)
    )
    for path, model in zip(reversed(paths), reversed(nearest), strict=True):
        yield modules[path], model


def _find_roots(modules: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the transformers models in a module that are not inside another one, with names."""
    roots: list[str] = []
    for name, module in modules.items():
        if _has_rules(module) and not any(_is_inside(name, root) for root in roots):
            roots.append(name)
            yield name, module


def _is_inside(name: str, root: str) -> bool:
    return not root or name == root or name.startswith(f"{root}.")


def _has_rules(module: nn.Module) -> bool:
    return hasattr(module, "_init_weights")


def _format_warnings(path: str, missing: list[str], unused: list[str]) -> Iterator[str]:
    if missing:
        yield (
            f"'{path}' has no head for this task: {format_clause(len(missing), 'weight', 'are')}"
            f" initialized randomly: {_list_some(missing)}"
        )
    if unused:
        clause = format_clause(len(unused), "weight", "are")
        yield f"'{path}': {clause} not used: {_list_some(unused)}"


def _list_some(names: list[str]) -> str:
    return f"{names[0]}, …" if len(names) > 1 else names[0]
