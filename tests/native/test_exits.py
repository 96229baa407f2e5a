"""Exit modules on hasten's CPU kernels say what they say on torch's operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.exits.exit_tensors import config, random_tensors

from hasten.drafters.exit_session import ExitSession, ModuleRun
from hasten.errors import ModelError
from hasten.exits import native_module
from hasten.exits.bank import DraftHead, ExitBank
from hasten.exits.config import ExitConfig
from hasten.exits.modules import ExitModule
from hasten.exits.native_module import NativeRun, Pairs
from hasten.native import library as native
from hasten.native.build import compiled
from hasten.targets.base import Ends
from hasten.targets.fused_native import NativeLinear
from hasten.targets.fused_weights import make_linear
from hasten.targets.quantized import quantize
from hasten.types import DraftTree, Round, RowSignals

if (missing := native.why_not_native(torch.float32, torch.device("cpu"), 16)) is not None:
    pytest.skip(f"no CPU kernels here: {missing}", allow_module_level=True)

VOCAB, CPU = 199, torch.device("cpu")
EVEN = range(0, VOCAB, 2)
SIZES: dict[str, Any] = {
    "pairs": {"heads": 4, "kv_heads": 2, "head_dim": 16, "inner": 24},
    "threes": {"heads": 6, "kv_heads": 2, "head_dim": 32, "inner": 80, "deep": (3,)},
    "no MLP": {"heads": 4, "kv_heads": 4, "head_dim": 64, "inner": 0, "deep": (1, 3, 6)},
    "odd": {"heads": 5, "kv_heads": 1, "head_dim": 80, "inner": 51},
}
HIDDEN = {"pairs": 32, "threes": 64, "no MLP": 32, "odd": 44}
PRODUCTS: dict[str, tuple[Callable[[torch.Tensor], Any], torch.dtype, float]] = {
    "float32": (lambda w: NativeLinear(w.float()), torch.float32, 1e-4),
    "bfloat16": (lambda w: NativeLinear(w.bfloat16()), torch.bfloat16, 0.06),
    "8 bits": (lambda w: NativeLinear(quantize(w, 8)), torch.float32, 0.03),
}
"""Products, the dtype of what is between them on torch's side, and how far chances may differ."""


@pytest.fixture(autouse=True)
def _one_setting() -> Iterator[None]:
    before = torch.get_num_threads()
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def made_config(name: str) -> ExitConfig:
    changes = dict(SIZES[name])
    deep = changes.pop("deep", (3, 6))
    return config("deep", 0, HIDDEN[name], deep_at=deep, **changes)


def banks(
    made: ExitConfig, products: str = "float32", ids: Sequence[int] | None = EVEN
) -> tuple[ExitBank, ExitBank]:
    """One module on the kernels, and the same on torch's operations (in float32: its own
    products)."""
    make, dtype, _ = PRODUCTS[products]
    generator = torch.Generator().manual_seed(7)
    table, head = (torch.randn(VOCAB, made.hidden, generator=generator) for _ in range(2))
    ends = Ends(table.to(dtype), 0.3 * head.to(dtype), torch.ones(made.hidden), 1e-5)
    kept = None if ids is None else torch.tensor(list(ids))

    def bank(how: Callable[[torch.Tensor], Any]) -> ExitBank:
        module = ExitModule(made, random_tensors(made), how, dtype=dtype, device=CPU)
        return ExitBank([module], DraftHead(kept, ends.head, how), ends)

    fast = bank(make)
    assert fast.native.keys() == {0}
    plain = bank(make_linear if products == "float32" else make)
    plain.native = {}
    return fast, plain


def text(rows: int, seed: int = 3) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (rows,), generator=generator).tolist()


def states(bank: ExitBank, rows: int, seed: int = 1) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size, dtype = (rows, bank.modules[0].config.hidden), bank.embeddings.dtype
    return {layer: torch.randn(size, generator=generator).to(dtype) for layer in bank.taps}


def cut(hidden: dict[int, torch.Tensor], start: int, stop: int) -> dict[int, torch.Tensor]:
    return {layer: value[start:stop] for layer, value in hidden.items()}


def begun(bank: ExitBank, prompt: Sequence[int] = ()) -> tuple[ExitSession, ModuleRun]:
    session = ExitSession(bank)
    session.begin(prompt, RowSignals())
    (run,) = session.runs
    return session, run


def close(found: list[Pairs], wanted: list[Pairs], far: float = 1e-4) -> None:
    """The same ids with the same chances; where chances are nearer than they are exact, another
    order is right too."""
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert [c for _, c in mine] == pytest.approx([c for _, c in theirs], abs=far)
        known = dict(theirs)
        for id_, chance in mine:
            assert chance == pytest.approx(known.get(id_, theirs[-1][1]), abs=far)
        assert [c for _, c in mine] == sorted((c for _, c in mine), reverse=True)


STEPS = [
    ([11], [-1]),
    ([4, 8, 6], [0, 0, 0]),
    ([9, 12], [2, 1]),
    ([1], [5]),
    ([70, 71, 72, 73, 74], [0, 5, 6, 3, 4]),
]
"""A tree over five steps: siblings, cousins, a path of three, late children of early rows."""


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("name", SIZES)
def test_a_tree_of_questions_gets_the_answers_of_torchs_operations(
    name: str, products: str, threads: int
) -> None:
    torch.set_num_threads(threads)
    far, prompt = PRODUCTS[products][2], text(30)
    sides = [begun(bank, prompt) for bank in banks(made_config(name), products)]
    hidden = states(sides[0][0].bank, 30)
    assert isinstance(sides[0][1], NativeRun)
    for start, stop in ((0, 9), (9, 10), (10, 17), (17, 30)):
        for _, run in sides:
            run.feed(prompt[start:stop], cut(hidden, start, stop))
        for _ in range(1 + stop % 2):  # asked twice: the same
            for tokens, parents in STEPS:
                found, wanted = (s.ask(run, tokens, parents, 6) for s, run in sides)
                close(found, wanted, far)
    assert {run.length for _, run in sides} == {30}


@pytest.mark.parametrize("ids", [None, EVEN, range(5)], ids=["all", "some", "few"])
@pytest.mark.parametrize("prompt", [(), (7, 4, 9, 8, 151)], ids=["no prompt", "prompt"])
@pytest.mark.parametrize("width", [1, 8, 500])
def test_the_draft_head_has_a_requests_own_ids_and_chances_over_all_of_them(
    ids: Sequence[int] | None, prompt: Sequence[int], width: int
) -> None:
    torch.set_num_threads(3)
    sides = [begun(bank, prompt) for bank in banks(made_config("pairs"), ids=ids)]
    found, wanted = (session.ask(run, [5], [-1], width) for session, run in sides)
    close(found, wanted)
    head = sides[0][0].head
    assert len(found[0]) == min(width, len(head.ids))
    if width == 500:
        assert {id_ for id_, _ in found[0]} == set(head.ids.tolist())
        assert sum(chance for _, chance in found[0]) == pytest.approx(1.0, abs=1e-4)


def test_two_requests_ask_one_module_in_turns_each_by_its_own_text_and_ids() -> None:
    fast, plain = banks(made_config("pairs"))
    hidden = states(fast, 8)
    pairs = []
    for bank in (fast, plain):
        one, two = begun(bank, (7,)), begun(bank, (9, 11))
        said = []
        for at in range(8):
            for session, run in (one, two):
                row = at if session is one[0] else 7 - at
                run.feed([row], cut(hidden, row, row + 1))
                said += session.ask(run, [row + 1], [-1], 100)
        pairs.append(said)
    close(*pairs)
    assert 7 in dict(pairs[0][0])
    assert 7 not in dict(pairs[0][1])


def test_long_contexts_and_many_rows_at_once_are_the_same_as_a_few_at_a_time() -> None:
    fast, plain = banks(made_config("pairs"))
    rows, prompt = 700, text(700)
    hidden = states(fast, rows)
    whole, pieces, slow = begun(fast)[1], begun(fast)[1], begun(plain)[1]
    for run in (whole, slow):
        run.feed(prompt, hidden)
        run.catch_up()
        assert run.length == rows
    for start in range(0, rows, 50):
        pieces.feed(prompt[start : start + 50], cut(hidden, start, start + 50))
    outs = [run.first(7, None) for run in (whole, pieces, slow)]
    assert torch.equal(outs[0], outs[1])
    torch.testing.assert_close(outs[0], outs[2], rtol=1e-4, atol=1e-4)


def test_rows_wait_until_they_are_many() -> None:
    run = begun(banks(made_config("pairs"))[0])[1]
    assert isinstance(run, NativeRun)
    most, hidden = native_module.MOST_WAITING, states(banks(made_config("pairs"))[0], 40)
    waited = []
    for _ in range(6):
        run.feed(text(40), hidden)
        waited.append(run.waiting)
    assert waited == [40, 80, 40, 80, 40, 80]
    assert run.length + run.waiting == 240
    assert max(waited) < 2 * most


def test_outputs_of_chains_and_of_verified_rows_are_torchs() -> None:
    prompt = text(20)
    runs = [begun(bank)[1] for bank in banks(made_config("no MLP"))]
    hidden = states(banks(made_config("no MLP"))[0], 20)

    def same(outs: list[torch.Tensor]) -> None:
        assert outs[0].shape == outs[1].shape
        torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-4)

    for start in range(0, 20, 4):
        for run in runs:
            run.feed(prompt[start : start + 4], cut(hidden, start, start + 4))
        if start % 8:
            same([run.verified(3) for run in runs])
        above = [run.first(50, None) for run in runs]
        same(above)
        for depth in (1, 2, 3):  # guesses that come to nothing
            above = [
                run.more([depth], None, out, (depth,)) for run, out in zip(runs, above, strict=True)
            ]
            same(above)


def test_outputs_are_the_same_for_any_number_of_threads() -> None:
    bank, prompt = banks(made_config("threes"), "8 bits")[0], text(20)
    said = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        run = begun(bank)[1]
        run.feed(prompt, states(bank, 20))
        said.append(run.first(3, None))
    assert torch.equal(said[0], said[1])
    assert torch.equal(said[0], said[2])


def test_without_this_processors_instructions_the_answers_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    portable = native.Library(compiled(portable=True))
    prompt = text(9)
    for products in ("float32", "8 bits"):
        said = []
        for kernels in (native.library(), portable):
            with monkeypatch.context() as patch:
                patch.setattr(native, "library", lambda kernels=kernels: kernels)
                bank = banks(made_config("threes"), products)[0]
                session, run = begun(bank, prompt)
                run.feed(prompt, states(bank, 9))
                said.append(session.ask(run, [4], [-1], 8) + session.ask(run, [5, 6], [0, 0], 8))
        close(said[0], said[1], 1e-3)


def test_kept_nodes_of_a_tree_are_fed_along_their_path() -> None:
    fast = banks(made_config("pairs"))[0]
    hidden = states(fast, 5)
    session, run = begun(fast)
    tree = DraftTree((3, 90, 5, 91, 6), (-1, 0, 0, 2, 2))
    signals = RowSignals(hidden=hidden)
    session.observe(Round(1, (5, 6, 7), tree=tree, accepted=(0, 2, 4), signals=signals))
    other, alone = begun(fast)
    alone.feed([3, 5, 6], {layer: value[[0, 2, 4]] for layer, value in hidden.items()})
    assert session.ask(run, [7], [-1], 5) == other.ask(alone, [7], [-1], 5)


def test_states_of_another_layout_or_dtype_are_read_as_they_are_meant() -> None:
    fast = banks(made_config("pairs"))[0]
    hidden = states(fast, 6)
    turned = {layer: value.T.contiguous().T.double() for layer, value in hidden.items()}
    answers = []
    for given in (hidden, turned):
        session, run = begun(fast)
        run.feed(text(6), given)
        answers.append(session.ask(run, [7], [-1], 5))
    assert answers[0] == answers[1]


def test_states_that_are_too_few_are_refused_and_nothing_is_fed() -> None:
    run = begun(banks(made_config("pairs"))[0])[1]
    assert isinstance(run, NativeRun)
    hidden = states(banks(made_config("pairs"))[0], 3)
    with pytest.raises(ModelError, match="states of others"):
        run.feed([1, 2, 3, 4], hidden)
    with pytest.raises(ModelError, match="states of others"):
        run.feed([1, 2], hidden, (0, 3))
    assert run.waiting == run.length == 0


def test_a_row_whose_logits_arent_finite_says_nothing_and_spoils_no_other() -> None:
    bank = banks(made_config("pairs"))[0]
    session, run = begun(bank)
    bank.embeddings[9] = torch.nan
    session.ask(run, [4], [-1], 4)
    said = session.ask(run, [8, 9], [0, 0], 4)
    assert len(said[0]) == 4
    assert said[1] == []


@pytest.mark.parametrize(
    ("changes", "make"),
    [
        ({"head_dim": 8}, PRODUCTS["float32"][0]),
        ({}, make_linear),
        ({"layer": 2}, PRODUCTS["float32"][0]),
    ],
    ids=["small heads", "torch's products", "a higher exit"],
)
def test_modules_the_kernels_dont_have_run_on_torchs_operations(
    changes: dict[str, Any], make: Callable[[torch.Tensor], Any]
) -> None:
    made = replace(made_config("pairs"), **changes)
    module = ExitModule(made, random_tensors(made), make, dtype=torch.float32, device=CPU)
    table = torch.randn(VOCAB, made.hidden)
    ends = Ends(table, table, torch.ones(made.hidden), 1e-5)
    bank = ExitBank([module], DraftHead(None, table, make), ends)
    assert bank.native == {}
    assert not isinstance(ExitSession(bank).runs[0], NativeRun)


def test_a_finished_request_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, closed = native.library(), []
    close_it = kernels.exit_close
    monkeypatch.setattr(kernels, "exit_close", lambda run: (closed.append(run), close_it(run)))
    session, run = begun(banks(made_config("pairs"))[0])
    session.ask(run, [4], [-1], 4)
    before = len(closed)
    del run
    session.end()
    assert len(closed) == before + 1
