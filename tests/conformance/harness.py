"""How conformance tests run a drafter, and what is checked in every run."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hasten import methods
from hasten.decode import decode
from hasten.decoding import Decoding
from hasten.drafters.base import Drafter
from hasten.exits import store
from hasten.metrics import Summary
from hasten.policies.base import FixedPolicy, Policy
from hasten.policies.cost_model import CostTable
from hasten.stopping import Stopper
from hasten.targets.base import TargetInfo
from hasten.text import TextStream
from hasten.types import FinishReason, Round, SamplingParams, TokenLogprob
from hasten.verify import VERIFIERS, Verifier
from tests.conformance.drafters import KINDS, KNOWING, ResumingTree, TestDrafter
from tests.conformance.toy_target import ToyTarget, ToyTokenizer
from tests.dflash import dflash_models
from tests.eagle3 import eagle3_models
from tests.exits import exit_tensors
from tests.policies import lede_cases

REGISTERED: dict[str, tuple[str, ...]] = {
    "ar": ("ar",),
    "prompt-lookup": ("prompt-lookup", "prompt-lookup:hf", "prompt-lookup:original"),
    "draft-model": (
        "draft-model,model=near",
        "draft-model,model=near,draw=off",
        "draft-model,model=near,threshold=0.2",
        "draft-model,model=short",
    ),
    "racer": (
        "racer",
        "racer:paper",
        "racer:retrieval",
        "racer:logits",
        "racer,schedule=wide,scope=session",
    ),
    "recycling": ("recycling", "recycling:paper"),
    "suffix": ("suffix", "suffix:path", "suffix:tree", "suffix:paper"),
    "adapld": (
        "adapld",
        "adapld:paper",
        "adapld:pld-plus",
        "adapld:pld",
        "adapld,succ_semantic=on,succ_query=previous",
        "adapld,deep=off,successors=off,layer=1",
    ),
    "ptd": ("ptd", "ptd:paper", "ptd,text=off,spine=off,roots=3,key=1", "ptd,roots=0"),
    "lookahead": ("lookahead", "lookahead:paper", "lookahead,ngram=2,window=3,text=off"),
    "early-exit": (
        "early-exit:layerskip,exits=3,length=4",
        "early-exit,head=own,exits=1+2+3,rule=lite,threshold=0.3",
        "early-exit,modules=toy,exits=2,rule=draft-verify,threshold=0.1,keep=on,draw=off",
        "early-exit:lookup,modules=toy",
    ),
    "del": ("del,modules=toy,exits=0+2,ending=both",),
    "dflash": (
        "dflash,model=toy",
        "dflash:adaflash,model=toy,rate=1.3,least=2",
        "dflash:cost,model=toy",
        "dflash:tree,model=toy",
        "dflash:tree,model=toy,nodes=9",
        "dflash,model=toy,draft=sample,draft_temperature=0.8",
    ),
    "eagle3": (
        "eagle3,model=toy/eagle3",
        "eagle3:tree,model=toy/eagle3,top_k=3,nodes=9",
        "eagle3,model=toy/eagle3,sample=on,draft_temperature=0.8",
    ),
    "hvd": (
        "hvd:frequency,s0=0.4,model=none",
        "hvd,rule=cache,model=early-exit:lookup;modules=toy",
        "hvd:frequency,s0=0.5,model=dflash;model=toy",
        "hvd:frequency,s0=0.5,model=eagle3;model=toy/eagle3",
        "hvd:frequency,s0=0.4,model=draft:near;draw=off",
    ),
    "lede": (
        "lede,modules=toy,arms=toy/lede_arms.npz",
        "lede,modules=toy,arms=toy/lede_arms.npz,retrieval=off,online=off",
        "lede:paper,modules=toy,agent=toy/lede.npz",
    ),
    "auto": ("auto",),
}
"""How each registered method is prepared here; `load_other` knows the models named, ``=toy`` is the
folder of `toy_modules`."""


COSTS = CostTable("toy", (1, 4, 16, 64), (64,), ((10.0, 11.0, 14.0, 26.0),))
"""What passes are said to cost: nothing is measured here."""


def load_other(name: str) -> tuple[ToyTarget, ToyTokenizer]:
    """The draft models: ``near`` agrees with the default toy target now and then (its tables are
    the same, the shares differ), ``short`` also has little context and padded vocabulary."""
    if name == "near":
        return ToyTarget(bigram=0.7, seed=0), ToyTokenizer()
    assert name == "short"
    return ToyTarget(bigram=0.7, seed=0, vocab=30, context_limit=20), ToyTokenizer()


MakeDrafter = Callable[[ToyTarget, Sequence[int], int], Drafter]
"""``(target, truth, seed) -> drafter``."""


def _toy(kind: type[TestDrafter]) -> MakeDrafter:
    return lambda target, truth, seed: kind(truth, target.info.vocab_size, seed)


def _registered(text: str) -> MakeDrafter:
    def make(target: ToyTarget, truth: Sequence[int], seed: int) -> Drafter:
        if "tree" in methods.get(methods.parse(text).name).requires:
            # Refused on a target without tree masks; the drafter copes with one all the same.
            target = ToyTarget(vocab=target.info.vocab_size, eos_ids=tuple(target.info.eos_ids))
        if "=toy" in text or "head=own" in text or ":layerskip" in text:
            return _exiting(text, target)()[0]
        context = methods.MethodContext(target, ToyTokenizer(), load_other, COSTS)
        return methods.prepare(methods.parse(text), context)()[0]

    return make


_EXITING: dict[tuple[str, str, int, frozenset[int]], methods.RequestMaker] = {}


def _exiting(text: str, target: ToyTarget) -> methods.RequestMaker:
    """A method with exit modules, prepared once for like targets: making modules takes longer than
    a request here."""
    info = target.info
    key = (text, info.fingerprint, info.vocab_size, info.eos_ids)
    if key not in _EXITING:
        spec = methods.parse(text.replace("=toy", f"={toy_modules(info)}"))
        context = methods.MethodContext(target, ToyTokenizer(), load_other, COSTS)
        passes = target.passes
        _EXITING[key] = methods.prepare(spec, context)
        target.passes = passes  # `lede` times questions between passes of its own
    return _EXITING[key]


_FOLDER = tempfile.TemporaryDirectory(prefix="hasten-toy-exits-")


def toy_modules(info: TargetInfo) -> Path:
    """A folder with exit modules of all kinds, a DFlash and an EAGLE-3 drafter, with random tensors
    for this toy target, over half of its ids; by chance some of their drafts are right."""
    folder = Path(_FOLDER.name) / f"{info.fingerprint}-{info.vocab_size}"
    if not folder.is_dir():
        kinds = (("deep", 0), ("affine", 1), ("adapter", 2), ("deep", 3))
        size = info.hidden_size
        made = [exit_tensors.config(kind, at, size, deep_at=(2, 4)) for kind, at in kinds]
        tensors = [(each, exit_tensors.random_tensors(each)) for each in made]
        store.save(folder, info.fingerprint, range(0, info.vocab_size, 2), tensors, {})
        lede_cases.save_files(folder, info)
        dflash_models.save_for(folder, info, ids=range(0, info.vocab_size, 2))
        eagle3_models.save_for(folder / "eagle3", info, ids=range(0, info.vocab_size, 2))
    return folder


DRAFTERS: dict[str, MakeDrafter] = {
    **{kind.name: _toy(kind) for kind in (*KNOWING, *KINDS)},
    **{text: _registered(text) for texts in REGISTERED.values() for text in texts},
}
"""Every drafter that runs on any target."""

TREE_DRAFTERS: dict[str, MakeDrafter] = {**DRAFTERS, ResumingTree.name: _toy(ResumingTree)}
"""Every drafter, for targets with tree masks."""

_DRAWS = (
    "draft-model",
    "early-exit",
    "del,",
    "lede:paper",
    "dflash,model=toy,draft=",
    "eagle3,model=toy/eagle3,sample",
)
DRAWING = {"drawn", "drawn-tree", "mixed"} | {
    t
    for t in DRAFTERS
    if t.startswith(_DRAWS) and "draw=off" not in t and not t.startswith("early-exit:lookup")
}
"""Those that draw: under `rejection` their answers are right in distribution, not by token."""


@dataclass
class Answer:
    """What came of a request."""

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""

    @property
    def finish(self) -> FinishReason | None:
        return self.rounds[-1].finish if self.rounds else None

    @property
    def end(self) -> tuple[FinishReason | None, int | str | None]:
        """Why it ended."""
        last = self.rounds[-1]
        return last.finish, last.stop_reason


def request(
    target: ToyTarget,
    prompt: Sequence[int],
    params: SamplingParams,
    drafter: Drafter,
    *,
    nodes: int = 8,
    policy: Policy | None = None,
    verifier: str | Verifier | None = None,
    seed: int = 0,
    text: TextStream | None = None,
) -> Decoding:
    """A request ready to run."""
    if verifier is None:
        verifier = "greedy" if params.is_greedy else "match"
    info = target.info
    return Decoding(
        target,
        prompt,
        params,
        drafter=drafter,
        policy=policy or FixedPolicy(nodes),
        verifier=VERIFIERS[verifier] if isinstance(verifier, str) else verifier,
        seed=seed,
        stopper=Stopper(params, info.eos_ids, len(prompt), info.context_limit, text),
    )


def run(
    target: ToyTarget, prompt: Sequence[int], params: SamplingParams, drafter: Drafter, **how: Any
) -> Answer:
    """Run one request to its end; checks the cache after every commit and everything at the end."""
    text = TextStream(ToyTokenizer(), params.stop, params.min_new_tokens)
    sequence = target.open()
    asked = request(target, prompt, params, drafter, text=text, **how)
    asked.lend(sequence)
    answer = Answer()
    with untouched_generators():
        for index, made in decode([asked]):
            assert index == 0
            answer.rounds.append(made)
            answer.tokens.extend(made.emitted)
            answer.logprobs.extend(made.logprobs)
            check_cache(sequence, [*prompt, *answer.tokens][:-1])
    answer.text = text.flush()
    target.close(sequence)
    assert target.live == [], "a sequence leaked"
    check_rounds(answer, params)
    if isinstance(drafter, TestDrafter):
        assert drafter.calls[-1:] in (["end"], [])
    return answer


def check_cache(sequence: Any, tokens: Sequence[int]) -> None:
    """The sequence is what plain decoding would have built: these tokens and nothing pending."""
    assert sequence.tokens == list(tokens)
    assert sequence.pending == 0
    target = ToyTarget()
    fresh = target.open()
    target.prefill(fresh, tokens)
    assert sequence.keys == fresh.keys


def check_rounds(answer: Answer, params: SamplingParams) -> None:
    """Conservation: counts add up, rates are rates, times are not negative."""
    rounds = answer.rounds
    assert [r.index for r in rounds] == list(range(len(rounds)))
    assert all(r.finish is None for r in rounds[:-1])
    for made in rounds:
        assert made.emitted, "a round emits something"
        assert made.times.total >= 0
        assert made.times.host >= 0
        if made.tree is not None:
            assert len(made.accepted) == len(made.emitted)
            assert made.accepted[0] == 0
            assert list(made.accepted) == made.tree.path(made.accepted[-1])
            kept = [made.tree.tokens[n] for n in made.accepted[1:]]
            assert kept == list(made.emitted[:-1]), "accepted nodes carry the emitted tokens"
    summary = Summary.of(rounds)
    assert summary.new_tokens == len(answer.tokens) <= params.max_new_tokens
    assert summary.target_passes == max(len(rounds) - 1, 0)
    assert summary.pass_tokens == summary.new_tokens - bool(rounds)
    assert summary.accepted + summary.target_passes == summary.pass_tokens
    assert sum(k * n for k, n in summary.accepted_lengths.items()) == summary.pass_tokens
    assert summary.mean_accepted_length >= 1
    assert 0 <= summary.acceptance_rate <= 1
    assert sum(summary.depth_accepted.values()) == summary.accepted
    assert all(0 <= v <= 1 for v in summary.conditional_acceptance().values())
    wanted = len(answer.tokens) if params.logprobs is not None else 0
    assert len(answer.logprobs) == wanted


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Fails when a global random generator was used."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    assert random.getstate() == before[0]
    after = np.random.get_state()
    assert all(np.array_equal(a, b) for a, b in zip(before[1], after, strict=True))
    assert torch.equal(torch.get_rng_state(), before[2])


def prompt_of(seed: int, length: int = 12, vocab: int = 24) -> list[int]:
    """A prompt that repeats itself, without the end-of-sequence id."""
    rng = random.Random(seed)
    half = [rng.randrange(2, vocab) for _ in range((length + 1) // 2)]
    return (half + half)[:length]
