"""The drafter's network: cached, packed and plain arithmetic agree in every variant."""

from __future__ import annotations

import pytest
import torch

from hasten.dflash.net import DraftCache
from hasten.eagle3.bank import assemble
from hasten.eagle3.net import Eagle3Net
from hasten.eagle3.pairs import CHUNK, MOST_WAITING, Pairs
from hasten.errors import CacheStateError
from hasten.targets.fused_native import draft_linear
from tests.eagle3.eagle3_models import KINDS, bank, config, loaded, net, reference, said
from tests.exits import exit_models as tiny

START = 7
"""Position of the first pair: the rest of the prompt wasn't run again."""


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(count: int, seed: int = 3) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny.VOCAB, (count,), generator=generator).tolist()


def embeds(tokens: list[int]) -> torch.Tensor:
    return tiny.target().embed(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_the_arithmetic_is_the_papers(kind: str) -> None:
    made = net(config(**KINDS[kind]))
    taps = len(made.config.taps)
    tokens, features = noise(6, 32), noise(6, taps * 32, seed=2)
    mask, positions = torch.ones(6, 6, dtype=torch.bool).tril(), torch.arange(6)
    near = None
    if made.config.sliding_window is not None:
        near = (mask & (positions > positions[:, None] - made.config.sliding_window))[None]
    with torch.no_grad():
        got = made(
            tokens[None], made.fuse(features)[None], positions[None], DraftCache(), mask[None], near
        )[0]
        want = reference(made, tokens, features)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(made.logits(got), said(made, want), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_run_bit_by_bit_with_drafts_between_are_what_one_pass_gives(kind: str) -> None:
    shared = bank(**KINDS[kind])
    made, taps = net(config(**KINDS[kind])), len(shared.config.taps)
    total = 26
    features, tokens = noise(total, taps * 32), ids(START + total + 1)
    pairs = Pairs(shared)
    with torch.inference_mode():
        want = reference(made, embeds(tokens[START + 1 :]), features, first=START)
        # Six features of a prompt, whose last token is the answer's first; then rounds.
        pairs.begin(tokens[: START + 6], features[:6])
        assert (pairs.start, pairs.held, pairs.waiting) == (START, 5, 0)
        pairs.first(tokens[START + 6 : START + 7])
        at = 6
        for number, count in enumerate((1, 3, 1, 5, 2, 8)):
            if number % 2:  # a round that this drafter drafts in
                pairs.check(START + at)
                pairs.catch_up()
                assert pairs.last is not None
                torch.testing.assert_close(pairs.last[0, 0], want[at - 1], atol=1e-4, rtol=1e-4)
                before = (pairs.held, pairs.waiting)
                with pairs.branch() as branch:
                    state = pairs.last
                    for token in (1, 2, 3):
                        state = branch.step([token], state)
                assert before == (pairs.held, pairs.waiting) == (at, 0)
            follow = tokens[START + at + 1 : START + at + 1 + count]
            pairs.follow(features[at : at + count], follow)
            at += count
        pairs.check(START + total)
        pairs.catch_up()
    assert pairs.last is not None
    torch.testing.assert_close(pairs.last[0, 0], want[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_each_path_of_a_tree_gives_the_logits_of_a_chain(kind: str) -> None:
    shared, made = bank(**KINDS[kind]), net(config(**KINDS[kind]))
    features, tokens = noise(6, len(shared.config.taps) * 32), ids(7)
    drafted = [11, 12, 13, 14, 15, 16, 17]
    levels = [([0, 1], [0, 0]), ([2, 3, 4], [0, 1, 1]), ([5, 6], [2, 0])]
    """Rows by level, and which rows of the level before they follow."""
    pairs = Pairs(shared)
    with torch.inference_mode():
        pairs.begin(tokens[:6], features)
        pairs.first(tokens[6:7])
        pairs.catch_up()
        assert pairs.last is not None
        state, seen = pairs.last, torch.ones(1, 0, dtype=torch.bool)
        paths: list[list[int]] = [[]]
        with pairs.branch() as branch:
            for rows, parents in levels:
                above = seen[parents]
                state = branch.step([drafted[row] for row in rows], state[:, parents], above)
                seen = torch.cat([above, torch.eye(len(rows), dtype=torch.bool)], 1)
                paths = [[*paths[parent], row] for row, parent in zip(rows, parents, strict=True)]
                for at, path in enumerate(paths):
                    text = embeds([*tokens[1:], *(drafted[row] for row in path)])
                    want = reference(made, text, features, drafted=len(path))[-1]
                    torch.testing.assert_close(state[0, at], want, atol=2e-4, rtol=1e-3)
        assert pairs.held == 6


def test_a_long_prompt_is_run_in_parts_that_see_each_other() -> None:
    shared, count = bank(), CHUNK + 40
    features, tokens = noise(count, 96), ids(count + 1)
    mask = torch.ones(count, count, dtype=torch.bool).tril()[None]
    pairs = Pairs(shared)
    with torch.inference_mode():
        pairs.begin(tokens[:count], features)
        pairs.first(tokens[count:])
        pairs.catch_up()
        state, at = shared.net.fuse(features)[None], torch.arange(count)[None]
        want = shared.net(embeds(tokens[1:])[None], state, at, DraftCache(), mask)
    assert pairs.last is not None
    torch.testing.assert_close(pairs.last[0, 0], want[0, -1], atol=1e-4, rtol=1e-4)


def test_few_pairs_wait_however_many_rounds_others_draft() -> None:
    pairs, most, features = Pairs(bank()), 0, noise(3, 96)
    with torch.inference_mode():
        pairs.begin([5, 6, 7], features)
        pairs.first([8])
        for _ in range(60):
            pairs.follow(features[:2], [1, 2])
            most = max(most, pairs.waiting)
    assert 0 < most < MOST_WAITING
    assert pairs.held + pairs.waiting == 3 + 120
    pairs.check(3 + 120)


def test_the_last_feature_of_a_prompt_does_not_keep_the_others() -> None:
    pairs, features = Pairs(bank()), noise(400, 96)
    with torch.inference_mode():
        pairs.begin(ids(400), features)
    assert pairs._features[0].untyped_storage().nbytes() == 96 * 4


def test_a_branch_leaves_nothing_also_after_an_error() -> None:
    pairs = Pairs(bank())
    with torch.inference_mode():
        pairs.begin([5, 6, 7], noise(3, 96))
        with pytest.raises(RuntimeError, match="by the way"):
            _broken(pairs)
    assert pairs.held == 2


def _broken(pairs: Pairs) -> None:
    with pairs.branch() as branch:
        assert pairs.last is not None
        branch.step([4], pairs.last)
        assert pairs.held == 3
        raise RuntimeError("by the way")


def test_pairs_that_do_not_end_at_the_pending_token_are_refused() -> None:
    pairs = Pairs(bank())
    with torch.inference_mode():
        pairs.begin([5, 6, 7], noise(2, 96))
    with pytest.raises(CacheStateError, match="1 pairs from 1 on and 0 wait, where 3 tokens"):
        pairs.check(3)
    with pytest.raises(CacheStateError, match="2 rows were kept and 1 tokens"):
        pairs.follow(noise(2, 96), [4])


def test_a_prompt_without_features_starts_behind_itself() -> None:
    pairs = Pairs(bank())
    pairs.begin([5, 6, 7], torch.empty(0))
    pairs.first([8])
    pairs.check(3)
    assert (pairs.start, pairs.last) == (3, None)


def test_products_laid_out_for_this_machine_say_nearly_the_same() -> None:
    quick = assemble(tiny.target(), loaded(config()), draft_linear)
    tokens, features, at = noise(1, 5, 32), noise(1, 5, 96), torch.arange(5)[None]
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None]
    with torch.inference_mode():
        made, packed = bank().net, quick.net
        want = made(tokens, made.fuse(features), at, DraftCache(), mask)
        got = packed(tokens, packed.fuse(features), at, DraftCache(), mask)
    assert (got - want).norm() < 0.05 * want.norm()


def test_in_bfloat16_norms_and_angles_stay_in_float32() -> None:
    made, low = net(config()), net(config()).to(torch.bfloat16)
    tokens, features, at = noise(1, 1, 32), noise(1, 1, 96), torch.tensor([[9000]])
    want = made(tokens, made.fuse(features), at, DraftCache())
    got = low(tokens.bfloat16(), low.fuse(features.bfloat16()), at, DraftCache())
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).norm() < 0.05 * want.norm()
    assert low.logits(got).dtype == torch.float32


def test_gradients_reach_every_parameter() -> None:
    made = Eagle3Net(config(norm_before_fc=True, head_norms=True, num_layers=2))
    tokens, at = noise(1, 4, 32), torch.arange(4)[None]
    mask = torch.ones(4, 4, dtype=torch.bool).tril()[None]
    out = made(tokens, made.fuse(noise(1, 4, 96)), at, DraftCache(), mask)
    made.logits(out).square().sum().backward()
    for name, value in made.named_parameters():
        assert value.grad is not None, name
        assert value.grad.abs().sum() > 0, name
