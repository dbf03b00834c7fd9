"""What no router can exceed: the share of a trace's requests whose first token can be in time.

Each request has an idle replica to itself, at once, that holds every page that any cache holds.
Knows neither queues nor decode steps, so the bounds are on TTFT alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from bench.router_sim.hardware import Hardware
from bench.router_sim.traces import SimRequest


def bounds(
    requests: Sequence[SimRequest], hardware: Hardware, *, num_pages: int, ttft_s: float
) -> dict[str, float]:
    """Return shares of the requests that have a first token within `ttft_s`.

    Args:
        requests: in order of arrival.
        hardware: of every replica.
        num_pages: of all replicas together.
        ttft_s: wanted.

    Returns:
        `no_cache`; `refusing`: nothing is ever forgotten, and who would be late is not served, so
        leaves no pages; `serving`: nothing is ever forgotten, and everybody is served; `lru`:
        the same, but all pages together are one cache that drops what was used longest ago.
    """
    num_in_time = dict.fromkeys(("no_cache", "refusing", "serving", "lru"), 0)
    none = _Cache(0)
    caches = {"refusing": _Cache(None), "serving": _Cache(None), "lru": _Cache(num_pages)}
    for request in requests:
        for name in num_in_time:
            cache = caches.get(name, none)
            held = cache.depth(request.page_keys) * hardware.page_size
            own_s = hardware.prefill_s(held, request.num_prompt_tokens)
            num_in_time[name] += own_s <= ttft_s
            if own_s <= ttft_s or name != "refusing":
                cache.store(request.page_keys)
    return {name: count / len(requests) for name, count in num_in_time.items()}


class _Cache:
    """Pages by key; beyond `num_pages` the least recently used goes first; None: no bound."""

    def __init__(self, num_pages: int | None) -> None:
        self._num_pages = num_pages
        self._pages: OrderedDict[bytes, None] = OrderedDict()

    def depth(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are held."""
        return next((depth for depth, key in enumerate(keys) if key not in self._pages), len(keys))

    def store(self, keys: Sequence[bytes]) -> None:
        """Hold the keys, the first one longest."""
        for key in reversed(keys):
            self._pages[key] = None
            self._pages.move_to_end(key)
        while self._num_pages is not None and len(self._pages) > self._num_pages:
            self._pages.popitem(last=False)
