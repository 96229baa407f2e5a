"""The draft head's ids, and banks of modules over one target."""

from __future__ import annotations

import pytest
import torch

from hasten.errors import CapabilityError, ModelError, OptionError
from hasten.exits.bank import LOCAL_IDS, DraftHead, ExitBank, own_head_bank, require_exits
from hasten.targets.base import Capabilities
from hasten.targets.fused_weights import make_linear
from tests.conformance.toy_target import ToyTarget
from tests.exits import exit_models as tiny
from tests.exits.exit_models import LAYERS, VOCAB

EVEN = range(0, VOCAB, 2)


def head(ids: range | None = EVEN) -> DraftHead:
    kept = None if ids is None else torch.tensor(list(ids))
    return DraftHead(kept, tiny.target().ends().head, make_linear)


def states(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(1))


def test_a_logit_is_that_of_its_id_in_the_whole_head() -> None:
    whole = states() @ tiny.target().ends().head.T
    for prompt in ((), (7, 4, 7, 9, 8)):
        local = head().local(prompt)
        logits = local(states())
        assert logits.shape == (3, len(local.ids))
        torch.testing.assert_close(logits, whole[:, local.ids], rtol=1e-4, atol=1e-5)
        ids = [local.id_of(place) for place in range(len(local.ids))]
        assert ids == local.ids.tolist()
        assert len(set(ids)) == len(ids)
        assert set(ids) == {*EVEN, *prompt}


def test_a_head_of_all_ids_is_the_targets_own() -> None:
    local = head(None).local((3, 5))
    assert local.ids.tolist() == list(range(VOCAB))
    torch.testing.assert_close(
        local(states()), states() @ tiny.target().ends().head.T, rtol=1e-4, atol=1e-5
    )


def test_logits_spread_over_all_ids_are_nothing_elsewhere() -> None:
    local = head().local((7, 9))
    logits = local(states())[1]
    wide = local.spread(logits)
    assert wide.shape == (VOCAB,)
    assert wide.isinf().sum() == VOCAB - len(local.ids)
    assert torch.equal(wide[local.ids], logits)
    assert int(wide.argmax()) == local.id_of(int(logits.argmax()))


def test_a_prompt_adds_its_latest_ids_up_to_a_limit() -> None:
    rows = torch.zeros(3 * LOCAL_IDS, 4)
    wide = DraftHead(torch.tensor([0, 1]), rows, make_linear)
    local = wide.local([*range(3 * LOCAL_IDS), 5, 5])
    extra = local.ids[2:].tolist()
    assert len(extra) == LOCAL_IDS
    assert set(extra) == {5, *range(2 * LOCAL_IDS + 1, 3 * LOCAL_IDS)}


def test_a_requests_ids_are_its_own() -> None:
    shared = head()
    shared.local((7, 9))
    assert shared.local((11,)).ids.tolist() == [*EVEN, 11]
    assert shared.local(()).ids.tolist() == list(EVEN)


def test_modules_stand_lowest_first_one_a_layer() -> None:
    made = tiny.bank([("lens", 4), ("deep", 0), ("adapter", 2)], EVEN)
    assert made.layers == (0, 2, 4)
    assert made.taps == (2, 3, LAYERS), "what adapters and deep modules see of verified rows"
    with pytest.raises(ModelError, match="one exit module a layer"):
        ExitBank([*made.modules, made.modules[0]], made.head, made.ends)


def test_a_pick_shares_the_head_and_names_what_isnt_there() -> None:
    made = tiny.bank([("lens", 4), ("deep", 0), ("adapter", 2)], EVEN)
    picked = made.pick((4, 0), "early-exit.exits")
    assert picked.layers == (0, 4)
    assert picked.head is made.head
    for layers in ((0, 3), ()):
        with pytest.raises(OptionError, match=r"early-exit\.exits.*some at 0, 2, 4"):
            made.pick(layers, "early-exit.exits")


def test_a_module_is_normed_by_its_own_norm_and_a_lens_by_the_models() -> None:
    made = tiny.bank([("lens", 4), ("affine", 2)], EVEN)
    affine, lens = made.modules
    ends, hidden = made.ends, states()
    scaled = hidden * (hidden.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(made.normed(lens, hidden), scaled * ends.norm, rtol=1e-3, atol=1e-3)
    assert affine.norm is not None
    torch.testing.assert_close(
        made.normed(affine, hidden), scaled * affine.norm, rtol=1e-3, atol=1e-3
    )


def test_the_models_own_head_at_an_exit_is_its_logit_lens() -> None:
    target = tiny.target()
    made = own_head_bank(target, (2, 5), None, make_linear)
    sequence = target.open()
    passed = target.prefill(sequence, [5, 6, 7], taps=(2, 5, LAYERS), all_logits=True)
    target.close(sequence)
    assert passed.logits is not None
    with torch.inference_mode():
        local = made.head.local(())
        # at the top it would be the model itself
        top = local(made.normed(made.modules[0], passed.hidden[LAYERS]))
    torch.testing.assert_close(top, passed.logits, rtol=1e-4, atol=1e-4)
    assert made.layers == (2, 5)
    assert made.taps == ()


@pytest.mark.parametrize("layer", [0, -1, LAYERS, LAYERS + 1])
def test_the_own_head_has_no_exit_before_the_first_layer_or_after_the_last(layer: int) -> None:
    with pytest.raises(OptionError, match=rf"del\.exits.*layer {layer}.*1 to {LAYERS - 1}"):
        own_head_bank(tiny.target(), (2, layer), None, make_linear, option="del.exits")


def test_targets_without_layer_ranges_or_ends_are_refused() -> None:
    class Endless:
        info = ToyTarget().info
        capabilities = Capabilities(layer_ranges=True)

    for target in (ToyTarget(layer_ranges=False), Endless()):
        with pytest.raises(CapabilityError, match=r"can't exit early.*toy engine"):
            require_exits(target)  # type: ignore[arg-type]
