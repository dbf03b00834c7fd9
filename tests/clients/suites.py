"""What each client is asked to do, and what must have come of it.

A suite returns one line of figures or raises SuiteFailed. Suites know the service by its URL, its
key and its model's name, as any client does; two also read the tokenizer from the model's
directory, so that nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clients import tools

LM_EVAL_TASKS = Path(__file__).parent / "lm_eval"
NUM_QUESTIONS = len((LM_EVAL_TASKS / "capitals.jsonl").read_text(encoding="utf-8").splitlines())
# The default model knows most of them; a chance answer is right once in four, or never.
LEAST_CHOSEN, LEAST_WRITTEN = 0.75, 0.5
NUM_PROFILED = 40
OUTPUT_TOKENS = 16
_LOG_TAIL_LINES = 40


class SuiteFailed(Exception):
    """The client found something; the message says what."""


@dataclass(frozen=True)
class Target:
    """The service under test, and where a suite may write.

    Attributes:
        url: root of the HTTP API.
        key: an API key.
        model: the model's name.
        model_dir: the tokenizer is there.
        directory: for logs and results.
    """

    url: str
    key: str
    model: str
    model_dir: Path
    directory: Path

    def run(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        cwd: Path = tools.ROOT,
        environment: Mapping[str, str] = {},
        limit_s: float,
    ) -> str:
        """Run a client to its end; return what it printed, which is also in NAME.log.

        Raises:
            SuiteFailed: it ended with another status than 0, or took longer than `limit_s`.
        """
        log = self.directory / f"{name}.log"
        own = {
            "OPENAI_API_KEY": self.key,
            "HF_HOME": str(tools.ENVIRONMENTS / "huggingface"),
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            "NO_COLOR": "1",
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(word) for word in command],
                cwd=cwd,
                env=os.environ | own | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            status: int | None = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # workers that it left, if any
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        text = log.read_text(encoding="utf-8", errors="replace")
        if status != 0:
            ended = f"took longer than {limit_s:g} s" if status is None else f"status {status}"
            tail = "\n".join(text.splitlines()[-_LOG_TAIL_LINES:])
            raise SuiteFailed(f"{ended}; the end of {log}:\n{tail}")
        return text


@dataclass(frozen=True)
class Suite:
    """One client.

    Attributes:
        name: for the command line and the tables.
        install: installs the client; ToolError where that fails.
        run: returns the line of figures; SuiteFailed where there is a fault.
    """

    name: str
    run: Callable[[Target], str]
    install: Callable[[], object] = field(default=lambda: None)


def run_python(target: Target) -> str:
    """Run what tests/serve has for the Python clients of OpenAI and Anthropic."""
    import anthropic
    import openai

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["tests/serve/test_api.py", "--service-url", target.url]
    text = target.run("python", command, limit_s=900)
    passed = _count(text, r"(\d+) passed")
    return f"openai {openai.__version__}, anthropic {anthropic.__version__}: {passed} tests passed"


def run_node(target: Target) -> str:
    """Run OpenAI's Node client through node/openai.test.mjs."""
    directory = tools.node_suite()
    environment = {"BASE_URL": target.url, "API_KEY": target.key}
    command = [tools.NODE, "--test", "--test-reporter=tap", "openai.test.mjs"]
    text = target.run("node", command, cwd=directory, environment=environment, limit_s=600)
    passed = _count(text, r"^# pass (\d+)")
    if _count(text, r"^# tests (\d+)") != passed:
        raise SuiteFailed("not every test passed, or some were not run")
    package = json.loads((directory / "node_modules/openai/package.json").read_text())
    return f"openai {package['version']} on Node: {passed} tests passed"


def run_lm_eval(target: Target) -> str:
    """Let lm-eval score and generate with `local-completions`."""
    output = target.directory / "lm-eval"
    arguments = {
        "model": target.model,
        "base_url": f"{target.url}/v1/completions",
        "tokenizer": target.model_dir,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 8,
        "max_retries": 1,
        "max_length": 2048,
    }
    command = [tools.python_tool("lm-eval", "lm_eval"), "run", "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--tasks", "capitals_choice,capitals_generate", "--include_path", LM_EVAL_TASKS]
    command += ["--output_path", output, "--batch_size", "1", "--seed", "0"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    target.run("lm-eval", command, environment=offline, limit_s=600)
    report = _read_json(output, "results_*.json")
    results = report["results"]
    chosen = results["capitals_choice"]["acc,none"]
    written = results["capitals_generate"]["exact_match,stripped"]
    for task in ("capitals_choice", "capitals_generate"):
        if report["n-samples"][task]["effective"] != NUM_QUESTIONS:
            raise SuiteFailed(f"{task} did not ask all {NUM_QUESTIONS} questions")
    figures = f"{NUM_QUESTIONS} questions, {chosen:.0%} chosen rightly, {written:.0%} written"
    if chosen < LEAST_CHOSEN or written < LEAST_WRITTEN:
        raise SuiteFailed(f"{figures}: less than {LEAST_CHOSEN:.0%} and {LEAST_WRITTEN:.0%}")
    return f"lm-eval {tools.version_of('lm-eval')}: {figures}"


def run_aiperf(target: Target) -> str:
    """Let aiperf profile streamed chats, and compare its counts with what it asked for."""
    output = target.directory / "aiperf"
    command = [tools.python_tool("aiperf", "aiperf"), "profile", "--model", target.model]
    command += ["--url", target.url, "--endpoint-type", "chat", "--streaming"]
    command += ["--tokenizer", target.model_dir, "--api-key", target.key]
    command += ["--concurrency", "4", "--request-count", str(NUM_PROFILED), "--random-seed", "0"]
    command += ["--synthetic-input-tokens-mean", "64", "--output-tokens-mean", str(OUTPUT_TOKENS)]
    command += ["--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"]
    command += ["--output-artifact-dir", output, "--ui", "none"]
    # With either set, even to 0, the tokenizer's directory is refused as no name of the Hub.
    environment = {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""}
    target.run("aiperf", command, environment=environment, limit_s=600)
    report = _read_json(output, "profile_export_aiperf.json")
    if report["request_count"]["avg"] != NUM_PROFILED or report.get("error_summary"):
        raise SuiteFailed(f"not all were answered: {report.get('error_summary')}")
    # aiperf tokenizes the text anew, which need not give the tokens that it was made of.
    if abs(report["output_sequence_length"]["avg"] - OUTPUT_TOKENS) > 1:
        raise SuiteFailed(f"answers of {report['output_sequence_length']['avg']} tokens")
    ttft = report["time_to_first_token"]
    speed = report["output_token_throughput"]
    return (
        f"aiperf {tools.version_of('aiperf')}: {NUM_PROFILED} streams, "
        f"{speed['avg']:.0f} tokens/s, TTFT p50 {ttft['p50']:.0f} ms"
    )


def _count(text: str, pattern: str) -> int:
    found = re.findall(pattern, text, re.MULTILINE)
    if not found or found[-1] == "0":
        raise SuiteFailed(f"its output does not say how many tests passed:\n{text[-2000:]}")
    return int(found[-1])


def _read_json(directory: Path, pattern: str) -> Any:
    paths = sorted(directory.rglob(pattern))
    if not paths:
        raise SuiteFailed(f"there is no {pattern} below {directory}")
    return json.loads(paths[-1].read_text(encoding="utf-8"))


SUITES = (
    Suite("python", run_python),
    Suite("node", run_node, tools.node_suite),
    Suite("lm-eval", run_lm_eval, lambda: tools.python_tool("lm-eval", "lm_eval")),
    Suite("aiperf", run_aiperf, lambda: tools.python_tool("aiperf", "aiperf")),
)
