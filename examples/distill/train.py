"""Offline distillation, end to end: a teacher's recorded replies to a small trained student.

A teacher scored six real conversations: for every token its 8 likeliest tokens, and the realised
one where that is another (vLLM's ``prompt_logprobs``). The steps:

1. convert the replies to samples with heads, everything counted;
2. validate them: order, repeats, mass of every head;
3. renumber the ids, so that the student's vocabulary is the tokens that occur;
4. write them compact, and load them as tensors;
5. train a student by the forward KL to the teacher's heads, all other tokens as one more outcome.

Run it anywhere: ``python train.py [DIRECTORY]``.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

import ragged_format as rf
from ragged_format.adapters import tensors, trl_distill
from ragged_format.adapters.report import ConversionReport
from ragged_format.torch import RaggedBatch, RaggedLoader, forward_kl, head_log_probs, reverse_kl

if TYPE_CHECKING:
    import pyarrow as pa

REPLIES = Path(__file__).with_name("teacher_replies.jsonl.gz")
VOCAB_SIZE = 49152
EPOCHS = 12


def read_replies(path: Path) -> list[dict[str, object]]:
    """Return the tokens of each conversation, which of them are scored, and the reply."""
    out = []
    with gzip.open(path, "rt") as lines:
        for line in lines:
            reply = json.loads(line)
            out.append({
                "sample_id": f"{reply['source']}#{reply['choice']}",
                "input_ids": reply["prompt"], "response": reply["response"],
                "completion_mask": [0] * reply["prompt_len"] + [1] * reply["completion_len"],
            })  # fmt: skip
    return out


def renumbered(samples: pa.RecordBatch) -> pa.RecordBatch:
    """Return the samples with the ids that occur numbered from 0."""
    arrays = tensors.to_arrays(samples)
    names = ("input_ids", "teacher_topk_ids")
    known = np.unique(np.concatenate([arrays[name] for name in names]))
    for name in names:
        arrays[name] = np.searchsorted(known, arrays[name]).astype(np.int32)
    columns = rf.parse_schema(samples.schema)
    return tensors.from_arrays(arrays, rf.sample_schema(vocab_size=len(known), columns=columns))


class Student(nn.Module):
    """A small recurrent model."""

    def __init__(self, vocab_size: int, size: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, size)
        self.body = nn.GRU(size, size, batch_first=True)
        self.head = nn.Linear(size, vocab_size, bias=False)

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Return the hidden states of all tokens end to end, (t, size)."""
        ids = batch.padded("input_ids", fill=0)
        hidden, _ = self.body(self.embed(ids))
        inside = torch.arange(ids.shape[1]) < batch.lengths("token")[:, None]
        return hidden[inside]


def divergences(student: Student, batch: RaggedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return forward and reverse KL of every target to the teacher's head."""
    targets = torch.nonzero(batch["completion_mask"])[:, 0]
    counts = batch["teacher_topk_counts"].long()
    # The token before a target predicts it. No candidate sets: the whole vocabulary.
    none = torch.zeros(0, dtype=torch.int64)
    _, ours = head_log_probs(
        student(batch), student.head.weight, targets - 1, batch["input_ids"][targets].long(),
        none, torch.zeros(len(targets), dtype=torch.int64), batch["teacher_topk_ids"], counts,
    )  # fmt: skip
    theirs = batch["teacher_topk_log_probs"]
    return forward_kl(ours, theirs, counts), reverse_kl(ours, theirs, counts)


def main(directory: str) -> list[float]:
    """Convert, validate, write, load and train; returns the mean forward KL of each epoch."""
    report = ConversionReport()
    samples = trl_distill.to_samples(read_replies(REPLIES), vocab_size=VOCAB_SIZE, report=report)
    rf.validate(samples)
    heads = report.head_entries
    print(f"{samples.num_rows} samples, {report.targets.stored} targets")
    print(f"heads: {heads.taken} entries in, {heads.stored} stored, dropped {dict(heads.dropped)}")

    samples = renumbered(samples)
    rf.validate(samples)

    path = f"{directory}/heads"
    with rf.Writer(path, samples.schema, encoding="compact") as writer:
        writer.write(samples)
    size = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
    print(f"compact: {size / report.targets.stored:.0f} bytes a target, tokens and all")

    torch.manual_seed(0)
    student = Student(rf.parse_schema(samples.schema).vocab_size)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.03)
    history = []
    with RaggedLoader(path, batch_size=2, shuffle=True, seed=0) as loader:
        for epoch in range(EPOCHS):
            total = torch.zeros(2)
            for batch in loader:
                forward, reverse = divergences(student, batch)
                optimizer.zero_grad()
                forward.mean().backward()
                optimizer.step()
                total += torch.stack([forward.detach().sum(), reverse.detach().sum()])
            mean = total / report.targets.stored
            history.append(float(mean[0]))
            print(f"epoch {epoch:2}: forward KL {mean[0]:.3f}, reverse KL {mean[1]:.3f}")
    return history


if __name__ == "__main__":
    torch.set_num_threads(1)  # of small tensors, more threads only wait for each other
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
