"""Ranks of AdaPLD's nodes, and their chances."""

from __future__ import annotations

from hasten.drafters import reuse_ranks
from hasten.drafters.ranks import prior


def test_every_rank_has_a_chance_and_a_lower_first_guess() -> None:
    ranks: dict[str, set[int]] = {source: set() for source in reuse_ranks.CHANCES}
    for agreement in range(12):
        for near in map(reuse_ranks.nearness, (-1.0, 0.55, 0.65, 0.75, 0.85, 1.0)):
            power = reuse_ranks.strength(agreement, near)
            ranks["successor"].add(power)
            ranks["copy"] |= {reuse_ranks.copy_rank(power, place) for place in range(3)}
            for place in range(20):
                ranks["branch"].add(reuse_ranks.branch_rank(place, agreement))
                ranks["semantic"].add(reuse_ranks.semantic_rank(place, near, agreement))
    ranks["successor"].add(reuse_ranks.BY_RESEMBLANCE)
    for source, chances in reuse_ranks.CHANCES.items():
        assert ranks[source] == set(range(len(chances)))
        assert all(0 < prior(source, r, 1) < c < 1 for r, c in enumerate(chances))


def test_better_anchors_have_better_chances() -> None:
    chances = reuse_ranks.CHANCES["copy"]
    by_agreement = [
        chances[reuse_ranks.copy_rank(reuse_ranks.strength(a), reuse_ranks.ARGMAX)]
        for a in (0, 1, 2, 4, 6, 10)
    ]
    assert by_agreement == sorted(by_agreement)
    by_near = [chances[reuse_ranks.copy_rank(reuse_ranks.strength(0, n), 0)] for n in range(6)]
    assert by_near == sorted(by_near)
    assert reuse_ranks.place_of(3, [4, 3]) == reuse_ranks.LISTED
    assert reuse_ranks.place_of(4, [4, 3]) == reuse_ranks.ARGMAX
    assert reuse_ranks.place_of(5, ()) == reuse_ranks.UNLISTED
