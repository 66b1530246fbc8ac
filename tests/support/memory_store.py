"""A store in memory with the interface of `ragged_server.store.store.Store`, for the HTTP side."""

import threading
from concurrent.futures import Future
from functools import partial

from ragged_server.store.cursors import decode_cursor, encode_cursor
from ragged_server.store.errors import ConflictError
from ragged_server.store.records import Appended, Page, Recovery, StoreStatus

LOG_ID = b"testtest"


class MemoryStore:
    """Keeps everything; `fail` is raised by the next appends, `hold` delays their answers."""

    def __init__(self):
        self.schema = None
        self.rows = []
        self.known = {}
        self.fail = None
        self.held = []
        self.hold = False
        self.closed = False
        self.listeners = []
        self.lock = threading.Lock()
        self.duplicates = 0

    def append(self, request):
        future = Future()
        if self.fail is not None:
            future.set_exception(self.fail)
            return future
        if self.hold:
            self.held.append((future, request))
            return future
        self.finish(future, request)
        return future

    def append_all(self, requests, tells):
        for request, tell in zip(requests, tells, strict=True):
            self.append(request).add_done_callback(partial(self.told, tell))

    @staticmethod
    def told(tell, future):
        error = future.exception()
        tell(None if error is not None else future.result(), error)

    def release(self):
        self.hold = False
        for future, request in self.held:
            self.finish(future, request)
        self.held.clear()

    def finish(self, future, request):
        try:
            future.set_result(self.store(request))
        except ConflictError as err:
            future.set_exception(err)
            return
        for listener in list(self.listeners):
            listener()

    def store(self, request):
        with self.lock:
            self.schema = self.schema or request.schema
            first = len(self.rows)
            row = 0
            new = []
            for batch in request.batches:
                for index in range(batch.num_rows):
                    key = bytes(request.id_digests[row])
                    digest = bytes(request.record_digests[row])
                    if self.known.get(key, digest) != digest:
                        raise ConflictError("a sample_id is in the log with other content")
                    if key not in self.known:
                        new.append((key, digest, batch.slice(index, 1)))
                    row += 1
            for key, digest, record in new:
                self.known[key] = digest
                self.rows.append(record)
            self.duplicates += row - len(new)
            cursor = encode_cursor(LOG_ID, len(self.rows))
            return Appended(first, len(new), row - len(new), cursor, False)

    def read(self, after, *, max_bytes, rank=0, world_size=1, min_policy_version=None):
        start = 0 if after is None else decode_cursor(after, LOG_ID)
        batches, size, end = [], 0, start
        for record in self.rows[start:]:
            if batches and size + record.nbytes > max_bytes:
                break
            batches.append(record)
            size += record.nbytes
            end += 1
        cursors = tuple(encode_cursor(LOG_ID, start + n + 1) for n in range(len(batches)))
        cursor = encode_cursor(LOG_ID, end)
        return Page(tuple(batches), cursor, cursors, len(batches), len(self.rows) - end)

    def wait(self, after, timeout_s):
        raise NotImplementedError

    def subscribe(self, callback):
        self.listeners.append(callback)
        return lambda: self.listeners.remove(callback)

    def status(self):
        zeros = (0,) * 32
        return StoreStatus(
            log_id=LOG_ID.hex(), records=len(self.rows), bytes=0, segments=1, shards=0,
            oldest_sequence=0, next_sequence=len(self.rows), commits=0, first_commit_s=None,
            last_commit_s=None, queue_requests=len(self.held), queue_bytes=0, failure=None,
            poisoned_segments=0, policy_version=None, stored=len(self.rows),
            duplicates=self.duplicates, conflicts=0, tokens=0, scored_tokens=0, set_widths=zeros,
            staleness=zeros, index_ids=len(self.rows), index_runs=0, index_bytes=0,
            recovery=Recovery(0, 0, 0, 0, (), False, 0.0),
        )  # fmt: skip

    def close(self, *, seal_while=None):
        self.closed = True
