"""What the soak's judge finds in samples and records."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from bench.measurement import RequestRecord
from bench.own_time import TICK_S
from bench.soak import Sample, judge, mixed_load, take_sample
from bench.top import parse
from bench.workloads import Vocabulary

DURATION_S = 600.0


def sample(at_s: float, **fields: Any) -> Sample:
    values: dict[str, Any] = {
        "rss_bytes": 1000,
        "rss_by_group": {"raylet": 1000},
        "num_descriptors": 100,
        "num_threads": 50,
        "held": {"pages": 0.0},
        "num_compiles": 0,
    }
    return Sample(at_s=at_s, **(values | fields))


def record(index: int, *, tpot_s: float = 0.01, error: str | None = None) -> RequestRecord:
    sent_s = index * DURATION_S / 600
    return RequestRecord(
        index=index,
        sent_s=sent_s,
        num_prompt_tokens=8,
        num_output_tokens=11,
        event_times_s=[sent_s + 0.1 + tpot_s * i for i in range(11)],
        end_s=sent_s + 1,
        error=error,
    )


SAMPLES = [sample(at_s) for at_s in range(0, 600, 10)]
RECORDS = [record(i) for i in range(600)]


def test_what_stays_as_it_is_passes() -> None:
    verdict = judge(SAMPLES, sample(600), RECORDS, duration_s=DURATION_S)
    assert verdict["problems"] == []
    assert verdict["num_requests"] == 600


@pytest.mark.parametrize(
    ("late", "idle", "tpot_s", "error", "problem"),
    [
        ({"rss_bytes": 1030}, {}, 0.01, None, "rss_growth 3.0% exceeds 2%"),
        ({"num_descriptors": 110}, {}, 0.01, None, "descriptor_growth 10.0% exceeds 5%"),
        ({"num_threads": 60}, {}, 0.01, None, "thread_growth 20.0% exceeds 5%"),
        ({}, {"held": {"pages": 3.0}}, 0.01, None, "3 pages held when idle"),
        ({}, {"num_compiles": 1}, 0.01, None, "1 num_compiles"),
        ({}, {}, 0.012, None, "tpot_drift 20.0% exceeds 10%"),
        ({}, {}, 0.01, "500: no", "1 num_failed"),
    ],
)
def test_what_grows_is_named(
    late: dict[str, Any], idle: dict[str, Any], tpot_s: float, error: str | None, problem: str
) -> None:
    samples = [s if s.at_s < 500 else sample(s.at_s, **late) for s in SAMPLES]
    records = [r if r.sent_s < 500 else record(r.index, tpot_s=tpot_s) for r in RECORDS]
    records[3] = record(3, error=error)
    verdict = judge(samples, sample(600, **idle), records, duration_s=DURATION_S)
    assert verdict["problems"] == [problem]


def test_growth_at_the_start_is_no_growth() -> None:
    samples = [sample(s.at_s, rss_bytes=500) if s.at_s < 100 else s for s in SAMPLES]
    assert judge(samples, sample(600), RECORDS, duration_s=DURATION_S)["problems"] == []


def test_requests_across_a_pause_do_not_count_for_tpot() -> None:
    records = [r if r.sent_s < 500 else record(r.index, tpot_s=0.02) for r in RECORDS]
    disturbed = {r.index for r in records if r.sent_s >= 500 and r.index != 599}
    records[599] = record(599)
    verdict = judge(SAMPLES, sample(600), records, duration_s=DURATION_S, disturbed=disturbed)
    assert verdict["problems"] == []


def test_own_time_stands_still_while_a_process_is_stopped() -> None:
    program = (
        "import sys\nfrom bench.own_time import CLOCK, now\nbefore = now()\n"
        "print(flush=True)\nsys.stdin.readline()\nprint(now() - before, CLOCK.paused_s)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(3.0)
        process.send_signal(signal.SIGCONT)
        elapsed_s, paused_s = map(float, process.communicate("\n")[0].split())
    assert paused_s == pytest.approx(3.0 - TICK_S, abs=TICK_S + 1.0)
    assert elapsed_s < 2.0


def test_too_little_is_not_judged() -> None:
    assert judge([], sample(1), [], duration_s=1)["problems"] == ["too short to judge"]


def test_load_is_mixed_and_repeatable() -> None:
    specs = mixed_load(400, 10.0, seed=0, vocabulary=Vocabulary())
    assert specs == mixed_load(400, 10.0, seed=0, vocabulary=Vocabulary())
    assert 30 < specs[-1].arrival_s < 50
    lengths = [len(spec.prompt_token_ids) for spec in specs]
    assert min(lengths) < 32
    assert max(lengths) > 512
    assert max(spec.max_tokens for spec in specs) > 128
    starts = [spec.prompt_token_ids[:256] for spec in specs if len(spec.prompt_token_ids) > 256]
    assert len(set(starts)) < len(starts)


def test_a_sample_reads_what_is_held() -> None:
    text = (
        'systole_token_sink_entries{ingress="a"} 3\n'
        'systole_engine_pages{replica="r"} 10\nsystole_engine_free_pages{replica="r"} 8\n'
        'systole_engine_compiles_after_warmup_total{replica="r"} 1\n'
    )
    found = take_sample(1, parse(text, at_s=0.0), at_s=5.0)
    assert (found.held["sink entries"], found.held["pages"], found.num_compiles) == (3, 2, 1)
