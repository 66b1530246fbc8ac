"""An S3 server on this machine: moto behind a door that can fail and forget like real ones."""

import re
import threading
from collections import Counter
from contextlib import contextmanager

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "rollouts"
KEYS = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}


class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, kind, message, *args):
        pass


class Fault:
    """What happens to requests of a method and key, so many times.

    Kinds: ``"refuse"`` answers 503 and does nothing; ``"forget"`` does what is asked and answers
    500; ``"cut"`` sends half of the body; ``"ignore"`` takes the conditions away; ``"deny"``
    answers 403.
    """

    def __init__(self, kind, method, key, times):
        self.kind, self.method, self.key, self.times = kind, method, re.compile(key), times
        self.hits = 0

    def applies(self, environ):
        fits = (
            self.hits < self.times
            and environ["REQUEST_METHOD"] == self.method
            and self.key.search(environ["PATH_INFO"])
        )
        self.hits += bool(fits)
        return bool(fits)


class S3Server:
    """Requests go one after the other, as the conditional puts of S3 do for one key."""

    def __init__(self):
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self.faults = []
        self.requests = Counter()
        self._server = make_server("127.0.0.1", 0, self._app, threaded=True, request_handler=Quiet)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.client = boto3.client(
            "s3", endpoint_url=self.endpoint, region_name="us-east-1",
            aws_access_key_id="test", aws_secret_access_key="test",
        )  # fmt: skip

    def stop(self):
        self.client.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def reset(self):
        """Begin with an empty bucket and no faults."""
        self.faults.clear()
        for bucket in self.client.list_buckets()["Buckets"]:
            for name in self.names(bucket=bucket["Name"]):
                self.client.delete_object(Bucket=bucket["Name"], Key=name)
            for upload in self.uploads(bucket=bucket["Name"]):
                self.client.abort_multipart_upload(
                    Bucket=bucket["Name"], Key=upload["Key"], UploadId=upload["UploadId"]
                )
            self.client.delete_bucket(Bucket=bucket["Name"])
        self.client.create_bucket(Bucket=BUCKET)
        self.requests.clear()

    @property
    def options(self):
        return {**KEYS, "endpoint": self.endpoint}

    @property
    def environment(self):
        return {
            "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": self.endpoint,
        }  # fmt: skip

    def names(self, prefix="", bucket=BUCKET):
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return sorted(entry["Key"] for page in pages for entry in page.get("Contents", []))

    def uploads(self, bucket=BUCKET):
        return self.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])

    def read(self, key):
        return self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def put(self, key, content):
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)

    @contextmanager
    def fault(self, kind, method, key, times=1):
        fault = Fault(kind, method, key, times)
        self.faults.append(fault)
        try:
            yield fault
        finally:
            self.faults.remove(fault)

    def _app(self, environ, start_response):
        with self._lock:
            self.requests[environ["REQUEST_METHOD"]] += 1
            kinds = {fault.kind for fault in self.faults if fault.applies(environ)}
            if "ignore" in kinds:
                environ.pop("HTTP_IF_MATCH", None)
                environ.pop("HTTP_IF_NONE_MATCH", None)
            if "refuse" in kinds or "deny" in kinds:
                size = int(environ.get("CONTENT_LENGTH") or 0)
                environ["wsgi.input"].read(size)
                status = "503 Slow Down" if "refuse" in kinds else "403 Forbidden"
                return self._answer(start_response, status)
            answer = {}

            def begin(status, headers, exc_info=None):
                answer.update(status=status, headers=headers)

            body = b"".join(self._moto(environ, begin))
            if "forget" in kinds:
                return self._answer(start_response, "500 Internal Server Error")
            headers = answer["headers"]
            if "cut" in kinds:
                headers.append(("Connection", "close"))
                body = body[: len(body) // 2]
            start_response(answer["status"], headers)
            return [body]

    def _answer(self, start_response, status):
        start_response(status, [("Content-Type", "text/plain"), ("Content-Length", "0")])
        return [b""]
