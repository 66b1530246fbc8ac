"""Log lines of several processes share one stream."""

import json
import subprocess
import sys

PROGRAM = """
import io, json, logging, sys, structlog
class Stream(io.StringIO):
    writes = []
    def write(self, text):
        self.writes.append(text)
        return len(text)
sys.stderr = stream = Stream()
from ragged_server.logs import configure
from ragged_server.settings import load_settings
configure(load_settings("x", None, log_format="json"))
structlog.get_logger().info("ours", n=1)
logging.getLogger("theirs").warning("of a library")
print(json.dumps(stream.writes))
"""


def test_a_line_is_one_write():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    ours, theirs = json.loads(done.stdout)
    assert ours.endswith("}\n")
    assert json.loads(ours)["event"] == "ours"
    assert theirs.endswith("}\n")
    assert json.loads(theirs)["event"] == "of a library"
