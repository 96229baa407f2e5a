"""``lede`` and ``lede:paper`` as users name them: their files, their answers, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.exits.layerskip import COSTS, save_modules
from tests.policies import lede_cases
from tests.tiny_llm import PLAIN, metered

from hasten import methods
from hasten.api import LLM
from hasten.builtin import lede
from hasten.errors import HastenError, ModelError, OptionError
from hasten.exits import store
from hasten.policies import cost, lede_arms
from hasten.policies.lede import LedePolicy
from hasten.policies.lede_agent import modules_digest


@pytest.fixture(autouse=True)
def _known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured here."""
    monkeypatch.setattr(cost, "load_or_measure", lambda target: COSTS)
    monkeypatch.setattr(lede, "question_share", lambda target, bank, growth: 0.02 * growth.steps)


@pytest.fixture(scope="module")
def files(
    layerskip: LLM, exits_folder: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Words that stand for files and folders in method strings."""
    root, info = tmp_path_factory.mktemp("lede"), layerskip.target.info
    stored = store.read(exits_folder)

    def agent(name: str, layers: tuple[int, ...] = (2, 4), **changes: Any) -> Path:
        changes = {"stored": stored, "seed": 4, **changes}
        return lede_cases.agent_file(root / f"{name}.npz", info, layers, **changes)

    facts = {"target": info.fingerprint, "exits": modules_digest(stored, (0,))}
    arms = lede_cases.arms(seed=2, **facts)
    arms.save(root / "arms.npz")
    replace(arms, facts={**facts, "target": "other"}).save(root / "foreign.npz")
    replace(arms, facts={**facts, "exits": "others"}).save(root / "stale.npz")
    plain_only = lede_cases.arms(names=("plain", "copy"), **facts)
    plain_only.save(root / "few.npz")
    (root / "damaged.npz").write_bytes(b"no")
    return {
        "FOLDER": exits_folder,
        "ABOVE": save_modules(root / "above", info.fingerprint, (("affine", 4),)),
        "AGENT": str(agent("agent")),
        "OWN": str(agent("own", stored=None)),
        "SHORT": str(agent("short", steps=3)),
        "OTHERS": str(agent("others", fingerprint="other")),
        "MODULES": str(agent("modules", modules="0" * 32)),
        "DEEPER": str(agent("deeper", num_layers=40, costs=lede_cases.costs((2, 4), 40))),
        "VERSION": str(agent("version", version=99)),
        "FEATURES": str(agent("features", features=("p1", "luck"))),
        "ARMS": str(root / "arms.npz"),
        "FOREIGN": str(root / "foreign.npz"),
        "STALE": str(root / "stale.npz"),
        "FEW": str(root / "few.npz"),
        "DAMAGED": str(root / "damaged.npz"),
    }


def named(method: str, files: dict[str, str]) -> str:
    for word, path in files.items():
        method = method.replace(f"={word}", f"={path}")
    return method


# -- answers ---------------------------------------------------------------------------------------

METHODS = [
    "lede:paper,agent=AGENT,modules=FOLDER",
    "lede:paper,agent=AGENT,modules=FOLDER,length=2,guard=off",
    "lede:paper,agent=OWN,head=own,draw=off",
    "lede,arms=ARMS,modules=FOLDER",
    "lede,arms=ARMS,modules=FOLDER,breadth=off",
    "lede,arms=ARMS,modules=FOLDER,retrieval=off",
    "lede,arms=ARMS,modules=FOLDER,plain=off,online=off,guard=off,start=off,most=6",
    "lede,arms=ARMS,modules=FOLDER,walk=on,agent=AGENT",
]


@pytest.mark.parametrize("method", METHODS)
def test_every_way_answers_as_plain_decoding_in_float32(
    method: str, layerskip: LLM, files: dict[str, str]
) -> None:
    method = named(method, files)
    with metered(layerskip):
        for prompt in ("Again and again and again.", [7]):
            want = layerskip.generate(prompt, **PLAIN)
            got = layerskip.generate(prompt, method=method, **PLAIN)
            assert got.tokens == want.tokens
            # rows an arm ran and gave up count too, so an answer may take more
            least = 16 * (got.metrics.drafted + got.metrics.target_passes)
            assert got.metrics.layer_rows == least
        options: dict[str, Any] = {"temperature": 0.8, "seed": 3, **PLAIN}
        want = layerskip.generate("Now then.", **options)
        assert layerskip.generate("Now then.", method=method, **options).tokens == want.tokens


def test_the_paper_drafts_chains_from_the_agents_exits_up_to_its_length(
    layerskip: LLM, files: dict[str, str]
) -> None:
    method = named("lede:paper,agent=SHORT,modules=FOLDER", files)
    got = layerskip.generate("Say it.", method=method, trace=True, **PLAIN)
    assert set(got.metrics.source_drafted) <= {"exit-2", "exit-4"}
    assert got.metrics.drafted > 0
    assert max(each.drafted for each in got.rounds) <= 3


@pytest.mark.parametrize("method", [METHODS[0], METHODS[3]])
def test_stop_strings_and_end_ids_end_answers_as_in_plain_decoding(
    method: str, layerskip: LLM, files: dict[str, str]
) -> None:
    method = named(method, files)
    whole = layerskip.generate("Count.", **PLAIN)
    for start, length in ((2, 1), (9, 3)):
        stop = whole.text[start : start + length]
        want = layerskip.generate("Count.", stop=stop, **PLAIN)
        got = layerskip.generate("Count.", stop=stop, method=method, **PLAIN)
        assert (got.tokens, got.text, got.stop_reason) == (want.tokens, want.text, stop)
    for token in whole.tokens[3:24:6]:
        want = layerskip.generate("Count.", stop_token_ids=[token], **PLAIN)
        got = layerskip.generate("Count.", stop_token_ids=[token], method=method, **PLAIN)
        assert (got.tokens, got.stop_reason) == (want.tokens, token)


@pytest.mark.parametrize("method", [METHODS[0], METHODS[3], METHODS[7]])
def test_batches_streams_and_conversations_are_plain_decodings(
    method: str, layerskip: LLM, files: dict[str, str]
) -> None:
    method = named(method, files)
    prompts = ["One.", "Two two two.", [9, 9, 9]]
    with metered(layerskip):
        want = [layerskip.generate(prompt, **PLAIN).tokens for prompt in prompts]
        made = layerskip.generate_many(prompts, method=method, **PLAIN)
        assert [each.tokens for each in made] == want
        text = "".join(layerskip.stream("One.", method=method, **PLAIN))
        assert text == layerskip.generate("One.", **PLAIN).text
        messages = [{"role": "user", "content": "One?"}]
        for more in ("Two?", "Three?"):
            want_next = layerskip.generate(messages, **PLAIN)
            got = layerskip.chat(messages, method=method, **PLAIN)
            assert got.tokens == want_next.tokens
            messages += [
                {"role": "assistant", "content": got.text},
                {"role": "user", "content": more},
            ]


def test_an_abandoned_stream_leaves_no_sequence_open(layerskip: LLM, files: dict[str, str]) -> None:
    with metered(layerskip):
        for method in (METHODS[0], METHODS[3]):
            stream = layerskip.stream("Go on.", method=named(method, files), **PLAIN)
            next(stream)
            stream.close()


def test_requests_have_agents_states_of_their_own_and_share_counts_only(
    layerskip: LLM, files: dict[str, str]
) -> None:
    context = methods.MethodContext(layerskip.target, layerskip.tokenizer, lambda name: None, COSTS)  # type: ignore[arg-type, return-value]
    chains = methods.prepare(methods.parse(named(METHODS[0], files)), context)
    (one, _), (two, _) = chains(), chains()
    assert isinstance(one.policy, LedePolicy)
    assert one.policy is not two.policy
    assert one.bank is two.bank
    arms = methods.prepare(methods.parse(named(METHODS[3], files)), context)
    (_, first), (_, second) = arms(), arms()
    assert arms.shares == ("counts",)
    assert first.chooser is not second.chooser
    assert first.book is second.book
    assert arms.fork()()[1].book is not first.book


# -- refusals --------------------------------------------------------------------------------------

REFUSED: list[tuple[str, type[HastenError], str]] = [
    ("lede", OptionError, r"lede\.modules: no exit modules are shipped.*hasten train exits"),
    ("lede,modules=FOLDER", OptionError, r"lede\.arms: no file of arms.*hasten train lede arms"),
    ("lede:paper", OptionError, r"lede\.agent: no agent is shipped.*hasten train lede collect"),
    ("lede:paper,modules=FOLDER", OptionError, r"lede\.agent: no agent is shipped"),
    ("lede:paper,agent=AGENT", OptionError, r"lede\.modules: no exit modules are shipped"),
    ("lede:paper,agent=NOWHERE", ModelError, "NOWHERE holds no agent"),
    ("lede:paper,agent=DAMAGED", ModelError, r"damaged\.npz holds no agent"),
    ("lede:paper,agent=ARMS,modules=FOLDER", ModelError, r"arms\.npz holds no agent"),
    ("lede:paper,agent=OTHERS,modules=FOLDER", ModelError, r"others\.npz belongs to other weights"),
    ("lede:paper,agent=MODULES,modules=FOLDER", ModelError, "with other exit modules"),
    ("lede:paper,agent=AGENT,head=own", ModelError, "with other exit modules"),
    ("lede:paper,agent=AGENT,modules=ABOVE", OptionError, r"lede\.exits.*\[2\].*some at 4"),
    ("lede:paper,agent=DEEPER,modules=FOLDER", ModelError, r"of 40 layers, not .* of 16"),
    ("lede:paper,agent=VERSION,modules=FOLDER", ModelError, "features of version 99"),
    ("lede:paper,agent=FEATURES,modules=FOLDER", ModelError, "features"),
    ("lede:paper,agent=SHORT,modules=FOLDER,length=4", ModelError, "at most 3 tokens, not 4"),
    ("lede:paper,agent=AGENT,modules=FOLDER,length=13", OptionError, r"lede\.length: must be 1 to"),
    ("lede:paper,agent=AGENT,modules=FOLDER,length=0", OptionError, r"lede\.length: must be 1 to"),
    ("lede:paper,breadth=off", OptionError, r"lede\.breadth: plays no part.*Leave breadth out"),
    ("lede:paper,arms=ARMS", OptionError, r"lede\.arms: plays no part"),
    ("lede,agent=AGENT", OptionError, r"lede\.agent: is for the agent's chains"),
    ("lede,length=3", OptionError, r"lede\.length: is for the agent's chains"),
    ("lede,head=own", OptionError, r"lede\.head: own is for lede:paper"),
    ("lede:paper,head=mine,agent=AGENT", OptionError, r"lede\.head: must be modules or own"),
    ("lede,modules=FOLDER,arms=FOREIGN", ModelError, r"foreign\.npz belongs to other weights"),
    ("lede,modules=FOLDER,arms=STALE", ModelError, r"stale\.npz was fitted with another module"),
    ("lede,modules=FOLDER,arms=DAMAGED", ModelError, r"damaged\.npz holds no arms"),
    ("lede,modules=FOLDER,arms=AGENT", ModelError, r"agent\.npz holds no arms"),
    ("lede,modules=ABOVE,arms=ARMS", OptionError, r"lede\.exits.*\[0\].*some at 4"),
    ("lede,modules=FOLDER,arms=FEW,retrieval=off", OptionError, r"lede\.arms: knows nothing of"),
    (
        "lede,modules=FOLDER,arms=FEW,walk=on,agent=AGENT",
        OptionError,
        r"lede\.arms: knows nothing of the walk",
    ),
    ("lede,modules=FOLDER,arms=ARMS,most=-1", OptionError, r"lede\.most: must be"),
    ("lede,modules=FOLDER,arms=ARMS,online=maybe", OptionError, r"lede\.online: must be on or off"),
    ("lede:best", OptionError, "has no variant 'best'.*paper"),
]


@pytest.mark.parametrize(("method", "error", "words"), REFUSED)
def test_what_makes_no_sense_is_refused_by_name_before_any_pass(
    method: str, error: type[HastenError], words: str, layerskip: LLM, files: dict[str, str]
) -> None:
    target: Any = layerskip.target
    before = target.layer_rows
    with pytest.raises(error, match=words):
        layerskip.generate("x", method=named(method, files))
    assert target.layer_rows == before


def test_shipped_files_are_used_where_there_are_some(
    layerskip: LLM,
    files: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assets = tmp_path / "assets" / "model"
    assets.mkdir(parents=True)
    assert lede.shipped_arms(layerskip.target) is None
    (assets / lede.SHIPPED_ARMS).write_bytes(Path(files["ARMS"]).read_bytes())
    monkeypatch.setattr(lede, "files", lambda name: tmp_path)
    found = lede.shipped_arms(layerskip.target)
    assert found is not None
    want = lede_arms.read(files["ARMS"], "arms")
    assert (found.arms, found.facts) == (want.arms, want.facts)


def test_costs_of_arms_are_told_in_plain_steps(layerskip: LLM, files: dict[str, str]) -> None:
    context = methods.MethodContext(layerskip.target, layerskip.tokenizer, lambda name: None, COSTS)  # type: ignore[arg-type, return-value]
    bank = lede.exit_zero(lede.LedeOptions(modules=files["FOLDER"]), layerskip.target)
    found = lede.arm_costs(context, bank)
    assert found.verify[:2] == (0.0, 1.0)
    assert found.verify[4] == pytest.approx(1.1)
    assert (found.question, found.step) == pytest.approx((0.02, 0.02))
    assert found.of(4, 3) == pytest.approx(1.1 + 0.06)
    assert found.of(4, 0) == pytest.approx(1.1)


def test_the_method_says_what_it_is() -> None:
    made = methods.get("lede")
    assert made.lossless == "yes"
    assert set(made.variants) == {"paper"}
    assert all(help for _, _, help in methods.option_help(made))
