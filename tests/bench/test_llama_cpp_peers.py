"""The llama.cpp peers, against a stand-in for llama-cpp-python that keeps its documented shape.

The package itself is built from source for ten minutes, so it isn't in the test environment.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import hasten
from hasten.bench import BenchConfig, llama_cpp_peers
from hasten.bench.peers import PeerContext, make_peers
from hasten.bench.runner import run
from hasten.errors import ModelError, OptionError
from hasten.targets.catalog import ModelSource

NAMES = ("peer:llama-cpp", "peer:llama-cpp-python", "peer:llama-cpp-prompt-lookup")
VOCABULARY = 50


def following(past: Sequence[int]) -> int:
    """The stand-in model: it counts upwards in sevens, from the prompt's sum."""
    return (past[-1] + 7) % VOCABULARY if len(past) > 3 else sum(past) % VOCABULARY


class Lookup:
    """Drafts the true next two tokens and a wrong one."""

    def __call__(self, ids: Any) -> Any:
        past = [int(i) for i in ids]
        for _ in range(2):
            past.append(following(past))
        return np.array([*past[-2:], 49], dtype=np.intc)


class Llama:
    """``llama_cpp.Llama`` as far as the peers use it; every instance is listed."""

    instances: list[Llama] = []  # noqa: RUF012

    def __init__(self, model_path: str, **options: Any) -> None:
        self.model_path, self.options = model_path, options
        self.n_batch, self.n_tokens = 4, 99
        self.ctx: dict[str, list[int]] = {"past": [1] * 99}
        self.past: list[int] = []
        Llama.instances.append(self)

    def n_vocab(self) -> int:
        return VOCABULARY

    def reset(self) -> None:
        self.n_tokens = 0

    def eval(self, tokens: Sequence[int]) -> None:
        self.past = self.past[: self.n_tokens] + list(tokens)
        self.n_tokens = len(self.past)

    def generate(self, tokens: Sequence[int], temp: float, repeat_penalty: float) -> Iterator[int]:
        assert (self.n_tokens, temp, repeat_penalty) == (0, 0.0, 1.0)
        due = list(tokens)
        while True:
            known = len(self.past[: self.n_tokens]) + len(due)
            drafted: list[int] = []
            if self.n_tokens and self.options["draft_model"] is not None:
                drafted = list(self.options["draft_model"]([*self.past[: self.n_tokens], *due]))
            self.eval([*due, *drafted])
            while True:
                token = following(self.past[:known])
                yield token
                due = [token]
                if known >= len(self.past) or self.past[known] != token:
                    self.n_tokens = known
                    break
                known += 1


def stand_in() -> tuple[ModuleType, ModuleType]:
    """The modules ``llama_cpp`` and ``llama_cpp.llama_speculative``."""
    package, speculative = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    speculative.LlamaPromptLookupDecoding = Lookup  # type: ignore[attr-defined]

    def decode(context: dict[str, list[int]], batch: list[int]) -> int:
        context["past"] += batch
        context.setdefault("tried", []).append(context["threads"][0])
        return 1 if len(context["past"]) > 60 else 0

    def logits(context: dict[str, list[int]], at: int) -> Any:
        assert at == -1
        row = np.zeros(VOCABULARY, dtype=np.float32)
        row[following(context["past"])] = 1.0
        context["kept"] = row  # type: ignore[assignment]
        return row.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    members: dict[str, Any] = {
        "Llama": Llama,
        "llama_token": ctypes.c_int32,
        "llama_get_memory": lambda context: context,
        "llama_memory_clear": lambda memory, data: memory["past"].clear(),
        "llama_batch_get_one": lambda array, count: list(array)[:count],
        "llama_set_n_threads": lambda context, n, batch: context.update(threads=[n, batch]),
        "llama_decode": decode,
        "llama_get_logits_ith": logits,
    }
    vars(package).update(members)
    return package, speculative


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    package, speculative = stand_in()
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    monkeypatch.setattr(Llama, "instances", [])
    monkeypatch.setattr(llama_cpp_peers, "source_gguf", lambda location: Path(f"{location}.gguf"))


def context(llm: hasten.LLM, **changes: Any) -> PeerContext:
    from dataclasses import replace

    info = replace(llm.target.info, **{"eos_ids": frozenset(), **changes})
    return PeerContext(info, ModelSource("gguf", "model", "model"))


def answer_of(ids: Sequence[int], count: int) -> tuple[int, ...]:
    past = list(ids)
    for _ in range(count):
        past.append(following(past))
    return tuple(past[len(ids) :])


@pytest.mark.usefixtures("installed")
def test_one_name_stands_for_three_ways_that_answer_alike(tiny: hasten.LLM) -> None:
    peers = make_peers(["llama-cpp"], context(tiny))
    assert tuple(peer.name for peer in peers) == NAMES
    for peer in peers:
        peer.prepare()
        for ids in ([1, 2, 3, 4, 5, 6], [3, 3]):  # longer than a batch, and after another prompt
            answer = peer.run(ids, 8)
            assert answer.tokens == answer_of(ids, 8)
            assert answer.decode_tokens == 7
            assert answer.decode_s >= 0
            assert answer.ttft_s > 0


@pytest.mark.usefixtures("installed")
def test_passes_are_counted_after_the_first_token(tiny: hasten.LLM) -> None:
    passes = {}
    for peer in make_peers(["llama-cpp"], context(tiny)):
        peer.prepare()
        passes[peer.name] = peer.run([1, 2, 3, 4, 5, 6], 8).passes
    assert passes[NAMES[0]] == passes[NAMES[1]] == 7
    assert passes[NAMES[2]] == 3  # two drafted tokens kept and one of its own: 3 + 3 + 1


@pytest.mark.usefixtures("installed")
def test_answers_end_at_the_end_of_sequence_id(tiny: hasten.LLM) -> None:
    end = answer_of([1, 2, 3, 4], 9)[4]
    for peer in make_peers(["llama-cpp"], context(tiny, eos_ids=frozenset({end}))):
        peer.prepare()
        assert peer.run([1, 2, 3, 4], 9).tokens == answer_of([1, 2, 3, 4], 5)


@pytest.mark.usefixtures("installed")
def test_the_same_file_threads_and_context_are_used(tiny: hasten.LLM) -> None:
    for peer in make_peers(["llama-cpp"], context(tiny)):
        peer.prepare()
    assert [llama.model_path for llama in Llama.instances] == ["model.gguf"] * 3
    for llama in Llama.instances:
        threads = torch.get_num_threads()
        assert llama.options["n_threads"] == llama.options["n_threads_batch"] == threads
        assert llama.options["n_ctx"] == tiny.target.info.context_limit
        assert llama.options["n_gpu_layers"] == 0
    drafting = [llama.options["draft_model"] for llama in Llama.instances]
    assert drafting[:2] == [None, None]
    assert isinstance(drafting[2], Lookup)


@pytest.mark.usefixtures("installed")
def test_all_peers_of_a_run_use_the_thread_count_that_decodes_fastest(
    tiny: hasten.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp_peers, "usable_cores", lambda: 6)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    real = llama_cpp_peers.GeneratorPeer._decode_s
    took = {1: 4.0, 2: 3.0, 3: 1.0, 4: 2.0, 6: 5.0}

    def decode_s(self: llama_cpp_peers.GeneratorPeer, threads: int) -> float:
        assert real(self, threads) > 0
        return took[threads]

    monkeypatch.setattr(llama_cpp_peers.GeneratorPeer, "_decode_s", decode_s)
    for peer in make_peers(["llama-cpp"], context(tiny)):
        peer.prepare()
        peer.run([1, 2, 3, 4], 4)
    assert [llama.ctx["threads"] for llama in Llama.instances] == [[3, 3]] * 3
    first = Llama.instances[0].ctx["tried"]
    assert first[: 5 * llama_cpp_peers.TRIALS : llama_cpp_peers.TRIALS] == [1, 2, 3, 4, 6]
    assert "tried" not in Llama.instances[1].ctx, "tried once"


@pytest.mark.usefixtures("installed")
def test_a_failed_decode_call_is_told(tiny: hasten.LLM) -> None:
    peer = make_peers(["llama-cpp"], context(tiny))[0]
    peer.prepare()
    with pytest.raises(ModelError, match="decode call failed with code 1"):
        peer.run([1, 2, 3, 4], 80)


@pytest.mark.usefixtures("installed")
def test_a_file_that_does_not_load_is_told(
    tiny: hasten.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**options: Any) -> None:
        raise ValueError("Failed to load model from file")

    monkeypatch.setattr(sys.modules["llama_cpp"], "Llama", broken)
    with pytest.raises(ModelError, match="Failed to load model"):
        make_peers(["llama-cpp"], context(tiny))[0].prepare()


@pytest.mark.usefixtures("installed")
def test_a_model_that_comes_from_no_gguf_file_is_refused(tiny: hasten.LLM) -> None:
    with pytest.raises(OptionError, match="GGUF files only"):
        run(BenchConfig(methods=(), limit=1, peers=("llama-cpp",)), llm=tiny)


def test_without_the_package_it_is_told_how_to_install_it_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr("hasten.bench.runner.load", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(OptionError, match=r"pip install 'hasten\[llama-cpp\]'") as caught:
        run(BenchConfig(peers=("llama-cpp",)))
    assert caught.value.option == "peers"
