"""The SGLang plug-in registers, drafts trees as the n-gram worker wants them, or declines.

Against a stand-in (`fake_sglang`): nothing here ran on a GPU.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import numpy as np
import pytest
from tests.plugins import fake_sglang
from tests.plugins.fake_sglang import Request, arguments, serve, target
from tests.plugins.fake_texts import (
    OutOfVocabulary,
    Raising,
    RaisingAtTheEnd,
    plain,
    register,
    repeating,
    unforeseeable,
)

from hasten.errors import CapabilityError, OptionError
from hasten.plugins import sglang
from hasten.plugins._sglang_corpus import Corpus, pad_tree
from hasten.plugins.session import EngineFacts
from hasten.types import DraftTree

COUNT = 80
PROMPTS = {f"r{i}": [i, 5, 9, 12, 7, 31, 22, 40, 18, i + 1, 5, 9, 12] for i in range(6)}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Algorithms registered with a stand-in of SGLang, by name."""
    made, known = fake_sglang.modules()
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv(sglang.VARIABLE, raising=False)
    return known


def worker(registered: dict[str, Any], after: Any = repeating, **changes: Any) -> Any:
    """The worker that SGLang would make."""
    if sglang.ALGORITHM not in registered:
        sglang.register()
    algorithm = registered[sglang.ALGORITHM]
    args = arguments(**changes)
    algorithm.handle_server_args(args)
    return algorithm.create_worker(args)(args, target(), after)


def requests(count: int = COUNT) -> list[Request]:
    return [Request(rid, list(prompt), count) for rid, prompt in PROMPTS.items()]


# -- registering -----------------------------------------------------------------------------------


def test_the_algorithm_is_treated_as_sglangs_own_ngram(registered: dict[str, Any]) -> None:
    sglang.register()
    algorithm = registered["HASTEN"]
    assert algorithm.supports_overlap
    assert algorithm.is_ngram()
    assert not algorithm.has_draft_kv()
    assert not algorithm.is_eagle()
    assert not algorithm.carries_draft_hidden_states()
    device, kind = algorithm.create_future_map("cuda")
    assert (device, kind.name) == ("cuda", "NGRAM")


def test_an_algorithm_can_be_copied_and_asked_for_what_there_is_not(
    registered: dict[str, Any],
) -> None:
    sglang.register()
    algorithm = registered["HASTEN"]
    assert not hasattr(algorithm, "__deepcopy__")
    assert not hasattr(algorithm, "is_something_new")


def test_registering_twice_declines_the_second_time(
    registered: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    sglang.register()
    sglang.register()
    assert list(registered) == ["HASTEN"]
    assert caplog.text.count("no speculative algorithm HASTEN") == 1


@pytest.mark.parametrize(
    "change",
    ["no sglang", "no NGRAM", "other register", "no base", "a base that lacks methods"],
)
def test_an_sglang_that_is_not_known_is_declined_in_one_line(
    change: str,
    registered: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec: Any = sys.modules["sglang.srt.speculative.spec_info"]
    registry: Any = sys.modules["sglang.srt.speculative.spec_registry"]
    if change == "no sglang":
        monkeypatch.setitem(sys.modules, "sglang.srt.speculative.spec_info", None)
    elif change == "no NGRAM":
        spec.SpeculativeAlgorithm = type("Other", (), {"register": lambda name: None})
    elif change == "other register":
        spec.SpeculativeAlgorithm = type(
            "Other", (), {"register": lambda name: None, "NGRAM": object()}
        )
    elif change == "no base":
        del registry.CustomSpecAlgo
    else:
        registry.CustomSpecAlgo = type("Base", (), {})
    sglang.register()
    assert registered == {}
    assert len(caplog.records) == 1
    assert "written for 0.5.23" in caplog.text


def test_a_worker_that_is_not_known_is_refused_with_the_way_out(
    registered: dict[str, Any],
) -> None:
    module: Any = sys.modules["sglang.srt.speculative.ngram_worker"]
    module.NGRAMWorker = type("NGRAMWorker", (), {})
    with pytest.raises(CapabilityError, match="--speculative-algorithm NGRAM"):
        worker(registered)


# -- arguments -------------------------------------------------------------------------------------


def test_arguments_are_settled_as_for_ngram() -> None:
    args = arguments()
    sglang.settle(args)
    assert args.max_running_requests == 48
    assert not args.enable_mixed_chunk
    assert args.speculative_num_draft_tokens == 12
    assert args.speculative_eagle_topk == 10
    assert args.speculative_num_steps == 1
    assert args.speculative_ngram_max_trie_depth == 24
    assert not args.disable_overlap_schedule


def test_what_the_user_says_stands() -> None:
    args = arguments(
        max_running_requests=7,
        speculative_num_draft_tokens=16,
        speculative_num_steps=3,
        speculative_ngram_max_trie_depth=99,
    )
    sglang.settle(args)
    assert (args.max_running_requests, args.speculative_num_draft_tokens) == (7, 16)
    assert (args.speculative_num_steps, args.speculative_ngram_max_trie_depth) == (3, 99)


def test_on_a_cpu_nothing_overlaps() -> None:
    args = arguments(device="cpu")
    sglang.settle(args)
    assert args.disable_overlap_schedule


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device": "npu"}, "device"),
        ({"enable_dp_attention": True}, "enable-dp-attention"),
        ({"speculative_num_draft_tokens": 1}, "at least 2"),
        ({"page_size": 16, "attention_backend": "triton"}, "--speculative-ngram-max-bfs-breadth 1"),
    ],
)
def test_what_the_worker_cannot_do_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        sglang.settle(arguments(**changes))


# -- drafting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("breadth", [10, 1])
def test_answers_are_plain_decodings_in_fewer_passes(
    overlap: bool, breadth: int, registered: dict[str, Any]
) -> None:
    made = worker(
        registered,
        disable_overlap_schedule=not overlap,
        speculative_ngram_max_bfs_breadth=breadth,
    )
    answers = serve(made, requests())
    for rid, prompt in PROMPTS.items():
        assert answers[rid] == plain(prompt, COUNT, repeating)
    assert made.passes < 0.4 * COUNT * len(PROMPTS)


def test_text_that_cannot_be_foretold_is_answered_too(registered: dict[str, Any]) -> None:
    answers = serve(worker(registered, unforeseeable), requests())
    assert answers["r3"] == plain(PROMPTS["r3"], COUNT, unforeseeable)


def test_a_long_prompt_is_read_whole_though_only_its_end_is_handed_over(
    registered: dict[str, Any],
) -> None:
    """What comes next stands at the prompt's beginning only."""
    phrase = list(range(20, 60))
    prompt = [*phrase, *[1, 2, 3] * 30, 20, 21]

    def quoting(ids: Any) -> int:
        return phrase[(len(ids) - len(prompt) + 2) % len(phrase)]

    made = worker(registered, quoting)
    answers = serve(made, [Request("long", prompt, 30)])
    assert answers["long"] == plain(prompt, 30, quoting)
    assert made.passes <= 5


def test_ranks_that_draft_each_by_itself_verify_the_same_trees(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = []
    for pace in (0.0, 1e6):  # of clocks
        ticks = iter(range(10**9))
        monkeypatch.setattr(
            "hasten.plugins.session.perf_counter", lambda p=pace, t=ticks: p * next(t)
        )
        for breadth in (10, 1):
            made = worker(registered, speculative_ngram_max_bfs_breadth=breadth)
            serve(made, requests())
            trees.append(made.trees)
    assert trees[:2] == trees[2:]


@pytest.mark.parametrize("method", ["suffix", "racer:retrieval", "prompt-lookup,nodes=40"])
def test_the_method_is_taken_from_the_environment(
    method: str,
    registered: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(sglang.VARIABLE, method)
    with caplog.at_level(logging.INFO, logger="hasten.plugins"):
        made = worker(registered)
    assert f"drafts with {method}, 12 rows" in caplog.text
    answers = serve(made, requests())
    assert answers["r1"] == plain(PROMPTS["r1"], COUNT, repeating)
    assert made.accepted > 0


@pytest.mark.parametrize("method", ["recycling", "early-exit", "nonsense"])
def test_a_method_that_cannot_be_fed_stops_the_engine_before_it_starts(
    method: str, registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sglang.VARIABLE, method)
    with pytest.raises((CapabilityError, OptionError), match=method):
        worker(registered)


# -- state and failures ----------------------------------------------------------------------------


def test_requests_that_have_left_are_forgotten(registered: dict[str, Any]) -> None:
    made = worker(registered)
    for number in range(128):
        serve(made, [Request(f"n{number}", [number % 60, 5, 9, 12], 12)])
        assert len(made.ngram_corpus) <= 2
    made.ngram_corpus.reset()
    assert len(made.ngram_corpus) == 0


def test_a_request_that_was_taken_back_is_read_again(registered: dict[str, Any]) -> None:
    made = worker(registered)
    request = Request("r", list(PROMPTS["r1"]), COUNT)
    request.output_ids.append(repeating(request.ids))
    batch = type("Batch", (), {"reqs": [request]})()
    for turn in range(200):
        if len(request.ids) >= len(PROMPTS["r1"]) + COUNT:
            break
        made.step(batch)
        if turn in (3, 7):  # its last tokens are thrown away
            request.late = []
            request.output_ids = request.output_ids[:-2]
    answer = request.ids[len(PROMPTS["r1"]) :][:COUNT]
    assert answer == plain(PROMPTS["r1"], COUNT, repeating)
    assert made.accepted > 0


def corpus() -> Corpus:
    return Corpus("suffix", EngineFacts("SGLang", 64, 512, trees=True, padded=True), rows=8)


def test_tokens_that_are_late_are_taken_from_the_tail() -> None:
    """The schedule overlaps: what was accepted last isn't among the request's output yet."""
    made = corpus()
    prompt = [*range(20, 40), *range(20, 30)]
    made.requests = {"r": Request("r", prompt, 10)}
    tokens, _ = made.batch_get(["r"], [[29, 30, 31]], [len(prompt) + 2])
    assert tokens[:3].tolist() == [31, 32, 33]


def test_another_text_by_the_same_name_is_read_anew() -> None:
    made = corpus()
    made.batch_get(["r"], [[1, 2, 3, 4, 1, 2]], [6])
    tokens, _ = made.batch_get(["r"], [[7, 8, 9, 5, 7, 8, 9]], [7])
    assert tokens[:2].tolist() == [9, 5]


@pytest.mark.parametrize("drafter", [Raising, OutOfVocabulary, RaisingAtTheEnd])
def test_a_drafter_that_fails_costs_its_drafts_and_one_line_in_the_log(
    drafter: type,
    registered: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    register(monkeypatch, drafter)
    monkeypatch.setenv(sglang.VARIABLE, "toy")
    answers = serve(worker(registered), requests())
    assert answers["r1"] == plain(PROMPTS["r1"], COUNT, repeating)
    failures = [r for r in caplog.records if "SGLang goes on without" in r.message]
    assert len(failures) == 1


def test_an_external_corpus_is_refused_with_the_way_out() -> None:
    made = corpus()
    with pytest.raises(CapabilityError, match="NGRAM"):
        made.load_external_corpus_named("wiki", [[1, 2]])
    assert made.list_external_corpora() == {}
    tokens, mask = made.batch_get([], [], [])
    assert len(tokens) == len(mask) == 0


def test_a_tree_is_padded_with_children_of_the_root() -> None:
    tokens, mask = pad_tree(DraftTree((9, 4, 5, 6), (-1, 0, 1, 0)), 6)
    assert tokens == [9, 4, 5, 6, 0, 0]
    assert mask.tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 1, 0],
        [1, 0, 0, 0, 0, 1],
    ]
    assert mask.dtype == np.int64
