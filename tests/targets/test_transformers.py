from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.targets import hf_cases
from tests.targets import tiny_models as tiny
from tests.targets.hf_cases import (
    CHAINS,
    NODES,
    PLAIN,
    PROMPT,
    TREE,
    TREES,
    WINDOWED,
    assert_goes_on_like,
    assert_same,
    filled,
    logits_of,
    make,
    named,
    path_to,
    run,
    step,
    target_of,
)

from hasten.errors import CapabilityError, ContextError, OptionError
from hasten.targets.base import Target
from hasten.types import Rows

one_thread = hf_cases.one_thread


@named(TREES + CHAINS + PLAIN)
def test_plain_decoding_answers_like_generate(kind: Any, attention: str | None) -> None:
    target = target_of(kind, attention)
    right = tiny.greedy_ids(target.facts.model, PROMPT, 24)
    sequence = target.open()
    got = [int(logits_of(target.prefill(sequence, PROMPT)).argmax())]
    while len(got) < 24:
        got.append(int(step(target, sequence, got[-1]).argmax()))
    assert got == right


@named(TREES)
def test_speculating_on_trees_answers_like_generate(kind: Any, attention: str | None) -> None:
    """Each round a wrong child comes before the right one, and the path ends in a wrong one."""
    target = target_of(kind, attention)
    right = tiny.greedy_ids(target.facts.model, PROMPT, 30)
    sequence = target.open()
    got = [int(logits_of(target.prefill(sequence, PROMPT)).argmax())]
    while len(got) < 24:
        truth = right[len(got) : len(got) + 3]
        wrong = [(token + 1) % tiny.VOCAB for token in truth]
        tokens = [got[-1], wrong[0], truth[0], wrong[1], truth[1], wrong[2]]
        best = run(target, sequence, tokens, [-1, 0, 0, 2, 2, 4]).argmax(-1).tolist()
        assert best[0] == truth[0]
        target.commit(sequence, [0, 2, 4])
        got += [best[0], best[2], best[4]]
    assert got == right[: len(got)]


@named(CHAINS)
def test_speculating_on_chains_answers_like_generate(kind: Any, attention: str | None) -> None:
    target = target_of(kind, attention)
    right = tiny.greedy_ids(target.facts.model, PROMPT, 30)
    sequence = target.open()
    got = [int(logits_of(target.prefill(sequence, PROMPT)).argmax())]
    while len(got) < 24:
        truth = right[len(got) : len(got) + 2]
        chain = [got[-1], *truth, (right[len(got) + 2] + 1) % tiny.VOCAB]
        best = run(target, sequence, chain, range(-1, 3)).argmax(-1).tolist()
        target.commit(sequence, [0, 1, 2])
        got += best[:3]
    assert got == right[: len(got)]


@named(TREES)
def test_a_tree_pass_says_what_each_path_alone_says(kind: Any, attention: str | None) -> None:
    target = target_of(kind, attention)
    logits = run(target, filled(target), NODES, TREE)
    for node in range(len(TREE)):
        path = [NODES[i] for i in path_to(node)]
        assert_same(logits[node], tiny.fresh_logits(target.facts.model, [*PROMPT, *path])[-1])


@named(TREES)
def test_a_forest_has_several_roots(kind: Any, attention: str | None) -> None:
    target = target_of(kind, attention)
    logits = run(target, filled(target), NODES[:4], [-1, -1, 0, 1])
    for row, path in enumerate([[0], [1], [0, 2], [1, 3]]):
        ids = [*PROMPT, *(NODES[i] for i in path)]
        assert_same(logits[row], tiny.fresh_logits(target.facts.model, ids)[-1])


@named(TREES)
@pytest.mark.parametrize("kept", [[0], [0, 2, 4, 6], [0, 7], [0, 1, 3]])
def test_after_a_commit_the_cache_is_what_plain_decoding_builds(
    kind: Any, attention: str | None, kept: list[int]
) -> None:
    target = target_of(kind, attention)
    sequence = filled(target)
    run(target, sequence, NODES, TREE)
    target.commit(sequence, kept)
    assert_goes_on_like(target, sequence, [*PROMPT, *(NODES[i] for i in kept)])


@named(TREES + CHAINS)
def test_a_rollback_leaves_no_trace(kind: Any, attention: str | None) -> None:
    target = target_of(kind, attention)
    sequence = filled(target)
    for _ in range(2):
        run(target, sequence, NODES[:5], range(-1, 4))
        assert sequence.pending == 5
        target.rollback(sequence)
    assert_goes_on_like(target, sequence, PROMPT)


@named(TREES)
def test_rows_may_follow_rows_of_an_earlier_pass(kind: Any, attention: str | None) -> None:
    """Enough of them to push a window's worth of slots in between."""
    target = target_of(kind, attention)
    sequence = filled(target)
    parents = [-1, 0, 0, 0, 1, 2, 3, 3, 0, 9, 5, 10, 8]
    parents[9] = 8
    ids = tiny.random_ids(len(parents), seed=4)
    logits = torch.cat(
        [
            run(target, sequence, ids[first:last], parents[first:last])
            for first, last in ((0, 4), (4, 9), (9, 10), (10, 13))
        ]
    )
    for node in range(len(parents)):
        path = [ids[i] for i in path_to(node, parents)]
        assert_same(logits[node], tiny.fresh_logits(target.facts.model, [*PROMPT, *path])[-1])
    kept = path_to(11, parents)
    target.commit(sequence, kept)
    assert_goes_on_like(target, sequence, [*PROMPT, *(ids[i] for i in kept)])


@named(CHAINS)
def test_a_chain_may_follow_a_chain_of_an_earlier_pass(kind: Any, attention: str | None) -> None:
    target = target_of(kind, attention)
    sequence = filled(target)
    run(target, sequence, NODES[:3], [-1, 0, 1])
    logits = run(target, sequence, NODES[3:5], [2, 3])
    right = tiny.fresh_logits(target.facts.model, [*PROMPT, *NODES[:5]])[-2:]
    assert_same(logits, right)
    target.commit(sequence, [0, 1, 2, 3])
    assert_goes_on_like(target, sequence, [*PROMPT, *NODES[:4]])


@named(TREES + CHAINS + PLAIN)
def test_a_fork_and_its_parent_go_separate_ways(kind: Any, attention: str | None) -> None:
    target = target_of(kind, attention)
    parent = filled(target)
    child = target.open(parent)
    step(target, parent, 11)
    step(target, child, 12)
    grandchild = target.open(child)
    assert_goes_on_like(target, parent, [*PROMPT, 11])
    assert_goes_on_like(target, child, [*PROMPT, 12])
    assert_goes_on_like(target, grandchild, [*PROMPT, 12])


def test_a_fork_shares_the_memory_of_keys_and_values() -> None:
    target = target_of(tiny.llama, "sdpa")
    parent = filled(target)
    child = target.open(parent, 10)
    held = [s.cache.layers[0].keys.data_ptr() for s in (parent, child)]
    assert held[0] == held[1]


@named([case for case in TREES if case not in WINDOWED] + [(tiny.mpt, None), (tiny.bloom, None)])
def test_fork_and_truncate_cut_to_any_length(kind: Any, attention: str | None) -> None:
    if kind in (tiny.mistral, tiny.gemma2, tiny.gemma3):
        prompt = PROMPT[: tiny.WINDOW - 2]  # a window that has slid can't be cut; see below
    else:
        prompt = PROMPT
    target = target_of(kind, attention)
    parent = filled(target, prompt)
    run(target, parent, NODES[:3], [-1, 0, 1])
    assert_goes_on_like(target, target.open(parent, 3), prompt[:3])
    assert parent.pending == 3
    target.commit(parent, [0])
    target.truncate(parent, 5)
    assert_goes_on_like(target, parent, prompt[:5])
    target.truncate(parent, 0)
    target.prefill(parent, PROMPT)
    assert_goes_on_like(target, parent, PROMPT)


@named([*WINDOWED, (tiny.lfm2, "sdpa"), *PLAIN])
def test_what_can_not_be_cut_is_refused_and_stays_whole(kind: Any, attention: str | None) -> None:
    target = target_of(kind, attention)
    sequence = filled(target)
    with pytest.raises(CapabilityError, match="can't be cut to 9"):
        target.truncate(sequence, 9)
    with pytest.raises(CapabilityError, match="can't be cut to 9"):
        target.open(sequence, 9)
    assert target.open(sequence, 0).length == 0
    target.truncate(sequence, len(PROMPT))
    assert_goes_on_like(target, sequence, PROMPT)


@named(PLAIN)
def test_a_state_that_can_not_roll_back_is_run_row_by_row(kind: Any, attention: str | None) -> None:
    target = target_of(kind, attention)
    assert not target.capabilities.rollback
    assert not target.capabilities.tree
    assert any("rolled back" in note for note in target.capabilities.notes)
    sequence = filled(target)
    with pytest.raises(CapabilityError, match="one row"):
        run(target, sequence, [5, 6], [-1, 0])
    target.rollback(sequence)  # nothing is pending
    run(target, sequence, [5], [-1])
    for refused in (
        lambda: run(target, sequence, [6], [0]),
        lambda: target.rollback(sequence),
        lambda: target.commit(sequence, []),
        lambda: target.open(sequence),
        lambda: target.truncate(sequence, len(PROMPT)),
    ):
        with pytest.raises(CapabilityError):
            refused()
    target.commit(sequence, [0])
    assert_goes_on_like(target, sequence, [*PROMPT, 5])


@named(TREES + CHAINS + PLAIN)
def test_a_prompt_in_chunks_is_the_prompt_in_one(kind: Any, attention: str | None) -> None:
    whole = target_of(kind, attention)
    right = tiny.fresh_logits(whole.facts.model, PROMPT)
    target = make(whole.facts.model, prefill_rows=6)
    sequence = target.open()
    last = logits_of(target.prefill(sequence, PROMPT[:13]))
    assert_same(last, right[12:13])
    rest = logits_of(target.prefill(sequence, PROMPT[13:], all_logits=True))
    assert_same(rest, right[13:])
    assert_goes_on_like(target, sequence, PROMPT)


def test_a_chat_goes_on_after_many_windows() -> None:
    """Prefill, trees and prefill again: what slid out is let go each time."""
    target = make(tiny.build(tiny.gemma3), prefill_rows=5)
    sequence = target.open()
    ids: list[int] = []
    for turn in range(4):
        more = tiny.random_ids(11, seed=turn)
        target.prefill(sequence, more)
        ids += more
        run(target, sequence, NODES, TREE)
        target.commit(sequence, [0, 2, 4])
        ids += [NODES[0], NODES[2], NODES[4]]
        slots = {layer.keys.shape[-2] for layer in sequence.cache.layers if layer.is_sliding}
        assert slots == {tiny.WINDOW - 1}
    assert_goes_on_like(target, sequence, ids)


@named([*TREES, (tiny.mpt, None), (tiny.lfm2, "sdpa"), (tiny.jamba, "sdpa")])
def test_taps_are_the_models_hidden_states_the_last_one_not_normed(
    kind: Any, attention: str | None
) -> None:
    target = target_of(kind, attention)
    model = target.facts.model
    ids = [*PROMPT, NODES[0]]
    last: list[Any] = []
    layer = target.facts.layers[-1]
    handle = layer.register_forward_hook(lambda _m, _a, out: last.append(out))
    with torch.no_grad():
        right = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
    handle.remove()
    unnormed = last[0] if isinstance(last[0], torch.Tensor) else last[0][0]
    sequence = target.open()
    first = target.prefill(sequence, PROMPT, taps=(0, 2, 3))
    (passed,) = target.forward([Rows(sequence, (NODES[0],), (-1,))], taps=(3, 0, 2))
    assert set(passed.hidden) == {0, 2, 3}
    for index, states in ((0, right[0]), (2, right[2]), (3, unnormed)):
        assert_same(first.hidden[index], states[0, :-1])
        assert_same(passed.hidden[index], states[0, -1:])
    assert not torch.allclose(passed.hidden[3], right[3][0, -1:])


def test_several_sequences_in_a_batch_answer_as_alone() -> None:
    target = target_of(tiny.llama, "sdpa")
    prompts = [PROMPT, PROMPT[:7]]
    alone = [run(target, filled(target, prompt), NODES, TREE) for prompt in prompts]
    batch = [Rows(filled(target, prompt), NODES, TREE) for prompt in prompts]
    together = [logits_of(passed) for passed in target.forward(batch)]
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(OptionError, match="twice"):
        target.forward([batch[0], batch[0]])


def test_embeddings_are_the_input_embeddings() -> None:
    target = target_of(tiny.llama, "sdpa")
    weight = target.facts.model.get_input_embeddings().weight
    assert torch.equal(target.embed([5, 7, 5]), weight[[5, 7, 5]])


def test_it_is_a_target_and_knows_its_model() -> None:
    target = target_of(tiny.gpt2, "sdpa")
    assert isinstance(target, Target)
    info = target.info
    assert (info.vocab_size, info.num_layers, info.hidden_size) == (tiny.VOCAB, 3, 32)
    assert (info.context_limit, info.dtype, info.engine) == (
        tiny.CONTEXT,
        torch.float32,
        "transformers",
    )
    assert (info.architecture, info.eos_ids) == ("GPT2LMHeadModel", frozenset({2}))


def test_misuse_is_refused_by_name_and_changes_nothing() -> None:
    target = target_of(tiny.llama, "sdpa")
    sequence = filled(target)
    full = Rows(sequence, (5,), (-1,))
    for error, message, call in (
        (CapabilityError, "layers=", lambda: target.forward([full], layers=(0, 2))),
        (OptionError, "taps", lambda: target.forward([full], taps=(4,))),
        (OptionError, "rows", lambda: run(target, sequence, [], [])),
        (OptionError, "row 1", lambda: run(target, sequence, [5, 6], [-1, 1])),
        (ContextError, "empty", lambda: target.prefill(sequence, [])),
        (ContextError, "holds 128", lambda: target.prefill(sequence, [5] * 109)),
        (ContextError, "holds 128", lambda: run(target, sequence, [5] * 109, range(-1, 108))),
        (OptionError, "length", lambda: target.truncate(sequence, 21)),
        (OptionError, "length", lambda: target.open(sequence, -1)),
        (OptionError, "length", lambda: target.open(None, 3)),
        (OptionError, "prefill_rows", lambda: make(target.facts.model, prefill_rows=0)),
    ):
        with pytest.raises(error, match=message):
            call()
    run(target, sequence, NODES, TREE)
    for rows in ([1], [0, 3], [0, 8], [0, 2, 1], [-1]):
        with pytest.raises(OptionError, match="no path"):
            target.commit(sequence, rows)
    with pytest.raises(OptionError, match="pending"):
        target.prefill(sequence, [5])
    target.rollback(sequence)
    assert_goes_on_like(target, sequence, PROMPT)
    target.close(sequence)
    target.close(sequence)
    with pytest.raises(CapabilityError, match="closed"):
        target.prefill(sequence, [5])
