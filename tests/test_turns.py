from __future__ import annotations

import os
import threading
import time

import pytest

from hasten.turns import TurnLock


def _wait_for_queue(lock: TurnLock, size: int) -> None:
    deadline = time.monotonic() + 10
    while len(lock._queue) < size:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_lock_goes_to_whoever_waited_longest() -> None:
    lock, order = TurnLock(), []

    def take(name: int) -> None:
        with lock:
            order.append(name)

    threads = []
    with lock:
        for name in range(4):
            threads.append(threading.Thread(target=take, args=(name,)))
            threads[-1].start()
            _wait_for_queue(lock, name + 1)
    # the thread that has just let go stands at the end of the line
    with lock:
        order.append(-1)
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2, 3, -1]


def test_a_loop_that_lets_go_for_a_moment_lets_others_in() -> None:
    lock, inside, stop = TurnLock(), [], threading.Event()

    def loop() -> None:
        while not stop.is_set():
            with lock:
                inside.append("loop")

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        for _ in range(50):
            with lock:
                inside.append("other")
    finally:
        stop.set()
        thread.join(10)
    assert inside.count("other") == 50


def test_the_same_thread_may_take_it_again() -> None:
    lock = TurnLock()
    with lock, lock:
        assert lock._depth == 2
    taken = threading.Event()

    def take() -> None:
        with lock:
            taken.set()

    threading.Thread(target=take).start()
    assert taken.wait(10)


def test_letting_go_of_what_one_does_not_hold_is_an_error() -> None:
    lock = TurnLock()
    with pytest.raises(RuntimeError):
        lock.release()


def test_only_one_thread_is_inside_at_a_time() -> None:
    lock, count, most = TurnLock(), [0], [0]

    def work() -> None:
        for _ in range(200):
            with lock:
                count[0] += 1
                most[0] = max(most[0], count[0])
                count[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == [1]
    assert lock._owner is None


def test_a_job_for_later_runs_at_once_where_nobody_holds_the_lock() -> None:
    lock, done = TurnLock(), []
    lock.later(lambda: done.append(lock._depth))
    assert done == [1]
    assert lock._owner is None


def test_a_job_for_later_runs_before_the_holder_lets_go_and_never_waits() -> None:
    lock, done = TurnLock(), []
    with lock:
        with lock:
            lock.later(lambda: done.append(1))  # a finalizer, in the middle of anything
        assert not done
        other = threading.Thread(target=lambda: lock.later(lambda: done.append(2)))
        other.start()
        other.join(10)
        assert not other.is_alive()
        assert not done
    assert done == [1, 2]


def test_a_finalizer_in_the_middle_of_acquiring_does_not_deadlock() -> None:
    lock, done = TurnLock(), []
    with lock._mutex:  # where a garbage collection may strike
        lock.later(lambda: done.append(1))
    assert not done
    with lock:
        pass
    assert done == [1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_finds_the_lock_free() -> None:
    lock, go = TurnLock(), threading.Event()
    held = threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            go.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        lock.acquire()
        os._exit(7)
    go.set()
    thread.join(30)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
