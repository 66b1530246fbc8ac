import resource
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragged_format.cli import app
from ragged_server.cli.serve import option_of
from ragged_server.http.errors import SettingsError
from ragged_server.process.descriptors import within_descriptors
from ragged_server.settings import ServerSettings, as_toml, load_settings


def test_command_line_goes_before_environment_before_file(tmp_path, monkeypatch):
    file = tmp_path / "server.toml"
    file.write_text('port = 1\nmax_wait_s = "2m"\nheader_timeout_s = 3')
    monkeypatch.setenv("RAGGED_MAX_WAIT_S", "90")
    monkeypatch.setenv("RAGGED_HEADER_TIMEOUT_S", "500ms")
    settings = load_settings(Path("live"), file, header_timeout_s="7")
    assert (settings.port, settings.max_wait_s, settings.header_timeout_s) == (1, 90.0, 7.0)


def test_an_empty_variable_is_none(monkeypatch):
    monkeypatch.setenv("RAGGED_PORT", "")
    assert load_settings(Path("live")).port == 8080


def test_other_variables_of_the_project_do_not_matter(monkeypatch):
    monkeypatch.setenv("RAGGED_HYPOTHESIS_PROFILE", "ci")
    assert load_settings(Path("live")).dataset == "live"


def test_a_variable_may_hold_a_list_of_words(monkeypatch):
    monkeypatch.setenv("RAGGED_ALLOWED_HOSTS", "one.example, two.example")
    assert load_settings(Path("live")).allowed_hosts == ("one.example", "two.example")


def test_printed_settings_are_a_settings_file(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGGED_KEYS", "a:read:a-secret-of-some-length")
    before = load_settings(
        Path("live"), None, port=9, max_request_bytes="1MiB", retain_age_s="7d", allowed_hosts="a b"
    )
    text = as_toml(before)
    assert "a-secret" not in text
    file = tmp_path / "printed.toml"
    file.write_text(text)
    after = load_settings(Path("live"), file)
    assert after.model_dump() == before.model_dump()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"port": "70000"}, "the setting port"),
        ({"max_request_bytes": "many"}, "the setting max_request_bytes"),
        ({"max_request_bytes": "many"}, "a size is a number of bytes, or has a unit"),
        ({"max_request_bytes": "3 lots"}, "a size is a number of bytes, or has a unit"),
        ({"max_request_bytes": "0"}, "the setting max_request_bytes"),
        ({"retain_age_s": "soon"}, "a duration is a number of seconds"),
        ({"max_wait_s": "-1"}, "a duration is a number"),
        ({"max_request_bytes": "1GiB"}, "max_request_bytes is larger than max_decoded_bytes"),
        ({"page_bytes": "1GiB"}, "page_bytes is larger than max_page_bytes"),
        ({"tls_cert": "a.pem"}, "tls_cert and tls_key go together"),
        ({"host": "0.0.0.0"}, "is not a loopback address, and there are no keys"),
        ({"host": "example.org"}, "is not a loopback address"),
        ({"log_level": "loud"}, "the setting log_level"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unusable_settings_say_which_and_why(options, said):
    with pytest.raises(SettingsError) as error:
        load_settings(Path("live"), None, **options)
    assert said in str(error.value)


def test_a_key_lets_the_server_bind_beyond_loopback(monkeypatch):
    monkeypatch.setenv("RAGGED_KEYS", "a:read:a-secret-of-some-length")
    assert load_settings(Path("live"), None, host="0.0.0.0").host == "0.0.0.0"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "prot"),
        ("port = ", "the settings file cannot be read"),
        ('port = "x"', "the setting port"),
    ],
    ids=["unknown", "not-toml", "wrong"],
)
def test_a_broken_file_is_named(tmp_path, text, said):
    file = tmp_path / "server.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=said) as error:
        load_settings(Path("live"), file)
    assert "server.toml" in str(error.value)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings(Path("live"), tmp_path / "none.toml")


def test_every_setting_says_what_it_is():
    assert all(field.description for field in ServerSettings.model_fields.values())


def test_every_setting_is_an_option_but_the_secrets():
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    for name in ServerSettings.model_fields:
        if name not in ServerSettings.NOT_OPTIONS:
            assert f"{option_of(name)} " in shown
    assert "--keys " not in shown


def test_print_config_prints_what_holds(tmp_path):
    command = ["serve", str(tmp_path / "live"), "--port", "7", "--print-config"]
    done = CliRunner().invoke(app, command, env={"RAGGED_MAX_WAIT_S": "5"})
    assert done.exit_code == 0, done.stderr
    printed = tomllib.loads(done.stdout)
    assert (printed["port"], printed["max_wait_s"]) == (7, 5.0)
    assert not (tmp_path / "live").exists()


def test_the_command_fails_with_what_is_wrong(tmp_path):
    done = CliRunner().invoke(app, ["serve", str(tmp_path), "--host", "0.0.0.0"])
    assert done.exit_code == 2
    assert "RF-H016" in done.stderr


@pytest.mark.parametrize(
    ("limits", "raised", "connections"),
    [
        ((1024, 1 << 20), (4352, 1 << 20), 4096),
        ((1024, 2000), (2000, 2000), 1744),
        ((100, 100), (100, 100), 1),
        ((1 << 20, 1 << 20), (1 << 20, 1 << 20), 4096),
        ((-1, -1), (-1, -1), 4096),
        ((1024, -1), (4352, -1), 4096),
    ],
)
def test_connections_leave_files_for_the_store(monkeypatch, limits, raised, connections):
    """1,024 files are the usual limit: idle connections must not keep segments from being made."""
    assert resource.RLIM_INFINITY == -1
    now = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: now.__setitem__(0, both))
    found = within_descriptors(load_settings(Path("live")))
    assert (now[0], found.max_connections) == (raised, connections)


def test_a_directory_that_is_not_on_this_machine_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["serve", "s3://bucket/live", "--json"])
    assert done.exit_code == 2
    assert "not on this machine" in done.output
    assert list(tmp_path.iterdir()) == []
