"""What is said where a package of an extra is not installed."""

import sys

import pytest
from support.containers import small_batch, small_schema
from typer.testing import CliRunner

import ragged_format as rf
import ragged_pipeline as rp
from ragged_format.cli import app


@pytest.fixture
def without_polars(monkeypatch):
    monkeypatch.setitem(sys.modules, "polars", None)


@pytest.mark.usefixtures("without_polars")
@pytest.mark.parametrize(
    "call",
    [
        lambda: rp.filter_dataset("in", "out", "token_length > 1"),
        lambda: rp.filter_dataset("in", "out", finish_reasons=["stop"]),
        lambda: rp.merge("in", "out", sort_by=["token_length"]),
        lambda: rp.scan("in"),
    ],
    ids=["where", "finish_reasons", "sort_by", "scan"],
)
def test_the_extra_is_named(call):
    with pytest.raises(rf.MissingDependencyError, match="polars") as caught:
        call()
    assert "ragged-format[pipeline]" in caught.value.remedy


@pytest.mark.usefixtures("without_polars")
def test_the_command_says_so(tmp_path):
    with rf.Writer(tmp_path / "in", small_schema()) as writer:
        writer.write(small_batch([2, 3]))
    words = ["filter", str(tmp_path / "in"), str(tmp_path / "out"), "--where", "token_length > 1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert "ragged-format[pipeline]" in done.stderr
