"""The examples of operating a server: what can be checked without a container and an init."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx2
import pytest
from support.served import Served
from typer.testing import CliRunner

from ragged_format.cli import app
from ragged_server.settings import ServerSettings, load_settings

FOLDER = Path(__file__).parents[2] / "examples" / "server"
ROOT = FOLDER.parents[1]
SECRET = "a-secret-for-the-examples"


@pytest.fixture
def keys(monkeypatch):
    monkeypatch.setenv("RAGGED_KEYS_FILE", str(FOLDER / "keys.toml"))


def printed_config(arguments):
    """What `ragged serve` makes of the arguments of an example."""
    done = CliRunner().invoke(app, ["serve", *arguments, "--print-config", "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["settings"]


def local(words):
    return [word.replace("/etc/ragged/", f"{FOLDER}/") for word in words]


def test_the_settings_hold(keys, tmp_path):
    settings = load_settings(tmp_path / "live", FOLDER / "server.toml")
    assert (settings.retain_age_s, settings.drain_delay_s) == (604800, 5)
    assert settings.retain_bytes == 500 * 10**9
    text = (FOLDER / "server.toml").read_text()
    named = set(re.findall(r"^(?:# )?([a-z_]+) = ", text, re.MULTILINE))
    assert named <= set(ServerSettings.model_fields)


def test_the_keys_are_of_every_kind_that_is_needed():
    found = tomllib.loads((FOLDER / "keys.toml").read_text())["keys"]
    assert [key["scopes"] for key in found] == [["ingest"], ["read"]]


def unit():
    parser = configparser.ConfigParser(
        strict=False, interpolation=None, delimiters=["="], comment_prefixes=["#"]
    )
    parser.optionxform = str
    parser.read(FOLDER / "ragged-server.service")
    return parser


def test_the_unit_runs_the_command(keys):
    service = unit()["Service"]
    words = shlex.split(service["ExecStart"])
    assert words[:2] == ["/opt/ragged/bin/ragged", "serve"]
    settings = printed_config(local(words[2:]))
    assert settings["host"] == "0.0.0.0"
    stop = settings["drain_delay_s"] + settings["drain_timeout_s"]
    assert int(service["TimeoutStopSec"]) > stop
    assert int(service["LimitNOFILE"]) > settings["max_connections"]


def test_the_unit_is_one_for_systemd(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    text = (FOLDER / "ragged-server.service").read_text()
    file = tmp_path / "ragged-server.service"
    file.write_text(text.replace("/opt/ragged/bin/ragged", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True)
    assert not re.search(r"ragged-server.*(Unknown|Invalid|Failed)", done.stderr), done.stderr


def instructions():
    text = (FOLDER / "Containerfile").read_text()
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return [line.split(maxsplit=1) for line in lines if line.strip()]


def test_the_image_copies_what_there_is_and_runs_the_command(keys):
    found = instructions()
    for name, rest in found:
        if name == "COPY" and "--from" not in rest:
            for path in rest.split()[:-1]:
                assert (ROOT / path).exists(), path
    # Files that the build of the package reads.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {path for name, rest in found if name == "COPY" for path in rest.split()}
    needed = [project["project"]["readme"], *project["project"]["license-files"]]
    needed += [
        path.split("/")[0]
        for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    ]
    assert set(needed) <= copied
    run = json.loads(dict(found)["ENTRYPOINT"])
    assert run[:2] == ["ragged", "serve"]
    assert printed_config(local(run[2:]))["port"] == 8080
    assert "[server]" in next(rest for name, rest in found if name == "RUN")


def test_the_health_check_tells_ready_from_stopped(tmp_path):
    check = json.loads(dict(instructions())["HEALTHCHECK"].partition("CMD ")[2])
    with Served(tmp_path / "live") as server:
        code = check[2].replace("8080", str(server.port))
        assert subprocess.run([sys.executable, "-c", code], timeout=20).returncode == 0
        assert httpx2.get(f"{server.url}/healthz", trust_env=False).status_code == 200
        server.stop()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20)
        assert done.returncode == 1
