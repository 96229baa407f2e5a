"""The native kernels: the numbers of torch's, and a row's bits whatever else is in its pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.targets import tiny_models as tiny
from tests.targets.fused_models import (
    PATHS,
    TREE,
    WEIGHTS,
    YARN,
    chain,
    close,
    fused,
    llama,
    qwen2,
    qwen3,
    random_model,
)

from hasten.errors import CapabilityError
from hasten.native.library import why_not_native
from hasten.targets.base import Rows
from hasten.targets.exactness import why_not_exact
from hasten.targets.fused import FusedTarget

if (missing := why_not_native(torch.float32, torch.device("cpu"), 16)) is not None:
    pytest.skip(f"no CPU kernels here: {missing}", allow_module_level=True)


KINDS: dict[str, Callable[[], Any]] = {
    "llama": llama(head_dim=16),
    "multi-query": llama(head_dim=32, num_key_value_heads=1),
    "no-groups": llama(head_dim=48, num_key_value_heads=4),
    "wide": llama(head_dim=80, hidden_size=36, intermediate_size=70),
    "biases": llama(head_dim=16, attention_bias=True, mlp_bias=True),
    "tied": llama(head_dim=64, tie_word_embeddings=True),
    "yarn-rope": llama(head_dim=16, rope_parameters=YARN),
    "qwen3": qwen3(head_dim=32),
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str) -> None:
    model, ids = random_model(KINDS[kind]), tiny.random_ids(40)
    target = fused(model, kernels="native")
    assert target.info.kernels == "native"
    sequence = target.open()
    close(
        target.prefill(sequence, ids[:30], all_logits=True).logits,
        tiny.fresh_logits(model, ids)[:30],
    )
    out = target.forward([chain(sequence, ids[30:])], taps=(0, 1, 2))[0]
    close(out.logits, tiny.fresh_logits(model, ids)[30:])
    theirs = fused(model, kernels="torch")
    other = theirs.open()
    theirs.prefill(other, ids[:30])
    want = theirs.forward([chain(other, ids[30:])], taps=(0, 1, 2))[0]
    for tap, hidden in want.hidden.items():
        close(out.hidden[tap], hidden, 5e-4)  # of hidden states up to 30


@pytest.mark.parametrize("kind", ["biases", "qwen3"])
def test_bfloat16_is_as_near_as_transformers_is(kind: str) -> None:
    model, ids = random_model(KINDS[kind]), tiny.random_ids(60)
    want = tiny.fresh_logits(model, ids)
    theirs = tiny.fresh_logits(random_model(KINDS[kind]).bfloat16(), ids).float()
    target = fused(model, torch.bfloat16, kernels="native")
    sequence = target.open()
    out = target.prefill(sequence, ids, all_logits=True, taps=(1,))
    assert out.logits is not None
    assert out.hidden[1].dtype == target.embed([1]).dtype == torch.bfloat16
    assert (out.logits - want).norm() <= 1.2 * (theirs - want).norm()


def test_embeddings_and_ends_are_the_dense_ones() -> None:
    for name in ("llama", "tied"):
        model = random_model(KINDS[name])
        ours, theirs = fused(model, kernels="native"), fused(model, kernels="torch")
        assert torch.equal(ours.embed([3, 1]), theirs.embed([3, 1]))
        assert torch.equal(ours.ends().embeddings, theirs.ends().embeddings)
        assert torch.equal(ours.ends().head, theirs.ends().head)
        assert torch.equal(ours.ends().norm, theirs.ends().norm)


def plain(target: FusedTarget, ids: Sequence[int], start: int) -> torch.Tensor:
    """Logits of ids[start:], one row a pass."""
    sequence, logits = target.open(), []
    target.prefill(sequence, ids[:start])
    for token in ids[start:]:
        out = target.forward([chain(sequence, [token])])[0].logits
        assert out is not None
        logits.append(out)
        target.commit(sequence, [0])
    target.close(sequence)
    return torch.cat(logits)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", ["llama", "wide", "qwen3"])
def test_a_row_of_a_chain_a_prompt_or_a_range_has_the_bits_it_has_alone(
    kind: str, weights: str
) -> None:
    target, ids = fused(random_model(KINDS[kind]), **WEIGHTS[weights]), tiny.random_ids(80)
    want = plain(target, ids, 20)
    for rows in (2, 5, 12, 13, 30, 60):
        sequence, got = target.open(), []
        target.prefill(sequence, ids[:20])
        for at in range(20, 80, rows):
            part = ids[at : at + rows]
            if rows == 5:  # in two ranges of layers
                target.forward([chain(sequence, part)], layers=(0, 1))
                got.append(target.forward([chain(sequence, part)], layers=(1, 3))[0].logits)
            else:
                got.append(target.forward([chain(sequence, part)])[0].logits)
            target.commit(sequence, range(len(part)))
        assert torch.equal(torch.cat(got), want), rows
    sequence = target.open()
    assert torch.equal(target.prefill(sequence, ids, all_logits=True).logits[20:], want)
    assert why_not_exact(target) is None


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_row_of_a_tree_of_a_fork_or_of_a_packed_pass_has_the_bits_it_has_alone(
    weights: str,
) -> None:
    target, ids = fused(random_model(KINDS["llama"]), **WEIGHTS[weights]), tiny.random_ids(50)
    target._store.copy_below = 0  # forks share their parent's memory, in parts of odd lengths
    sequence = target.open()
    target.prefill(sequence, ids[:19])
    fork = target.open(sequence, 17)
    target.prefill(fork, ids[17:23])
    second = target.open(fork, 21)
    target.prefill(second, ids[21:40])
    passes = target.forward([Rows(second, *TREE), chain(fork, [5, 6]), Rows(sequence, *TREE)])
    for prefix, out in ((ids[:40], passes[0]), (ids[:19], passes[2])):
        for row, path in enumerate(PATHS):
            tokens = [TREE[0][node] for node in path]
            alone = plain(target, [*prefix, *tokens], len(prefix))
            assert out.logits is not None
            assert torch.equal(out.logits[row], alone[-1])
    assert torch.equal(passes[1].logits, plain(target, [*ids[:23], 5, 6], 23))
    target.commit(second, [0, 2, 5, 6])
    after = target.forward([chain(second, [9])])[0].logits
    assert torch.equal(after, plain(target, [*ids[:40], 11, 13, 16, 17, 9], 44))
    target.check()


@pytest.mark.parametrize("weights", ["bfloat16", "bfloat16-int8-cache"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_work_on_a_sequence_leaves_the_cache_of_plain_decoding(
    weights: str, data: st.DataObject
) -> None:
    target = fused(random_model(KINDS["llama"]), **WEIGHTS[weights])
    sequence, ids = target.open(), tiny.random_ids(data.draw(st.integers(1, 20)))
    target.prefill(sequence, ids)
    for _ in range(data.draw(st.integers(1, 6))):
        count = data.draw(st.integers(1, 20))
        tokens = data.draw(st.lists(st.integers(0, tiny.VOCAB - 1), min_size=count, max_size=count))
        parents = [data.draw(st.integers(-1, i - 1)) for i in range(count)]
        out = target.forward([Rows(sequence, tuple(tokens), tuple(parents))])[0].logits
        row, path = data.draw(st.integers(0, count - 1)), []
        while row >= 0:
            path.insert(0, row)
            row = parents[row]
        alone = plain(target, [*ids, *(tokens[node] for node in path)], len(ids))
        assert out is not None
        assert torch.equal(out[path], alone)
        target.commit(sequence, path)
        ids = [*ids, *(tokens[node] for node in path)]
        if data.draw(st.booleans()):
            keep = data.draw(st.integers(1, len(ids)))
            target.truncate(sequence, keep)
            ids = ids[:keep]
    target.check()


def test_a_model_without_groups_and_biases_of_qwen2_run() -> None:
    shape = {**tiny.SHAPE, "hidden_size": 64}
    model = random_model(lambda: (qwen2()[0], type(qwen2()[1])(**shape, tie_word_embeddings=True)))
    target, ids = fused(model, kernels="native"), tiny.random_ids(30)
    sequence = target.open()
    close(target.prefill(sequence, ids, all_logits=True).logits, tiny.fresh_logits(model, ids))


def test_what_runs_layers_by_hand_asks_for_torchs_kernels() -> None:
    with pytest.raises(CapabilityError, match="kernels='torch'"):
        _ = fused(random_model(KINDS["llama"]), kernels="native").torch_decoder


def test_weights_are_counted_once() -> None:
    model = random_model(KINDS["tied"])
    whole, half = (fused(model, **WEIGHTS[name]).weight_bytes for name in ("float32", "bfloat16"))
    assert whole == 2 * half > 0
