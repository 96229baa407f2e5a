"""Rounds played on logs are the engine's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hasten.drafters.early_exit import EarlyExit
from hasten.policies import exit_rules
from hasten.policies.exit_adaptive import DEL, Myopic
from hasten.policies.exits import SELECT, ExitPolicy, Outcome, Probe
from hasten.policies.lede_features import FEATURES, Bools, FeatureFacts, Floats, LiveFeatures, Prior
from hasten.train.lede import plans
from hasten.train.lede.candidates import Candidates
from hasten.train.lede.chances import calibrate
from hasten.train.lede.logs import Doc
from hasten.train.lede.replay import score_policy
from hasten.train.lede.simulate import Score, Simulator, play
from hasten.train.lede.world import World, build
from tests.policies.exit_cases import costs as toy_costs
from tests.train.lede import cases
from tests.train.lede.toy import Toy

AT = (0, 2, 4)
COSTS = toy_costs(AT, 6, rows=cases.STEPS + 4)
FACTS = FeatureFacts(AT, COSTS, (0.5, 0.5, 0.5), 1.0, Prior.flat((0.4, 0.4, 0.4)), cases.STEPS)


class Logged:
    def __init__(self, folder: Path) -> None:
        self.exits: Candidates = cases.found(folder / "modules")
        self.docs: list[Doc] = cases.documents(self.exits.target, self.exits)
        self.experience = cases.experience(folder / "logs", self.exits, self.docs)
        self.world: World = build(self.experience)
        self.all = np.arange(len(self.docs))


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Logged:
    return Logged(tmp_path_factory.mktemp("lede"))


def replayed(logged: Logged, make: Callable[[], ExitPolicy]) -> list[list[Outcome]]:
    made: list[list[Outcome]] = []
    for doc in range(len(logged.docs)):
        seen: list[Outcome] = []
        score_policy(logged.world, np.array([doc]), FACTS, lambda s=seen: cases.Noting(make(), s))  # type: ignore[misc]
        made.append(seen)
    return made


def told(outcomes: list[list[Outcome]]) -> list[list[tuple[int | None, int, int]]]:
    return [[(o.layer, o.drafted, o.accepted) for o in each] for each in outcomes]


@pytest.mark.parametrize("exit", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 3, 12])
def test_a_fixed_setting_goes_on_logs_as_in_the_engine(
    logged: Logged, exit: int, length: int
) -> None:
    engine = told(cases.engine_outcomes(logged.exits, logged.docs, _fixed(exit, length)))
    assert told(replayed(logged, _fixed(exit, length))) == engine
    kept = sum(accepted for each in engine for _, _, accepted in each)
    assert kept > (0 if exit == 0 else 5), "nothing was kept: this shows little"


def _fixed(exit: int, length: int) -> Callable[[], ExitPolicy]:
    return lambda: exit_rules.Static(exit, length)


POLICIES: dict[str, Callable[[], ExitPolicy]] = {
    "thresholds": lambda: exit_rules.Thresholds([0.6, 0.3, 0.1], stop=0.15),
    "kangaroo": lambda: exit_rules.Kangaroo(2, 0.3, keep=True),
    "svip": lambda: exit_rules.SVIP(0, 0.6),
    "del by length": lambda: DEL(COSTS, AT, steps=4, ending="length"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_what_any_policy_keeps_is_what_the_engine_keeps(logged: Logged, name: str) -> None:
    """Tokens drafted after a wrong one aren't the text's: how many may differ."""
    engine = cases.engine_outcomes(logged.exits, logged.docs, POLICIES[name])
    replay = replayed(logged, POLICIES[name])
    assert [[(o.layer, o.accepted) for o in each] for each in replay] == [
        [(o.layer, o.accepted) for o in each] for each in engine
    ]
    for ours, theirs in zip(replay, engine, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            near = zip(a.probes[: a.accepted + 1], b.probes[: b.accepted + 1], strict=False)
            for mine, real in near:
                got = (mine.p1, mine.p2, mine.entropy, mine.gap, mine.context)
                want = (real.p1, real.p2, real.entropy, real.gap, real.context)
                np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-4)


class _Features:
    """Leaves where p1 is high on the walk, drafts three tokens; keeps the features it sees."""

    shadow = False

    def __init__(self) -> None:
        self.live = LiveFeatures(FACTS)
        self.kept: list[Floats] = []
        self._seen: list[Floats] = []

    def wants(self, phase: str, exit: int, drafted: int) -> bool:
        return drafted < cases.STEPS

    def leave(self, probe: Probe) -> bool:
        self._seen.append(self.live.features(probe).copy())
        walking = probe.phase == SELECT
        take = probe.p1 > 0.35 if walking else probe.drafted < 3
        if take:
            self.live.took()
        return take

    def learn(self, outcome: Outcome) -> None:
        drafts = [x[FEATURES.index("phase")] for x in self._seen]
        walk = drafts.count(0.0)
        self.kept += self._seen[: walk + outcome.accepted]
        self._seen = []
        self.live.learn(outcome)


class _Told(EarlyExit):
    def propose(self, ctx, budget):  # type: ignore[no-untyped-def]
        self.policy.live.root(ctx.ids[-1])  # type: ignore[attr-defined]
        return super().propose(ctx, budget)

    def _token(self, ctx, prefix, probe):  # type: ignore[no-untyped-def]
        token, q = super()._token(ctx, prefix, probe)
        self.policy.live.drew(token)  # type: ignore[attr-defined]
        return token, q


def test_features_of_a_live_request_are_those_of_the_simulator(logged: Logged) -> None:
    for number, doc in enumerate(logged.docs):
        policy = _Features()
        drafter = _Told(logged.exits.bank, policy, length=cases.STEPS)
        cases.answer(logged.exits.target, doc.prompt, len(doc.output), drafter)
        seen: list[Floats] = []

        def decide(simulator: Simulator, features: Floats, seen: list[Floats] = seen) -> Bools:
            if simulator.true[0]:
                seen.append(features[:, 0].copy())
            return np.where(simulator.walking, simulator.p1 > 0.35, simulator.drafted < 3)

        play(logged.world, np.array([number]), FACTS, decide)
        assert len(seen) == len(policy.kept)
        np.testing.assert_allclose(seen, policy.kept, rtol=5e-3, atol=2e-3)
    spread = np.array(seen).std(0)
    changing = [name for name, s in zip(FEATURES, spread, strict=True) if s > 1e-4]
    assert {"p1", "entropy", "cosine", "growth", "rate", "length", "last"} <= set(changing)


def test_lanes_and_single_requests_and_plans_agree_on_fixed_settings(logged: Logged) -> None:
    for exit, length in ((0, 2), (1, 5), (2, 12)):
        one = score_policy(logged.world, logged.all, FACTS, _fixed(exit, length))
        plan = plans.Plan.fixed(logged.world, exit, length)
        two = plans.follow(logged.world, logged.all, plan, COSTS)

        def decide(s: Simulator, _: Floats, exit: int = exit, length: int = length) -> Bools:
            return np.where(s.walking, s.exit == exit, s.drafted < length)

        lanes = play(logged.world, logged.all, FACTS, decide)
        for name in Score.NAMES:
            np.testing.assert_allclose(getattr(one, name), getattr(two, name), err_msg=name)
            if name != "time":
                np.testing.assert_allclose(getattr(one, name), getattr(lanes, name), err_msg=name)
        probes = lanes.time - one.time
        assert (probes >= -1e-4).all(), "lanes pay for every probe on the walk, and the last one"


def test_every_token_of_every_document_is_played_once(logged: Logged) -> None:
    coin = np.random.default_rng(0)
    score = play(logged.world, logged.all, FACTS, lambda s, _: coin.random(len(s.live)) < 0.6)
    assert score.tokens.tolist() == [doc.rows for doc in logged.docs]
    assert (score.rounds + score.accepted == score.tokens).all()


def test_oracles_are_in_order_and_above_what_policies_do() -> None:
    toy = Toy()
    world = toy.world(24, 120)
    docs = world.docs("test")
    truth = world.alpha
    scores = plans.grid(world, docs, toy.costs)
    fixed = scores[plans.best_fixed(scores)].rho
    seer = plans.clairvoyant(world, docs, toy.costs).rho
    far = plans.foresight(world, docs, toy.costs, truth).rho
    calibration = calibrate(world, world.docs("policy"))
    myopic = score_policy(
        world, docs, toy.facts, lambda: Myopic(toy.costs, world.at, calibration, steps=toy.steps)
    ).rho
    assert seer > far > 1.05 * fixed
    assert toy.best() < far
    assert myopic < seer
    assert abs(myopic - toy.best()) < 0.1 * toy.best()


def test_costs_follow_the_table() -> None:
    """A draft of two from exit 1, one kept: three rows to the exit, two probes, a resumed pass."""
    toy = Toy(chances=((1.0, 1.0), (1.0, 1.0)))
    world, costs = toy.world(2, 40), toy.costs
    plan = plans.Plan.fixed(world, 1, 2)
    score = plans.follow(world, np.array([0]), plan, costs)
    each = 3 * costs.layer[1] + 2 * costs.probe[1] + costs.resume(1, 4, 3)
    assert score.rounds[0] == 14
    assert score.tokens[0] == 40
    np.testing.assert_allclose(score.time[0], 13 * each + costs.verify[1])


def test_the_score_is_a_ratio_of_sums_with_an_interval_around_it() -> None:
    docs = np.arange(40)
    ones = np.ones(40)
    tokens = np.where(docs % 2, 30.0, 10.0)
    time = np.where(docs % 2, 10.0, 10.0)
    score = Score(docs, tokens, time, ones, ones, ones, ones, ones)
    low, high = score.spread()
    assert score.rho == 2.0
    assert low < 2.0 < high


def test_drawn_drafts_are_kept_with_chance_alpha_and_gains_promise_as_much() -> None:
    toy = Toy(chances=((0.8, 0.5), (0.9, 0.6)))
    world = toy.world(60, 120)
    docs = np.arange(60)
    never = World(**{name: getattr(world, name) for name in World.__slots__})
    never.hit[:] = False
    simulator = Simulator(never, docs, toy.facts, np.random.default_rng(0), expected=True)
    promised = 0.0
    while simulator.live.any():
        simulator.observe()
        take = np.where(simulator.walking, simulator.exit == 0, simulator.drafted < 3)
        promised += float(simulator.step(take).gain.sum())
    score = simulator.score
    assert abs(score.acceptance - (0.68 + 0.68**2 + 0.68**3) / 3) < 0.03
    plain = score.tokens.sum() - (score.accepted.sum() + score.rounds.sum())
    assert plain == 0
    assert abs(promised / score.tokens.sum() - 1.0) < 0.03
