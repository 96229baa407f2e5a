"""The agent's network: noisy where it should be, and folded to what it is without the noise."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from torch import nn

from hasten.policies.lede_features import FEATURES, MINIMAL
from hasten.train.lede.net import SIGMA, STREAM, WIDTH, Scale, fold, make_net, noise
from hasten.train.lede.net import NoisyLinear as Noisy

X = np.random.default_rng(0).normal(size=(9, 20)).astype(np.float32)
PLAIN = Scale(np.zeros(20, np.float32), np.ones(20, np.float32), np.ones(20, np.float32), 1.0)


def noisy_layers(net: nn.Module) -> list[Noisy]:
    return [layer for layer in net.modules() if isinstance(layer, Noisy)]


Folded = tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]


def forward(folded: Folded, x: np.ndarray) -> np.ndarray:
    weights, biases = folded
    for w, b in zip(weights[:-1], biases[:-1], strict=True):
        x = np.maximum(x @ w.T + b, 0)
    return x @ weights[-1].T + biases[-1]


def test_both_streams_are_noisy_and_the_trunk_is_not() -> None:
    net = make_net(0)
    assert len(noisy_layers(net)) == 4
    assert len(noisy_layers(net.features)) == 0
    sizes = [tuple(layer.weight_mu.shape) for layer in noisy_layers(net)]
    assert sorted(sizes) == sorted([(STREAM, WIDTH), (1, STREAM), (STREAM, WIDTH), (2, STREAM)])


def test_the_first_deviation_is_sigma_over_the_root_of_the_inputs() -> None:
    for layer in noisy_layers(make_net(0)):
        inputs = layer.weight_mu.shape[1]
        want = torch.full_like(layer.weight_sigma, SIGMA / math.sqrt(inputs))
        torch.testing.assert_close(layer.weight_sigma.data, want)
        assert float(layer.weight_mu.detach().abs().max()) <= 1.0 / math.sqrt(inputs)


def test_the_mean_of_the_noise_is_the_plain_layer_and_off_is_deterministic() -> None:
    layer = noisy_layers(make_net(0))[0]
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    with noise(False):
        plain = layer(x)
        layer.reset_noise()
        assert torch.equal(layer(x), plain)
    torch.testing.assert_close(plain, nn.functional.linear(x, layer.weight_mu, layer.bias_mu))
    with noise(True):
        assert not torch.equal(layer(x), plain)
        total = torch.zeros_like(plain)
        for _ in range(4000):
            layer.reset_noise()
            total += layer(x).detach()
    torch.testing.assert_close(total / 4000, plain, atol=0.02, rtol=0.0)


def test_noise_is_factorised() -> None:
    layer = noisy_layers(make_net(0))[0]
    layer.reset_noise()
    assert int(torch.linalg.matrix_rank(layer.weight_epsilon)) == 1


def test_the_folded_network_is_the_network_without_noise() -> None:
    net = make_net(3)
    with noise(False), torch.no_grad():
        want = net(torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(forward(fold(net, PLAIN), X), want, atol=1e-5)
    with noise(True), torch.no_grad():
        loud = net(torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(forward(fold(net, PLAIN, noisy=True), X), loud, atol=1e-5)
    assert np.abs(loud - want).max() > 1e-3


def test_standardising_and_the_unit_are_folded_in() -> None:
    net = make_net(3)
    raw = 5.0 + 3.0 * X
    scale = Scale.of(raw, FEATURES, 4.0)
    with noise(False), torch.no_grad():
        want = 4.0 * net(torch.from_numpy(scale(raw))).numpy()
    np.testing.assert_allclose(forward(fold(net, scale), raw), want, atol=1e-4)


def test_features_that_it_may_not_see_change_nothing() -> None:
    net = make_net(3)
    scale = Scale.of(X, MINIMAL, 1.0)
    other = X.copy()
    hidden = [at for at, name in enumerate(FEATURES) if name not in MINIMAL]
    other[:, hidden] += 10.0
    folded = fold(net, scale)
    np.testing.assert_allclose(forward(folded, other), forward(folded, X), atol=1e-4)


def test_a_feature_that_never_varied_stays_harmless_where_it_does() -> None:
    same = X.copy()
    same[:, 18] = 0.25
    scale = Scale.of(same, FEATURES, 1.0)
    same[:, 18] = 0.5
    assert np.abs(scale(same)[:, 18]).max() < 0.3


def test_the_two_streams_are_told_apart() -> None:
    """Whatever is added to both advantages is taken out again: the value stream alone sets the
    level."""
    net = make_net(1)
    before = forward(fold(net, PLAIN), X)
    other = copy.deepcopy(net)
    last = [layer for layer in other.advantage if isinstance(layer, nn.Linear)][-1]
    with torch.no_grad():
        last.bias_mu += 5.0
    np.testing.assert_allclose(forward(fold(other, PLAIN), X), before, atol=1e-4)
    value = [layer for layer in other.value if isinstance(layer, nn.Linear)][-1]
    with torch.no_grad():
        value.bias_mu += 5.0
    np.testing.assert_allclose(forward(fold(other, PLAIN), X), before + 5.0, atol=1e-4)


def test_making_a_network_leaves_the_global_generator_alone() -> None:
    state = torch.random.get_rng_state()
    one, two = make_net(5), make_net(5)
    assert torch.equal(torch.random.get_rng_state(), state)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
