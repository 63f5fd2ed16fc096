"""Features that stand several times: which ones, of which layers, and what integers gain by it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from regauge.backends import Calibration, _rounding
from regauge.backends._copies import COPIES, WIDTH, Repeated, fed, places, shared
from regauge.backends._integers import Rounded
from regauge.backends._rounding import BUDGET, rounded


def mlp(between: nn.Module, inner: int = WIDTH, scale: float = 1.0) -> nn.Sequential:
    """Return two layers; the last feature between them is larger than all others."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(16, inner), between, nn.Linear(inner, 16))
    made.requires_grad_(False)[0].weight[-1] *= scale  # noqa: FBT003 - torch's own
    return made.eval()


def drawn(seed: int, rows: int = 400) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))


def layers(program: nn.Module) -> dict[str, nn.Linear]:
    return {name: each for name, each in program.named_modules() if type(each) is nn.Linear}


class Alternating(nn.Module):
    """Doubles every other feature: what a feature becomes depends on its place."""

    def forward(self, given: Tensor) -> Tensor:
        return given * (1 + torch.arange(given.shape[-1]) % 2)


@pytest.mark.parametrize("width", [WIDTH, 2 * WIDTH + 5])
def test_no_other_copies_would_make_the_largest_part_smaller(width: int) -> None:
    peaks = torch.rand(width, generator=torch.Generator().manual_seed(1)) ** 8 + 1e-3
    counts = shared(peaks)
    assert int(counts.sum()) == width + width // WIDTH * COPIES
    largest = float((peaks / counts).max())
    copied = counts > 1
    assert copied.any()
    assert float((peaks[copied] / (counts[copied] - 1)).min()) >= largest
    assert torch.equal(torch.bincount(places(counts)), counts)


def test_a_narrow_layer_has_no_copies() -> None:
    assert torch.equal(shared(torch.rand(WIDTH - 1) + 1), torch.ones(WIDTH - 1, dtype=torch.int64))


@pytest.mark.parametrize("between", [nn.GELU(), nn.ReLU(), nn.Tanh(), nn.Identity()])
def test_a_layer_reads_what_the_one_before_makes_feature_by_feature(between: nn.Module) -> None:
    program = mlp(between)
    own = dict(program.named_modules())
    assert fed(program, layers(program), [(drawn(0),)]) == {"2": "0"}
    assert dict(program.named_modules()) == own


@pytest.mark.parametrize(
    "between",
    [
        nn.LayerNorm(WIDTH),
        nn.LayerNorm(WIDTH, elementwise_affine=False),
        nn.Softmax(-1),
        Alternating(),
    ],
)
def test_features_that_are_computed_of_several_have_no_copies(between: nn.Module) -> None:
    program = mlp(between)
    assert fed(program, layers(program), [(drawn(0),)]) == {}


class Twice(nn.Module):
    """What its first layer makes is read by a second one, and by what comes after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 32)

    def forward(self, given: Tensor) -> Tensor:
        made = self.first(given)
        return made.mean(1, keepdim=True) + self.second(made.relu())


def test_features_that_something_else_reads_have_no_copies() -> None:
    torch.manual_seed(0)
    program = Twice().eval()
    with torch.no_grad():
        program.first.weight[0] *= 50
    assert fed(program, layers(program), [(drawn(0),)]) == {}


def test_of_a_bert_it_is_the_layers_behind_its_activations() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}
    bert = BertModel(BertConfig(vocab_size=50, num_hidden_layers=2, **sizes)).eval()

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, ids: Tensor) -> Tensor:
            found: Tensor = self.bert(input_ids=ids).last_hidden_state
            return found

    program = Hidden().eval()
    ids = torch.arange(40).reshape(4, 10)
    own = {name: each for name, each in layers(program).items() if "pooler" not in name}
    blocks = [f"bert.encoder.layer.{number}" for number in range(2)]
    expected = {f"{block}.output.dense": f"{block}.intermediate.dense" for block in blocks}
    assert fed(program, own, [(ids,)]) == expected


def far(program: nn.Module, plain: nn.Module) -> float:
    given = drawn(7)
    return float((program(given) - plain(given)).norm() / plain(given).norm())


def test_integers_are_nearer_where_a_large_feature_has_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = mlp(nn.GELU(), scale=30.0)
    made = rounded(plain, Calibration(plain, [(drawn(0),)], 1.0))
    first, _, second = made
    assert isinstance(first, Rounded)
    assert isinstance(second, Rounded)
    assert second.copied
    assert int(torch.bincount(second.columns).argmax()) == WIDTH - 1
    assert made[0](drawn(1)).shape == (400, WIDTH + COPIES)
    monkeypatch.setattr(_rounding, "fed", lambda *_: {})
    without = rounded(plain, Calibration(plain, [(drawn(0),)], 1.0))
    assert far(made, plain) < 0.8 * far(without, plain)


def test_a_layer_that_stays_as_it_is_makes_copies_too() -> None:
    """Its input has one row a million times as large as all others, which a tanh cuts off."""
    plain, given = mlp(nn.Tanh()), drawn(0, 1000)
    given[0] *= 1e6
    first, _, second = rounded(plain, Calibration(plain, [(given,)], 1.0))
    assert isinstance(first, Repeated)
    assert isinstance(second, Rounded)
    assert second.copied
    made = nn.Sequential(first, nn.Tanh(), second)
    assert float((made(drawn(1)) - plain(drawn(1))).abs().max()) < 0.03


def test_the_worst_layers_stay_where_answers_would_lose_too_much() -> None:
    plain = nn.Sequential(*(mlp(nn.GELU(), inner=64) for _ in range(3))).eval()
    given = drawn(0)

    def tried(bound: float) -> tuple[nn.Module, float]:
        made = rounded(plain, Calibration(plain, [(given,)], bound))
        lost = (made(given) - plain(given)).square().sum(1) / plain(given).square().sum(1)
        return made, float(lost.mean()) / 2

    every, lost = tried(1.0)
    assert not layers(every)
    some, less = tried(lost)
    assert less <= BUDGET * lost
    errors: dict[str, float] = {}

    def judge(name: str, read: Tensor, answered: Tensor) -> None:
        off = (every.get_submodule(name)(read) - answered).norm(dim=1)
        errors[name] = float((off / (answered - layers(plain)[name].bias).norm(dim=1)).median())

    for name, layer in layers(plain).items():
        layer.register_forward_hook(lambda _, read, made, name=name: judge(name, read[0], made))
    plain(given)
    left, put = layers(some).keys(), errors.keys() - layers(some).keys()
    assert put
    assert min(errors[name] for name in left) >= max(errors[name] for name in put)
    with pytest.raises(ValueError, match="no linear layer is near enough"):
        tried(1e-12)
