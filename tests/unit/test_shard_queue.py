from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from regauge.prediction.shard_queue import Shard, Tickets


@dataclass
class Crew:
    """Workers that come to the end of pieces as real ones do, and may be lost."""

    sizes: list[int]
    """Parts of each piece; 1 at least."""
    seed: int
    finished: list[Shard] = field(default_factory=list)

    def work(self, tickets: Tickets, workers: int, ahead: int, lost: float = 0.0) -> None:
        draw = np.random.default_rng(self.seed)
        held: dict[int, list[Shard]] = {worker: [] for worker in range(workers)}
        while tickets.left:
            worker = int(draw.integers(workers))
            while len(held[worker]) < ahead and (shard := tickets.take(worker)):
                assert not any(shard in each for each in held.values())
                held[worker].append(shard)
            if not held[worker]:
                assert any(held.values()), "pieces are left, and nobody has a shard of one"
                continue
            if draw.random() < lost:
                assert tickets.give_back(worker) == held[worker]
                held[worker] = []
                continue
            shard = held[worker].pop(0)
            if shard.part >= self.sizes[shard.piece]:
                tickets.beyond(shard)
            else:
                self.finished.append(shard)
                tickets.finish(shard, last=shard.part == self.sizes[shard.piece] - 1)
        assert sum(map(len, held.values())) == 0 or all(
            shard.part >= self.sizes[shard.piece] for each in held.values() for shard in each
        )

    @property
    def all_shards(self) -> list[Shard]:
        return [Shard(piece, part) for piece, size in enumerate(self.sizes) for part in range(size)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("workers", "ahead", "lost"), [(1, 1, 0.0), (1, 2, 0.1), (3, 2, 0.2)])
def test_every_shard_is_finished_once(seed: int, workers: int, ahead: int, lost: float) -> None:
    draw = np.random.default_rng(seed)
    crew = Crew(draw.choice([1, 1, 2, 5, 9], draw.integers(1, 12)).tolist(), seed)
    crew.work(Tickets(range(len(crew.sizes)), {}), workers, ahead, lost)
    assert sorted(crew.finished) == crew.all_shards


@pytest.mark.parametrize("seed", range(8))
def test_what_is_finished_is_not_given_again(seed: int) -> None:
    draw = np.random.default_rng(seed)
    crew = Crew(draw.choice([1, 2, 5], 6).tolist(), seed)
    done = {
        shard: shard.part == crew.sizes[shard.piece] - 1
        for shard in crew.all_shards
        if draw.random() < 0.5
    }
    crew.work(Tickets(range(6), done), 2, 2)
    assert sorted(crew.finished) == [shard for shard in crew.all_shards if shard not in done]


def test_a_worker_reads_on_in_its_piece() -> None:
    tickets = Tickets(range(3), {})
    assert [tickets.take(0), tickets.take(0)] == [Shard(0, 0), Shard(0, 1)]
    assert tickets.take(1) == Shard(1, 0)
    tickets.finish(Shard(0, 0), last=False)
    assert tickets.take(0) == Shard(0, 2)


def test_parts_of_the_only_piece_are_shared() -> None:
    tickets = Tickets([7], {})
    assert [tickets.take(worker) for worker in (0, 1, 2)] == [Shard(7, 0), Shard(7, 1), Shard(7, 2)]


def test_nothing_is_left_where_all_is_done() -> None:
    tickets = Tickets([4], {Shard(4, 0): False, Shard(4, 1): True, Shard(9, 0): True})
    assert tickets.left == 0
    assert tickets.take(0) is None


def test_names_sort_as_the_records_do() -> None:
    shards = [Shard(0, 1), Shard(0, 10), Shard(2, 0), Shard(10, 3)]
    assert sorted(shard.name for shard in shards) == [shard.name for shard in sorted(shards)]
