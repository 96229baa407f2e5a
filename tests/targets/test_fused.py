"""The fused target against transformers' model of the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.targets import tiny_models as tiny
from tests.targets.fused_models import (
    KINDS,
    LONG,
    PATHS,
    TREE,
    chain,
    close,
    fused,
    random_model,
)

from hasten.targets.base import Rows, Target
from hasten.targets.fused import FusedTarget


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(max_position_embeddings=LONG)


@pytest.fixture
def target(model: Any) -> FusedTarget:
    return fused(model)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_logits_agree_with_transformers(kind: Callable[[], Any]) -> None:
    model = random_model(kind)
    assert FusedTarget.unsupported(model.config) is None
    target, ids = fused(model), tiny.random_ids(100)
    want = tiny.fresh_logits(model, ids)
    sequence = target.open()
    close(target.prefill(sequence, ids[:80], all_logits=True).logits, want[:80])
    close(target.forward([chain(sequence, ids[80:90])])[0].logits, want[80:90])
    target.commit(sequence, range(10))
    for i in range(90, 100):
        close(target.forward([chain(sequence, ids[i : i + 1])])[0].logits, want[i : i + 1])
        target.commit(sequence, [0])
    target.check()


def test_it_is_a_target_that_says_what_it_is(target: FusedTarget) -> None:
    assert isinstance(target, Target)
    info, can = target.info, target.capabilities
    assert (info.engine, info.architecture) == ("fused", "LlamaForCausalLM")
    assert (info.vocab_size, info.num_layers, info.hidden_size) == (tiny.VOCAB, 3, 32)
    assert (info.eos_ids, info.context_limit) == (frozenset({2}), LONG)
    assert all((can.tree, can.rollback, can.layer_ranges, can.taps, can.fork, can.packed))


@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 513])
def test_prefill_agrees_on_both_sides_of_chunk_borders(
    model: Any, target: FusedTarget, length: int
) -> None:
    ids = tiny.random_ids(length)
    want = tiny.fresh_logits(model, ids)
    sequence = target.open()
    close(target.prefill(sequence, ids).logits, want[-1:])
    assert sequence.length == length
    whole = target.open()
    close(target.prefill(whole, ids, all_logits=True).logits, want)


def test_prefill_in_pieces_agrees(model: Any, target: FusedTarget) -> None:
    ids = tiny.random_ids(60)
    sequence = target.open()
    for piece in (ids[:1], ids[1:20], ids[20:21]):
        target.prefill(sequence, piece)
    close(target.prefill(sequence, ids[21:]).logits, tiny.fresh_logits(model, ids)[-1:])


def test_each_tree_row_sees_its_own_path(model: Any, target: FusedTarget) -> None:
    prompt, (tokens, parents) = tiny.random_ids(30), TREE
    sequence = target.open()
    target.prefill(sequence, prompt)
    logits = target.forward([Rows(sequence, tokens, parents)])[0].logits
    assert logits is not None
    for row, path in enumerate(PATHS):
        want = tiny.fresh_logits(model, [*prompt, *(tokens[i] for i in path)])
        close(logits[row], want[-1])


def test_rows_added_to_pending_rows_see_their_ancestors(model: Any, target: FusedTarget) -> None:
    prompt, (tokens, parents) = tiny.random_ids(30), TREE
    sequence = target.open()
    target.prefill(sequence, prompt)
    for first, last in ((0, 1), (1, 3), (3, 7)):
        logits = target.forward([Rows(sequence, tokens[first:last], parents[first:last])])[0].logits
        assert logits is not None
        for row, path in list(enumerate(PATHS))[first:last]:
            want = tiny.fresh_logits(model, [*prompt, *(tokens[i] for i in path)])
            close(logits[row - first], want[-1])


@pytest.mark.parametrize("path", PATHS)
def test_after_a_commit_the_cache_is_what_plain_decoding_builds(
    model: Any, target: FusedTarget, path: list[int]
) -> None:
    prompt, (tokens, parents) = tiny.random_ids(30), TREE
    sequence = target.open()
    target.prefill(sequence, prompt)
    target.forward([Rows(sequence, tokens, parents)])
    target.commit(sequence, path)
    kept = [*prompt, *(tokens[i] for i in path)]
    assert (sequence.length, sequence.pending) == (len(kept), 0)
    logits = target.forward([chain(sequence, [50, 51])])[0].logits
    close(logits, tiny.fresh_logits(model, [*kept, 50, 51])[-2:])
    target.check()


def test_rollback_and_truncate_leave_no_trace(model: Any, target: FusedTarget) -> None:
    ids = tiny.random_ids(40)
    sequence = target.open()
    target.prefill(sequence, ids)
    target.forward([Rows(sequence, *TREE)])
    target.rollback(sequence)
    want = tiny.fresh_logits(model, [*ids, 50])[-1:]
    close(target.forward([chain(sequence, [50])])[0].logits, want)
    target.truncate(sequence, 13)
    assert (sequence.length, sequence.pending) == (13, 0)
    want = tiny.fresh_logits(model, [*ids[:13], 60, 61])[-1:]
    close(target.prefill(sequence, [60, 61]).logits, want)


def test_forks_hold_the_prompt_once_and_outlive_their_parent(
    model: Any, target: FusedTarget
) -> None:
    prompt = tiny.random_ids(300)
    parent = target.open()
    target.prefill(parent, prompt)
    alone = target.bytes_in_use
    forks = [target.open(parent, 250 + i) for i in range(4)]
    assert target.bytes_in_use == alone
    target.truncate(parent, 100)
    target.prefill(parent, [7] * 200)
    for i, fork in enumerate(forks):
        kept = [*prompt[: 250 + i], 20 + i]
        logits = target.prefill(fork, [20 + i]).logits
        close(logits, tiny.fresh_logits(model, kept)[-1:])
        grandchild = target.open(fork)
        target.close(fork)
        logits = target.forward([Rows(grandchild, (30, 31, 32), (-1, 0, 0))])[0].logits
        assert logits is not None
        close(logits[2], tiny.fresh_logits(model, [*kept, 30, 32])[-1])
        target.check()
        target.close(grandchild)
        target.close(grandchild)
    target.close(parent)
    assert target.bytes_in_use == 0


def test_layer_ranges_run_each_row_through_each_layer_once(model: Any, target: FusedTarget) -> None:
    prompt, (tokens, parents) = tiny.random_ids(20), TREE
    sequence = target.open()
    target.prefill(sequence, prompt)
    before = target.layer_rows
    for first, last in ((0, 1), (1, 3), (3, 7)):
        rows = Rows(sequence, tokens[first:last], parents[first:last])
        assert target.forward([rows], layers=(0, 1))[0].logits is None
    assert target.forward([Rows(sequence, tokens, parents)], layers=(1, 2))[0].logits is None
    logits = target.forward([Rows(sequence, tokens, parents)], layers=(2, 3))[0].logits
    assert target.layer_rows - before == 3 * len(tokens)
    fork = target.open(sequence)
    close(logits, target.forward([Rows(fork, tokens, parents)])[0].logits)
    target.commit(sequence, [0, 2, 5, 6])
    want = tiny.fresh_logits(model, [*prompt, 11, 13, 16, 17, 50])[-1:]
    close(target.forward([chain(sequence, [50])])[0].logits, want)


def test_rows_standing_apart_resume_together(model: Any, target: FusedTarget) -> None:
    prompt = tiny.random_ids(20)
    sequence = target.open()
    target.prefill(sequence, prompt)
    target.forward([Rows(sequence, (11,), (-1,))], layers=(0, 2))
    target.forward([Rows(sequence, (12,), (-1,))])
    target.forward([Rows(sequence, (13,), (0,))], layers=(0, 2))
    logits = target.forward([Rows(sequence, (11, 13), (-1, 0))], layers=(2, 3))[0].logits
    close(logits, tiny.fresh_logits(model, [*prompt, 11, 13])[-2:])


def test_taps_are_the_hidden_states_of_transformers(model: Any, target: FusedTarget) -> None:
    ids = tiny.random_ids(300)
    raw: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: raw.append(inputs[0]))
    try:
        with torch.no_grad():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    finally:
        hook.remove()
    want = {0: states[0][0], 1: states[1][0], 3: raw[0][0]}
    sequence = target.open()
    hidden = target.prefill(sequence, ids[:290], taps=(0, 1, 3)).hidden
    assert set(hidden) == set(want)
    for layer, state in want.items():
        # These states reach 50: what is asked of them is relative.
        close(hidden[layer], state[:290], 1e-5 * float(state.abs().max()))
    hidden = target.forward([chain(sequence, ids[290:])], layers=(0, 2), taps=(0, 1, 3))[0].hidden
    assert set(hidden) == {0, 1}
    close(hidden[1], states[1][0, 290:])
    rows = chain(sequence, ids[290:])
    close(target.forward([rows], layers=(2, 3), taps=(3,))[0].hidden[3], raw[0][0, 290:])
    close(target.embed(ids[:4]), states[0][0, :4])


def test_a_pass_over_several_sequences_equals_separate_passes(
    model: Any, target: FusedTarget
) -> None:
    prompts = [tiny.random_ids(n, seed=n) for n in (3, 40, 17)]
    sequences = [target.open() for _ in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        target.prefill(sequence, prompt)
    sequences.append(target.open(sequences[1], 30))
    prompts.append(prompts[1][:30])
    drafts = [TREE, ((21,), (-1,)), ((31, 32, 33), (-1, 0, 1)), ((41, 42), (-1, -1))]
    batch = [Rows(s, *draft) for s, draft in zip(sequences, drafts, strict=True)]
    passes = target.forward(batch, taps=(2,))
    for sequence, prompt, (tokens, parents), got in zip(
        sequences, prompts, drafts, passes, strict=True
    ):
        assert sequence.pending == len(tokens)
        alone = fused(model)
        other = alone.open()
        alone.prefill(other, prompt)
        want = alone.forward([Rows(other, tokens, parents)], taps=(2,))[0]
        assert want.logits is not None
        close(got.logits, want.logits)
        close(got.hidden[2], want.hidden[2])


def test_a_callers_autocast_changes_nothing(target: FusedTarget) -> None:
    sequence, ids = target.open(), tiny.random_ids(20)
    want = target.prefill(sequence, ids, all_logits=True).logits
    target.truncate(sequence, 10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = target.forward([chain(sequence, ids[10:])])[0].logits
    assert want is not None
    close(logits, want[10:], 1e-5)


def test_nothing_of_the_users_is_changed(model: Any) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config, state = model.config.to_dict(), torch.random.get_rng_state()
    threads = torch.get_num_threads()
    target = fused(model)
    sequence = target.open()
    target.prefill(sequence, tiny.random_ids(20))
    target.forward([Rows(sequence, *TREE)])
    target.commit(sequence, [0, 2])
    assert model.config.to_dict() == config
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
