from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten
from hasten.bench import BenchConfig, Report, peers
from hasten.bench.peers import Peer, PeerContext, TransformersPeer, make_peers
from hasten.bench.runner import run
from hasten.bench.stats import Answer
from hasten.errors import ModelError, OptionError

NAMES = ("peer:transformers", "peer:transformers-prompt-lookup")


@pytest.fixture(scope="module")
def report(tiny: hasten.LLM) -> Report:
    config = BenchConfig(
        methods=(), suite="mini", limit=6, max_new_tokens=16, peers=("transformers",)
    )
    return run(config, llm=tiny)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> hasten.LLM:
    """Four layers, of which the last one changes little: leaving before it is often right."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("deep-llama")
    for file in tiny_folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder)
    config = LlamaConfig.from_pretrained(tiny_folder, num_hidden_layers=4)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(1)
        model = LlamaForCausalLM(config)
    for product in (model.model.layers[3].self_attn.o_proj, model.model.layers[3].mlp.down_proj):
        product.weight.data *= 0.1
    model.save_pretrained(folder)
    return hasten.load(str(folder), method="ar", dtype="float32", device="cpu")


def context(llm: hasten.LLM) -> PeerContext:
    return PeerContext(llm.target.info, llm._loaded.source)


def test_peers_answer_as_plain_decoding_does_in_float32(report: Report) -> None:
    assert report.methods == ("ar", *NAMES)
    for name in NAMES:
        row = report.row(name)
        assert row.identical == row.prompts == 6
        assert row.tokens == report.row("ar").tokens


def test_peers_count_one_pass_a_token_in_plain_generate(report: Report) -> None:
    row = report.row(NAMES[0])
    assert row.mean_accepted_length == 1.0
    assert row.target_passes == report.row("ar").target_passes
    assert row.speedup_micro is not None


def test_peers_tell_no_times_per_round(report: Report) -> None:
    for name in NAMES:
        row = report.row(name)
        assert row.draft_ms_per_round is row.verify_ms_per_round is row.extra["pass_ms"] is None
        assert row.extra["faults"] == 0


# -- transformers' early exit ----------------------------------------------------------------------


def test_early_exit_answers_as_plain_decoding_does_and_counts_its_passes(
    deep: hasten.LLM,
) -> None:
    names = ("transformers-early-exit", "transformers-early-exit=3")
    config = BenchConfig(methods=(), suite="mini", limit=2, max_new_tokens=10, peers=names)
    made = run(config, llm=deep)
    assert made.methods == ("ar", *(f"peer:{name}" for name in names))
    for name in names:
        row = made.row(f"peer:{name}")
        assert row.identical == row.prompts == 2
        assert row.mean_accepted_length is not None
        assert row.mean_accepted_length >= 1.0
        assert row.extra["faults"] == 0
    kept = made.row("peer:transformers-early-exit=3").mean_accepted_length
    assert kept is not None
    assert kept > 1.0, "no draft was kept: this shows little"


def test_early_exit_leaves_after_a_quarter_of_the_layers_unless_told(deep: hasten.LLM) -> None:
    def options(*names: str) -> list[dict[str, Any]]:
        return [peer._options for peer in make_peers(names, context(deep))]  # type: ignore[attr-defined]

    assert options("transformers-early-exit") == [{"assistant_early_exit": 1}]
    assert options("transformers-early-exit=2") == [{"assistant_early_exit": 2}]


@pytest.mark.parametrize("layer", ["0", "4", "-1", "two", "1.5"])
def test_an_exit_the_model_hasnt_is_refused_before_it_is_loaded(
    layer: str, deep: hasten.LLM
) -> None:
    with pytest.raises(OptionError, match=rf"peers: transformers-early-exit={layer}.*1 to 3"):
        make_peers([f"transformers-early-exit={layer}"], context(deep))


def test_a_peer_without_options_refuses_one(deep: hasten.LLM) -> None:
    with pytest.raises(OptionError, match="peers: transformers takes no option"):
        make_peers(["transformers=4"], context(deep))


def test_a_model_transformers_cant_exit_early_is_refused_when_prepared(deep: hasten.LLM) -> None:
    (peer,) = make_peers(["transformers-early-exit"], context(deep))

    class Refusing:
        device = torch.device("cpu")

        def get(self) -> Refusing:
            return self

        def generate(self, *inputs: Any, **options: Any) -> Any:
            raise ValueError("assisted generation isn't supported")

    peer._shared = Refusing()  # type: ignore[attr-defined]
    with pytest.raises(
        ModelError, match=r"can't exit this model early.*isn't supported.*Leave out"
    ):
        peer.prepare()


class Blockwise:
    """A stand-in for a transformers model whose first pass gives three tokens, the second one."""

    device = torch.device("cpu")

    def get(self) -> Blockwise:
        return self

    def generate(self, prompt: torch.Tensor, *, streamer: Any, **options: Any) -> torch.Tensor:
        assert options["max_new_tokens"] == 9
        blocks = [prompt, torch.tensor([[5, 6, 7]]), torch.tensor([[8]])]
        for block in blocks:
            streamer.put(block)
        streamer.end()
        return torch.cat(blocks, 1)


def test_tokens_put_out_together_with_the_first_are_not_credited() -> None:
    shared: Any = Blockwise()
    answer = TransformersPeer("peer:x", shared, {}).run([1, 2], 9)
    assert answer.tokens == (5, 6, 7, 8)
    assert (answer.decode_tokens, answer.passes) == (1, 1)
    assert answer.ttft_s >= 0


def test_peers_share_one_model_and_leave_progress_bars_as_they_were(
    tiny: hasten.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers
    from transformers.utils import logging

    real = transformers.AutoModelForCausalLM.from_pretrained
    loads: list[Any] = []

    def counted(*args: Any, **options: Any) -> Any:
        loads.append(args)
        return real(*args, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", counted)
    before = logging.is_progress_bar_enabled()
    names = ["transformers", "transformers-early-exit", "transformers"]
    for peer in make_peers(names, context(tiny)):
        peer.prepare()
    assert len(loads) == 1
    assert logging.is_progress_bar_enabled() == before


def test_peers_stop_at_the_end_of_sequence_id(tiny_folder: Path, tiny: hasten.LLM) -> None:
    from dataclasses import replace

    prompt = tiny.tokenize("Tell me.")
    free = tiny.generate(prompt, method="ar", max_new_tokens=12, ignore_eos=True).tokens
    end = free[5]
    info = replace(tiny.target.info, eos_ids=frozenset({end}))
    for peer in make_peers(["transformers"], PeerContext(info, tiny._loaded.source)):
        peer.prepare()
        assert peer.run(prompt, 12).tokens == free[: free.index(end) + 1]


def test_a_model_given_as_an_object_has_no_peers(tiny_folder: Path, tiny: hasten.LLM) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    llm = hasten.load((model, tiny.tokenizer), method="ar")
    with pytest.raises(OptionError, match="peers: need a model given by name"):
        run(BenchConfig(methods=(), limit=1, peers=("transformers",)), llm=llm)


def test_peers_and_sampling_contradict() -> None:
    with pytest.raises(OptionError, match="peers: are measured greedy only"):
        BenchConfig(peers=("transformers",), temperature=0.5)


def test_an_unknown_peer_is_refused_naming_the_known_ones(tiny: hasten.LLM) -> None:
    with pytest.raises(OptionError, match=r"unknown peer 'llama'.*Known: transformers"):
        make_peers(["llama"], context(tiny))


def test_another_librarys_peer_drops_in(tiny: hasten.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed:
        name = "peer:fixed"

        def prepare(self) -> None:
            """Nothing to load."""

        def run(self, ids: Sequence[int], max_new_tokens: int) -> Answer:
            return Answer((1, 2), 1, 1e-3, 1e-3)

    def make(context: PeerContext) -> list[Peer]:
        return [Fixed()]

    monkeypatch.setitem(peers.PEERS, "fixed", make)
    config = BenchConfig(methods=(), limit=2, max_new_tokens=4, peers=("fixed",))
    row = run(config, llm=tiny).row("peer:fixed")
    assert (row.tokens, row.target_passes, row.mean_accepted_length) == (4, None, None)
    assert row.tokens_per_s == pytest.approx(1000)
    assert row.identical == 0
    assert row.extra["unexplained"] == 2
