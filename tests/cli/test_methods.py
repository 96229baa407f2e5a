"""``hasten methods``, and how little it and ``--help`` import."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hasten.methods import MethodSpec, all_methods, option_help, parse
from tests.cli.conftest import Hasten


def test_every_method_is_listed_within_80_columns(run: Hasten) -> None:
    result = run("methods")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in all_methods())
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_a_method_s_options_are_shown_with_defaults_and_help(run: Hasten) -> None:
    shown = " ".join(run("methods", "prompt-lookup").stdout.split())
    for name, default, help in option_help(all_methods()["prompt-lookup"]):
        assert f"{name} │ {default}" in shown or f"{name} {default}" in shown
        assert help.split()[0] in shown


def test_a_configured_method_is_found_by_its_name(run: Hasten) -> None:
    plain = run("methods", "prompt-lookup").stdout
    assert run("methods", "prompt-lookup:hf,nodes=3").stdout == plain


def test_variants_are_told_in_words_that_method_takes(run: Hasten) -> None:
    (method,) = (json.loads(run("methods", "--json", "prompt-lookup").stdout),)
    assert method["variants"]
    for name, values in method["variants"].items():
        same = ",".join([method["name"], *(f"{k}={v}" for k, v in values.items())])
        assert same.replace(",", "") in "".join(
            run("methods", "prompt-lookup").stdout.split()
        ).replace(",", "")
        assert parse(f"{method['name']}:{name}").name == parse(same).name == "prompt-lookup"


def test_no_variant_is_cut_off_on_a_narrow_screen(run: Hasten) -> None:
    for name, method in all_methods().items():
        shown = "".join(run("methods", name).stdout.split())
        for variant, values in method.variants.items():
            assert f"{name}:{variant}" in shown
            assert str(MethodSpec(name, options=tuple(values.items()))) in shown


def test_json_lists_every_method_with_its_options(run: Hasten) -> None:
    listed = {entry["name"]: entry for entry in json.loads(run("methods", "--json").stdout)}
    assert set(listed) == set(all_methods())
    for name, method in all_methods().items():
        assert [o["name"] for o in listed[name]["options"]] == [o[0] for o in option_help(method)]


@pytest.mark.parametrize(
    ("args", "absent"),
    [(["--help"], "torch"), (["generate", "--help"], "torch"), (["methods"], "transformers")],
    ids=["help", "generate-help", "methods"],
)
def test_what_needs_no_model_does_not_import_it(args: list[str], absent: str) -> None:
    code = (
        "import sys\nfrom hasten.cli import app\n"
        f"try:\n    app({args!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        f"sys.exit({absent!r} in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_no_command_shows_the_help(run: Hasten) -> None:
    result = run()
    assert result.exit_code == 0
    assert all(
        name in result.stdout for name in ("generate", "chat", "methods", "info", "verify", "bench")
    )


def test_version_is_the_package_s(run: Hasten) -> None:
    import hasten

    assert run("--version").stdout == f"hasten {hasten.__version__}\n"
