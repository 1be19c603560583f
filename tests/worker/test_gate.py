"""Turns at the device: one at a time, in the order they were asked for."""

from __future__ import annotations

import threading
from itertools import pairwise

from emlxd.worker.gate import Gate


def test_turns_are_taken_in_the_order_they_are_asked_for() -> None:
    gate, order, threads = Gate(), [], []

    def take(number: int) -> None:
        with gate:
            order.append(number)

    with gate:
        for number in range(6):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            while gate.waiting < number + 1:
                pass
        assert gate.contested and order == []
    for thread in threads:
        thread.join()
    assert order == list(range(6))
    assert not gate.contested


def test_two_that_never_pause_alternate() -> None:
    gate, order = Gate(), []
    start = threading.Barrier(2)

    def work(name: str) -> None:
        start.wait()
        for _ in range(50):
            with gate:
                order.append(name)
                # The turn ends once the other one has asked for the next, or is through with its own.
                while not gate.contested and order.count("a") < 50 and order.count("b") < 50:
                    pass

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(first != second for first, second in pairwise(order[1:90]))


def test_a_turn_that_fails_is_over() -> None:
    gate = Gate()
    try:
        with gate:
            raise ValueError
    except ValueError:
        pass
    with gate:
        assert not gate.contested
