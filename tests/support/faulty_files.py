"""A file layer that loses what was not synced, shortens writes and fails, for tests.

Files are real, so that they can be mapped; beside each the layer keeps what is durable. A power
loss puts that back, with some of the unsynced pages, chosen at random: a kernel may have written
any of them. Names are durable when their directory is synced.
"""

import errno
import random

from ragged_server.store.file_layer import RealFiles

PAGE = 512


class PowerLost(SystemExit):
    """The machine stopped at this call, and nothing after it happens: it ends a thread quietly."""


class FaultyFiles:
    """Real files with faults.

    Parameters
    ----------
    rng : random.Random
    syncs : bool
        Whether a sync makes anything durable; without it the layer shows what tests must find.
    """

    def __init__(self, rng: random.Random, *, syncs: bool = True):
        self._real = RealFiles()
        self._rng = rng
        self._syncs = syncs
        self.durable = {}  # path → bytes that survive
        self.dirty = {}  # path → whether its name is not durable yet
        self.removed = {}  # path → durable bytes of a file whose removal is not durable
        self.faults = {}  # operation → errno, or "power"
        self.odds = 0.0
        self.short = 0.0
        self.lost = False

    def fault(self, operation):
        kind = self.faults.get(operation)
        if kind is None and self.odds and self._rng.random() < self.odds:
            kind = self._rng.choice([errno.EIO, errno.ENOSPC, "power"])
        if kind == "power" or self.lost:
            self.lost = True
            raise PowerLost(operation)
        if kind is not None:
            raise OSError(kind, operation)

    def create(self, path):
        self.fault("create")
        file = self._real.create(path)
        self.durable[path] = b""
        self.dirty[path] = True
        return _File(self, path, file)

    def append(self, path):
        self.fault("open")
        self.durable.setdefault(path, path.read_bytes())
        return _File(self, path, self._real.append(path))

    def sync_directory(self, path):
        self.fault("sync_directory")
        self._real.sync_directory(path)
        if self._syncs:
            self.dirty.clear()
            self.removed.clear()

    def remove(self, path):
        self.fault("remove")
        if path.exists():
            if path in self.durable and not self.dirty.get(path):
                self.removed[path] = self.durable[path]
            self._real.remove(path)
        self.durable.pop(path, None)
        self.dirty.pop(path, None)

    def lose_power(self):
        """Put the files into a state in which the machine could find them."""
        self.lost = True
        for path, data in self.removed.items():
            if self._rng.random() < 0.5:
                path.write_bytes(data)
        for path, data in self.durable.items():
            if not path.exists():
                continue
            seen = path.read_bytes()
            if self.dirty.get(path) and self._rng.random() < 0.5:
                path.unlink()
                continue
            path.write_bytes(self._survivors(data, seen))

    def _survivors(self, durable, seen):
        # The size may have reached the disk before the pages, which are then zeros.
        size = self._rng.choice([len(durable), len(seen), (len(durable) + len(seen)) // 2])
        out = bytearray(size)
        common = min(size, len(durable))
        out[:common] = durable[:common]
        for start in range(0, size, PAGE):
            stop = min(start + PAGE, size)
            if self._rng.random() < 0.5:
                page = seen[start:stop]
                out[start : start + len(page)] = page
        return bytes(out)


class _File:
    def __init__(self, layer, path, file):
        self._layer, self._path, self._file = layer, path, file

    def writev(self, buffers):
        layer = self._layer
        if layer.short and layer._rng.random() < layer.short:
            whole = b"".join(buffers)
            buffers = [memoryview(whole)[: layer._rng.randrange(1, len(whole) + 1)]]
        try:
            layer.fault("write")
        except BaseException:
            # Part of it may be there.
            whole = b"".join(buffers)
            part = whole[: layer._rng.randrange(len(whole) + 1)]
            if part:
                self._file.writev([memoryview(part)])
            raise
        return self._file.writev(buffers)

    def truncate(self, size):
        self._layer.fault("truncate")
        self._file.truncate(size)

    def sync(self):
        self._layer.fault("sync")
        if self._layer._syncs:
            self._file.sync()
            self._layer.durable[self._path] = self._path.read_bytes()

    def close(self):
        self._file.close()
