"""One replica as the router sees it: its last reported load, and what was booked on it since.

Pure. Invariant: `num_booked_tokens` is the sum over `bookings`, and credit is never granted twice
for the same slot or page.
"""

from __future__ import annotations

from dataclasses import dataclass

from replicas.wire import ReplicaLoad


@dataclass(frozen=True, slots=True)
class Booking:
    """A request that was sent to a replica and has not ended.

    Attributes:
        num_prompt_tokens: tokens to prefill.
        num_tokens: prompt and the most output that it may produce.
    """

    num_prompt_tokens: int
    num_tokens: int


class ReplicaView:
    """Load, bookings and credit of one replica.

    Attributes:
        replica_id: which one.
        sequence: number of the last load event that was seen.
        is_routable: false from a sign of trouble until the replica reports again.
        num_silent_ticks: ticks since the replica was last heard.
        load: as last reported.
        bookings: by request id.
        num_booked_tokens: sum of `num_tokens` over `bookings`.
        num_foreign: requests at the replica that are not ours, as of the last load.
    """

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.sequence = 0
        self.is_routable = False
        self.num_silent_ticks = 0
        self.load = ReplicaLoad()
        self.bookings: dict[str, Booking] = {}
        self.num_booked_tokens = 0
        self.num_foreign = 0
        self._claims: dict[str, int] = {}
        self._num_claimed_pages = 0

    def update(self, load: ReplicaLoad, sequence: int) -> None:
        """Take a load. Bookings made before it are assumed to be in it from now on."""
        self.load = load
        self.sequence = sequence
        self.num_silent_ticks = 0
        # Fixed until the next load: when one of ours ends meanwhile, its slot is credit at once.
        self.num_foreign = max(0, load.num_running + load.num_waiting - len(self.bookings))
        self._claims.clear()
        self._num_claimed_pages = 0

    def book(self, request_id: str, booking: Booking) -> None:
        """Count a request that is being sent."""
        assert request_id not in self.bookings, request_id
        self.bookings[request_id] = booking
        self.num_booked_tokens += booking.num_tokens
        num_pages = self.pages_of(booking.num_prompt_tokens)
        self._claims[request_id] = num_pages
        self._num_claimed_pages += num_pages

    def release(self, request_id: str) -> Booking:
        """Stop counting a request that has ended."""
        booking = self.bookings.pop(request_id)
        self.num_booked_tokens -= booking.num_tokens
        self._num_claimed_pages -= self._claims.pop(request_id, 0)
        return booking

    def free_slots(self, *, max_waiting: int) -> int:
        """Return the requests that may be sent: free slots, and `max_waiting` to bridge a step."""
        return self.load.num_slots + max_waiting - len(self.bookings) - self.num_foreign

    def has_pages_for(self, num_prompt_tokens: int) -> bool:
        """Whether a prompt fits the pages that are neither in use nor claimed.

        An idle replica takes anything: what does not fit even then, the engine refuses.
        """
        if not self.bookings and not self.num_foreign:
            return True
        pending = self.pages_of(self.load.num_pending_prefill_tokens)
        num_free = self.load.num_free_pages - pending - self._num_claimed_pages
        return num_free >= self.pages_of(num_prompt_tokens)

    def pages_of(self, num_tokens: int) -> int:
        """Return the pages that hold `num_tokens` and the first output token."""
        if not self.load.page_size or not num_tokens:
            return 0
        return num_tokens // self.load.page_size + 1
