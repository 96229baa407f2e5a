"""The agent learns: double, dueling, noisy DQN with n-step returns over replay, through torchrl.

The paper: DQN with replay, about 200 episodes of exploration, Adam at 6.25e-5, factorised noise of
0.1 (second-hand or from its setup). The rest is ours (docs/methods/lede.md).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict  # type: ignore[import-untyped]

from hasten.errors import CapabilityError, OptionError
from hasten.policies.lede_agent import AgentFacts, LedeAgent
from hasten.policies.lede_features import FEATURES, Bools, FeatureFacts, Floats, Ints
from hasten.train.lede.logs import Rollout
from hasten.train.lede.net import SIGMA, Scale, fold, make_net, noise
from hasten.train.lede.simulate import Simulator
from hasten.train.lede.transitions import (
    REWARDS,
    Trace,
    Transitions,
    from_rollouts,
    join,
    n_step,
    priced,
)
from hasten.train.lede.world import World

UNIT = 4.0
"""The network learns values in so many tokens: Huber's loss is quadratic within one unit."""
CHUNK = 24
"""Steps of all lanes between looks at the network."""


@dataclass(frozen=True, slots=True)
class LearnOptions:
    """How an agent learns.

    rate         Adam's; batch; updates: at each price of time
    prices       times that the price of time is set (Dinkelbach), the first included
    episodes     documents played by a mixture of behaviours before anything is learned
    lanes        documents played at a time; every: updates between looks at the world
    flip  chance of the other action beside the noise
    sigma        of the first noise; reward: one of `REWARDS`
    expected     gains by alpha (for text that was drawn)
    kappa        weight of the conservative term on rollouts; logged: their share of a batch
    prioritized  replay by temporal-difference error, else uniform
    features     those the network sees
    fixed        0, or every draft's length (an ablation)
    check        updates between scores on the documents that select

    Raises OptionError for an unknown reward or feature.
    """

    rate: float = 6.25e-5
    batch: int = 256
    updates: int = 30_000
    prices: int = 3
    episodes: int = 200
    lanes: int = 128
    every: int = 8
    flip: float = 0.05
    sigma: float = SIGMA
    steps: int = 3
    capacity: int = 100_000
    target_every: int = 1000
    reward: str = "throughput"
    expected: bool = False
    kappa: float = 0.1
    logged: float = 0.25
    prioritized: bool = False
    features: tuple[str, ...] = FEATURES
    fixed: int = 0
    check: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.reward not in REWARDS:
            raise OptionError("reward", f"must be one of {', '.join(REWARDS)}, got {self.reward!r}")
        if unknown := set(self.features) - set(FEATURES):
            raise OptionError("features", f"unknown: {', '.join(sorted(unknown))}")
        for name in ("updates", "prices", "batch", "lanes", "every", "steps", "check"):
            if getattr(self, name) < 1:
                raise OptionError(name, f"must be at least 1, got {getattr(self, name)}")


PRESETS: dict[str, LearnOptions] = {
    "paper": LearnOptions(),
    "fast": LearnOptions(rate=1e-3, updates=2500, target_every=200, check=500),
}
"""paper: its learning rate, and as many updates as that needs; fast: minutes instead of hours."""


class Learner:
    """One agent on its way.

    world, docs  what it learns from; facts: features and costs
    rollouts     logged ones, for the conservative term
    """

    def __init__(
        self,
        world: World,
        docs: Ints,
        facts: FeatureFacts,
        options: LearnOptions,
        rollouts: list[Rollout],
    ) -> None:
        self.world, self.docs, self.facts, self.options = world, docs, facts, options
        self._rng = np.random.default_rng(options.seed)
        self._chance = torch.Generator().manual_seed(options.seed).get_state()
        self._rollouts = rollouts
        self.net = make_net(options.seed, options.sigma)
        self._loss, self._optimizer, self._target = objective(self.net, options)
        self._buffer = _buffer(options)
        first = self._explore()
        self.scale = Scale.of(first.before, options.features, UNIT)
        with _quiet():
            self._put(first)
        self._noise = torch.Generator().manual_seed(options.seed)
        self._simulator = self._lanes()
        self.updates = 0

    def _lanes(self) -> Simulator:
        return Simulator(
            self.world,
            self.docs,
            self.facts,
            self._rng,
            lanes=self.options.lanes,
            endless=True,
            expected=self.options.expected,
            fixed=self.options.fixed,
        )

    # -- playing ---------------------------------------------------------------------------------

    def _explore(self) -> Transitions:
        """Documents under the mixture of behaviours, one-step transitions."""
        options = self.options
        docs = self._rng.choice(self.docs, options.episodes)
        simulator = Simulator(
            self.world, docs, self.facts, self._rng, expected=options.expected, fixed=options.fixed
        )
        behave = Mixture(len(docs), len(self.facts.at), self.facts.steps, self._rng)
        parts: list[Transitions] = []
        while simulator.live.any():
            trace = Trace.empty(CHUNK, len(docs))
            for at in range(CHUNK):
                live = simulator.live.copy()
                trace.features[at] = simulator.observe().T
                self._note(trace, at, behave(simulator), simulator)
                trace.live[at] = live
            parts.append(n_step(trace, 1))
        return join(parts)

    def _note(self, trace: Trace, at: int, take: Bools, simulator: Simulator) -> None:
        moved = simulator.step(take)
        trace.action[at] = take
        trace.gain[at], trace.cost[at] = priced(moved, self.options.reward)
        trace.done[at] = moved.done

    def _play(self) -> None:
        """A chunk under the noisy network, into the buffer."""
        simulator, options = self._simulator, self.options
        noisy, own = fold(self.net, self.scale, noisy=True), fold(self.net, self.scale)
        trace = Trace.empty(CHUNK, options.lanes)
        for at in range(CHUNK):
            features = simulator.observe()
            trace.features[at] = features.T
            take = _takes(noisy, features)
            take ^= self._rng.random(len(take)) < options.flip
            trace.greedy[at] = take == _takes(own, features)
            self._note(trace, at, take, simulator)
        self._put(n_step(trace, options.steps))

    def _put(self, made: Transitions) -> None:
        self._buffer.extend(self._data(made))

    def _data(self, made: Transitions) -> TensorDict:
        """As torchrl wants them; gains and costs apart, for the price may change."""
        done = torch.from_numpy(made.done).unsqueeze(1)
        return TensorDict(
            {
                "observation": torch.from_numpy(self.scale(made.before)),
                "action": torch.from_numpy(made.action).unsqueeze(1),
                "next": {
                    "observation": torch.from_numpy(self.scale(made.after)),
                    "gain": torch.from_numpy(made.gain.astype(np.float32)).unsqueeze(1),
                    "cost": torch.from_numpy(made.cost.astype(np.float32)).unsqueeze(1),
                    "done": done,
                    "terminated": done.clone(),
                },
            },
            batch_size=[len(made)],
        )

    # -- learning --------------------------------------------------------------------------------

    def learn(self, rho: float, updates: int) -> float:
        """So many updates at this price of time; the mean loss."""
        # torchrl draws noise from the global generator, which is the user's.
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._chance)
            loss = self._learn(rho, updates)
            self._chance = torch.get_rng_state()
        return loss

    def _learn(self, rho: float, updates: int) -> float:
        options, total = self.options, 0.0
        logged = self._logged()
        for _ in range(updates):
            if self.updates % options.every == 0:
                self._play()
            self.updates += 1
            batch = with_reward(self._buffer.sample(), rho)
            with noise(True):
                loss = self._loss(batch)["loss"]
                if logged is not None:
                    loss = loss + options.logged * self._on_rollouts(logged, rho)
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 10.0)
            self._optimizer.step()
            if options.prioritized:
                self._buffer.update_tensordict_priority(batch)
            self._target.step()
            self._new_noise()
            total += float(loss.detach())
        return total / updates

    def _logged(self) -> TensorDict | None:
        """Transitions of the rollouts, as the network would act now."""
        if not self._rollouts or self.options.reward != "throughput":
            return None
        made = from_rollouts(self._rollouts, self.facts, self.agent(), self.options.steps)
        return None if made is None else self._data(made)

    def _on_rollouts(self, logged: TensorDict, rho: float) -> torch.Tensor:
        """The loss on some of the rollouts' transitions, with the conservative term: values of
        actions that weren't taken there are held down."""
        count = max(int(self.options.logged * self.options.batch), 1)
        some = torch.from_numpy(self._rng.integers(0, len(logged), count))
        batch = with_reward(logged[some], rho)
        values = self.net(batch["observation"])
        taken = values.gather(1, batch["action"]).squeeze(1)
        held = (torch.logsumexp(values, 1) - taken).mean()
        loss: torch.Tensor = self._loss(batch)["loss"] + self.options.kappa * held
        return loss

    def _new_noise(self) -> None:
        """New noise for the network and, apart from it, for its target."""
        for layer in self.net.modules():
            if hasattr(layer, "reset_noise"):
                layer.reset_noise()
        draw_noise(self._loss.target_value_network_params, self._noise)

    def agent(self, facts: AgentFacts | None = None) -> LedeAgent:
        """What it has learned, the noise off."""
        weights, biases = fold(self.net, self.scale)
        known = self.facts
        facts = facts or AgentFacts("", "", known.at, known.costs.layers, known.steps, known.costs)
        facts = replace(facts, features=self.options.features)
        return LedeAgent(facts, weights, biases, known.prior, known.rates, known.length)


class Mixture:
    """A behaviour for each lane: 40% fixed exit and length, 30% random thresholds, 30% a coin; each
    decision is turned round with chance `FLIP`."""

    FLIP = 0.1

    def __init__(self, lanes: int, exits: int, steps: int, rng: np.random.Generator) -> None:
        self._rng = rng
        self.kind = rng.choice(3, lanes, p=[0.4, 0.3, 0.3])
        self.exit = rng.integers(0, exits, lanes)
        self.length = rng.integers(1, steps + 1, lanes)
        self.select, self.stop = rng.random((exits, lanes)), rng.random(lanes)

    def __call__(self, simulator: Simulator) -> Bools:
        """Which lanes take their row's token."""
        walking, p1 = simulator.walking, simulator.p1
        lanes = np.arange(len(p1))
        fixed = np.where(walking, simulator.exit == self.exit, simulator.drafted < self.length)
        sure = p1 >= np.where(walking, self.select[simulator.exit, lanes], self.stop)
        coin = self._rng.random(len(p1)) < 0.5
        take = np.select([self.kind == 0, self.kind == 1], [fixed, sure], coin)
        turned: Bools = take.astype(np.bool_) ^ (self._rng.random(len(p1)) < self.FLIP)
        return turned


def _takes(folded: tuple[tuple[Floats, ...], tuple[Floats, ...]], features: Floats) -> Bools:
    """What a folded network does at features ``(20, n)``."""
    x = features
    weights, biases = folded
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        x = np.maximum(weight @ x + bias[:, None], 0.0)
    go_on, take = weights[-1] @ x + biases[-1][:, None]
    taken: Bools = np.greater(take, go_on)
    return taken


def with_reward(batch: TensorDict, rho: float) -> TensorDict:
    """The batch with its reward at this price of time."""
    then = batch["next"]
    batch["next", "reward"] = (then["gain"] - rho * then["cost"]) / UNIT
    return batch


def objective(net: Any, options: LearnOptions) -> tuple[Any, torch.optim.Optimizer, Any]:
    """torchrl's loss over the network, its optimizer, and what copies it to its target."""
    from torchrl.data import Categorical  # type: ignore[import-untyped]
    from torchrl.modules import QValueActor  # type: ignore[import-untyped]
    from torchrl.objectives import DQNLoss, HardUpdate  # type: ignore[import-untyped]

    actor = QValueActor(net, in_keys=["observation"], spec=Categorical(2))
    loss = DQNLoss(
        actor,
        loss_function="smooth_l1",
        double_dqn=True,
        delay_value=True,
        action_space="categorical",
    )
    loss.make_value_estimator(gamma=1.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=options.rate, eps=1.5e-4)
    return loss, optimizer, HardUpdate(loss, value_network_update_interval=options.target_every)


def _buffer(options: LearnOptions) -> Any:
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import PrioritizedSampler, RandomSampler  # type: ignore[import-untyped]

    sampler: Any = RandomSampler()
    if options.prioritized:
        try:
            sampler = PrioritizedSampler(options.capacity, alpha=0.5, beta=0.4)
        except RuntimeError as error:  # its compiled part isn't of this torch
            raise CapabilityError(
                "this torchrl has no prioritized replay for this torch: leave it out "
                f"(prioritized=False). {error}"
            ) from None
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(options.capacity),
        sampler=sampler,
        batch_size=options.batch,
        priority_key="td_error",
        generator=torch.Generator().manual_seed(options.seed),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """torchrl tells of a buffer's first rows; its logger stays as it was."""
    logger = logging.getLogger("torchrl")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def draw_noise(params: Any, generator: torch.Generator) -> None:
    """Draw factorised noise for all noisy layers among functional parameters."""
    entries = dict(params.items(include_nested=True, leaves_only=True))
    for name, value in entries.items():
        if name[-1] == "weight_epsilon":
            left, right = (
                x.sign() * x.abs().sqrt()
                for x in (torch.randn(size, generator=generator) for size in value.shape)
            )
            value.data.copy_(torch.outer(left, right))
            beside = (*name[:-1], "bias_epsilon")
            entries[beside].data.copy_(left)
