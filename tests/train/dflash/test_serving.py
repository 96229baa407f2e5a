"""What was trained serves: as long as it was measured, and in rounds it answers itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hasten.dflash import store
from hasten.methods import configure
from hasten.train.dflash import run as training
from hasten.train.dflash.evaluate import evaluate
from hasten.train.dflash.feed import Feed, FreshStates
from hasten.train.dflash.objectives import Drafter
from hasten.train.dflash.options import SFT, Rounds
from hasten.train.dflash.texts import Text
from hasten.train.exits import Teacher
from tests.train.dflash.cases import LENGTH, PROMPT, answers, llm, options, target, write_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that has seen the toy's text often."""
    where = tmp_path_factory.mktemp("drafter")
    rows = write_rows(where / "rows.jsonl")
    chosen = options(sft=SFT(150, 10.0, 8, 12, lr=5e-3))
    training.run(llm(), [rows], where / "out", chosen)
    return where / "out"


def narrowed(folder: Path, out: Path) -> Path:
    """The drafter without the ids of the measured prompts in its vocabulary."""
    loaded = store.load(folder, target().info, dtype=torch.float32)
    assert loaded.draft_ids is not None
    prompts = {token for ids in answers()[2:8] for token in ids[:PROMPT]}
    ids = [each for each in loaded.draft_ids.tolist() if each not in prompts]
    assert len(ids) < len(loaded.draft_ids)
    config = replace(loaded.config, draft_vocab_size=len(ids))
    store.save(out, config, loaded.net, torch.tensor(ids), {"target": target().info.fingerprint})
    return out


@pytest.mark.parametrize("narrow", [False, True])
def test_the_walk_over_held_out_text_is_what_serving_emits_a_pass(
    folder: Path, tmp_path: Path, narrow: bool
) -> None:
    """Teacher-forced tau, on the greedy text itself, is the loop's mean accepted length: with the
    whole draft vocabulary, and where ids are drafted because they stand in the prompt."""
    if narrow:
        folder = narrowed(folder, tmp_path)
    model = llm()
    loaded = store.load(folder, target().info, dtype=torch.float32)
    assert loaded.draft_ids is not None
    teacher = Teacher.of(target(), loaded.draft_ids.tolist(), torch.float32)
    texts = [Text(ids[:PROMPT], ids[PROMPT:]) for ids in answers()[2:8]]
    feed = Feed(
        FreshStates(target(), texts),
        range(len(texts)),
        loaded.config.taps,
        last=0,
        device=torch.device("cpu"),
        size=3,
    )
    embeddings, head = target().torch_decoder.embeddings, target().ends().head
    walk = evaluate(Drafter(loaded.net, teacher, embeddings, head), feed)["all"].walks["fixed"]
    rounds = tokens = 0
    for text in texts:
        result = model.generate(
            list(text.prompt),
            method=configure("dflash", model=str(folder)),
            max_new_tokens=LENGTH - PROMPT,
            trace=True,
        )
        assert result.tokens == text.output
        rounds += sum(each.tree is not None for each in result.rounds)
        tokens += len(result.tokens) - 1
    assert walk.tokens == tokens
    assert walk.tau > 1.3  # the toy's training text: it has something to accept
    # States are kept in bfloat16 there: a draft may differ now and then.
    assert walk.rounds == pytest.approx(rounds, abs=0.05 * rounds)


def test_a_round_answered_by_the_deployed_drafter_is_the_targets_greedy_text(
    folder: Path, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    written = {}
    for writer in ("deployed", "batched"):
        rounds = Rounds(2, 10.0, 5, 1, max_new_tokens=20, writer=writer)
        chosen = options(sft=SFT(0), rounds=rounds, init=str(folder))
        training.run(llm(), [rows], tmp_path / writer, chosen)
        kept = sorted((tmp_path / writer / "rounds").glob("*.jsonl"))
        written[writer] = [path.read_text() for path in kept]
    assert len(written["deployed"]) == 2
    assert written["deployed"] == written["batched"]
    deployed = store.load(tmp_path / "deployed" / "rounds" / "drafter", target().info)
    last = store.load(tmp_path / "deployed", target().info)
    assert not torch.equal(deployed.net.fc.weight, last.net.fc.weight)
