"""One replica as the router sees it: its last reported load, and what was booked on it since.

Pure. Invariant: `num_booked_tokens` is the sum over `bookings`, and credit is never granted twice
for the same slot or page.
"""

from __future__ import annotations

from dataclasses import dataclass

from replicas.wire import ReplicaLoad

TRANSIT_S = 0.02
"""A load event that comes sooner after a booking may have been made before the request arrived."""


@dataclass(frozen=True, slots=True)
class Booking:
    """A request that was sent to a replica and has not ended.

    Attributes:
        num_prompt_tokens: length of the prompt.
        num_tokens: prompt and the most output that it may produce.
        num_uncached_tokens: of the prompt, those to prefill.
        num_pairs: (token, position before it) pairs that they attend to.
    """

    num_prompt_tokens: int
    num_tokens: int
    num_uncached_tokens: int = 0
    num_pairs: int = 0


@dataclass(frozen=True, slots=True)
class _Claim:
    """What a booking takes of a replica that the last load does not show."""

    booked_at: float
    num_pages: int
    num_tokens: int
    num_pairs: int


class ReplicaView:
    """Load, bookings and credit of one replica.

    Attributes:
        replica_id: which one.
        row: its place in the fleet's arrays.
        sequence: number of the last load event that was seen.
        is_routable: false from a sign of trouble until the replica reports again.
        num_silent_ticks: ticks since the replica was last heard.
        load: as last reported.
        loaded_at: router clock when it was.
        bookings: by request id.
        num_booked_tokens: sum of `num_tokens` over `bookings`.
        num_foreign: requests at the replica that are not ours, as of the last load.
        num_claimed_pages: pages of bookings that the last load does not show.
        num_claimed_tokens: prompt tokens to prefill of those.
        num_claimed_pairs: pairs of those.
        slowness: duration of its steps against the model's prediction, an average; 1 is as fast as
            the others.
        prefill_share: share of time that it lately spent on prompts, in [0, 1].
        max_outstanding: requests that it may have here, or None: as many as it has room for.
    """

    def __init__(self, replica_id: str, row: int = 0) -> None:
        self.replica_id = replica_id
        self.row = row
        self.sequence = 0
        self.is_routable = False
        self.num_silent_ticks = 0
        self.load = ReplicaLoad()
        self.loaded_at = 0.0
        self.bookings: dict[str, Booking] = {}
        self.num_booked_tokens = 0
        self.num_foreign = 0
        self.num_claimed_pages = 0
        self.num_claimed_tokens = 0
        self.num_claimed_pairs = 0
        self.slowness = 1.0
        self.prefill_share = 0.0
        self.max_outstanding: int | None = None
        self._claims: dict[str, _Claim] = {}  # by time of booking

    def update(self, load: ReplicaLoad, sequence: int, now: float) -> None:
        """Take a load. Bookings older than `TRANSIT_S` are assumed to be in it from now on."""
        self.load = load
        self.loaded_at = now
        self.sequence = sequence
        self.num_silent_ticks = 0
        while self._claims:
            request_id, claim = next(iter(self._claims.items()))
            if claim.booked_at > now - TRANSIT_S:
                break
            self._unclaim(request_id)
        # Fixed until the next load: when one of ours ends meanwhile, its slot is credit at once.
        num_shown = len(self.bookings) - len(self._claims)
        self.num_foreign = max(0, load.num_running + load.num_waiting - num_shown)

    def book(self, request_id: str, booking: Booking, now: float) -> None:
        """Count a request that is being sent."""
        assert request_id not in self.bookings, request_id
        self.bookings[request_id] = booking
        self.num_booked_tokens += booking.num_tokens
        num_pages = self.pages_of(booking.num_prompt_tokens)
        self._claims[request_id] = _Claim(
            now, num_pages, booking.num_uncached_tokens, booking.num_pairs
        )
        self.num_claimed_pages += num_pages
        self.num_claimed_tokens += booking.num_uncached_tokens
        self.num_claimed_pairs += booking.num_pairs

    def release(self, request_id: str) -> Booking:
        """Stop counting a request that has ended."""
        booking = self.bookings.pop(request_id)
        self.num_booked_tokens -= booking.num_tokens
        self._unclaim(request_id)
        return booking

    def free_slots(self, *, max_waiting: int) -> int:
        """Return the requests that may be sent: free slots, and `max_waiting` to bridge a step."""
        room = self.load.num_slots + max_waiting - len(self.bookings) - self.num_foreign
        if self.max_outstanding is None:
            return room
        return min(room, self.max_outstanding - len(self.bookings))

    @property
    def num_outstanding(self) -> int:
        """Requests there, ours and others'."""
        return len(self.bookings) + self.num_foreign

    @property
    def num_creditable_pages(self) -> int:
        """Pages that are neither in use nor claimed; running sequences have all of theirs."""
        waiting = self.pages_of(self.load.num_waiting_tokens)
        return self.load.num_free_pages - waiting - self.num_claimed_pages

    def has_pages_for(self, num_prompt_tokens: int) -> bool:
        """Whether a prompt fits the pages that are neither in use nor claimed.

        An idle replica takes anything: what does not fit even then, the engine refuses.
        """
        return not self.num_outstanding or self.num_creditable_pages >= self.pages_of(
            num_prompt_tokens
        )

    def pages_of(self, num_tokens: int) -> int:
        """Return the pages that hold `num_tokens` and the first output token."""
        if not self.load.page_size or not num_tokens:
            return 0
        return num_tokens // self.load.page_size + 1

    def _unclaim(self, request_id: str) -> None:
        claim = self._claims.pop(request_id, None)
        if claim is not None:
            self.num_claimed_pages -= claim.num_pages
            self.num_claimed_tokens -= claim.num_tokens
            self.num_claimed_pairs -= claim.num_pairs
