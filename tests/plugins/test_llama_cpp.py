"""llama-cpp-python is given chains, and the next ids tell what it kept of them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.plugins import fake_llama_cpp
from tests.plugins.fake_llama_cpp import Llama
from tests.plugins.fake_texts import (
    NextToken,
    Raising,
    RaisingAtTheEnd,
    plain,
    register,
    repeating,
    unforeseeable,
)

from hasten.errors import CapabilityError, OptionError
from hasten.plugins import session
from hasten.plugins._llama_cpp_costs import PassCosts
from hasten.plugins.llama_cpp import DraftModel
from hasten.targets.catalog import source_gguf

PROMPT = [3, 5, 9, 12, 7, 31, 22, 40, 18, 5, 9]
COUNT = 120


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting takes no time: how long drafts are doesn't depend on how busy the machine is."""
    monkeypatch.setattr(session, "perf_counter", lambda: 0.0)


def draft_model(method: str = "suffix", **options: Any) -> DraftModel:
    """One for which passes of any number of rows take as long, unless a clock is given."""
    return DraftModel(method, **{"row_cost": 0.01, "clock": lambda: 0.0, **options})


@pytest.mark.parametrize("method", ["suffix", "prompt-lookup", "racer:retrieval", "auto"])
def test_answers_are_plain_decodings_in_fewer_passes(method: str) -> None:
    llama = Llama(draft_model(method), repeating)
    assert llama.generate(PROMPT, COUNT) == plain(PROMPT, COUNT, repeating)
    assert llama.passes < 0.5 * COUNT


def test_text_that_cannot_be_foretold_is_answered_too() -> None:
    llama = Llama(draft_model(row_cost=0.25), unforeseeable)
    assert llama.generate(PROMPT, COUNT) == plain(PROMPT, COUNT, unforeseeable)
    assert llama.drafted < 0.5 * COUNT


def test_drafts_are_intc_arrays_no_longer_than_asked() -> None:
    model = draft_model(num_pred_tokens=3)
    draft = model(np.array([1, 2, 3, 4, 5, 1, 2], dtype=np.intc))
    assert (draft.dtype, draft.tolist()) == (np.intc, [3, 4, 5])
    nothing = model(np.array([9, 8], dtype=np.intc))
    assert (nothing.dtype, nothing.shape) == (np.intc, (0,))


def test_what_was_kept_is_read_off_the_next_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    model = draft_model()
    told = []
    learn = session.ChainPolicy.learn

    def listening(self: Any, round: Any) -> None:
        told.append((round.emitted, len(round.accepted)))
        learn(self, round)

    monkeypatch.setattr(session.ChainPolicy, "learn", listening)
    ids = [1, 2, 3, 4, 5, 1, 2]
    draft = model(np.array(ids, dtype=np.intc)).tolist()
    assert draft[:2] == [3, 4]
    model(np.array([*ids, 3, 4, 9], dtype=np.intc))
    assert told == [((2,), 0), ((3, 4, 9), 3)]


def test_a_text_that_goes_on_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = draft_model()
    begun = []
    begin = session.Session.begin
    monkeypatch.setattr(
        session.Session, "begin", lambda self, *args: (begun.append(args), begin(self, *args))
    )
    llama = Llama(model, repeating)
    answer = llama.generate(PROMPT, 20)
    assert len(begun) == 1
    # A chat's next turn: all that was said, and more.
    llama.generate([*PROMPT, *answer, 1, 2, 3], 20)
    assert len(begun) == 1
    llama.generate([7, 7, 7], 20)
    assert len(begun) == 2


def test_a_text_that_was_changed_is_a_new_one() -> None:
    model = draft_model()
    model(np.array([1, 2, 3, 4, 1, 2], dtype=np.intc))
    assert model(np.array([1, 2, 3, 4], dtype=np.intc)).tolist() == []
    assert model(np.array([1, 9, 3, 4, 1], dtype=np.intc)).tolist()[:1] == [9]


def test_the_callers_array_is_neither_kept_nor_changed() -> None:
    model = draft_model()
    ids = np.array([1, 2, 3, 4, 1, 2, 0, 0], dtype=np.intc)
    before = ids.copy()
    model(ids[:6])
    assert (ids == before).all()
    ids[:8] = [7, 7, 7, 7, 1, 2, 3, 4]  # llama-cpp-python writes the next text there
    assert model(ids).tolist() == []


def timed(model: DraftModel, now: list[float], cost: Callable[[int], float]) -> Any:
    """`model`, on a clock that a pass moves on by `cost` of its drafted rows."""

    def drafts(ids: Any) -> Any:
        draft = model(ids)
        now[0] += cost(len(draft))
        return draft

    return drafts


@pytest.mark.parametrize("after", [repeating, unforeseeable])
def test_where_rows_turn_out_dear_drafting_costs_little(after: NextToken) -> None:
    now = [0.0]
    model = draft_model(clock=lambda: now[0])
    llama = Llama(timed(model, now, lambda drafted: 1.0 + 1.5 * drafted), after, n_ctx=1024)
    llama.generate(PROMPT, 900)
    assert now[0] < 1.1 * 900  # what plain decoding takes


def test_where_rows_turn_out_cheap_long_drafts_are_made() -> None:
    now = [0.0]
    model = draft_model(row_cost=0.8, clock=lambda: now[0])
    llama = Llama(timed(model, now, lambda drafted: 1.0 + 0.02 * drafted), repeating)
    llama.generate(PROMPT, 400)
    assert now[0] < 0.35 * 400


def test_what_was_seen_of_a_row_count_is_believed_and_fades() -> None:
    costs = PassCosts(0.1, most=9)
    assert costs.curve(3, 100) == pytest.approx([10.0, 11.0, 12.0])
    for _ in range(20):
        costs.observe(1, 100, 5.0, 0.0)
        costs.observe(4, 100, 20.0, 0.0)
    seen = costs.curve(9, 100)
    assert seen[0] == pytest.approx(5.0, rel=0.01)
    assert seen[3] == pytest.approx(20.0, rel=0.01)
    assert seen[8] > seen[3]
    for _ in range(3000):
        costs.observe(1, 100, 5.0, 0.0)
    assert costs.curve(9, 100)[3] < 10.0


def test_a_slow_reader_of_one_answer_counts_for_little() -> None:
    costs = PassCosts(0.1, most=9)
    for _ in range(10):
        costs.observe(1, 100, 5.0, 0.0)
    costs.observe(1, 100, 60_000.0, 0.0)
    costs.observe(1, 100, 0.0, 0.0)
    assert costs.curve(1, 100)[0] == pytest.approx(6.0)


@pytest.mark.parametrize("drafter", [Raising, RaisingAtTheEnd])
def test_a_drafter_that_fails_costs_its_drafts_and_not_the_answer(
    drafter: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register(monkeypatch, drafter)
    llama = Llama(draft_model("toy"), repeating)
    assert llama.generate(PROMPT, COUNT) == plain(PROMPT, COUNT, repeating)
    assert caplog.text.count("llama.cpp goes on without") == 1
    llama.generate([8, *PROMPT], COUNT)
    assert caplog.text.count("llama.cpp goes on without") == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "nonsense"}, "unknown method"),
        ({"num_pred_tokens": 0}, "num_pred_tokens: must be at least 1"),
        ({"row_cost": 0.0}, "row_cost: must be a number above 0"),
    ],
)
def test_a_bad_option_is_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        DraftModel(**options)


def test_a_method_that_needs_the_model_is_refused_by_name() -> None:
    with pytest.raises(CapabilityError, match=r"recycling.*top-k logits"):
        DraftModel("recycling")


def test_where_llama_cpp_python_is_loaded_it_is_one_of_its_draft_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, module in fake_llama_cpp.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    assert isinstance(DraftModel(), fake_llama_cpp.LlamaDraftModel)


# In a process of its own: llama.cpp leaves files open, and a fault of it would end this one.
REAL = """
import sys
import llama_cpp
from hasten.plugins.llama_cpp import DraftModel

drafts = []

class Counting(DraftModel):
    def __call__(self, input_ids, /, **kwargs):
        draft = super().__call__(input_ids, **kwargs)
        drafts.append(len(draft))
        return draft

model = Counting("suffix", row_cost=0.001, clock=lambda: 0.0)
assert isinstance(model, llama_cpp.llama_speculative.LlamaDraftModel)
answers = []
for draft in (None, model):
    llama = llama_cpp.Llama(sys.argv[1], n_ctx=128, n_threads=2, verbose=False, draft_model=draft)
    made = llama.create_completion(
        "Write the days of the week three times:\\nMonday, Tuesday,", max_tokens=24, temperature=0.0
    )
    answers.append(made["choices"][0]["text"])
assert answers[0], "no answer"
print(answers[0] == answers[1], sum(drafts) > 0, len(drafts) < 22)
"""


def test_llama_cpp_python_itself_answers_alike_in_fewer_passes(smollm2_dir: Path) -> None:
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("needs llama-cpp-python (the extra llama-cpp)")
    command = [sys.executable, "-c", REAL, str(source_gguf())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["True", "True", "True"]
