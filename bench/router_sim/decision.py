"""What one decision costs: the router core alone, with many replicas and long prompts, timed.

The only bench here that times anything. CPU time of this thread, so that a busy machine counts
less; the hashing of a prompt is timed apart, since it does not depend on the replicas.
"""

from __future__ import annotations

import random
import time
from typing import Any

from app.router.config import RouterConfig
from app.router.core import RouterCore
from app.router.events import LoadChanged, ReplicaReported, RequestArrived, RequestEnded
from bench.router_sim.experiment import quantile
from replicas.page_keys import hash_prompt, hash_root
from replicas.wire import CacheChange, ReplicaLoad

PAGE_SIZE = 128
PROMPT_TOKENS = 12_000
PAGES_PER_REPLICA = 1000
NUM_SHARED = 8


def measure(*, num_replicas: int, num_decisions: int, seed: int = 0) -> dict[str, Any]:
    """Time arrivals of prompts, half of them with a prefix that some replicas hold.

    Returns:
        p50 and p99 of a decision, and p50 of hashing its prompt, in us.
    """
    rng = random.Random(seed)
    core = RouterCore(RouterConfig(max_indexed_pages=4 << 20), random.Random(seed))
    system_prompt = tuple(rng.randbytes(16) for _ in range(NUM_SHARED))
    documents = [
        (
            *system_prompt,
            *(rng.randbytes(16) for _ in range(PROMPT_TOKENS // PAGE_SIZE - NUM_SHARED)),
        )
        for _ in range(500)
    ]
    for number in range(num_replicas):
        load = ReplicaLoad(
            num_slots=64,
            num_running=rng.randint(0, 40),
            num_free_pages=2000,
            num_pages=2600,
            page_size=PAGE_SIZE,
            num_pending_prefill_tokens=rng.randint(0, 9000),
            num_decodes=20,
            num_decode_context_tokens=rng.randint(0, 200_000),
            max_chunk_tokens=2048,
        )
        name = f"replica-{number}"
        core.on(ReplicaReported(name, 0, load, system_prompt), 0.0)
        held = tuple(key for _ in range(PAGES_PER_REPLICA // 90) for key in rng.choice(documents))
        core.on(LoadChanged(name, 1, load, CacheChange(stored=held)), 0.0)
    times: list[float] = []
    for number in range(num_decisions):
        if number % 2:
            keys = rng.choice(documents)
        else:
            keys = (*system_prompt, *(rng.randbytes(16) for _ in range(80)))
        event = RequestArrived(
            request_id=f"r{number}", num_prompt_tokens=PROMPT_TOKENS, max_tokens=512, page_keys=keys
        )
        now = 1e-3 * number
        begin = time.thread_time()
        actions = core.on(event, now)
        times.append(time.thread_time() - begin)
        assert actions
        core.on(RequestEnded(f"r{number}"), now)
    tokens = tuple(rng.randrange(100_000) for _ in range(PROMPT_TOKENS))
    hashing: list[float] = []
    for _ in range(50):
        begin = time.thread_time()
        hash_prompt(hash_root("model", ""), tokens, page_size=PAGE_SIZE)
        hashing.append(time.thread_time() - begin)
    times.sort()
    return {
        "num_replicas": num_replicas,
        "decision_p50_us": 1e6 * quantile(times, 0.5),
        "decision_p99_us": 1e6 * quantile(times, 0.99),
        "hashing_p50_us": 1e6 * quantile(sorted(hashing), 0.5),
        "indexed_pages": core.num_indexed_pages,
    }
