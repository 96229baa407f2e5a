"""``early-exit`` and ``del`` as users name them: LayerSkip checkpoints and stored modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exits.layerskip import COSTS
from tests.tiny_llm import PLAIN, meter, metered

import hasten
from hasten import methods
from hasten.api import LLM
from hasten.builtin import exit_sources
from hasten.exits import store
from hasten.policies import cost
from hasten.policies.exit_adaptive import DEL, Myopic
from hasten.targets.fused_weights import make_linear


@pytest.fixture(autouse=True)
def _known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured here."""
    monkeypatch.setattr(cost, "load_or_measure", lambda target: COSTS)


def sources(result: Any) -> set[str]:
    """Where drafted tokens came from."""
    return set(result.metrics.source_drafted)


# -- LayerSkip -------------------------------------------------------------------------------------


def test_a_layerskip_checkpoint_loads_and_exits_by_the_models_own_head(
    layerskip_folder: Path, layerskip: LLM
) -> None:
    method = "early-exit:layerskip,exits=2"
    made = hasten.load(str(layerskip_folder), method=method, dtype="float32", device="cpu")
    got = made.generate("Say it.", trace=True, **PLAIN)
    assert got.tokens == layerskip.generate("Say it.", **PLAIN).tokens
    assert sources(got) == {"exit-2"}
    assert got.metrics.accepted > 0
    assert got.metrics.drafted > got.metrics.accepted
    assert max(each.drafted for each in got.rounds) == 6
    assert got.metrics.layer_rows == 16 * (got.metrics.drafted + got.metrics.target_passes)


def test_without_exits_it_leaves_after_a_quarter_of_the_layers(layerskip: LLM) -> None:
    assert sources(layerskip.generate("Say it.", method="early-exit:layerskip", **PLAIN)) == {
        "exit-4"
    }
    assert [exit_sources.own_layers(n, several=False) for n in (2, 6, 16, 32, 80)] == [
        (1,), (1,), (4,), (8,), (20,),
    ]  # fmt: skip
    assert exit_sources.own_layers(32, several=True) == (4, 8, 12, 16)
    assert exit_sources.own_layers(2, several=True) == (1,)


METHODS = [
    "early-exit:layerskip,exits=8,length=3",
    "early-exit,head=own,exits=2,rule=kangaroo,threshold=0.2,keep=on",
    "early-exit,head=own,rule=lite,threshold=0.3",
    "del,head=own",
    "del,head=own,exits=2+6,ending=length,length=4,keep=on",
    "early-exit,modules=FOLDER",
    "early-exit,modules=FOLDER,exits=4,rule=draft-verify",
    "early-exit:kangaroo,modules=FOLDER",
    "early-exit,modules=FOLDER,exits=0,rule=svip",
    "early-exit,modules=FOLDER,exits=2,rule=adaedl",
    "early-exit,modules=FOLDER,rule=lite",
    "early-exit,modules=FOLDER,rule=myopic",
    "early-exit:tree,modules=FOLDER",
    "early-exit:lookup,modules=FOLDER,steps=2,most=6",
    "del,modules=FOLDER",
]


@pytest.mark.parametrize("method", METHODS)
def test_every_way_answers_as_plain_decoding_in_float32(
    method: str, layerskip: LLM, exits_folder: str
) -> None:
    method = method.replace("FOLDER", exits_folder)
    with metered(layerskip):
        for prompt in ("Again and again and again.", [7]):
            want = layerskip.generate(prompt, **PLAIN)
            got = layerskip.generate(prompt, method=method, **PLAIN)
            assert got.tokens == want.tokens
            assert got.metrics.layer_rows == 16 * (got.metrics.drafted + got.metrics.target_passes)


@pytest.mark.parametrize("method", ["early-exit:layerskip", "early-exit:lookup,modules=FOLDER"])
def test_stop_strings_and_end_ids_end_answers_as_in_plain_decoding(
    method: str, layerskip: LLM, exits_folder: str
) -> None:
    method = method.replace("FOLDER", exits_folder)
    whole = layerskip.generate("Count.", **PLAIN)
    for start, length in ((2, 1), (9, 3)):
        stop = whole.text[start : start + length]
        want = layerskip.generate("Count.", stop=stop, **PLAIN)
        got = layerskip.generate("Count.", stop=stop, method=method, **PLAIN)
        assert (got.tokens, got.text, got.stop_reason) == (want.tokens, want.text, stop)
    for token in whole.tokens[3:24:4]:
        want = layerskip.generate("Count.", stop_token_ids=[token], **PLAIN)
        got = layerskip.generate("Count.", stop_token_ids=[token], method=method, **PLAIN)
        assert (got.tokens, got.stop_reason) == (want.tokens, token)


@pytest.mark.parametrize("rule", ["rule=lite", "exits=0", "exits=2,rule=kangaroo,threshold=0.1"])
def test_a_conversation_goes_on_over_its_kept_cache(
    rule: str, layerskip: LLM, exits_folder: str
) -> None:
    method = f"early-exit,modules={exits_folder},{rule}"
    messages: list[dict[str, str]] = []
    with metered(layerskip):
        rows = []
        for text in ("One?", "And two?", "Three."):
            messages.append({"role": "user", "content": text})
            want = layerskip.generate(messages, **PLAIN)
            before = meter(layerskip).rows
            got = layerskip.chat(messages, method=method, **PLAIN)
            rows.append(meter(layerskip).rows - before)
            assert got.tokens == want.tokens
            messages.append({"role": "assistant", "content": got.text})
        assert len(layerskip.tokenize(messages)) > 2 * max(rows), "earlier turns ran again"


def test_many_answers_to_one_prompt_share_it(layerskip: LLM, exits_folder: str) -> None:
    method = f"early-exit,modules={exits_folder},rule=lite"
    want = layerskip.generate("Same.", **PLAIN).tokens
    with metered(layerskip):
        got = layerskip.generate_many(["Same."] * 3, method=method, **PLAIN)
        rows = meter(layerskip).rows
    assert {each.tokens for each in got} == {want}
    assert rows < 2 * len(layerskip.tokenize("Same."))


# -- rules and their options -----------------------------------------------------------------------


def drafter_of(layerskip: LLM, method: str) -> Any:
    context = methods.MethodContext(layerskip.target, layerskip.tokenizer, lambda name: None, COSTS)  # type: ignore[arg-type, return-value]
    return methods.prepare(methods.parse(method), context)()[0]


def test_a_rule_for_one_exit_takes_the_shallowest_and_reads_no_other_layers(
    layerskip: LLM, exits_folder: str
) -> None:
    made = drafter_of(layerskip, f"early-exit,modules={exits_folder}")
    assert made.bank.layers == (0,)
    assert made.needs.hidden == (8, 16)
    made = drafter_of(layerskip, f"early-exit,modules={exits_folder},rule=lite")
    assert made.bank.layers == (0, 2, 4)
    assert made.needs.hidden == (2, 8, 16)
    assert made.policy.select == pytest.approx((0.6, 0.54, 0.486))


@pytest.mark.parametrize(
    ("method", "length", "threshold"),
    [
        ("rule=fixed", 2, None),
        ("rule=kangaroo", 6, 0.6),
        ("rule=adaedl", 12, 0.5),
        ("rule=svip", 12, 0.3),
        ("rule=draft-verify", 8, 0.8),
        ("rule=svip,threshold=0,length=3", 3, 0.0),
        ("rule=kangaroo,threshold=1", 6, 1.0),
    ],
)
def test_a_rule_brings_its_own_length_and_threshold(
    method: str, length: int, threshold: float | None, layerskip: LLM
) -> None:
    made = drafter_of(layerskip, f"early-exit,head=own,{method}")
    assert made.length == made.policy.steps == length
    assert getattr(made.policy, "threshold", None) == threshold
    assert made.policy.keep is False


def test_requests_have_policies_of_their_own(layerskip: LLM) -> None:
    context = methods.MethodContext(layerskip.target, layerskip.tokenizer, lambda name: None, COSTS)  # type: ignore[arg-type, return-value]
    make = methods.prepare(methods.parse("del,head=own"), context)
    (one, _), (two, _) = make(), make()
    assert isinstance(one.policy, DEL)  # type: ignore[attr-defined]
    assert one.policy is not two.policy  # type: ignore[attr-defined]
    assert one.bank is two.bank  # type: ignore[attr-defined]


def test_the_myopic_rule_takes_the_calibration_stored_for_its_exits(
    layerskip: LLM, exits_folder: str
) -> None:
    made = drafter_of(layerskip, f"early-exit,modules={exits_folder},rule=myopic,exits=4+2")
    assert isinstance(made.policy, Myopic)
    assert made.policy.at == (2, 4)
    assert [round(c, 6) for c in made.policy.calibration.later] == [0.5, 0.7]
    x = [0.0] * 5
    assert made.policy.calibration.chance(0, x) == pytest.approx(0.5)


def test_costs_are_told_in_plain_steps(layerskip: LLM, exits_folder: str) -> None:
    stored = store.read(exits_folder)
    with torch.inference_mode():
        bank = store.build(layerskip.target, stored, make_linear)
    found = exit_sources.exit_costs(layerskip.target, bank, COSTS, 4)
    assert found.layer == (0.0, 2 / 16, 4 / 16)
    assert found.verify[:2] == (0.0, 1.0)
    assert found.verify[4] == pytest.approx(1.1)
    assert len(found.verify) == 4 + 3
    assert len(found.probe) == 3
    assert all(0.0 < probe < 10.0 for probe in found.probe)
