"""The made-up weights of the GPU scripts: what a model computes with them depends on all of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import lively_weights  # noqa: E402 - needs torch, which not every environment has


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.input_norm = torch.nn.RMSNorm(64)
        self.one, self.two = torch.nn.Linear(64, 256), torch.nn.Linear(64, 256)
        self.experts = torch.nn.Parameter(torch.zeros(8, 32, 128))
        self.register_buffer("count", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("weight_scale_inv", torch.zeros(2, 2))


def made_up(model: Any) -> None:
    for tensor in model.state_dict().values():
        if torch.is_floating_point(tensor):
            tensor.uniform_(-1e-3, 1e-3, generator=torch.Generator().manual_seed(1234))


@pytest.fixture(scope="module")
def model() -> Model:
    model = Model()
    with torch.no_grad():
        lively_weights.enliven(made_up, model)
    return model


def test_norms_are_one_and_matrices_keep_the_size_of_what_they_multiply(model: Model) -> None:
    assert (model.input_norm.weight == 1).all()
    for matrix in (model.one.weight, model.experts):
        assert float(matrix.detach().std()) == pytest.approx(matrix.shape[-1] ** -0.5, rel=0.05)
    out = model.one(torch.randn(512, 64)).detach()
    assert float(out.std()) == pytest.approx(1.0, rel=0.1)


def test_no_two_matrices_are_the_same_and_all_are_on_every_rank(model: Model) -> None:
    assert not torch.equal(model.one.weight, model.two.weight)
    other = Model()
    with torch.no_grad():
        lively_weights.enliven(made_up, other)
    assert all(torch.equal(a, other.state_dict()[name]) for name, a in model.state_dict().items())


def test_scales_and_biases_stay_what_they_were(model: Model) -> None:
    assert float(model.weight_scale_inv.abs().max()) <= 1e-3
    assert float(model.one.bias.detach().abs().max()) <= 1e-3


@pytest.mark.filterwarnings("ignore")
def test_the_installed_sglang_makes_weights_up_where_this_takes_hold() -> None:
    pytest.importorskip("sglang")
    module, _, name = lively_weights.INITIALISE.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))


class GemmaRMSNorm(torch.nn.Module):
    """Named as SGLang's: its factor is its weight and one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((8,), 0.001), requires_grad=False)


def test_norms_whose_factor_is_one_more_than_their_weight_are_one_too() -> None:
    model = torch.nn.Module()
    model.q_norm, model.norm = GemmaRMSNorm(), torch.nn.RMSNorm(8).requires_grad_(False)
    lively_weights.enliven(lambda *_: None, model)
    assert (model.q_norm.weight + 1 == 1).all()
    assert (model.norm.weight == 1).all()
