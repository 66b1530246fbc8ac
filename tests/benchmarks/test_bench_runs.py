"""The command prints and writes its figures; the loader's benchmark reads what it wrote."""

import json
import subprocess
import sys
from pathlib import Path

import ragged_format as rf
from benchmarks import arena
from ragged_format.torch import RaggedLoader

ROOT = Path(__file__).parents[2]


def run(*args):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *args], cwd=ROOT, capture_output=True, text=True
    )


def test_command_prints_a_table_and_writes_json(tmp_path):
    out = tmp_path / "figures.json"
    done = run("row_bytes", "--quick", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert "agent: bytes of a packed row" in done.stdout
    report = json.loads(out.read_text())
    assert report["quick"] is True
    assert report["environment"]["versions"]["pyarrow"][0].isdigit()
    figures = {figure["name"]: figure for figure in report["figures"]["row_bytes"]}
    assert figures["agent: bytes of a packed row"]["goal"] == 0.3


def test_command_refuses_unknown_names():
    done = run("pack", "no_such_benchmark")
    assert done.returncode == 2
    assert "no_such_benchmark" in done.stderr


def test_dataset_of_the_loader_benchmark(tmp_path):
    arena.write_dataset(tmp_path / "data", distinct=6, repeats=3)
    dataset = rf.Dataset(tmp_path / "data")
    dataset.validate()
    assert dataset.num_rows == 18
    assert dataset[2].column("input_ids").equals(dataset[8].column("input_ids"))
    with RaggedLoader(tmp_path / "data", 4) as loader:
        total = sum(batch.nbytes for batch in loader)
        assert arena.epoch(loader) == total
    for verify in (False, True):
        assert arena.first_epoch(tmp_path / "data", 4, verify=verify) == total
    arena.copy_pieces(tmp_path / "data", 4, total)()
    arena.memcpy([3, 5, 2])()
