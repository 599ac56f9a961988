"""Assign arrays to devices, without contacting any worker: the largest first, and whoever is idle takes the next.

(R. Graham, 1969: longest first ends within a third of the best.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Placement:
    """Assigns arrays to devices. A running array stays on its device until it ends or the device is lost.

    Args:
        sizes: an estimate for each array, by which they start.
        budgets: the memory of each device, in bytes.
        max_failures: how often the device of an array may be lost before the array is given up.
    """

    def __init__(self, sizes: Sequence[float], budgets: Sequence[int], max_failures: int) -> None:
        self._budgets, self._max_failures = list(budgets), max_failures
        self._sizes: list[float] = []
        self.failures: list[int] = []
        # For each array, the memory of the largest device that was too small for it.
        self._too_small: list[int] = []
        self._running: dict[int, int] = {}
        self._lost: set[int] = set()
        self._waiting: list[int] = []
        for size in sizes:
            self.add(size)

    @property
    def over(self) -> bool:
        """True if no array runs or waits."""
        return not self._running and not self._waiting

    @property
    def stranded(self) -> list[int]:
        """The arrays that wait while none runs and no remaining device takes one of them."""
        idle = not self._running and not any(self._next_array(device) is not None for device in self._remaining())
        return sorted(self._waiting) if idle else []

    def _remaining(self) -> Iterator[int]:
        return (device for device in range(len(self._budgets)) if device not in self._lost)

    def add(self, size: float) -> int:
        """Let one more array wait, and return its index."""
        self._sizes.append(size)
        self.failures.append(0)
        self._too_small.append(0)
        self._wait(len(self._sizes) - 1)
        return len(self._sizes) - 1

    def _wait(self, number: int) -> None:
        self._waiting = sorted([*self._waiting, number], key=lambda waiting: (-self._sizes[waiting], waiting))

    def starts(self) -> Iterator[tuple[int, int]]:
        """Yield each idle device that begins an array now, and that array."""
        for device in self._remaining():
            number = None if device in self._running else self._next_array(device)
            if number is not None:
                self._waiting.remove(number)
                self._running[device] = number
                yield device, number

    def _next_array(self, device: int) -> int | None:
        fitting = (number for number in self._waiting if self._too_small[number] < self._budgets[device])
        return next(fitting, None)

    def end(self, device: int) -> int:
        """Note that the array on a device has ended or failed, and return its index."""
        return self._running.pop(device)

    def exceed(self, device: int) -> bool:
        """Let the array on a device wait for a larger one. Return False if there is none; then the array has ended."""
        number = self.end(device)
        self._too_small[number] = self._budgets[device]
        if any(self._budgets[other] > self._budgets[device] for other in self._remaining()):
            self._wait(number)
            return True
        return False

    def lose(self, device: int, *, back: bool) -> list[int]:
        """Note that a device was lost; ``back``: it was restarted. Return its array if it must be given up.

        Otherwise that array waits again.
        """
        if not back:
            self._lost.add(device)
        if device not in self._running:
            return []
        number = self.end(device)
        self.failures[number] += 1
        if self.failures[number] > self._max_failures:
            return [number]
        self._wait(number)
        return []

    def join(self, budget: int) -> None:
        """Append a device."""
        self._budgets.append(budget)

    def give_up_stranded(self) -> list[int]:
        """Return the stranded arrays and forget them."""
        stranded = self.stranded
        self._waiting = [number for number in self._waiting if number not in stranded]
        return stranded
