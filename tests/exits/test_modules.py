"""Exit modules at work are the modules that were trained."""

from __future__ import annotations

import pytest
import torch

from hasten.errors import ModelError
from hasten.exits.config import ExitConfig
from hasten.exits.modules import ExitState, cut
from hasten.train.exit_nets import ExitNet
from tests.exits.exit_models import LAYERS, config, module, random_tensors

HIDDEN = 32
ROWS = 9


def trained(made: ExitConfig) -> ExitNet:
    net = ExitNet(made)
    net.load(random_tensors(made))
    return net


def states(seed: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["adapter", "deep"])
def test_rows_given_one_by_one_or_together_give_what_was_trained(kind: str) -> None:
    made = config(kind, 2, HIDDEN)
    net, at_work = trained(made), module(made)
    rows = states(1)
    features = states(2) if kind == "deep" else None
    with torch.no_grad():
        (wanted,) = net.steps(rows[None], None if features is None else features[None], 1)
        together = at_work.run(ExitState(), rows, features, verified=ROWS, want=ROWS)
        close(together, wanted[0])
        state = ExitState()
        for row in range(ROWS):
            part = slice(row, row + 1)
            given = None if features is None else features[part]
            close(at_work.run(state, rows[part], given, verified=1, want=1), wanted[0, part])


def test_drafted_rows_see_the_outputs_of_those_before_them_as_in_training() -> None:
    made = config("deep", 0, HIDDEN)
    net, at_work = trained(made), module(made)
    rows, features = states(1), states(2)
    with torch.no_grad():
        wanted = net.steps(rows[None], features[None], 3)
        for root in range(ROWS - 2):
            state = ExitState()
            out = at_work.run(
                state, rows[: root + 1], features[: root + 1], verified=root, want=1, depths=(0,)
            )
            close(out, wanted[0][0, root : root + 1])
            for step in (1, 2):
                row = rows[root + step : root + step + 1]
                out = at_work.run(state, row, out, verified=0, want=1, depths=(step,))
                close(out, wanted[step][0, root + step : root + step + 1])


def test_a_branch_sees_its_own_ancestors_only() -> None:
    made = config("deep", 0, HIDDEN)
    at_work = module(made)
    rows, features = states(1), states(2)
    kids = states(3, 2)

    def root(state: ExitState) -> torch.Tensor:
        return at_work.run(state, rows, features, verified=ROWS - 1, want=1, depths=(0,))

    hide = -torch.inf
    with torch.no_grad():
        state = ExitState()
        above = root(state)
        mask = torch.tensor([[0.0, 0.0, hide], [0.0, hide, 0.0]])
        both = at_work.run(
            state, kids, above.expand(2, -1), verified=0, want=2, depths=(1, 1), mask=mask
        )
        for kid in range(2):
            cut(state)
            above = root_again(at_work, state, rows, features)
            alone = at_work.run(state, kids[kid : kid + 1], above, verified=0, want=1, depths=(1,))
            close(both[kid : kid + 1], alone)


def root_again(
    at_work: object, state: ExitState, rows: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    run = at_work.run  # type: ignore[attr-defined]
    out: torch.Tensor = run(state, rows[-1:], features[-1:], verified=0, want=1, depths=(0,))
    return out


def test_a_low_rank_map_is_what_was_trained() -> None:
    made = config("affine", 3, HIDDEN)
    rows = states(1)
    with torch.no_grad():
        found = module(made).run(None, rows, None, verified=0, want=4)
        close(found, trained(made).affine(rows)[-4:])


def test_a_lens_is_the_state_itself() -> None:
    rows = states(1)
    found = module(config("lens", 3, HIDDEN)).run(None, rows, None, verified=0, want=2)
    assert torch.equal(found, rows[-2:])


def test_the_cache_grows_without_losing_rows() -> None:
    made = config("adapter", 1, HIDDEN)
    at_work, rows = module(made), states(4, 400)
    with torch.no_grad():
        whole = at_work.run(ExitState(), rows, None, verified=400, want=1)
        state = ExitState()
        for start in range(0, 400, 50):
            out = at_work.run(state, rows[start : start + 50], None, verified=50, want=1)
    close(out, whole)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "bilinear", "layer": 1},
        {"kind": "affine", "layer": 0},
        {"kind": "deep", "layer": 0},
        {"kind": "adapter", "layer": 2, "deep": (LAYERS,)},
        {"kind": "lens", "layer": -1},
    ],
)
def test_a_module_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ModelError):
        ExitConfig(hidden=HIDDEN, **wrong)  # type: ignore[arg-type]


def test_a_missing_or_misshapen_tensor_is_named() -> None:
    from hasten.exits.modules import ExitModule

    made = config("adapter", 1, HIDDEN)
    tensors = random_tensors(made)
    del tensors["out"]
    with pytest.raises(ModelError, match="'out' is missing"):
        ExitModule(made, tensors, lambda w: w, dtype=torch.float32, device=torch.device("cpu"))  # type: ignore[arg-type, return-value]
