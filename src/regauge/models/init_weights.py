"""The weights of step 0, one at a time: drawn by a seed, or read from a folder.

A model is first made on torch's meta device, where it has shapes and no memory. What a weight is
drawn as depends on the seed, on the name of its module and on its shape, and on nothing else: not
on the other weights, the processes or the strategy. So each process draws or reads what it keeps,
and holds no more than one whole weight beside it.
"""

from __future__ import annotations

import copy
import hashlib
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from regauge.data.randomness import keyed
from regauge.errors import SettingsError
from regauge.models import dual_encoder, heads, multitask
from regauge.models import weights as folders
from regauge.models.hub import at
from regauge.models.tensors import bits, put, ties

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from regauge.models.settings import Model

META = torch.device("meta")
HOST = torch.device("cpu")
NAME_BYTES = 7
"""Of the hash of a module's name that enter its key, so that it is a positive 64-bit integer."""


class Values(Protocol):
    """One whole weight: in memory, or in a file."""

    def __getitem__(self, rows: slice) -> Tensor:
        """Return some rows of it."""
        ...


class InitialWeights:
    """The weights of step 0 of a module, by name; they can be gone through again.

    The module lies on the meta device, and is the template: nobody else may use it. `places` says
    where those lie that are not drawn.
    """

    def __init__(self, module: nn.Module, seed: int, places: Mapping[str, Values]) -> None:
        self._modules: dict[str, Any] = dict(module.named_modules())
        self._seed = seed
        self._places = places
        self.remarks: tuple[str, ...] = ()
        """What a user should know of where they come from."""
        self.sums: dict[str, int] = {}
        """What the bits of each add up to, once all processes together have taken them."""

    def part(self, name: str) -> Any:
        """Return a module by its name; its weights lie on the meta device."""
        return self._modules[name]

    def __iter__(self) -> Iterator[tuple[str, Values]]:
        seen: set[int] = set()
        for name, part in self._modules.items():
            own = {
                key: value
                for key, value in part.named_parameters(recurse=False)
                if id(value) not in seen
            }
            seen |= {id(value) for value in own.values()}
            full = {key: f"{name}.{key}".removeprefix(".") for key in own}
            drawn = {key: value for key, value in own.items() if full[key] not in self._places}
            values: Mapping[str, Values] = self._drawn(name, part, drawn) if drawn else {}
            for key, whole in full.items():
                yield whole, values[key] if key in drawn else self._places[whole]

    @torch.no_grad()
    def _drawn(
        self, name: str, part: nn.Module, wanted: Mapping[str, nn.Parameter]
    ) -> dict[str, Tensor]:
        """Return weights of one module as transformers' rules, or its own, would draw them.

        All else is on the meta device, where a rule changes nothing. The process's own generator
        goes on afterwards as if nothing had been drawn.
        """
        generator = torch.default_generator
        state = generator.get_state()
        try:
            for key, value in wanted.items():
                setattr(part, key, nn.Parameter(torch.empty_like(value, device=HOST)))
            generator.manual_seed(self._key(name))
            with HOST:
                self._follow_rules(name)
            return {key: getattr(part, key).data for key in wanted}
        finally:
            for key, value in wanted.items():
                setattr(part, key, value)
            generator.set_state(state)

    def _key(self, name: str) -> int:
        root = next((each for each, _ in _roots(self._modules) if _inside(name, each)), "")
        inner = folders.plain_name(f"{name}.").removeprefix(f"{root}.").removesuffix(".")
        word = hashlib.sha256(inner.encode()).digest()[:NAME_BYTES]
        return int(keyed(self._seed, int.from_bytes(word))) >> 1

    def _follow_rules(self, name: str) -> None:
        """Apply the rules for a module, and then for those that hold it, to what is in memory."""
        found = list(_rules(name, self._modules))
        if not any(rules for _, rules in found):
            self._modules[name].reset_parameters()
        for module, rules in found:
            if rules is not None:
                rules._init_weights(module)  # noqa: SLF001 - transformers' rules
            if hasattr(module, "reset_lora_parameters"):  # peft's rule for both of an adapter's
                for adapter in module.lora_A:
                    module.reset_lora_parameters(adapter, True)  # noqa: FBT003 - it has no names


def initial_weights(module: nn.Module, settings: Model, seed: int) -> InitialWeights:
    """Return the first weights of a module that lies on the meta device.

    Raises SettingsError where those that the settings name are of another model.
    """
    template = copy.deepcopy(module)
    if settings.path is None or settings.weights == "random":
        return InitialWeights(template, seed, {})
    folder = at(settings.path)
    own: dict[str, Values] = {}
    absent: list[str] = []
    unused: list[set[str]] = []
    roots = list(_roots(dict(template.named_modules())))
    for root, model in roots:
        found = folders.stored(dual_encoder.folder_of(folder, root))
        places, lacking, strange = folders.matched(model, found, settings.path)
        names = {folders.plain_name(name): name for name, _ in model.named_parameters()}
        prefix = f"{root}." if root else ""
        own |= {f"{prefix}{names[name]}": each for name, each in places.items()}
        absent += lacking
        unused.append(set(strange))
    for name, part in multitask.modules_by_task(template).items():
        head = heads.places(part, folder)
        own |= {f"{multitask.prefix(name)}{key}": each for key, each in head.items()}
    if absent and settings.lora is not None:
        raise SettingsError(
            f"'{settings.path}' has no '{absent[0]}', and adapters would leave it as it is drawn",
            "name a model with that head, or train without model.lora",
        )
    weights = InitialWeights(template, seed, own)
    weights.remarks = tuple(_remarks(settings.path, absent, sorted(set.intersection(*unused))))
    if dual_encoder.there(folder) and not any(dual_encoder.is_one(root) for root, _ in roots):
        weights.remarks += (f"'{settings.path}' has an encoder of documents that is left out",)
    return weights


def materialize(module: nn.Module, weights: InitialWeights) -> None:
    """Give a module that lies on the meta device its first weights, whole, on the CPU."""
    found = {name: values[:] for name, values in weights}
    groups = {first: others for first, *others in ties(module)}
    for name, value in found.items():
        old = module.get_parameter(name)
        whole = nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad)
        for each in (name, *groups.get(name, ())):
            put(module, each, whole)
        weights.sums[name] = int(bits(whole))


def make_buffers(model: PreTrainedModel) -> None:
    """Give a model that lies on the meta device its buffers, on the CPU, by transformers' rules.

    Raises SettingsError for an architecture that has no rule for one of them.
    """
    made: dict[str, Tensor] = {}
    for name, old in model.named_buffers(remove_duplicate=False):
        if old.is_meta:
            made[name] = torch.full_like(old, _unset(old.dtype), device=HOST)
            put(model, name, made[name])
    modules = dict(model.named_modules())
    with torch.no_grad(), HOST:
        for name in reversed(modules):
            module, rules = next(_rules(name, modules))
            rules._init_weights(module)  # noqa: SLF001 - transformers' rules
    for name, value in made.items():
        unset = value.isnan() if value.is_floating_point() else value == _unset(value.dtype)
        if value.numel() and value.dtype != torch.bool and bool(unset.all()):
            kind = model.config.model_type
            raise SettingsError(f"'{kind}' has no rule for its '{name}'", "choose another model")


def _unset(dtype: torch.dtype) -> float | int | bool:
    """Return what no rule sets a whole buffer to."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).min


def _rules(name: str, modules: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield a module and those that hold it, innermost first, each with the model of its rules."""
    steps = name.split(".") if name else []
    around = ["", *accumulate(steps, lambda outer, inner: f"{outer}.{inner}")]
    models = [modules[each] if _has_rules(modules[each]) else None for each in around]
    nearest: list[Any] = list(
        accumulate(models, lambda outer, inner: outer if inner is None else inner)
    )
    for each, rules in zip(reversed(around), reversed(nearest), strict=True):
        yield modules[each], rules


def _roots(modules: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the models of transformers in a module that are not part of another one."""
    outer: list[str] = []
    for name, part in modules.items():
        if _has_rules(part) and not any(_inside(name, each) for each in outer):
            outer.append(name)
            yield name, part


def _inside(name: str, root: str) -> bool:
    """Return whether a module is the root itself, or part of it."""
    return not root or name == root or name.startswith(f"{root}.")


def _has_rules(part: nn.Module) -> bool:
    return hasattr(part, "_init_weights")


def _remarks(path: str, absent: list[str], strange: list[str]) -> Iterator[str]:
    if absent:
        yield f"'{path}' has no head for this task: {len(absent)} weights are drawn, {absent[0]} …"
    if strange:
        yield f"'{path}' has {len(strange)} weights that are left out: {strange[0]} …"
