"""A DFlash drafter on hasten's CPU kernels says what it says in torch's operations."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hasten.dflash.bank import DFlashBank, TorchRun, assemble
from hasten.dflash.config import DFlashConfig
from hasten.dflash.lengths import BlockLength
from hasten.dflash.native_net import MOST_ROWS, NativeRun, native_net
from hasten.dflash.net import pack
from hasten.drafters.dflash import DFlash
from hasten.errors import ModelError
from hasten.exits.bank import DraftHead
from hasten.native import library as native
from hasten.native.build import compiled
from hasten.policies.length import LengthPolicy
from hasten.targets.fused_native import NativeLinear
from hasten.targets.fused_weights import make_linear
from hasten.targets.quantized import quantize
from hasten.types import Round, SamplingParams
from tests.dflash import dflash_models
from tests.dflash.dflash_models import BLOCK, SIZES, config
from tests.exits import exit_models as tiny
from tests.exits.exit_requests import plain, prompt_of, rounds_of, tokens_of

if (missing := native.why_not_native(torch.float32, torch.device("cpu"), 16)) is not None:
    pytest.skip(f"no CPU kernels here: {missing}", allow_module_level=True)

VOCAB = SIZES["vocab_size"]
EVEN = range(0, VOCAB, 2)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "pairs": {"head_dim": 16},
    "one tap": {
        "head_dim": 48, "num_heads": 3, "num_kv_heads": 1, "hidden_size": 44, "num_layers": 1,
        "intermediate_size": 51, "target_layer_ids": (3,), "block_size": 2,
    },
    "five taps": {
        "head_dim": 32, "num_heads": 6, "hidden_size": 64, "num_layers": 3, "block_size": 9,
        "intermediate_size": 80, "target_layer_ids": (0, 1, 2, 4, 5), "rope_scaling": YARN,
    },
}  # fmt: skip
Make = Callable[[torch.Tensor], Any]
PRODUCTS: dict[str, tuple[Make, torch.dtype, float]] = {
    "float32": (lambda w: NativeLinear(w.float()), torch.float32, 1e-4),
    "bfloat16": (lambda w: NativeLinear(w.bfloat16()), torch.bfloat16, 0.06),
    "8 bits": (lambda w: NativeLinear(quantize(w, 8)), torch.float32, 0.03),
}
"""Products, the dtype of what is between them on torch's side, and how far states may differ (as a
share of their length)."""


@pytest.fixture(autouse=True)
def _one_setting() -> Iterator[None]:
    before = torch.get_num_threads()
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(name: str) -> DFlashConfig:
    return config(**SHAPES[name])


def sides(
    shape: DFlashConfig,
    products: str = "float32",
    *,
    ids: Sequence[int] | None = EVEN,
    prompt: Sequence[int] = (),
    start: int = 0,
    rows: torch.Tensor | None = None,
) -> tuple[NativeRun, TorchRun]:
    """A request's run on the kernels, and one of the same network in torch's operations."""
    make, dtype, _ = PRODUCTS[products]
    mask = noise(1, shape.hidden_size, seed=8).to(dtype)
    rows = noise(VOCAB, shape.hidden_size, seed=9) if rows is None else rows
    kept = None if ids is None else torch.tensor(list(ids))

    def local(how: Make) -> Any:
        return DraftHead(kept, rows.to(dtype), how).local(prompt)

    quick = native_net(pack(dflash_models.net(shape).to(dtype), make), mask)
    assert quick is not None
    how = make_linear if products == "float32" else make
    slow = pack(dflash_models.net(shape).to(dtype), how)
    return NativeRun(quick, local(make), start), TorchRun(slow, mask, local(how), start)


def states(shape: DFlashConfig, rows: int, seed: int = 1) -> torch.Tensor:
    return noise(rows, len(shape.taps) * shape.hidden_size, seed=seed)


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def says_the_best(run: NativeRun, hidden: torch.Tensor, want: int, slack: float) -> None:
    """The ids are those of the largest logits that torch makes of the same states."""
    slots = hidden[0, 1 : 1 + want]
    ids, logits = run._head.ids.tolist(), run._head(slots)
    for row, said in zip(logits, run.likeliest(slots), strict=True):
        assert row[ids.index(said)] >= row.max() - slack


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_behind_a_growing_context_are_those_of_torchs_operations(
    name: str, products: str
) -> None:
    torch.set_num_threads(2)
    shape, (_, dtype, most) = made(name), PRODUCTS[products]
    quick, slow = sides(shape, products, prompt=(7, 9, 4, 151), start=11)
    for number, rows in enumerate((0, 7, 1, 0, 70, 3, 64, 1)):
        features = states(shape, rows, number).to(dtype)
        if number == 6:
            quick.catch_up(features)
            slow.catch_up(features)
            features = features[:0]
        anchor = noise(1, shape.hidden_size, seed=100 + number).to(dtype)
        got, want = (run.block(anchor, features, number) for run in (quick, slow))
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert far(got, want) < most
        says_the_best(quick, got, shape.block_size - 1, 1e-4 if dtype == torch.float32 else 0.1)
    assert (quick.cache.start, quick.cache.length) == (11, 146)
    assert (slow.cache.start, slow.cache.length) == (11, 146)


def test_caches_grow_and_keep_what_they_hold() -> None:
    shape = made("five taps")
    quick, slow = sides(shape)
    held = []
    for number, rows in enumerate((100, 90, MOST_ROWS + 40, 400, 3)):
        features, anchor = states(shape, rows, number), noise(1, shape.hidden_size, seed=number)
        assert far(*(run.block(anchor, features, 0) for run in (quick, slow))) < 1e-4
        held.append(quick.nbytes)
    assert quick.cache.length == slow.cache.length == 889
    row = shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * 4
    assert 889 * row <= held[-1] < 2.5 * 889 * row
    assert len(set(held)) < len(held), "room is made for more than comes"


@pytest.mark.parametrize("ids", [None, EVEN, (5,)], ids=["all", "some", "one"])
@pytest.mark.parametrize("prompt", [(), (7, 4, 9, 151)], ids=["no prompt", "prompt"])
def test_a_request_has_its_prompts_ids_and_says_what_torch_says(
    ids: Sequence[int] | None, prompt: Sequence[int]
) -> None:
    torch.set_num_threads(3)
    shape, said = made("five taps"), set()
    quick, slow = sides(shape, ids=ids, prompt=prompt)
    for number in range(12):
        anchor, features = noise(1, 64, seed=number), states(shape, 2, number)
        slots = [run.block(anchor, features, 8)[0, 1:] for run in (quick, slow)]
        assert quick.likeliest(slots[0]) == slow.likeliest(slots[1])
        said |= set(quick.likeliest(slots[0]))
    assert said <= {*(range(VOCAB) if ids is None else ids), *prompt}
    assert ids == (5,) or len(said) > 2
    assert ids != (5,) or not prompt or said & set(prompt)


def test_of_equal_logits_the_lowest_place_is_said_whoever_made_them() -> None:
    shape = made("pairs")
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        quick, slow = sides(shape, prompt=(7, 9), rows=torch.zeros(VOCAB, 32))
        for run in (quick, slow):
            hidden = run.block(noise(1, 32), states(shape, 3), 4)
            assert run.likeliest(hidden[0, 1:]) == [0] * 4


@pytest.mark.parametrize("ids", [None, EVEN, (5,)], ids=["all ids", "half", "one"])
def test_candidates_and_their_chances_are_those_of_torchs_operations(ids: Any) -> None:
    shape = made("five taps")
    quick, slow = sides(shape, ids=ids, prompt=(7, 9))
    for number, width in enumerate((1, 3, 8, 3, 500)):
        anchor, features = noise(1, 64, seed=number), states(shape, 2, number)
        slots = [run.block(anchor, features, 3, 2)[0, 1:] for run in (quick, slow)]
        for count in (2, 8, 0, 5):
            got, want = (
                run.candidates(each[:count], width)
                for run, each in zip((quick, slow), slots, strict=True)
            )
            assert [[token for token, _ in row] for row in got] == [
                [token for token, _ in row] for row in want
            ]
            chances = [[[chance for _, chance in row] for row in side] for side in (got, want)]
            torch.testing.assert_close(*map(torch.tensor, chances), atol=1e-5, rtol=1e-4)
            assert len(got) == count
        said = [token for token, *_ in (row[0] for row in quick.candidates(slots[0], width))]
        assert quick.likeliest(slots[0]) == said, "either may be asked after the other"
        assert all(sum(c for _, c in row) < 1.0 + 1e-5 for row in got)


def test_slots_that_arent_numbers_say_nothing_and_dont_reach_the_next_text() -> None:
    shape = made("pairs")
    quick, slow = sides(shape)
    for run in (quick, slow):
        hidden = run.block(torch.full((1, 32), torch.nan), states(shape, 3), 4)
        assert run.likeliest(hidden[0, 1:]) == [-1] * 4
        assert run.candidates(hidden[0, 1:], 3) == [[]] * 4
        hidden = run.block(noise(1, 32), states(shape, 1), 4)
        assert hidden.isfinite().all()
        assert min(run.likeliest(hidden[0, 1:])) >= 0


def test_any_number_of_threads_makes_the_same_bits() -> None:
    shape, found = made("five taps"), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        quick, _ = sides(shape, "8 bits", prompt=(7, 9))
        hidden = [quick.block(noise(1, 64, seed=i), states(shape, 9, i), 8) for i in range(3)]
        found.append((torch.cat(hidden), quick.likeliest(hidden[-1][0, 1:])))
    for hidden, said in found[1:]:
        assert torch.equal(hidden, found[0][0])
        assert said == found[0][1]


def test_rows_make_the_same_bits_however_they_come() -> None:
    shape, features = made("pairs"), states(made("pairs"), 600)
    hidden = []
    for cut in (600, 600 - MOST_ROWS, 37, 1, 0):
        quick, _ = sides(shape)
        quick.catch_up(features[:cut])
        hidden.append(quick.block(noise(1, 32), features[cut:], 0))
    for each in hidden[1:]:
        assert torch.equal(each, hidden[0])


def test_ids_may_be_asked_for_after_a_block_in_any_number() -> None:
    shape = made("five taps")
    quick, slow = sides(shape)
    hidden = quick.block(noise(1, 64), states(shape, 5), 2)
    want = slow.likeliest(slow.block(noise(1, 64), states(shape, 5), 0)[0, 1:])
    for count in (1, 2, 8, 3, 0):
        assert quick.likeliest(hidden[0, 1 : 1 + count]) == want[:count]
    quick.catch_up(states(shape, 2))
    assert quick.likeliest(hidden[0, 1:]) == want, "rows that come later don't touch the block"


def test_without_this_processors_instructions_the_states_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    portable, shape = native.Library(compiled(portable=True)), made("five taps")
    for products in ("float32", "8 bits"):
        hidden = []
        for kernels in (native.library(), portable):
            with monkeypatch.context() as patch:
                patch.setattr(native, "library", lambda kernels=kernels: kernels)
                quick, _ = sides(shape, products)
                hidden.append(quick.block(noise(1, 64), states(shape, 9), 3))
        assert far(hidden[0], hidden[1]) < PRODUCTS[products][2]


def test_states_of_another_layout_or_dtype_are_read_as_they_are_meant() -> None:
    shape, features = made("pairs"), states(made("pairs"), 6)
    turned = features.T.contiguous().T.double()
    hidden = [sides(shape)[0].block(noise(1, 32), each, 0) for each in (features, turned)]
    assert torch.equal(hidden[0], hidden[1])
    with pytest.raises(ModelError, match="64 are read"):
        sides(shape)[0].block(noise(1, 32), features[:, :32], 0)


@pytest.mark.parametrize(
    ("changes", "make"),
    [
        ({"head_dim": 8}, PRODUCTS["float32"][0]),
        ({"attention_bias": True}, PRODUCTS["float32"][0]),
        ({"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 4},
         PRODUCTS["float32"][0]),
        ({}, make_linear),
    ],
    ids=["small heads", "biases", "sliding layers", "torch's products"],
)  # fmt: skip
def test_networks_the_kernels_dont_have_run_in_torchs_operations(
    changes: dict[str, Any], make: Make
) -> None:
    shape = config(**{"head_dim": 16, **changes})
    bank = assemble(tiny.target(), dflash_models.loaded(shape), make)
    assert bank.native is None
    assert isinstance(bank.open(bank.head.local(()), 0), TorchRun)


def native_bank(ids: Sequence[int] | None = None, **changes: Any) -> DFlashBank:
    if ids is not None:
        changes["draft_vocab_size"] = len(ids)
    shape = config(**{"head_dim": 16, **changes})
    make = PRODUCTS["float32"][0]
    return assemble(tiny.target(), dflash_models.loaded(shape, ids=ids), make)


def test_a_head_in_torchs_operations_means_a_run_in_them() -> None:
    bank = native_bank()
    assert isinstance(bank.open(bank.head.local(()), 0), NativeRun)
    other = replace(bank, head=DraftHead(None, bank.head.rows, make_linear))
    assert isinstance(other.open(other.head.local(()), 0), TorchRun)


GREEDY = SamplingParams(max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.7, top_p=0.95)


def rule(policy: str = "fixed", most: int = 0) -> BlockLength:
    return BlockLength(LengthPolicy(BLOCK, policy=policy, most=most))


@pytest.mark.parametrize("policy", ["fixed", "ratio"])
@pytest.mark.parametrize("how", ["greedy", "sampled", "drawn"])
def test_whole_answers_are_plain_decodings_and_drafts_are_torchs(how: str, policy: str) -> None:
    params = GREEDY if how == "greedy" else SAMPLED
    bank = native_bank(EVEN, length_head=6)

    def drafts(shared: DFlashBank, case: int) -> list[tuple[int, ...]]:
        drafter = DFlash(shared, rule(policy), draw=how == "drawn")
        rounds: list[Round] = rounds_of(tiny.target(), prompt_of(case), params, drafter, seed=case)
        want = tokens_of(plain(tiny.target(), prompt_of(case), params, seed=case))
        assert tokens_of(rounds) == want
        return [each.tree.tokens for each in rounds if each.tree is not None]

    for case in range(2):
        found = drafts(bank, case)
        assert max(len(each) for each in found) > 1
        assert found == drafts(replace(bank, native=None), case)


@pytest.mark.parametrize("policy", ["fixed", "ratio"])
def test_a_block_is_one_call_also_where_its_states_decide_how_much_is_verified(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, made = native.library(), []
    step = kernels.dflash_step
    monkeypatch.setattr(kernels, "dflash_step", lambda *all: made.append(all) or step(*all))
    bank = replace(native_bank(length_head=6), length=lambda hidden: 0.9)
    drafter = DFlash(bank, rule(policy))
    rounds = rounds_of(tiny.target(), prompt_of(0), GREEDY, drafter)
    drafted = sum(each.drafted > 0 for each in rounds)
    assert drafted > 5
    assert len(made) == 1 + drafted, "the prompt's states are a call, too"


def test_a_finished_request_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, held = native.library(), set()
    opened, close = kernels.dflash_open, kernels.dflash_close

    def open_one() -> int:
        made: int = opened()
        held.add(made)
        return made

    monkeypatch.setattr(kernels, "dflash_open", open_one)
    monkeypatch.setattr(kernels, "dflash_close", lambda run: (held.remove(run), close(run)))
    drafters = [DFlash(native_bank(), rule()) for _ in range(3)]
    for drafter in drafters:
        rounds_of(tiny.target(), prompt_of(0), GREEDY, drafter)
        assert drafter._run.nbytes == 0
    assert len(held) == 3, "one that is empty each"
    del drafter, drafters
    gc.collect()
    assert not held


def test_short_memory_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, shape = native.library(), made("pairs")
    quick, _ = sides(shape)
    monkeypatch.setattr(kernels, "dflash_step", lambda *_: 1)
    with pytest.raises(ModelError, match="no memory for a step"):
        quick.block(noise(1, 32), states(shape, 3), 2)
    assert quick.cache.length == 0
    monkeypatch.setattr(kernels, "dflash_open", lambda: None)
    with pytest.raises(ModelError, match="no memory for another request"):
        sides(shape)
