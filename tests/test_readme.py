"""The README is true: its files, commands and flags exist, its deviations are the code's, its picture is the output."""
import re
import subprocess
import sys

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPTS = ("deloop.py", "rollout.py", "train.py", "eval.py")


def output(*arguments):
    """What a script prints when it succeeds."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_named_exists():
    """Every path in backquotes or in a command that looks like one of ours is a file or folder of the repository."""
    named = set(re.findall(r"(?<![\w/.-])((?:tests/)?[\w.]+\.(?:py|txt)|tests/[\w./]+)(?![\w/])",
                           re.sub(r"> \S+", "", README)))         # what a command writes need not be there
    absent = sorted(name for name in named if not (ROOT / name).exists() and not (ROOT / "tests" / name).exists())
    assert set(SCRIPTS) <= named and not absent


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_named_exists(script):
    """Every flag the README gives a script, in a command or as `script --flag`, stands in that script's --help."""
    commands = re.findall(rf"(?<!\w){script}((?: [^\n|`#]*)?)", README)
    flags = {flag for command in commands for flag in re.findall(r"(?<!\S)--[a-z][a-z-]*", command)}
    helps = "".join(output(script, *sub, "--help") for sub in
                    ([["detect"], ["explain"], ["mine"]] if script == "deloop.py" else [[]]))
    known = set(re.findall(r"--[a-z][a-z-]*", helps))
    assert commands and flags <= known, sorted(flags - known)


def test_every_deviation_is_in_the_table_and_in_the_code():
    """The numbers DEV-n in the code are exactly the rows of the README's table, which counts from 1 without a gap."""
    rows = [int(n) for n in re.findall(r"^\| DEV-(\d+) \|", README, re.M)]
    code = {int(n) for script in SCRIPTS for n in re.findall(r"DEV-(\d+)", (ROOT / script).read_text())}
    assert rows == list(range(1, len(rows) + 1)) and code == set(rows)


def test_every_name_in_the_paper_table_exists():
    """`deloop.kappa` and the like are functions, classes or constants of those files."""
    for module, name in re.findall(r"`(deloop|rollout|train|eval)\.(\w+)`", README):
        if name != "py":
            source = (ROOT / f"{module}.py").read_text()
            assert re.search(rf"^(?:def|class) {name}\b|^{name}\b", source, re.M), f"{module}.{name}"


def test_the_picture_is_what_explain_prints():
    """The trajectory at the top is the output of the command above it."""
    command = re.search(r"^\$ python (deloop\.py explain .*)$", README, re.M)
    shown = README[command.end():].split("```")[0].strip()
    assert output(*command[1].split()).strip() == shown


def test_the_set_up_commands_install_from_the_requirements():
    """.ci/run finds both set-up commands, and both start from nothing."""
    for name in ("demonstration", "tests"):
        command = README.split(f"<!-- set-up: {name} -->")[1].split("```")[1]
        assert command.startswith("sh\npython3 -m venv .venv && .venv/bin/pip install -r requirements.txt && ")
        assert f"set-up: {name}" in README and name in (ROOT / ".ci" / "run").read_text()
