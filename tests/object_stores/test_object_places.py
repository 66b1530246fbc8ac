"""How the core finds what stores, and what it says when it cannot."""

import pickle
import sys
from importlib.metadata import EntryPoint

import pytest

import ragged_format as rf
from ragged_format import storage
from ragged_format.local_storage import LocalStorage
from ragged_format.storage import ReadOnlyStorage, open_storage, register_store


@pytest.fixture
def alone(monkeypatch):
    """No store is known."""
    monkeypatch.setattr(storage, "_openers", {})
    monkeypatch.setattr(storage, "_entries", dict)


def entries(monkeypatch, **found):
    made = {name: EntryPoint(name, value, "ragged_format.stores") for name, value in found.items()}
    monkeypatch.setattr(storage, "_entries", lambda: made)


def test_places_of_this_machine(tmp_path):
    near = open_storage(tmp_path.as_uri())
    assert isinstance(near, LocalStorage)
    assert open_storage(near) is near
    assert pickle.loads(pickle.dumps(near)).place == tmp_path
    assert near.open_file() is None
    (tmp_path / "a").write_bytes(b"12")
    with open_storage(tmp_path / "a").open_file() as file:
        assert file.read() == b"12"
    assert open_storage(tmp_path / "a").local_file() == tmp_path / "a"


def test_a_store_can_be_registered(alone, tmp_path, samples):
    asked = []

    def opener(url, options):
        asked.append((url, options))
        return LocalStorage(tmp_path / url.rpartition("/")[2])

    with pytest.raises(rf.UnsupportedFeatureError, match="file://"):
        open_storage("box://a/b")
    register_store("Box", opener)
    with rf.Writer("box://a/b", samples.schema, storage_options={"key": 1}) as writer:
        writer.write(samples)
    assert asked == [("box://a/b", {"key": 1})]
    assert rf.Dataset("BOX://a/b").num_rows == 37
    assert rf.Dataset(tmp_path / "b").num_rows == 37
    assert rf.sweep("box://a/b", grace_s=0) == []


@pytest.mark.parametrize("arguments", [(1, print), ("a", 1)], ids=["scheme", "opener"])
def test_registering_what_cannot_be_is_refused(alone, arguments):
    with pytest.raises(rf.RaggedError):
        register_store(*arguments)


def test_a_store_of_a_package_that_lacks_a_module_names_the_extra(alone, monkeypatch):
    entries(monkeypatch, s3="a_module_that_is_not_installed:open_store")
    for action in (rf.Dataset, rf.open_source):
        with pytest.raises(rf.MissingDependencyError, match=r"ragged-format\[store\]") as caught:
            action("s3://bucket/data")
        assert "a_module_that_is_not_installed" in caught.value.expected


def test_the_fallback_is_asked_for_what_nobody_else_knows(alone, monkeypatch, tmp_path):
    module = "fallback_of_stores"
    (tmp_path / f"{module}.py").write_text(
        "from ragged_format.local_storage import LocalStorage\n"
        "def find(place, options):\n"
        "    return LocalStorage(options['at']) if 'known' in str(place) else None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    entries(monkeypatch, **{"*": f"{module}:find"})
    assert module not in sys.modules
    assert open_storage("known://x", {"at": tmp_path}).place == tmp_path
    assert open_storage("first::known://x", {"at": tmp_path}).place == tmp_path
    with pytest.raises(rf.UnsupportedFeatureError, match="URLs of this scheme"):
        open_storage("other://x", {"at": tmp_path})

    class Thing:
        fs = "known"

        def __str__(self):
            return self.fs

    assert open_storage(Thing(), {"at": tmp_path}).place == tmp_path


def test_a_place_that_can_only_be_read_refuses_the_rest():
    place = ReadOnlyStorage()
    place.place = "far"
    assert place.open_file() is None
    for action in (place.local_file, lambda: place.begin("0"), lambda: place.sweep(0)):
        with pytest.raises(rf.UnsupportedFeatureError):
            action()
    for action in (place.read_manifest, lambda: place.open_shard(None, None, verify=True)):
        with pytest.raises(NotImplementedError):
            action()
