"""The best of some timings, and sizes that grow until one takes long enough."""

from __future__ import annotations

from regauge import timing


def test_the_best_is_the_least_of_all_tries() -> None:
    taken = iter([3.0, 1.0, 2.0, 0.5])
    assert timing.best(lambda: next(taken), 0.0) == 1.0
    assert next(taken) == 0.5, "it was tried more often than it was told"


def test_sizes_double_until_the_work_takes_long_enough() -> None:
    made = []

    def work(size: int) -> timing.Timed:
        made.append(size)
        return lambda: size**3 * 1e-6

    size, seconds = timing.grown(work, 10, 1000, 0.05)
    assert (size, seconds()) == (40, 0.064)
    assert made == [10, 20, 40]
    assert timing.grown(work, 10, 35, 0.05)[0] == 20, "no size is larger than the largest"


def test_one_slow_try_does_not_end_the_growth() -> None:
    def work(size: int) -> timing.Timed:
        taken = iter([9.0, 9.0] + [size * 1e-3] * 8)
        return lambda: next(taken)

    assert timing.grown(work, 1, 8, 4e-3)[0] == 4
