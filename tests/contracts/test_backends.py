"""What every backend must do where it is usable; elsewhere it must say why it is not."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._inductor import config as inductor

from regauge import accelerators, choices, config
from regauge.accelerators import Availability, Precision
from regauge.accelerators.cpu import Cpu
from regauge.backends import (
    Backend,
    Calibration,
    Job,
    Payload,
    Shape,
    Site,
    _rounding,
    require,
    usable_for,
)
from regauge.backends._integers import Rounded
from regauge.backends._rounding import rounded
from regauge.errors import PreflightError, SettingsError
from regauge.models import architectures
from regauge.models.inference_modules import TextProgram, cast, tensors
from regauge.models.io_spec import Input
from regauge.models.modules import Encoder
from regauge.models.settings import Model
from regauge.safetensors_io import write

KINDS = choices.names("backends")
LIBRARIES = ("onnxruntime", "onnx", "onnxscript", "openvino")
VENDORS = ("torch_xla", "torch_neuronx", "torch_neuron", "habana_frameworks")
OUTSIDE = {"inductor", "onnx", "openvino"}
"""Backends whose payloads hold no weights."""
SHAPES = (Shape(6, 8), Shape(4, 16), Shape(3, 24))
VOCABULARY = 60
TYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.half}
ERRORS = {"fp32": 1e-5, "tf32": 3e-3, "bf16": 3e-2, "fp16": 3e-3}
ROUNDED = 0.1
"""Largest difference from eager in fp32, as a share of the largest value."""
BOUND = 0.001
"""Share of the quality of answers that integers may lose: what an export allows by itself."""
WRITTEN_OUT = 8
"""Numbers of a vector that a compiler may write into its code."""
Form = tuple[Any, Any]
EXACT: Form = ("fp32", "no")


class Priced(nn.Module):
    """Numbers and a kind in, two values out: no text, no length, and a buffer."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(7, 8)
        self.inner, self.outer = nn.Linear(5, 8), nn.Linear(8, 2)
        self.register_buffer("offset", torch.full((5,), 0.25))

    def forward(self, numbers: Tensor, kind: Tensor) -> Tensor:
        hidden = self.inner(numbers.to(self.inner.weight.dtype) - self.offset)
        return self.outer(torch.tanh(hidden) + self.kinds(kind)).float()


def encoder() -> nn.Module:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 32}
    widths = {"hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.2}
    settings = Model(architecture="bert", config={**sizes, **widths}, attention="sdpa")
    model, keys = architectures.build(settings, "none", VOCABULARY, 0)
    return TextProgram(Encoder(model, keys), "vectors")


def text_batch(rows: int, length: int) -> tuple[Tensor, ...]:
    """Return texts of all lengths with their padding, and where there is room one without words."""
    draw = torch.Generator().manual_seed(rows)
    tokens = torch.randint(1, VOCABULARY, (rows, length), generator=draw, dtype=torch.int32)
    lengths = torch.randint(1, length + 1, (rows,), generator=draw, dtype=torch.int32)
    lengths[0] = length
    lengths[2:3] = 0
    return tokens * (torch.arange(length)[None] < lengths[:, None]).int(), lengths


def priced_batch(rows: int, length: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(rows + length)
    return torch.randn(rows, 5, generator=draw), torch.randint(0, 7, (rows,), generator=draw)


@dataclass(frozen=True)
class Example:
    """A program with what it takes."""

    make: Callable[[], nn.Module]
    inputs: tuple[Input, ...]
    batch: Callable[[int, int], tuple[Tensor, ...]]

    def drawn(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().eval().requires_grad_(False)  # noqa: FBT003 - torch's own

    def batches(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield full batches of every length, fewer rows, and one."""
        for shape in SHAPES:
            for rows in (shape.rows, shape.rows - 1, 1):
                yield self.batch(rows, shape.length)


TEXT = Example(
    encoder,
    (
        Input(name="tokens", shape=("rows", "length"), dtype="int32"),
        Input(name="lengths", shape=("rows",), dtype="int32"),
    ),
    text_batch,
)
PRICED = Example(
    Priced,
    (
        Input(name="numbers", shape=("rows", 5)),
        Input(name="kind", shape=("rows",), dtype="int64"),
    ),
    priced_batch,
)
EXAMPLES = {"text": TEXT, "priced": PRICED}
WHOLE = pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.full)])


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    threads, precision = torch.get_num_threads(), torch.backends.cuda.matmul.fp32_precision
    with inductor.patch(compile_threads=1):  # several would live on
        yield
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.fp32_precision = precision
    torch._dynamo.reset()


def found(kind: str) -> tuple[Backend, Site]:
    """Return a backend, and the fittest device here that it is for; skip where there is none."""
    backend: Backend = choices.load("backends", kind)()
    reason: str | None = backend.available().reason
    if backend.available().fitness > 0:
        survey = accelerators.survey()
        for name in sorted(survey, key=lambda each: -survey[each].fitness):
            accelerator = choices.load("accelerators", name)()
            reason = backend.fits(accelerator)
            if reason is None and survey[name].fitness > 0:
                return backend, Site(accelerator, accelerator.claim(0, 2), 2)
    pytest.skip(f"not proved here: {kind}: {reason}")


@pytest.fixture(params=KINDS)
def usable(request: pytest.FixtureRequest) -> tuple[Backend, Site]:
    return found(request.param)


Export = Callable[[Backend, Site, Example, Form], Path]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Return a function that writes a payload, once for all tests."""
    made: dict[tuple[Any, ...], Path] = {}

    def exported(backend: Backend, site: Site, example: Example, form: Form) -> Path:
        key = backend.kind, example.make, form
        if key not in made:
            made[key] = tmp_path_factory.mktemp(backend.kind)
            program = example.drawn()
            cast(program, TYPES[form[0]])
            calibration = Calibration(example.drawn(), [example.batch(64, 24)], BOUND)
            job = Job(program, example.inputs, SHAPES, *form, None, calibration)
            backend.export(job, site, made[key])
        return made[key]

    return exported


def loaded(
    backend: Backend, site: Site, example: Example, folder: Path, program: nn.Module, form: Form
) -> Any:
    """Load a payload; what is compiled ahead is not handed the program."""
    program = copy.deepcopy(program)
    cast(program, TYPES[form[0]])

    def refused() -> NoReturn:
        raise AssertionError(f"{backend.kind} is compiled ahead, and asks for the program")

    def weights() -> dict[str, Tensor]:
        return {name: value.detach() for name, value in tensors(program).items()}

    make = refused if backend.ahead else (lambda: program)
    return backend.load(Payload(folder, example.inputs, SHAPES, form[0], weights, make), site)


def differ(runner: Any, example: Example, plain: nn.Module) -> float:
    """Return the largest difference from eager, relative to the largest value of a batch."""
    largest = 0.0
    for given in example.batches():
        with torch.no_grad():
            expected = plain(*given)
        output = runner(*given).float().cpu()
        assert output.shape == expected.shape
        assert output.isfinite().all()
        error = (output - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
        largest = max(largest, float(error))
    return largest


@pytest.mark.parametrize("kind", KINDS)
def test_availability_is_told_with_its_reason_and_never_raised(kind: str) -> None:
    backend: Backend = choices.load("backends", kind)()
    availability = backend.available()
    assert isinstance(availability, Availability)
    assert availability.reason
    cpu = choices.load("accelerators", "cpu")()
    obstacle = backend.fits(cpu)
    assert obstacle is None or obstacle.strip()
    usable_here = availability.fitness > 0 and obstacle is None
    assert (kind in [each.kind for each in usable_for(cpu)]) == usable_here
    if not usable_here:
        with pytest.raises(SettingsError, match=f"'{kind}' is not usable here: .*usable: .*eager"):
            require(backend, cpu)


BLOCKED = f"""
import sys
for name in {(*LIBRARIES, *VENDORS)}:
    sys.modules[name] = None
from regauge import choices
from regauge.backends import usable_for
for kind in choices.names("backends"):
    backend = choices.load("backends", kind)()
    found = backend.available()
    print(kind, found.fitness, found.reason, sep="|")
usable = [each.kind for each in usable_for(choices.load("accelerators", "cpu")())]
print("usable", *usable, sep="|")
"""


class Abacus(Cpu):
    """The processor under another name, as another package may offer it."""

    kind: ClassVar[str] = "abacus"


class Sundial(Cpu):
    """A device of which no backend's library has heard."""

    kind: ClassVar[str] = "sundial"
    on_host: ClassVar[bool] = False
    ahead_of_time: ClassVar[bool] = False
    onnx_provider: ClassVar[str | None] = None


@pytest.mark.parametrize("kind", ["inductor", "onnx", "openvino"])
def test_a_backend_asks_what_a_device_states_and_not_its_name(kind: str) -> None:
    backend: Backend = choices.load("backends", kind)()
    assert backend.fits(Abacus()) is None
    assert "sundial" in (backend.fits(Sundial()) or "")


def test_the_runtime_of_a_graph_gets_the_settings_of_the_device() -> None:
    for kind in choices.names("accelerators"):
        accelerator = choices.load("accelerators", kind)()
        provider = accelerator.onnx_provider
        options = accelerator.onnx_options(1, "tf32")
        assert not options or provider is not None
        assert all(isinstance(value, str) for value in options.values())
        assert (provider, options) in (
            (None, {}),
            ("CPUExecutionProvider", {}),
            ("CUDAExecutionProvider", {"device_id": "1", "use_tf32": "1"}),
        )


def test_what_is_not_installed_is_said_with_what_installs_it() -> None:
    command = [sys.executable, "-c", BLOCKED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    *lines, usable = done.stdout.splitlines()
    said = {kind: (int(fitness), reason) for kind, fitness, reason in (x.split("|") for x in lines)}
    assert said.keys() == set(KINDS)
    assert said["onnx"] == (0, "onnxruntime is not installed: pip install 'regauge[onnx]'")
    assert said["openvino"] == (0, "openvino is not installed: pip install 'regauge[openvino]'")
    assert all(reason for _, reason in said.values())
    assert {"onnx", "openvino"}.isdisjoint(usable.split("|"))
    assert {"eager", "inductor"} <= set(usable.split("|"))


@pytest.mark.parametrize(
    ("usable", "name"),
    [
        # It compiles again what `inductor` has compiled, at each shape.
        pytest.param(kind, name, marks=[pytest.mark.full] * ((kind, name) == ("lazy", "text")))
        for kind in KINDS
        for name in EXAMPLES
    ],
    indirect=["usable"],
)
def test_answers_are_those_of_eager_to_the_bit_each_time(
    usable: tuple[Backend, Site], name: str, export: Export
) -> None:
    """Over several shapes with padding in rows; no graph comes after each was met once."""
    backend, site = usable
    example = EXAMPLES[name]
    plain = example.drawn()
    runner = loaded(backend, site, example, export(backend, site, example, EXACT), plain, EXACT)
    assert differ(runner, example, plain) < ERRORS["fp32"]
    known = runner.graphs()
    assert known <= 1 or not backend.ahead
    for given in example.batches():
        first = runner(*given).clone()
        assert runner(*given).equal(first)
    assert runner.graphs() == known


@WHOLE
def test_every_form_is_computed(
    usable: tuple[Backend, Site],
    whole: bool,  # noqa: FBT001 - a case
    export: Export,
) -> None:
    backend, site = usable
    forms = backend.forms(site.accelerator)
    assert len(set(forms)) == len(forms) > 0
    assert {precision for precision, _ in forms} <= set(site.accelerator.precisions())
    for form, example in cases(backend, site, whole=whole):
        plain, folder = example.drawn(), export(backend, site, example, form)
        runner = loaded(backend, site, example, folder, plain, form)
        error, most = differ(runner, example, plain), ERRORS[form[0]]
        assert error < (most if form[1] == "no" else most + ROUNDED), form
        exact = form == EXACT or not site.accelerator.repeatable
        assert exact or error > ERRORS["fp32"], f"{form} is computed in fp32"


def cases(backend: Backend, site: Site, *, whole: bool) -> list[tuple[Form, Example]]:
    """Return every form with attention; or those that an export tries by itself, types without.

    What has no attention is compiled the fastest.
    """
    forms = backend.forms(site.accelerator)
    if whole:
        return [(form, TEXT) for form in forms]
    every = site.accelerator.precisions()
    tried = every[: every.index("fp32") + 1]
    return [(form, PRICED if form[1] == "no" else TEXT) for form in forms if form[0] in tried]


def test_an_answer_is_not_written_over(usable: tuple[Backend, Site], export: Export) -> None:
    backend, site = usable
    folder = export(backend, site, PRICED, EXACT)
    runner = loaded(backend, site, PRICED, folder, PRICED.drawn(), EXACT)
    first = runner(*priced_batch(3, 8))
    kept = first.clone()
    runner(*priced_batch(3, 16))
    assert first.equal(kept)


def test_weights_are_those_that_are_given(usable: tuple[Backend, Site], export: Export) -> None:
    backend, site = usable
    folder, changed = export(backend, site, PRICED, EXACT), PRICED.drawn()
    for number, value in enumerate(tensors(changed).values()):
        if value.numel() > WRITTEN_OUT:
            value.add_(0.1 * (number + 1))
    runner = loaded(backend, site, PRICED, folder, changed, EXACT)
    assert differ(runner, PRICED, changed) < ERRORS["fp32"]
    assert differ(runner, PRICED, PRICED.drawn()) > 0.1


@WHOLE
@pytest.mark.parametrize("kind", sorted(OUTSIDE))
def test_a_payload_holds_no_weights(
    kind: str,
    whole: bool,  # noqa: FBT001 - a case
    export: Export,
) -> None:
    backend, site = found(kind)
    for form, example in cases(backend, site, whole=whole):
        program = example.drawn()
        cast(program, TYPES[form[0]])
        every = [
            value.contiguous().view(torch.uint8).numpy().tobytes()[-64:]  # padding is 0, and first
            for value in program.parameters()
            if value.ndim > 1
        ]
        assert every
        for path in export(backend, site, example, form).rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            assert not any(weight in content for weight in every), path


ALONE = """
import faulthandler, json, signal, sys
from pathlib import Path
from safetensors.torch import load_file, save_file
from regauge import choices
from regauge.backends import Payload, Shape, Site
from regauge.models.io_spec import Input

faulthandler.enable()  # signals have a stack of their own
told = json.loads(sys.argv[1])
inputs = [Input.model_validate_json(each) for each in told["inputs"]]
given, here = load_file(told["given"]), Path(told["given"]).parent
for kind, device, folder in told["payloads"]:
    accelerator = choices.load("accelerators", device)()
    site = Site(accelerator, accelerator.claim(0, 2), 2)
    weights = lambda: load_file(told["weights"])
    payload = Payload(Path(folder), inputs, [Shape(6, 8)], "fp32", weights, None)
    runners = [choices.load("backends", kind)().load(payload, site) for _ in range(2)]
    save_file({"answers": runners[0](*given.values()).cpu()}, here / kind)
    while runners:  # the first goes first
        del runners[0]
signal.signal(signal.SIGTERM, lambda *_: None)
signal.raise_signal(signal.SIGTERM)
print(*(name for name in ("transformers", "openvino_telemetry") if sys.modules.get(name)))
"""


def test_a_payload_and_its_weights_are_enough_for_another_process(
    export: Export, tmp_path: Path
) -> None:
    """Which needs no library of models, tells nobody of it, and is told of signals after it."""
    plain, payloads = TEXT.drawn(), []
    for backend in (choices.load("backends", kind)() for kind in KINDS):
        cpu = Cpu()
        ready = backend.ahead and backend.available().fitness and backend.fits(cpu) is None
        if ready and backend.forms(cpu):
            site = Site(cpu, cpu.claim(0, 2), 2)
            payloads.append((backend.kind, "cpu", str(export(backend, site, TEXT, EXACT))))
    given = dict(zip(("a", "b"), text_batch(4, 16), strict=True))
    write(tmp_path / "weights", tensors(plain))
    write(tmp_path / "given", given)
    told = {
        "inputs": [each.model_dump_json() for each in TEXT.inputs],
        "payloads": payloads,
        "weights": str(tmp_path / "weights"),
        "given": str(tmp_path / "given"),
    }
    command = [sys.executable, "-c", ALONE, json.dumps(told)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == []
    assert payloads
    expected = plain(*given.values())
    for kind, _, _ in payloads:
        answers = load_file(tmp_path / kind)["answers"]
        assert float((answers - expected).abs().max()) < ERRORS["fp32"], kind


def test_needs_are_features_of_the_machine(usable: tuple[Backend, Site]) -> None:
    backend, site = usable
    features = site.accelerator.features()
    assert backend.needs(site, None) <= features
    try:
        needed = backend.needs(site, "x86-64-v3")
    except SettingsError:
        return
    assert not needed or "avx2" in needed


def test_settings_survive_the_run_file(usable: tuple[Backend, Site]) -> None:
    backend, _ = usable
    saved = backend.model_dump(mode="json")
    assert saved["kind"] in KINDS
    assert config.choose("backends", saved) == backend
    assert "torch" in backend.versions()


# Integers


def deep(scale: float) -> nn.Module:
    """Return two layers; a feature of the first one's input is larger than others for few rows."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).eval()
    made.requires_grad_(False)[0].weight[:, 0] /= scale  # noqa: FBT003 - torch's own
    return made


def uneven(rows: int, scale: float) -> Tensor:
    given = torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))
    given[:, 0] *= scale
    return given


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_integers_are_near_where_features_differ_in_size(scale: float) -> None:
    plain = deep(scale)
    made = rounded(plain, Calibration(plain, [(uneven(200, scale),)], BOUND))
    assert [type(each) for each in made] == [Rounded, nn.GELU, Rounded]
    assert tensors(plain).keys() <= tensors(made).keys()
    assert type(plain[0]) is nn.Linear
    given = uneven(50, scale)
    error = (made(given) - plain(given)).norm() / plain(given).norm()
    assert 0 < float(error) < ROUNDED
    torch.testing.assert_close(made(given.unflatten(0, (5, 10))).flatten(0, 1), made(given))


def test_a_layer_that_would_be_off_stays_as_it_is() -> None:
    """One row in a thousand has all of its features a million times as large."""
    plain, given = deep(1.0), uneven(1000, 1.0)
    given[0] *= 1e6
    with pytest.raises(ValueError, match="no linear layer is near enough"):
        rounded(plain[:1], Calibration(plain[:1], [(given,)], BOUND))
    squashed = nn.Sequential(plain[0], nn.Tanh(), nn.Linear(32, 4))
    made = rounded(squashed, Calibration(squashed, [(given,)], BOUND))
    assert [type(each) for each in made] == [nn.Linear, nn.Tanh, Rounded]


def test_integers_are_chosen_by_samples() -> None:
    with pytest.raises(ValueError, match="there is none"):
        rounded(deep(1.0), Calibration(deep(1.0), [], BOUND))


def test_what_is_chosen_once_serves_weights_of_fewer_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, given = deep(1000.0), uneven(50, 1000.0)
    calibration = Calibration(plain, [(uneven(200, 1000.0),)], BOUND)
    rounded(plain, calibration)
    monkeypatch.setattr(_rounding, "_chosen", None)
    program = copy.deepcopy(plain)
    cast(program, torch.bfloat16)
    cast(program, torch.float32)
    made = rounded(program, calibration)
    assert [type(each) for each in made] == [Rounded, nn.GELU, Rounded]
    assert torch.equal(made[0].weight, program[0].weight)
    assert not torch.equal(made[0].weight, plain[0].weight)
    assert float((made(given) - program(given)).norm() / program(given).norm()) < ROUNDED
    with pytest.raises(TypeError):
        rounded(plain, calibration, most=63)


class Exact(Cpu):
    """A processor that adds products of integers in 32 bits."""

    kind = "cpu"

    def features(self) -> frozenset[str]:
        return frozenset({"x86_64", "avx512_vnni"})

    def precisions(self) -> tuple[Precision, ...]:
        return ("bf16", "fp32")


class Coarse(Cpu):
    """A processor that does not."""

    kind = "cpu"

    def features(self) -> frozenset[str]:
        return frozenset({"x86_64", "avx2"})

    def precisions(self) -> tuple[Precision, ...]:
        return ("fp32", "bf16")


def test_integers_of_8_bits_are_refused_where_their_sums_would_be_cut_off(tmp_path: Path) -> None:
    backend, site = found("openvino")
    exact, coarse = (Site(each(), site.device, 2) for each in (Exact, Coarse))
    assert backend.forms(coarse.accelerator) == (("fp32", "no"), ("fp32", "int8"))
    assert backend.forms(exact.accelerator) == (
        ("bf16", "int8"),
        ("fp32", "int8"),
        ("bf16", "no"),
        ("fp32", "no"),
    )
    program = PRICED.drawn()
    calibration = Calibration(program, [priced_batch(64, 8)], BOUND)
    job = Job(program, PRICED.inputs, SHAPES, "fp32", "int8", None, calibration)
    for name, place in (("exact", exact), ("coarse", coarse)):
        (tmp_path / name).mkdir()
        backend.export(job, place, tmp_path / name)
    parts = backend, coarse, PRICED
    assert loaded(*parts, tmp_path / "coarse", program, EXACT).graphs() == 0
    with pytest.raises(PreflightError, match=r"adds them in 32 bits.*export it again"):
        loaded(*parts, tmp_path / "exact", program, EXACT)
    runner = loaded(backend, exact, PRICED, tmp_path / "exact", program, EXACT)
    assert runner(*priced_batch(3, 8)).shape == (3, 2)
