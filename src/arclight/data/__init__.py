"""Read resumable data: order and randomness depend on seed, epoch, batch and rank only.

In: a user's DataLoader or token shards; out: batches from any position of any epoch. Open ``loader`` first; ``sampling`` assigns samples
to batches and ranks, ``seeding`` isolates generators, ``fetching`` loads in workers, ``combined`` reads several loaders as one.
``permutation`` computes any element of a shuffled sequence, ``computed_order`` and ``mixture`` the order of an epoch. ``token_shards``,
``packing`` and ``token_samples`` read a text corpus on disk, ``remote`` one at an address; ``unigrams`` counts its tokens, ``ray_tasks``
distributes work over machines. ``sites`` partitions data among federated sites. Orders must not change: runs resume in them.
"""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.data.combined import CombinedLoader as CombinedLoader
    from arclight.data.combined import ResumableCombination as ResumableCombination
    from arclight.data.loader import ResumableLoader as ResumableLoader
    from arclight.data.seeding import derive_seed as derive_seed
    from arclight.data.seeding import isolated_rng as isolated_rng
    from arclight.data.token_shards import TokenShards as TokenShards

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "CombinedLoader": "arclight.data.combined",
        "ResumableCombination": "arclight.data.combined",
        "ResumableLoader": "arclight.data.loader",
        "TokenShards": "arclight.data.token_shards",
        "derive_seed": "arclight.data.seeding",
        "isolated_rng": "arclight.data.seeding",
    },
)
