"""A server's directory before its first shard: no dataset yet, and the error says what it is."""

import pytest
from support.store_kit import request, samples

import ragged_format as rf
from ragged_server.store.records import StoreSettings
from ragged_server.store.store import Store


def test_a_log_without_shards_is_named(tmp_path):
    with Store(tmp_path / "live", StoreSettings()) as store:
        store.append(request(samples())).result()
    with pytest.raises(rf.DatasetNotFoundError, match="log of a server") as caught:
        rf.Dataset(tmp_path / "live")
    assert "ragged tail" in caught.value.remedy


def test_other_directories_are_told_as_before(tmp_path):
    (tmp_path / "log").mkdir()
    for path, got in ((tmp_path, "no manifest"), (tmp_path / "none", "no directory")):
        with pytest.raises(rf.DatasetNotFoundError) as caught:
            rf.Dataset(path)
        assert caught.value.got == got
