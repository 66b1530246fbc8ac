"""Local copies of remote shards: whole, bounded, shared between threads and processes."""

import subprocess
import sys
import threading

import pytest

from ragged_format.errors import CorruptError, LimitExceededError
from ragged_format.shard_cache import ShardCache, default_cache_directory

SIZE = 1000


def content(name):
    return name.encode().ljust(SIZE, b".")


class Far:
    """Files elsewhere that count how often they are fetched."""

    def __init__(self, cache):
        self.cache = cache
        self.fetched = []

    def open(self, name, opener=lambda path, fresh: path.read_bytes()):
        def fetch(path):
            self.fetched.append(name)
            path.write_bytes(content(name))

        return self.cache.open(f"{name}.arrow", SIZE, fetch, opener)


@pytest.fixture
def far(tmp_path):
    return Far(ShardCache(tmp_path, max_bytes=3 * SIZE))


def copies(far):
    return sorted(path.stem for path in far.cache.directory.glob("*.arrow"))


def test_a_copy_is_fetched_once(far):
    assert [far.open("a"), far.open("a")] == [content("a")] * 2
    assert far.fetched == ["a"]
    assert far.cache.fetched == 1


def test_the_copy_not_opened_for_longest_makes_room(far):
    for name in "abcabad":
        far.open(name)
    assert copies(far) == ["a", "b", "d"]
    assert far.cache.evicted == 1


def test_the_bound_counts_what_other_objects_and_datasets_left(far, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "old.arrow").write_bytes(bytes(2 * SIZE))
    (tmp_path / "notes.txt").write_bytes(bytes(9 * SIZE))
    for name in "ab":
        far.open(name)
    assert not (tmp_path / "other" / "old.arrow").exists()
    assert (tmp_path / "notes.txt").exists()
    assert copies(far) == ["a", "b"]


def test_a_file_larger_than_the_cache_is_refused(tmp_path):
    with pytest.raises(LimitExceededError, match="does not fit") as caught:
        Far(ShardCache(tmp_path, max_bytes=SIZE - 1)).open("a")
    assert caught.value.got == SIZE


@pytest.mark.parametrize("damage", [b"", bytes(SIZE - 1), bytes(SIZE)], ids=["empty", "cut", "bad"])
def test_a_damaged_copy_is_fetched_again(far, damage):
    def opener(path, fresh):
        if path.read_bytes() != content("a"):
            raise CorruptError("bad copy")
        return fresh

    assert far.open("a", opener) is False
    assert len(far.fetched) == 1
    (far.cache.directory / "a.arrow").write_bytes(damage)
    assert far.open("a", opener) is False
    assert len(far.fetched) == 2


def test_a_fetch_that_fails_leaves_nothing(far):
    def fetch(path):
        path.write_bytes(b"half")
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        far.cache.open("a.arrow", SIZE, fetch, lambda path, fresh: path)
    assert not [p for p in far.cache.directory.iterdir() if p.suffix != ".lock"]
    assert far.open("a") == content("a")


def test_content_that_was_fetched_damaged_is_an_error_and_not_kept(far):
    def opener(path, fresh):
        raise CorruptError("bad copy")

    with pytest.raises(CorruptError):
        far.open("a", opener)
    assert copies(far) == []


def test_what_a_killed_fetch_left_is_overwritten_or_makes_room(far):
    (far.cache.directory / f"a.arrow.{SIZE}.part").write_bytes(bytes(7))
    (far.cache.directory / f"z.arrow.{3 * SIZE}.part").write_bytes(bytes(7))
    assert far.open("a") == content("a")
    assert not list(far.cache.directory.glob("*.part"))


def test_a_file_that_is_cut_while_it_is_fetched_keeps_its_room(tmp_path):
    cache = ShardCache(tmp_path, max_bytes=2 * SIZE)
    other = ShardCache(tmp_path, max_bytes=2 * SIZE)

    def fetch(path):
        path.write_bytes(b"")  # as every open for writing does
        for name in "xy":
            other.open(
                f"{name}.arrow", SIZE, lambda p: p.write_bytes(bytes(SIZE)), lambda p, _: None
            )
        path.write_bytes(bytes(SIZE))

    cache.open("a.arrow", SIZE, fetch, lambda path, _: None)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.arrow")) <= 2 * SIZE


def test_threads_fetch_each_file_once_and_read_whole_ones(tmp_path):
    far = Far(ShardCache(tmp_path, max_bytes=100 * SIZE))
    names = [f"n{number}" for number in range(12)]
    wrong = []

    def read():
        wrong.extend(name for name in names if far.open(name) != content(name))

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sorted(far.fetched) == sorted(names)


READ = """
import random, sys
from ragged_format.shard_cache import ShardCache
cache = ShardCache(sys.argv[1], max_bytes=3000)
order = random.Random(int(sys.argv[2]))
for _ in range(150):
    name = order.choice("abcdef")
    content = name.encode().ljust(1000, b".")
    fetch = lambda path: path.write_bytes(content)
    assert cache.open(name + ".arrow", 1000, fetch, lambda p, fresh: p.read_bytes()) == content
"""


def test_processes_share_a_cache_that_is_too_small_for_them(tmp_path):
    workers = [
        subprocess.Popen([sys.executable, "-c", READ, str(tmp_path), str(seed)])
        for seed in range(3)
    ]
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    kept = [p for p in tmp_path.iterdir() if p.suffix != ".lock"]
    assert sum(path.stat().st_size for path in kept) <= 3 * SIZE
    assert not [p for p in kept if p.suffix == ".part"]


def test_where_copies_are_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("RAGGED_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_directory() == tmp_path / "ragged"
    monkeypatch.setenv("RAGGED_CACHE_DIR", str(tmp_path / "mine"))
    assert default_cache_directory() == tmp_path / "mine"
