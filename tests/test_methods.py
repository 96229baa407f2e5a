"""Methods by name: parsing, options, registration, plug-ins, capability checks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest

from hasten import methods
from hasten.drafters.ar import Plain
from hasten.errors import CapabilityError, HastenError, OptionError, VocabularyError
from hasten.methods import Method, MethodContext, configure, parse, prepare, register, split
from hasten.policies.base import FixedPolicy
from tests.conformance.harness import COSTS, load_other
from tests.conformance.toy_target import ToyTarget, ToyTokenizer


@dataclass(frozen=True, slots=True)
class Options:
    nodes: int = field(default=4, metadata={"help": "rows"})
    share: float = 0.5
    fast: bool = True
    mode: str = "a"


def _prepare(options: Options, context: MethodContext) -> methods.MakeRequest:
    return lambda: (Plain(), FixedPolicy(options.nodes))


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has its own registry, with one method more."""
    methods.all_methods()
    monkeypatch.setattr(methods, "_REGISTRY", dict(methods._REGISTRY))
    variants = {"wide": {"nodes": 9, "mode": "b"}}
    register(Method("toy", "a toy", _prepare, Options, variants=variants))


def _context(target: ToyTarget | None = None) -> MethodContext:
    return MethodContext(target or ToyTarget(), ToyTokenizer(), load_other, COSTS)


def test_a_name_with_options_is_parsed_and_typed() -> None:
    spec = parse(" toy : wide , nodes = 7, share=0.25,fast=off, mode = x ")
    assert (spec.name, spec.variant) == ("toy", "wide")
    assert dict(spec.options) == {"nodes": 7, "share": 0.25, "fast": False, "mode": "x"}
    assert str(spec) == "toy:wide,nodes=7,share=0.25,fast=off,mode=x"
    assert parse(str(spec)) == spec
    assert parse(spec) is spec
    assert {spec: 1}[parse(str(spec))] == 1


def test_options_as_python_values_are_the_same_spec() -> None:
    assert configure("toy", variant="wide", nodes=7) == parse("toy:wide,nodes=7")
    assert configure("toy", share=1) == parse("toy,share=1.0")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nope", "unknown method 'nope'.*prompt-lookup"),
        ("", "unknown method"),
        ("toy:tall", "no variant 'tall'.*wide"),
        ("ar:tall", "none"),
        ("toy,nodes", "'nodes'.*key=value"),
        ("toy,=3", "key=value"),
        ("toy,nodes=2,nodes=3", "twice"),
        ("toy,knots=3", "toy.knots: no such option.*nodes, share, fast, mode"),
        ("ar,nodes=3", "ar.nodes: no such option.*no options"),
        ("toy,nodes=x", "toy.nodes: must be a whole number, got 'x'"),
        ("toy,nodes=1.5", "toy.nodes"),
        ("toy,share=much", "toy.share: must be a number"),
        ("toy,fast=maybe", "toy.fast: must be on or off"),
    ],
)
def test_a_method_that_cannot_be_parsed_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        parse(text)


@pytest.mark.parametrize("value", [3, None, ["ar"]])
def test_a_method_that_is_no_text_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="method"):
        parse(value)


@pytest.mark.parametrize(("key", "value"), [("nodes", True), ("nodes", 1.5), ("nodes", None)])
def test_a_python_value_of_another_kind_is_refused(key: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"toy.{key}"):
        configure("toy", **{key: value})


def test_a_variant_sets_options_and_options_override_it() -> None:
    target = ToyTarget()
    for text, nodes in (("toy", 4), ("toy:wide", 9), ("toy:wide,nodes=2", 2)):
        _, policy = prepare(parse(text), _context(target))()
        assert isinstance(policy, FixedPolicy)
        assert policy.nodes == nodes


def test_lists_are_split_between_names_only() -> None:
    text = "racer,nodes=24,ar, lede:paper,a=1,b=x , prompt-lookup:hf,"
    assert split(text) == ["racer,nodes=24", "ar", "lede:paper,a=1,b=x", "prompt-lookup:hf"]
    assert split("draft-model,model=org/name:q4,nodes=3,ar") == [
        "draft-model,model=org/name:q4,nodes=3",
        "ar",
    ]
    assert split("") == []


def test_a_name_is_registered_once() -> None:
    with pytest.raises(OptionError, match="'toy' is registered already"):
        register(Method("toy", "another", _prepare))


def test_a_plug_in_is_loaded_once_and_a_broken_one_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Entry:
        def __init__(self, name: str, loaded: Any) -> None:
            self.name, self.value, self.loaded = name, f"pkg:{name}", loaded

        def load(self) -> Any:
            if isinstance(self.loaded, Exception):
                raise self.loaded
            return self.loaded

    entries = [
        Entry("broken", ImportError("gone")),
        Entry("plain", Method("plug-a", "a", _prepare, Options)),
        Entry("taken", Method("ar", "a thief", _prepare, Options)),
        Entry("made", lambda: Method("plug-b", "b", _prepare, Options)),
    ]
    monkeypatch.setattr(methods, "_entry_points_read", False)
    monkeypatch.setattr(methods, "entry_points", lambda group: entries)
    with caplog.at_level(logging.WARNING, logger="hasten.methods"):
        known = methods.all_methods()
        methods.all_methods()
    assert {"plug-a", "plug-b", "ar"} <= known.keys()
    assert known["ar"].summary != "a thief"
    assert [r.message.split()[1] for r in caplog.records] == ["broken", "taken"]
    assert "gone" in caplog.text


def test_a_method_the_target_cannot_carry_is_refused_before_any_pass() -> None:
    register(Method("deep", "d", _prepare, Options, requires=("rollback", "layer_ranges")))
    target = ToyTarget(layer_ranges=False)
    with pytest.raises(
        CapabilityError, match=r"'deep' needs a target with layer ranges.*method 'ar'"
    ):
        prepare(parse("deep"), _context(target))
    with pytest.raises(CapabilityError, match="rollback"):
        prepare(parse("prompt-lookup"), _context(ToyTarget(rollback=False)))
    prepare(parse("ar"), _context(ToyTarget(rollback=False)))
    assert target.passes == 0


def test_a_tree_method_on_a_chain_target_says_so(caplog: pytest.LogCaptureFixture) -> None:
    register(Method("bushy", "b", _prepare, Options, trees=True))
    with caplog.at_level(logging.WARNING, logger="hasten.methods"):
        prepare(parse("bushy"), _context(ToyTarget(tree=True)))
        assert not caplog.records
        prepare(parse("bushy"), _context(ToyTarget(tree=False)))
    assert "chains instead of trees" in caplog.text


def test_options_have_help_and_defaults() -> None:
    assert methods.option_help(methods.get("toy"))[:3] == [
        ("nodes", "4", "rows"),
        ("share", "0.5", ""),
        ("fast", "on", ""),
    ]
    for name, method in methods.all_methods().items():
        assert method.name == name
        assert method.summary
        assert name == "toy" or all(help for _, _, help in methods.option_help(method))
        for variant in method.variants:
            configure(name, variant=variant, **method.variants[variant])


def test_each_request_gets_a_drafter_of_its_own() -> None:
    for name in ("ar", "prompt-lookup", "draft-model,model=near"):
        make = prepare(parse(name), _context())
        (one, policy), (two, other) = make(), make()
        assert one is not two
        assert policy is not other


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("prompt-lookup,nodes=0", "prompt-lookup.nodes"),
        ("prompt-lookup,min_ngram=0", "prompt-lookup.min_ngram"),
        ("prompt-lookup,min_ngram=4,max_ngram=3", "prompt-lookup.min_ngram"),
        ("prompt-lookup,mode=newest", "prompt-lookup.mode"),
        ("draft-model", "draft-model.model"),
        ("draft-model,model=near,nodes=0", "draft-model.nodes"),
        ("draft-model,model=near,threshold=1", "draft-model.threshold"),
        ("draft-model,model=near,threshold=nan", "draft-model.threshold"),
    ],
)
def test_a_bad_option_is_refused_when_the_method_is_prepared(text: str, option: str) -> None:
    with pytest.raises(OptionError) as caught:
        prepare(parse(text), _context())
    assert caught.value.option == option


def test_one_node_is_plain_decoding() -> None:
    for text in ("prompt-lookup,nodes=1", "draft-model,model=near,nodes=1"):
        _, policy = prepare(parse(text), _context())()
        assert policy == FixedPolicy(1)


def test_a_draft_model_that_cannot_roll_back_is_refused() -> None:
    other = ToyTarget(rollback=False)
    context = MethodContext(ToyTarget(), ToyTokenizer(), lambda name: (other, ToyTokenizer()))
    with pytest.raises(CapabilityError, match="can't be a draft model"):
        prepare(parse("draft-model,model=x"), context)


class Swapped(ToyTokenizer):
    """Two letters changed places."""

    letters = "abdcefghijklmnopqrstuvwxyz0123456789"


class Longer(ToyTokenizer):
    """Some tokens more, at the end."""

    letters = ToyTokenizer.letters + "!?"


def test_another_vocabulary_is_refused_with_sizes_and_the_first_difference() -> None:
    context = MethodContext(ToyTarget(), ToyTokenizer(), lambda name: (ToyTarget(), Swapped()))
    with pytest.raises(VocabularyError, match=r"36 tokens.*36 tokens.*id 2 is 'c'.*'d'"):
        prepare(parse("draft-model,model=x"), context)


@pytest.mark.parametrize("vocab", [20, 24, 30])
def test_padded_and_longer_vocabularies_are_fine(vocab: int) -> None:
    other = ToyTarget(vocab=vocab)
    context = MethodContext(ToyTarget(), ToyTokenizer(), lambda name: (other, Longer()))
    prepare(parse("draft-model,model=x"), context)


def test_without_tokenizers_sizes_must_be_equal() -> None:
    for vocab, fine in ((24, True), (25, False)):
        other = ToyTarget(vocab=vocab)
        context = MethodContext(ToyTarget(), None, lambda name, other=other: (other, None))
        if fine:
            prepare(parse("draft-model,model=x"), context)
        else:
            with pytest.raises(VocabularyError, match=r"24 ids.*25"):
                prepare(parse("draft-model,model=x"), context)


def test_every_refusal_is_a_hasten_error() -> None:
    for text in ("nope", "toy,nodes=x", "toy:tall"):
        with pytest.raises(HastenError):
            parse(text)
