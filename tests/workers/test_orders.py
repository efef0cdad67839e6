"""What a worker takes orders from: its own generation or a newer one, when it is free. The training thread is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vescale_ray.workers.messages import Join, Origin, Phase, Save, Seat, Ticket
from vescale_ray.workers.worker import Refused, Worker


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Worker, "_live", lambda self: None)
    made = Worker("w7", {})  # the plain class: Ray's decorators only mark its methods
    made._phase = Phase.PARKED
    made._ticket = Ticket(4, 1)
    return made


def join(generation: int, attempt: int = 1) -> Join:
    return Join(Ticket(generation, attempt), Seat("host", 1, "prefix", 0, 2), Origin.FRESH, "prefix")


def refused(call: Callable[[], None], words: str) -> None:
    with pytest.raises(Refused, match=words):
        call()


def test_orders_of_the_current_or_an_older_generation_come_too_late(worker: Any) -> None:
    for order in (join(3), join(4)):
        refused(lambda order=order: worker.give_order(order), r"w7: an order of .* comes too late, 4\.1 is over or going on")  # type: ignore[misc]
    worker.give_order(join(4, 2))
    assert worker._order is not None and worker._order.ticket == Ticket(4, 2)


def test_what_was_fenced_is_never_joined_however_late_the_order_comes(worker: Any) -> None:
    worker.fence(Ticket(6, 1))
    worker.fence(Ticket(5, 1))  # an older fence does not open it again
    refused(lambda: worker.give_order(join(5)), r"5\.1 comes too late, 6\.1")
    refused(lambda: worker.give_order(join(6)), r"6\.1 comes too late, 6\.1")
    worker.give_order(join(7))


def test_a_busy_worker_takes_no_order_and_a_zombie_no_vote(worker: Any) -> None:
    worker.give_order(join(5))
    refused(lambda: worker.give_order(join(6)), "takes an order of 6.1 when it is parked")
    worker._order, worker._phase, worker._ticket = None, Phase.TRAINING, Ticket(5, 1)
    refused(lambda: worker.give_order(join(6)), "is training in 5.1")
    refused(lambda: worker.ask(Ticket(4, 1), 1), "nothing can be asked of 4.1")
    worker.ask(Ticket(5, 1), 1)
    worker.ask(Ticket(5, 1), 4)
    assert worker._asked == 5
    old = Save(Ticket(4, 1), resume=None, ranks=(0,), attempt="a", epoch=1)  # type: ignore[arg-type]
    refused(lambda: worker.give_order(old), "4.1 comes too late")
