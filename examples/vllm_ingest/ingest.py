"""Ask a running vLLM for rollouts and write them as a dataset, while they come in.

python ingest.py --url http://127.0.0.1:8000 --model NAME --vocab-size N prompts.jsonl samples

Each line of the prompts is an object with `messages` (a chat, which the server renders) or
`token_ids`, and optionally `sampling_params`, `group_id` and other columns of records. README.md
says how to start the server so that it returns candidate sets.
"""

import argparse
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import ragged_format as rf
from ragged_format.adapters import vllm
from ragged_format.adapters.report import ConversionReport

# With the mask flag on, vLLM refuses requests without top_k and temperature (status 500, no text).
SAMPLING = {"temperature": 1.0, "top_p": 0.95, "top_k": 512, "n": 8, "logprobs": 20}
# Named, so that all windows have the same columns whatever is in them.
COLUMNS = [
    "group_id", "policy_version", "temperature", "finish_reason", "provenance",
    "rollout_log_probs", "candidate_counts", "candidate_ids", "topk_counts", "topk_ids",
    "topk_log_probs", "target_flags",
]  # fmt: skip
WINDOW = 32
BUSY = {429, 502, 503, 504}
TIMEOUT_S = 600


def post(url: str, body: Any, tries: int = 5) -> tuple[int, bytes]:
    """Return status and body of the answer; a busy or absent server is asked again."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310
    for attempt in range(tries):
        last = attempt == tries - 1
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                return answer.status, answer.read()
        except urllib.error.HTTPError as err:
            if err.code not in BUSY or last:
                return err.code, err.read()
        except OSError:
            if last:
                raise
        time.sleep(2**attempt)
    raise ValueError("tries is at least 1")


def rollout(url: str, model: str, prompt: dict[str, Any]) -> dict[str, Any]:
    """Return one record: the request, the answer as bytes, and the prompt's own columns."""
    own = dict(prompt)
    sampling = SAMPLING | own.pop("sampling_params", {})
    token_ids, messages = own.pop("token_ids", None), own.pop("messages", None)
    if token_ids is None:
        body = {"model": model, "messages": messages}
        status, text = post(f"{url}/v1/chat/completions/render", body)
        if status != 200:
            return own | {"http_status": status, "response": text}
        token_ids = json.loads(text)["token_ids"]
    request = {
        "model": model, "token_ids": token_ids, "sampling_params": sampling,
        "return_token_ids": True,
    }  # fmt: skip
    status, text = post(f"{url}/inference/v1/generate", request)
    return own | {"request": request, "http_status": status, "response": text}


def in_windows(items: Iterator[Any]) -> Iterator[list[Any]]:
    """Yield the items in lists of WINDOW."""
    while window := list(islice(items, WINDOW)):
        yield window


def rollouts(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the records in the order of the prompts, a few requests at a time."""
    with Path(args.prompts).open() as lines, ThreadPoolExecutor(args.parallel) as pool:
        prompts = (json.loads(line) for line in lines if line.strip())
        for window in in_windows(prompts):
            yield from pool.map(lambda prompt: rollout(args.url, args.model, prompt), window)


def main(argv: list[str] | None = None) -> ConversionReport:
    """Run from the command line; returns what became of everything."""
    parser = argparse.ArgumentParser(description="Write rollouts of a running vLLM as a dataset.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--vocab-size", type=int, required=True, help="of the model's config.json")
    parser.add_argument("--parallel", type=int, default=8, help="requests at a time")
    parser.add_argument("--engine-version", help="for the provenance")
    parser.add_argument("prompts")
    parser.add_argument("dataset")
    args = parser.parse_args(argv)

    report = ConversionReport()
    schema = rf.sample_schema(vocab_size=args.vocab_size, columns=COLUMNS)
    with rf.Writer(args.dataset, schema) as writer:
        for window in in_windows(rollouts(args)):
            writer.write(
                vllm.to_samples(
                    window, schema=schema, engine_version=args.engine_version, on_error="skip",
                    report=report,
                )
            )  # fmt: skip
    print(f"{report.samples.stored} samples of {report.responses.taken} requests")
    for name, ledger in report.to_dict().items():
        if ledger.get("dropped"):
            print(f"  {name}: dropped {ledger['dropped']}")
    return report


if __name__ == "__main__":
    main()
