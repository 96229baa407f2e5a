"""DDTree: a draft tree from one block (arXiv 2604.12989).

Every slot of a block has a distribution over the token at its place. A path takes a token from each
of the first slots, and its chance is the product of theirs, because slots don't see each other's
tokens. The tree is that of the likeliest paths. (As published the number of nodes is fixed; here
the budget policy may choose it, by what paths were kept and by what rows cost.)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from heapq import heappop, heappush

import torch

from hasten.dflash.bank import DFlashBank
from hasten.drafters.base import DraftContext
from hasten.drafters.blocks import BlockDrafter
from hasten.drafters.ranks import BESIDE, SLOT, module_rank
from hasten.drafters.tree_builder import TreeBuilder
from hasten.exits.native_module import Pairs
from hasten.types import Budget, Draft, DraftTree


class DFlashTree(BlockDrafter):
    """A tree of the likeliest paths through a block.

    width  candidates of a slot at most

    Slots were made as if the tokens before them were the likeliest ones. So a node has the source
    ``dflash`` where they are, else ``dflash-beside``, and is counted apart.
    """

    name = "dflash"

    def __init__(
        self, bank: DFlashBank, *, width: int = 8, eos_ids: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(bank, eos_ids)
        self.width = width

    @torch.inference_mode()
    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """The likeliest paths, as many nodes as the budget has."""
        room, root = min(budget.nodes - 1, budget.depth), ctx.ids[-1]
        if room < 1 or root in self._eos_ids:
            return Draft(DraftTree.chain(root))
        started = time.perf_counter()
        slots = min(self.bank.config.block_size - 1, room)
        self._wanted, self._width = slots, min(self.width, room)
        hidden = self._block(ctx)
        said = self._run.candidates(hidden[0, 1 : 1 + slots], self._width)
        ctx.model_seconds += time.perf_counter() - started
        tree = TreeBuilder(root, budget.nodes, budget.depth, self._eos_ids)
        grow(tree, said)
        return tree.draft()


def grow(tree: TreeBuilder, slots: Sequence[Pairs]) -> None:
    """Add the likeliest paths through a block to `tree`, which has a root only, until it is full.

    slots  of each depth the candidates and their chances, likeliest first; none: nothing is said
           there, nor below
    """
    # A path waits with its chance (negative), its parent and the chance of reaching that, its place
    # among the slot's candidates, and whether all above it are the first of theirs. When it is
    # taken its next sibling and its first child wait instead: neither is likelier.
    heap: list[tuple[float, int, int, int, float, bool]] = []

    def wait(parent: int, place: int, above: float, spine: bool) -> None:
        depth = tree.depths[parent]
        if depth < len(slots) and place < len(slots[depth]):
            chance = above * slots[depth][place][1]
            heappush(heap, (-chance, len(tree), parent, place, above, spine))

    wait(0, 0, 1.0, True)
    while heap and not tree.full:
        minus, _, parent, place, above, spine = heappop(heap)
        token, chance = slots[tree.depths[parent]][place]
        node = tree.add(parent, token, SLOT if spine else BESIDE, module_rank(chance))
        if node is None:  # nothing follows there
            continue
        wait(parent, place + 1, above, spine)
        wait(node, 0, -minus, spine and place == 0)
