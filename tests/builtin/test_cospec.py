"""``cospec`` as it is put together: drafts, rules, arbiters, and refusals before any pass."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exits.layerskip import save_modules
from tests.tiny_llm import PLAIN, metered

import hasten
from hasten import methods
from hasten.api import LLM
from hasten.arbitration import arbiter as arbiters
from hasten.arbitration.arbiter import Arbiter
from hasten.arbitration.rollouts import draft_mark
from hasten.arbitration.rules import Always, BiLD, Learned
from hasten.builtin import cospec
from hasten.drafters.early_exit import EarlyExit
from hasten.errors import CapabilityError, ModelError, OptionError
from hasten.exits import store

OWN = "cospec:target,head=own,exits=4"


def arbiter(target: str, draft: str, *, bias: float = 0.0, **changes: Any) -> Arbiter:
    weights = {"w": torch.zeros(18), "b": torch.tensor(bias)}
    meta = {"target": target, "draft": draft, "length": changes.pop("length", 4)}
    return Arbiter("linear", weights, torch.zeros(18), torch.ones(18), meta=meta, **changes)


@pytest.fixture
def marks(layerskip: LLM) -> tuple[str, str]:
    return layerskip.target.info.fingerprint, draft_mark(layerskip, OWN)


# -- drafts ----------------------------------------------------------------------------------------

DRAFTS = [
    "cospec:target,head=own,exits=4",
    "cospec:target,head=own,exits=2,length=7,bonus=off",
    "cospec:target,modules=FOLDER",
    "cospec:target,modules=FOLDER,exits=2",
    "cospec:target,modules=FOLDER,exits=4,length=1",
    "cospec:target,draft=draft-model,model=MODEL",
]


@pytest.mark.parametrize("method", DRAFTS)
def test_with_the_rule_target_every_draft_answers_as_plain_decoding(
    method: str, layerskip: LLM, layerskip_folder: Path, exits_folder: str
) -> None:
    method = method.replace("FOLDER", exits_folder).replace("MODEL", str(layerskip_folder))
    with metered(layerskip):
        for prompt in ("Again and again and again.", [7], [7, 8]):
            want = layerskip.generate(prompt, **PLAIN)
            got = layerskip.generate(prompt, method=method, **PLAIN)
            assert got.tokens == want.tokens
            assert got.overrides == ()
            assert got.metrics.drafted > 0


@pytest.mark.parametrize("method", ["modules=FOLDER,exits=2", "head=own,exits=4"])
def test_with_the_rule_draft_no_token_is_the_targets(
    method: str, layerskip: LLM, exits_folder: str
) -> None:
    method = "cospec:draft," + method.replace("FOLDER", exits_folder)
    got = layerskip.generate("Again and again.", method=method, trace=True, **PLAIN)
    assert got.metrics.overrides == got.metrics.mismatches == len(got.overrides) > 0
    drafted = [t for made in got.rounds if made.tree for t in made.tree.tokens[1:]]
    assert list(got.tokens) == drafted[: len(got.tokens)]


def test_bild_stops_drafting_where_the_draft_is_unsure(layerskip: LLM) -> None:
    sure = layerskip.generate("Say it.", method="cospec:bild,head=own,exits=2,fallback=0", **PLAIN)
    unsure = layerskip.generate(
        "Say it.", method="cospec:bild,head=own,exits=2,fallback=0.99", **PLAIN
    )
    assert sure.metrics.drafted > unsure.metrics.drafted
    assert unsure.metrics.target_passes > sure.metrics.target_passes
    always = layerskip.generate(
        "Say it.", method="cospec:bild,head=own,exits=2,fallback=0.99", rule=BiLD(), **PLAIN
    )
    assert always.tokens == unsure.tokens


def test_modules_are_told_apart_by_their_tensors(tmp_path: Path, layerskip: LLM) -> None:
    mark = layerskip.target.info.fingerprint
    one = save_modules(tmp_path / "one", mark, (("deep", 0), ("adapter", 2)))
    stored = store.read(one)
    assert cospec.exit_mark(stored, 0) != cospec.exit_mark(stored, 2)
    assert cospec.exit_mark(stored, 2) == cospec.exit_mark(store.read(one), 2)
    changed = {name: value + 1e-4 for name, value in stored.tensors.items()}
    other = store.Stored(mark, stored.ids, stored.configs, changed, {})
    assert cospec.exit_mark(other, 2) != cospec.exit_mark(stored, 2)
    fewer = store.Stored(mark, stored.ids[:-1], stored.configs, stored.tensors, {})
    assert cospec.exit_mark(fewer, 2) != cospec.exit_mark(stored, 2)
    named = f"cospec:target,modules={one},exits=2"
    assert draft_mark(layerskip, named) == cospec.exit_mark(stored, 2)


def test_a_shipped_specialist_drafts_by_name(
    layerskip: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cospec, "files", lambda package: tmp_path)
    (tmp_path / "assets").mkdir()
    with pytest.raises(OptionError, match="no specialist is shipped for"):
        layerskip.prepare("cospec:target,draft=specialist")
    mark = layerskip.target.info.fingerprint
    for model, fingerprint in (("other", "f" * 64), ("tiny", mark)):
        save_modules(tmp_path / "assets" / model / "specialist", fingerprint, (("affine", 4),))
    got = layerskip.generate("Say it.", method="cospec:target,draft=specialist", **PLAIN)
    assert set(got.metrics.source_drafted) == {"exit-4"}
    assert got.tokens == layerskip.generate("Say it.", **PLAIN).tokens


def test_drafters_tell_their_laws_only_where_somebody_asks(
    layerskip: LLM, exits_folder: str
) -> None:
    maker = layerskip._prepared[layerskip.prepare(f"early-exit,modules={exits_folder},exits=2")]
    drafter, _ = maker()
    assert isinstance(drafter, EarlyExit)
    assert not drafter.laws


# -- arbiters --------------------------------------------------------------------------------------


def test_the_default_rule_wants_an_arbiter_and_says_what_else_there_is(layerskip: LLM) -> None:
    with pytest.raises(OptionError, match=r"cospec\.arbiter.*cospec:typical"):
        layerskip.prepare("cospec,head=own,exits=4")


@pytest.mark.parametrize("bias", [-9.0, 9.0])
def test_an_arbiter_from_a_file_decides(
    bias: float, layerskip: LLM, marks: tuple[str, str], tmp_path: Path
) -> None:
    arbiter(*marks, bias=bias, gate=0.0, consecutive=0).save(tmp_path)
    method = f"cospec,head=own,exits=4,arbiter={tmp_path}"
    got = layerskip.generate("Say it.", method=method, **PLAIN)
    want = layerskip.generate("Say it.", **PLAIN)
    if bias < 0:
        assert got.tokens == want.tokens
    else:
        assert got.metrics.overrides == got.metrics.mismatches > 0
        shut = layerskip.generate("Say it.", method=f"{method},threshold=1.5", **PLAIN)
        assert shut.tokens == want.tokens


def test_an_arbiters_own_gate_holds_unless_another_is_given(
    layerskip: LLM, marks: tuple[str, str], tmp_path: Path
) -> None:
    arbiter(*marks, bias=9.0, gate=0.9, consecutive=0).save(tmp_path)
    method = f"cospec,head=own,exits=4,arbiter={tmp_path}"
    assert layerskip.generate("Say it.", method=method, **PLAIN).metrics.overrides == 0
    freed = layerskip.generate("Say it.", method=f"{method},gate=0", **PLAIN)
    assert freed.metrics.overrides > 0
    row = layerskip.generate("Say it.", method=f"{method},gate=0,consecutive=1", **PLAIN)
    assert 0 < row.metrics.overrides < row.metrics.mismatches


def test_a_shipped_arbiter_is_taken_without_being_named(
    layerskip: LLM, marks: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = arbiter(*marks, bias=9.0, gate=0.0)
    monkeypatch.setattr(
        arbiters, "shipped", lambda target, draft: made if (target, draft) == marks else None
    )
    got = layerskip.generate("Say it.", method="cospec,head=own,exits=4,length=4", **PLAIN)
    assert got.metrics.overrides > 0
    with pytest.raises(OptionError, match=r"cospec\.arbiter"):
        layerskip.prepare("cospec,head=own,exits=2")


def test_an_arbiter_brings_its_exit(
    layerskip: LLM, exits_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = f"modules={exits_folder}"
    mark = draft_mark(layerskip, f"cospec:target,{named},exits=4")
    made = arbiter(layerskip.target.info.fingerprint, mark, bias=9.0)
    made.save(tmp_path)
    got = layerskip.generate("Say it.", method=f"cospec,{named},arbiter={tmp_path}", **PLAIN)
    assert set(got.metrics.source_drafted) == {"exit-4"}
    monkeypatch.setattr(arbiters, "shipped", lambda target, draft: made if draft == mark else None)
    got = layerskip.generate("Say it.", method=f"cospec,{named},gate=0", **PLAIN)
    assert set(got.metrics.source_drafted) == {"exit-4"}
    other = layerskip.generate("Say it.", method=f"cospec:target,{named},gate=0", **PLAIN)
    assert set(other.metrics.source_drafted) == {"exit-0"}


def test_another_models_or_drafts_arbiter_is_refused_before_any_pass(
    layerskip: LLM, marks: tuple[str, str], tmp_path: Path
) -> None:
    arbiter("other weights", marks[1]).save(tmp_path / "a")
    arbiter(marks[0], "exit-9").save(tmp_path / "b")
    for folder, message in (("a", "other weights"), ("b", "another draft"), ("c", "no arbiter")):
        with pytest.raises(ModelError, match=message):
            layerskip.prepare(f"cospec,head=own,exits=4,arbiter={tmp_path / folder}")


def test_another_length_than_the_arbiters_is_said(
    layerskip: LLM, marks: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arbiter(*marks, length=6).save(tmp_path)
    layerskip.prepare(f"cospec,head=own,exits=4,length=3,arbiter={tmp_path}")
    assert "length=6" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        arbiter(*marks, fallback=True).save(tmp_path / "fallen")
        layerskip.prepare(f"cospec,head=own,exits=4,arbiter={tmp_path / 'fallen'}")
    assert "no better than the model alone" in caplog.text


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ("rule=oracle", "rule"),
        ("draft=tea", "draft"),
        ("length=0", "length"),
        ("length=99", "length"),
        ("gate=1", "gate"),
        ("gate=nan", "gate"),
        ("threshold=0.5", "threshold"),
        ("rule=kl,threshold=nan", "threshold"),
        ("rate=0.2", "rate"),
        ("arbiter=x", "arbiter"),
        ("model=x", "model"),
        ("fallback=1", "fallback"),
        ("draft=draft-model,exits=2", "exits"),
        ("draft=draft-model,modules=x", "modules"),
        ("draft=draft-model", "model"),
        ("draft=specialist,head=own", "head"),
        ("exits=2+4", "exits"),
        ("rule=judge", "weights"),
        ("rule=typical,epsilon=2", "epsilon"),
        ("rule=random,rate=2", "rate"),
        ("rule=cascade,cascade=x", "cascade"),
        ("rule=fuzzy,divergence=x", "divergence"),
        ("rule=mentored,budget=-1", "budget"),
        ("rule=bild,rollback=-1", "rollback"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(
    options: str, option: str, layerskip: LLM
) -> None:
    given = options if "rule=" in options else f"rule=target,{options}"
    if "draft=" not in given and "head" not in given:
        given += ",head=own"
    with pytest.raises(OptionError, match=rf"cospec\.{option}"):
        layerskip.prepare(f"cospec,{given}")


def test_a_model_without_exits_is_told_so() -> None:
    from tests.tiny_llm import make_model, make_tokenizer

    llm = hasten.load((make_model(), make_tokenizer()), method="ar", engine="transformers")
    with pytest.raises(CapabilityError, match="can't exit early"):
        llm.prepare("cospec:target")


def test_whoever_wants_only_a_drafter_is_refused(layerskip: LLM) -> None:
    maker = layerskip._prepared[layerskip.prepare(OWN)]
    assert isinstance(maker, methods.ArbitratedMaker)
    with pytest.raises(OptionError, match="method: keeps a draft's tokens against the model"):
        maker()
    assert maker.fork() is maker
    one, two = maker.arrange(Always()), maker.arrange()
    assert one[0] is not two[0]
    assert one[2] is not two[2]
    assert isinstance(one[2].rule, Always)


def test_every_variant_can_be_prepared(
    layerskip: LLM, marks: tuple[str, str], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "judge.safetensors"
    size = layerskip.target.info.hidden_size
    save_file({"w": torch.ones(size), "b": torch.tensor(0.0)}, path, metadata={"target": marks[0]})
    for variant in methods.get("cospec").variants:
        more = f",weights={path}" if variant == "judge" else ""
        with metered(layerskip):
            method = f"cospec:{variant},head=own,exits=4{more}"
            for temperature in (0.0, 0.8):
                got = layerskip.generate(
                    "Say it.", method=method, seed=3, temperature=temperature, **PLAIN
                )
                assert len(got.tokens) == PLAIN["max_new_tokens"]


def test_it_says_that_it_is_lossy_by_design() -> None:
    method = methods.get("cospec")
    assert method.lossless == "no (by design)"
    assert not isinstance(cospec.RULES["target"].make(cospec.CoSpecOptions(), None), Learned)  # type: ignore[arg-type]
