"""Every shard is claimed and finished once, although workers may be lost."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from regauge.inference.predict.shard_queue import ShardId, ShardQueue


@dataclass
class SimulatedWorkers:
    """Workers that detect the ends of pieces as real workers do, and may be lost."""

    sizes: list[int]
    """Number of parts of each piece, at least 1."""
    seed: int
    finished: list[ShardId] = field(default_factory=list)

    def work(
        self, shard_queue: ShardQueue, workers: int, max_claims: int, loss_rate: float = 0.0
    ) -> None:
        draw = np.random.default_rng(self.seed)
        claims: dict[int, list[ShardId]] = {worker: [] for worker in range(workers)}
        while shard_queue.num_unfinished:
            worker = int(draw.integers(workers))
            while len(claims[worker]) < max_claims and (shard := shard_queue.claim(worker)):
                assert not any(shard in shards for shards in claims.values())
                claims[worker].append(shard)
            if not claims[worker]:
                assert any(claims.values()), "pieces are unfinished, but no worker has a shard"
                continue
            if draw.random() < loss_rate:
                assert shard_queue.requeue(worker) == claims[worker]
                claims[worker] = []
                continue
            shard = claims[worker].pop(0)
            if shard.part >= self.sizes[shard.piece]:
                shard_queue.mark_past_end(shard)
            else:
                self.finished.append(shard)
                shard_queue.finish(shard, is_last=shard.part == self.sizes[shard.piece] - 1)
        assert sum(map(len, claims.values())) == 0 or all(
            shard.part >= self.sizes[shard.piece] for shards in claims.values() for shard in shards
        )

    @property
    def all_shards(self) -> list[ShardId]:
        return [
            ShardId(piece, part) for piece, size in enumerate(self.sizes) for part in range(size)
        ]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("workers", "max_claims", "loss_rate"), [(1, 1, 0.0), (1, 2, 0.1), (3, 2, 0.2)]
)
def test_every_shard_is_finished_once(
    seed: int, workers: int, max_claims: int, loss_rate: float
) -> None:
    draw = np.random.default_rng(seed)
    simulation = SimulatedWorkers(draw.choice([1, 1, 2, 5, 9], draw.integers(1, 12)).tolist(), seed)
    simulation.work(ShardQueue(range(len(simulation.sizes)), {}), workers, max_claims, loss_rate)
    assert sorted(simulation.finished) == simulation.all_shards


@pytest.mark.parametrize("seed", range(8))
def test_finished_shards_are_not_claimed_again(seed: int) -> None:
    draw = np.random.default_rng(seed)
    simulation = SimulatedWorkers(draw.choice([1, 2, 5], 6).tolist(), seed)
    finished_before = {
        shard: shard.part == simulation.sizes[shard.piece] - 1
        for shard in simulation.all_shards
        if draw.random() < 0.5
    }
    simulation.work(ShardQueue(range(6), finished_before), 2, 2)
    assert sorted(simulation.finished) == [
        shard for shard in simulation.all_shards if shard not in finished_before
    ]


def test_a_worker_claims_the_next_part_of_its_piece() -> None:
    shard_queue = ShardQueue(range(3), {})
    assert [shard_queue.claim(0), shard_queue.claim(0)] == [ShardId(0, 0), ShardId(0, 1)]
    assert shard_queue.claim(1) == ShardId(1, 0)
    shard_queue.finish(ShardId(0, 0), is_last=False)
    assert shard_queue.claim(0) == ShardId(0, 2)


def test_workers_share_the_parts_of_the_last_piece() -> None:
    shard_queue = ShardQueue([7], {})
    assert [shard_queue.claim(worker) for worker in (0, 1, 2)] == [
        ShardId(7, 0),
        ShardId(7, 1),
        ShardId(7, 2),
    ]


def test_a_finished_queue_is_empty() -> None:
    shard_queue = ShardQueue([4], {ShardId(4, 0): False, ShardId(4, 1): True, ShardId(9, 0): True})
    assert shard_queue.num_unfinished == 0
    assert shard_queue.claim(0) is None


def test_names_sort_in_the_order_of_the_records() -> None:
    shards = [ShardId(0, 1), ShardId(0, 10), ShardId(2, 0), ShardId(10, 3)]
    assert sorted(shard.name for shard in shards) == [shard.name for shard in sorted(shards)]
