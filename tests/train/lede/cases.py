"""Experience of a tiny target with random exit modules at three layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hasten.decode import decode
from hasten.decoding import Decoding
from hasten.drafters.ar import Plain
from hasten.drafters.early_exit import EarlyExit
from hasten.exits import store
from hasten.policies.base import FixedPolicy
from hasten.policies.exits import ExitPolicy, Outcome
from hasten.targets.fused import FusedTarget
from hasten.train.lede import candidates, logs, tables
from hasten.train.lede.candidates import Candidates
from hasten.train.lede.collect import CollectOptions, meta_of
from hasten.train.lede.logs import Doc, Experience
from hasten.types import SamplingParams
from hasten.verify import walk
from tests.exits import exit_models as tiny
from tests.exits.exit_requests import prompt_of

KINDS = (("deep", 0), ("adapter", 2), ("deep", 4))
STEPS = 12


def save_modules(folder: Path, kinds: Sequence[tuple[str, int]] = KINDS) -> Path:
    """Modules that are right now and then, as `hasten train exits` writes them."""
    hidden = tiny.target().info.hidden_size
    configs = [tiny.config(kind, layer, hidden) for kind, layer in kinds]
    modules = [(c, tiny.near_tensors(c, seed)) for seed, c in enumerate(configs)]
    store.save(folder, "tiny", range(0, tiny.VOCAB, 2), modules, {})
    return folder


def found(folder: Path) -> Candidates:
    return candidates.find(tiny.target(), (), save_modules(folder))


def answer(
    target: FusedTarget, prompt: Sequence[int], count: int, drafter: object = None
) -> list[int]:
    params = SamplingParams(max_new_tokens=count, temperature=0.0)
    asked = Decoding(
        target,
        prompt,
        params,
        drafter=drafter or Plain(),  # type: ignore[arg-type]
        policy=FixedPolicy(STEPS + 1),
        verifier=walk,
    )
    return [token for _, made in decode([asked]) for token in made.emitted]


def documents(over: FusedTarget, exits: Candidates, count: int = 4, length: int = 24) -> list[Doc]:
    docs = []
    for at in range(count):
        prompt = prompt_of(at, 8 + at)
        output = answer(over, prompt, length)
        known = len(exits.bank.head.local(prompt).ids)
        split = ("policy", "select", "test")[at % 3]
        domain = ("math", "chat")[at // 3 % 2]
        docs.append(Doc(at, domain, split, True, tuple(prompt), tuple(output), known))
    return docs


def experience(
    folder: Path, exits: Candidates, docs: Sequence[Doc], depths: int = STEPS
) -> Experience:
    """A folder with the tables of these documents."""
    meta = meta_of(exits, CollectOptions(depths=depths))
    there = logs.begin(folder, meta, docs)
    for number, part in enumerate(there.parts()):
        logs.write_tables(there.shard(number), tables.compute(exits, part, meta.depths))
    return there


class Noting:
    """A policy that is asked through another, and keeps every outcome."""

    def __init__(self, inner: ExitPolicy, seen: list[Outcome]) -> None:
        self._inner, self._seen = inner, seen
        self.shadow = inner.shadow
        self.wants, self.leave = inner.wants, inner.leave

    def learn(self, outcome: Outcome) -> None:
        self._inner.learn(outcome)
        self._seen.append(outcome)


def engine_outcomes(
    exits: Candidates, docs: Sequence[Doc], make: Callable[[], ExitPolicy]
) -> list[list[Outcome]]:
    """What rounds of the real engine come to, document by document."""
    made: list[list[Outcome]] = []
    for doc in docs:
        seen: list[Outcome] = []
        drafter = EarlyExit(exits.bank, Noting(make(), seen), length=STEPS)
        assert answer(exits.target, doc.prompt, len(doc.output), drafter) == list(doc.output)
        made.append(seen)
    return made
