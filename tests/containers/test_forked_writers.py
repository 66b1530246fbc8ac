"""A child that was forked while something is written leaves it to its parent."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.containers import equal, small_batch, three_batches

import ragged_format as rf

TESTS = str(Path(__file__).parents[1])

PROGRAM = """
import os, sys
sys.path.insert(0, sys.argv[1])
from support.containers import small_schema, three_batches
import ragged_format as rf
from ragged_format.compact.files import CompactWriter
kinds = {"dataset": rf.Writer, "file": rf.FileWriter, "stream": rf.StreamWriter,
         "compact": CompactWriter}
options = {"batch_rows": 2, "max_shard_bytes": 4000} if sys.argv[3] == "dataset" else {}
batches = three_batches()
parent = os.getpid()
try:
    with kinds[sys.argv[3]](sys.argv[2], small_schema(), **options) as writer:
        for batch in batches[:2]:
            writer.write(batch)
        child = os.fork()
        if not child and sys.argv[4] == "exit":
            sys.exit(3)
        if not child and sys.argv[4] == "raise":
            raise RuntimeError
        if child:
            _, status = os.waitpid(child, 0)
            writer.write(batches[2])
except (rf.DatasetExistsError, RuntimeError) as error:
    sys.exit(3 if os.getpid() != parent else f"{error}")
sys.exit(os.getpid() == parent and os.waitstatus_to_exitcode(status) != 3)
"""


@pytest.mark.parametrize("how", ["exit", "raise", "leave"])
@pytest.mark.parametrize("kind", ["dataset", "file", "stream", "compact"])
def test_a_forked_child_leaves_the_parents_data_alone(tmp_path, kind, how):
    """By any way out of the block; leaving it without an error is one in the child."""
    path = tmp_path / "x"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, TESTS, str(path), kind, how],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    source = rf.open_source(path)
    assert equal([rf.concat(list(source.batches()))], [rf.concat(three_batches())])
    assert not list(tmp_path.glob("**/*.tmp-*"))


COPY = """
import os, sys
sys.path.insert(0, sys.argv[1])
from support.containers import small_batch, small_schema
import ragged_format as rf
writer = rf.Writer(sys.argv[2], small_schema())
writer.write(small_batch())
child = os.fork()
if not child:
    for step in (lambda: writer.write(small_batch()), writer.close):
        try:
            step()
        except rf.DatasetExistsError as error:
            print(error.what)
    writer.abort()
    sys.exit()
os.waitpid(child, 0)
writer.close()
"""


def test_a_copy_in_a_child_says_whose_it_is(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COPY, TESTS, str(tmp_path / "x")],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "the writer belongs to the process from which this one was forked\n" * 2
    assert equal([rf.Dataset(tmp_path / "x")[:]], [small_batch()])
