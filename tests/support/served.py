"""A server in a process of its own, which may be killed and started again."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2


class Served:
    """``ragged serve DIRECTORY``; `url` stays the same over restarts."""

    def __init__(self, directory, *options, env=None):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            sys.executable, "-c", "from ragged_format.cli import main; main()", "serve",
            str(directory), "--port", str(self.port), "--json", "--log-requests", "none", *options,
        ]  # fmt: skip
        self._env = {**os.environ, **(env or {})}
        self.log = Path(f"{directory}.log")  # what all of its processes say
        self.process = None

    def start(self):
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, env=self._env, stdout=subprocess.PIPE, stderr=log
            )
        assert json.loads(self.process.stdout.readline())["url"] == self.url
        # Connections wait until the workers, if there are any, are up.
        end = time.monotonic() + 60
        while httpx2.get(f"{self.url}/readyz", trust_env=False, timeout=60).status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.02)
        return self

    def kill(self):
        """As the out-of-memory killer would."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def end(self):
        """At the end of a test, whatever the state."""
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(30)
        self.process.stdout.close()
        return status

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.stop()
