"""Whatever is done to sequences, a row of the native decoder has the bits it has when run alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.targets import tiny_models as tiny
from tests.targets.fused_models import WEIGHTS, chain, close, fused, llama, qwen3, random_model

from hasten.errors import ContextError, ModelError, OptionError
from hasten.native import library as native
from hasten.native.build import compiled
from hasten.targets.base import Pass, Rows
from hasten.targets.cache import CachedSequence
from hasten.targets.exactness import why_not_exact
from hasten.targets.fused import FusedTarget

if (missing := native.why_not_native(torch.float32, torch.device("cpu"), 16)) is not None:
    pytest.skip(f"no CPU kernels here: {missing}", allow_module_level=True)

LAYERS = 3
CONTEXT = 160
TAPS = tuple(range(LAYERS + 1))
MODELS: dict[str, Callable[[], Any]] = {
    "pairs": llama(head_dim=16),
    "threes": qwen3(head_dim=48, num_attention_heads=6),  # three queries a key
    "odd": llama(head_dim=80, hidden_size=36, intermediate_size=70, num_key_value_heads=1),
}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@cache
def model(name: str) -> Any:
    return random_model(MODELS[name], max_position_embeddings=CONTEXT)


@cache
def target(name: str, weights: str) -> FusedTarget:
    """Shared: whoever opens a sequence closes it."""
    return fused(model(name), **WEIGHTS[weights])


class Alone:
    """What rows are when one thread runs them token by token, by the tokens up to them."""

    def __init__(self, target: FusedTarget) -> None:
        self.target = target
        self.known: dict[tuple[int, ...], Pass] = {}

    def __call__(self, ids: Sequence[int]) -> Pass:
        if tuple(ids) not in self.known:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            sequence = self.target.open()
            for at, token in enumerate(ids):
                out = self.target.forward([chain(sequence, [token])], taps=TAPS)[0]
                self.known[tuple(ids[: at + 1])] = out
                self.target.commit(sequence, [0])
            self.target.close(sequence)
            torch.set_num_threads(threads)
        return self.known[tuple(ids)]


@cache
def alone(name: str, weights: str) -> Alone:
    return Alone(target(name, weights))


def same(out: Pass, row: int, want: Pass) -> None:
    """The row's logits and taps, those there are, bit by bit."""
    if out.logits is not None:
        assert want.logits is not None
        assert torch.equal(out.logits[row], want.logits[0])
    for tap, hidden in out.hidden.items():
        assert torch.equal(hidden[row], want.hidden[tap][0])


def path_to(sequence: CachedSequence, row: int) -> list[int]:
    out: list[int] = []
    while row >= 0:
        out.append(row)
        row = sequence.pending_rows.parents[row]
    return out[::-1]


class History:
    """Sequences of a target beside the ids they hold; all that is run is compared."""

    OPERATIONS = ("rise", "rise", "rise", "rise", "together", "commit", "commit", "prompt",
                  "rollback", "fork", "truncate", "close")  # fmt: skip

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        name, weights = self.pick(sorted(MODELS)), self.pick(sorted(WEIGHTS))
        self.target, self.alone = target(name, weights), alone(name, weights)
        # Forks of these short sequences share memory in some runs, copy in the others.
        self.target._store.copy_below = self.pick((0, 0, 3, 64))
        self.kept: list[tuple[CachedSequence, list[int]]] = []
        torch.set_num_threads(self.pick((1, 1, 2, 3)))

    def pick(self, choices: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(choices))

    def whole(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def tokens(self, count: int) -> tuple[int, ...]:
        """Few different ones, so that histories meet what is known already."""
        start = self.whole(0, 1)
        return tuple((start + i) % 3 for i in range(count))

    def step(self) -> None:
        if not self.kept:
            self.kept.append((self.target.open(), []))
            self.prompt(0)
        getattr(self, self.pick(self.OPERATIONS))(self.whole(0, len(self.kept) - 1))
        self.target.check()

    def prompt(self, index: int) -> None:
        sequence, ids = self.kept[index]
        tokens = self.tokens(self.pick((1, 2, 7, 15, 16, 17, 40, 70)))
        if sequence.pending or len(ids) + len(tokens) > CONTEXT:
            return
        out = self.target.prefill(sequence, tokens, taps=TAPS, all_logits=True)
        for row in range(len(tokens)):
            same(out, row, self.alone([*ids, *tokens[: row + 1]]))
        ids.extend(tokens)

    def rows(self, index: int) -> tuple[Rows, list[int], int, int] | None:
        """New rows, or all that stand at some layer: their indices, the layer where they are, and
        the highest they may reach."""
        sequence, ids = self.kept[index]
        pending = sequence.pending_rows
        low = self.pick((0, *sorted({at for at in pending.frontier if at < LAYERS})))
        if low:
            picked = [row for row, at in enumerate(pending.frontier) if at == low]
            parents = tuple(pending.parents[row] for row in picked)
            tokens = tuple(pending.tokens[row] for row in picked)
        else:
            count, before = self.pick((1, 2, 3, 5, 12, 13, 30)), len(pending)
            if before + count + len(ids) > CONTEXT:
                return None
            picked = list(range(before, before + count))
            # Chains beside each other, their rows by turns; or any tree.
            chains, below = self.pick((1, 2, 3, 0)), self.whole(-1, before - 1)
            if chains or count > 5:
                back = [row - (chains or 2) for row in picked]
                parents = tuple(parent if parent >= before else below for parent in back)
            else:
                parents = tuple(self.whole(-1, row - 1) for row in picked)
            tokens = self.tokens(count)
        above = [pending.frontier[p] for p in parents if p >= 0 and p not in picked]
        most = min([LAYERS, *above])
        return (Rows(sequence, tokens, parents), picked, low, most) if most > low else None

    def compare(self, index: int, picked: Sequence[int], out: Pass) -> None:
        sequence, ids = self.kept[index]
        for i, row in enumerate(picked):
            path = [sequence.pending_rows.tokens[node] for node in path_to(sequence, row)]
            same(out, i, self.alone([*ids, *path]))

    def rise(self, index: int) -> None:
        """Some rows of a sequence go up some layers, or all."""
        made = self.rows(index)
        if made is None:
            return
        rows, picked, low, most = made
        high = most if self.draw(st.booleans()) else self.whole(low + 1, most)
        out = self.target.forward([rows], layers=(low, high), taps=TAPS[low : high + 1])[0]
        self.compare(index, picked, out)

    def together(self, _: int) -> None:
        """New rows of several sequences in one pass."""
        batch: list[tuple[int, Rows, list[int]]] = []
        for index in range(len(self.kept)):
            made = self.rows(index)
            if made is not None and made[2:] == (0, LAYERS):
                batch.append((index, made[0], made[1]))
        if batch:
            passes = self.target.forward([rows for _, rows, _ in batch], taps=(1,))
            for (index, _rows, picked), out in zip(batch, passes, strict=True):
                self.compare(index, picked, out)

    def commit(self, index: int) -> None:
        sequence, ids = self.kept[index]
        pending = sequence.pending_rows
        done = [row for row, at in enumerate(pending.frontier) if at == LAYERS]
        path = path_to(sequence, self.pick((*done[::-1], -1)))
        ids.extend(pending.tokens[row] for row in path)
        self.target.commit(sequence, path)
        assert sequence.length == len(ids)

    def rollback(self, index: int) -> None:
        self.target.rollback(self.kept[index][0])

    def fork(self, index: int) -> None:
        parent, ids = self.kept[index]
        length = self.whole(0, len(ids))
        self.kept.append((self.target.open(parent, length), ids[:length]))

    def truncate(self, index: int) -> None:
        sequence, ids = self.kept[index]
        del ids[self.whole(0, len(ids)) :]
        self.target.truncate(sequence, len(ids))

    def close(self, index: int) -> None:
        self.target.close(self.kept.pop(index)[0])

    def finish(self) -> None:
        """Every sequence goes on as one run alone would."""
        for index, (sequence, ids) in enumerate(self.kept):
            self.target.rollback(sequence)
            if len(ids) < CONTEXT:
                out = self.target.forward([chain(sequence, [1])], taps=TAPS)[0]
                self.compare(index, [0], out)

    def stop(self) -> None:
        """Then no memory is left in use."""
        while self.kept:
            self.close(0)
        self.target.check()
        assert self.target.bytes_in_use == 0


@pytest.mark.timeout(200)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_a_row_has_the_bits_it_has_alone_after_any_history(data: st.DataObject) -> None:
    history = History(data.draw)
    try:
        for _ in range(history.whole(3, 14)):
            history.step()
        history.finish()
    finally:
        history.stop()


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", MODELS)
def test_threads_change_no_bit_however_few_rows_they_share(name: str, weights: str) -> None:
    made, ids, found = target(name, weights), tiny.random_ids(37), []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        sequence = made.open()
        prompt = made.prefill(sequence, ids[:30], taps=TAPS, all_logits=True)
        row = made.forward([chain(sequence, ids[30:31])], taps=TAPS)[0]
        found.append([prompt.logits, row.logits, *prompt.hidden.values(), *row.hidden.values()])
        made.close(sequence)
    for others in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], others, strict=True))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_portable_build_keeps_a_rows_bits_and_gives_the_same_numbers(
    weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tiny.random_ids(40)
    portable = native.Library(compiled(portable=True))
    assert portable.features == 0
    for name in ("pairs", "odd"):
        fast, one = target(name, weights), target(name, weights).open()
        want = fast.prefill(one, ids, all_logits=True).logits
        fast.close(one)
        with monkeypatch.context() as patch:
            patch.setattr(native, "_load", lambda: portable)
            made = fused(model(name), **WEIGHTS[weights])
            assert why_not_exact(made) is None
            got = made.prefill(made.open(), ids, all_logits=True).logits
        assert got is not None
        assert want is not None
        if weights == "float32":
            close(got, want)
        else:  # a number rounded another way is a step off, and steps add up
            assert (got - want).norm() <= 0.05 * want.norm()


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "bfloat16-int8-cache", "int4"])
def test_a_sequence_runs_to_the_very_end_of_the_context(weights: str) -> None:
    made, ids = target("pairs", weights), [i % 3 for i in range(CONTEXT)]
    sequence = made.open()
    made.prefill(sequence, ids[:-6])
    out = made.forward([chain(sequence, ids[-6:])])[0]
    for row in range(6):
        same(out, row, alone("pairs", weights)(ids[: CONTEXT - 5 + row]))
    with pytest.raises(ContextError, match=f"{CONTEXT + 1} tokens"):
        made.forward([Rows(sequence, (1,), (5,))])
    out = made.forward([Rows(sequence, (4,), (0,))])[0]  # beside the chain there is room
    same(out, 0, alone("pairs", weights)([*ids[:-5], 4]))
    made.commit(sequence, range(6))
    assert sequence.length == CONTEXT
    made.close(sequence)


def test_a_pass_that_fails_midway_changes_no_later_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ids = target("pairs", "bfloat16"), [1, 3, 0, 2]
    sequence = made.open()
    made.prefill(sequence, ids)
    made.forward([chain(sequence, [4, 1])], layers=(0, 1))
    decoder: Any = made._decoder
    with monkeypatch.context() as patch:
        patch.setattr(decoder._kernels, "run", lambda *_: 1)
        with pytest.raises(ModelError, match="no memory for a pass over 2 rows"):
            made.forward([chain(sequence, [4, 1])], layers=(1, 3))
        with pytest.raises(ModelError, match="no memory"):
            made.forward([Rows(sequence, (2,), (-1,))])
    assert sequence.pending_rows.frontier == [1, 1]
    out = made.forward([chain(sequence, [4, 1])], layers=(1, 3))[0]
    same(out, 0, alone("pairs", "bfloat16")([*ids, 4]))
    same(out, 1, alone("pairs", "bfloat16")([*ids, 4, 1]))
    made.check()
    made.close(sequence)


def test_ids_outside_the_vocabulary_never_reach_the_kernels() -> None:
    made = target("pairs", "float32")
    sequence = made.open()
    for token in (-1, tiny.VOCAB, 2**40):
        with pytest.raises(OptionError, match=f"id {token} isn't"):
            made.prefill(sequence, [token])
        with pytest.raises(OptionError, match=f"id {token} isn't"):
            made.forward([chain(sequence, [3, token])])
        with pytest.raises(OptionError, match=f"id {token} isn't"):
            made.embed([token])
    assert sequence.length == sequence.pending == 0
    made.close(sequence)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "float32-int8-cache"])
def test_what_is_not_a_number_stays_with_the_rows_that_see_it(weights: str) -> None:
    broken = random_model(MODELS["pairs"])
    with torch.no_grad():
        broken.model.embed_tokens.weight[9] = torch.nan
    made = fused(broken, **WEIGHTS[weights])
    sequence = made.open()
    made.prefill(sequence, [1, 2, 3])
    whole = made.forward([Rows(sequence, (4, 9, 5, 6), (-1, 0, 1, 0))])[0].logits
    assert whole is not None
    assert whole[[1, 2]].isnan().all()
    assert whole[[0, 3]].isfinite().all()
    made.commit(sequence, [0, 3])
    again = made.forward([chain(sequence, [5])])[0].logits
    assert again is not None
    assert again.isfinite().all()
