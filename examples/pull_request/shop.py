"""Takes a hundred orders. Each part uses the CPU time that it says, so that this shows the same on any machine."""

import time


def use_cpu(milliseconds: float) -> None:
    end = time.process_time() + milliseconds / 1000
    for now in iter(time.process_time, None):
        if now >= end:
            break


def price(order: int) -> None:
    use_cpu(2.8)


def stock(order: int) -> None:
    use_cpu(1.2)


def check_out(orders: range) -> None:
    for order in orders:
        stock(order)
        price(order)
        stock(order)


check_out(range(100))
