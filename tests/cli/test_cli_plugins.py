"""Commands that other distributions register in the entry-point group."""

import json
import subprocess
import sys
import textwrap
from importlib.metadata import EntryPoint

import pytest

from ragged_format.cli import plugins

MODULE = """
    import typer

    from ragged_format.errors import ConversionError
    from ragged_format.cli import Json, Output

    raise_at_import = {raise_at_import}
    if raise_at_import == "missing":
        import a_module_that_is_not_installed
    elif raise_at_import:
        raise SystemError("half installed")

    def hello(ctx: typer.Context, name: str, json: Json = False) -> None:
        "Greet somebody."
        out = Output(ctx, json=json)
        if name == "nobody":
            raise ConversionError("nobody is there", got=name)
        out.text(f"hello {{name}}")
        out.result({{"name": name}})

    many = typer.Typer(help="Several commands.")
    many.command()(hello)

    @many.command()
    def bye() -> None:
        typer.echo("bye")

    number = 7
"""
ENTRIES = {
    "hello": "fake_plugin:hello",
    "many": "fake_plugin:many",
    "number": "fake_plugin:number",
    "gone": "fake_plugin:no_such_name",
    "needy": "fake_missing:hello",
    "half": "fake_broken:hello",
    "validate": "fake_plugin:hello",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A directory with a fake installed distribution that registers commands."""
    site = tmp_path_factory.mktemp("site")
    for module, raises in (("plugin", False), ("missing", "missing"), ("broken", True)):
        text = textwrap.dedent(MODULE).format(raise_at_import=repr(raises))
        (site / f"fake_{module}.py").write_text(text)
    info = site / "fake_commands-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: fake-commands\nVersion: 1.0\n"
        'Requires-Dist: a-module-that-is-not-installed>=1; extra == "more"\n'
    )
    lines = [f"{name} = {value}" for name, value in ENTRIES.items()]
    (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n" + "\n".join(lines) + "\n")
    other = site / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text(f"[{plugins.GROUP}]\nhello = other_package:hello\n")
    return site


@pytest.fixture(autouse=True)
def on_path(site, monkeypatch):
    monkeypatch.syspath_prepend(site)


def test_a_function_is_a_command(invoke):
    assert invoke("hello", "you").output == "hello you\n"
    done = invoke("hello", "you", "--json")
    assert json.loads(done.output) == {"command": "hello", "ok": True, "name": "you"}


def test_a_typer_app_brings_its_sub_commands(invoke):
    assert invoke("many", "bye").output == "bye\n"
    assert invoke("many", "hello", "you").output == "hello you\n"


@pytest.mark.parametrize("words", [("hello",), ("many", "hello")])
def test_errors_of_a_plugin_are_printed_as_those_of_built_in_commands(invoke, words):
    done = invoke(*words, "nobody", "--json")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: [RF-A001] nobody is there")
    assert json.loads(done.stdout)["code"] == "RF-A001"


def test_usage_errors_of_a_plugin_exit_with_2(invoke):
    assert invoke("hello").exit_code == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("needy", "a_module_that_is_not_installed"),
        ("half", "SystemError: half installed"),
        ("gone", "AttributeError"),
        ("number", "a int, not a function"),
    ],
)
def test_a_broken_plugin_breaks_its_own_command_only(invoke, name, said):
    done = invoke(name, "anything", "--at", "all")
    assert done.exit_code == 1
    assert said in done.stderr
    assert "remedy:" in done.stderr
    assert "Traceback" not in done.stderr
    assert invoke("hello", "you").exit_code == 0


def test_a_missing_module_is_named_with_the_extra_that_brings_it(invoke):
    done = invoke("needy")
    assert "pip install 'fake-commands[more]'" in done.stderr


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [("serve", "pydantic_settings", "server"), ("filter", "polars", "pipeline")],
)
def test_extras_of_this_package_are_found(command, module, extra):
    entry = plugins.discover()[0][command]
    assert f"ragged-format[{extra}]" in plugins._how_to_install(entry, module)


def test_help_lists_working_and_broken_plugins_and_those_left_out(invoke):
    done = invoke("--help")
    assert done.exit_code == 0
    assert "Greet somebody." in done.output
    assert "Several commands." in done.output
    assert done.output.count("(broken)") == 3
    assert done.output.count("(not available)") == 1
    assert "'validate' of fake_plugin:hello is the name of a built-in command" in done.stderr
    assert "'hello' of other_package:hello is registered by fake_plugin:hello" in done.stderr


def test_a_plugin_is_not_imported_by_other_commands(site):
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop()); sys.argv[1:] = ['validate', 'nowhere']\n"
        "from ragged_format.cli import main\n"
        "try: main()\n"
        "finally: print([m for m in sys.modules if m.startswith('fake_')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(site)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stdout == "[]\n"


def test_a_distribution_that_is_found_twice_is_one(monkeypatch):
    """An editable install next to a wheel of the same package lists its entry points twice."""
    entry = EntryPoint("hello", "fake_plugin:hello", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry, entry])
    assert plugins.discover() == ({"hello": entry}, [])


def test_no_entry_points_no_commands(monkeypatch):
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    assert plugins.discover() == ({}, [])
