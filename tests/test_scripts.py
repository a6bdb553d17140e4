"""scripts/setup.sh with stand-in Pythons (nothing is installed), and what the wheel holds."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

TOOLS = ["bash", "sh", "cat", "cksum", "cp", "dirname", "mkdir", "paste", "rm", "sed", "sort"]

# Stands for a good Python 3.12: answers the version probe, "makes" environments by copying itself, logs its arguments.
GOOD_PYTHON = """\
#!/bin/sh
echo "$*" >>"$LOG"
case "$1 $2" in
    "- "*) echo 3.12.4 ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac
"""


class Sandbox:
    """A project directory with setup.sh alone, and a PATH with the tools it needs and no Python but stand-ins."""

    def __init__(self, root: Path, home: Path):
        self.home, self.bin = home, home / "bin"
        self.log = home / "log"
        (home / "scripts").mkdir()
        self.bin.mkdir()
        shutil.copy(root / "scripts" / "setup.sh", home / "scripts")
        (home / "pyproject.toml").write_text("first")
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or pytest.fail(f"{tool} is missing"))

    def add_python(self, name: str, script: str) -> None:
        path = self.home / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(script)
        path.chmod(0o755)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run setup.sh; the log then tells of this run only."""
        self.log.write_text("")
        path = f"{self.bin}:{self.home / 'more'}"
        command = [str(self.bin / "bash"), "scripts/setup.sh", *arguments]
        environment = {"PATH": path, "LOG": str(self.log), **environment}
        return subprocess.run(command, cwd=self.home, env=environment, capture_output=True, text=True)

    def installed(self) -> list[str]:
        """What pip was asked to install in the last run."""
        return re.findall(r"^-m pip install .*--editable (.*)$", self.log.read_text(), re.MULTILINE)


@pytest.fixture
def sandbox(root: Path, tmp_path: Path) -> Sandbox:
    return Sandbox(root, tmp_path)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "no Python 3.11 or newer with the venv module"),
        ("#!/bin/sh\necho 'pyenv: python3: command not found' >&2\nexit 127\n", "bin/python3 does not run"),
        ("#!/bin/sh\necho 3.10.13\nexit 3\n", "bin/python3 is 3.10.13"),
        ("#!/bin/sh\necho 3.11.2\nexit 4\n", "bin/python3 is 3.11.2 without the venv module"),
    ],
)
def test_no_usable_python_is_one_line_and_exit_2(sandbox: Sandbox, script: str | None, message: str):
    if script:
        sandbox.add_python("bin/python3", script)
    result = sandbox.run()
    assert result.returncode == 2
    assert result.stdout == "" and result.stderr.count("\n") == 1
    assert message in result.stderr
    assert not (sandbox.home / ".venv").exists()


def test_broken_shims_are_passed_over(sandbox: Sandbox):
    for name in ("python3", "python3.13", "python3.12"):
        sandbox.add_python(f"bin/{name}", "#!/bin/sh\nexit 127\n")
    sandbox.add_python("more/python3.12", GOOD_PYTHON)
    result = sandbox.run()
    assert result.returncode == 0, result.stderr
    assert f"making .venv with {sandbox.home}/more/python3.12" in result.stderr
    assert sandbox.installed() == ["."]


def test_named_python_wins(sandbox: Sandbox):
    sandbox.add_python("bin/python3", GOOD_PYTHON)
    sandbox.add_python("a python/python", GOOD_PYTHON)
    result = sandbox.run(DDTREE_PYTHON=str(sandbox.home / "a python" / "python"))
    assert "a python/python" in result.stderr


def test_warm_runs_install_nothing(sandbox: Sandbox):
    sandbox.add_python("bin/python3", GOOD_PYTHON)
    assert sandbox.run("test").returncode == 0
    assert sandbox.installed() == [".[test]"]
    warm = sandbox.run("test")
    assert (warm.returncode, warm.stdout, warm.stderr) == (0, "", "")
    assert sandbox.installed() == []


def test_extras_add_up(sandbox: Sandbox):
    sandbox.add_python("bin/python3", GOOD_PYTHON)
    sandbox.run("test")
    sandbox.run()
    assert sandbox.installed() == []
    sandbox.run("plot", DDTREE_EXTRAS="cuda13")
    assert sandbox.installed() == [".[cuda13,plot,test]"]


def test_a_changed_pyproject_installs_again(sandbox: Sandbox):
    sandbox.add_python("bin/python3", GOOD_PYTHON)
    sandbox.run("test")
    (sandbox.home / "pyproject.toml").write_text("second")
    sandbox.run()
    assert sandbox.installed() == [".[test]"]


def test_a_failed_installation_is_tried_again(sandbox: Sandbox):
    sandbox.add_python("bin/python3", GOOD_PYTHON.replace("esac", '    "-m pip") exit 1 ;;\nesac'))
    assert sandbox.run().returncode == 1
    assert sandbox.run().returncode == 1
    assert sandbox.installed() == ["."]


def test_a_dead_environment_is_made_again(sandbox: Sandbox):
    sandbox.add_python("bin/python3", GOOD_PYTHON)
    sandbox.run()
    (sandbox.home / ".venv" / "bin" / "python").unlink()
    result = sandbox.run()
    assert "making .venv" in result.stderr and sandbox.installed() == ["."]


def test_setup_asks_for_the_python_that_pyproject_states(root: Path):
    stated = tomllib.loads((root / "pyproject.toml").read_text())["project"]["requires-python"]
    minimum = re.search(r'^minimum="([\d.]+)"', (root / "scripts" / "setup.sh").read_text(), re.MULTILINE)
    assert minimum and stated == f">={minimum[1]}"


def test_the_test_extra_has_the_versions_of_parity_and_real(root: Path):
    """With Python 3.11 alone: elsewhere PyTorch can be gigabytes."""
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    marked = {entry for entry in extras["test"] if ";" in entry}
    assert marked == {f"{entry}; python_version < '3.12'" for entry in extras["parity"] + extras["real"]}


@pytest.mark.parametrize("script", ["scripts/setup.sh", "scripts/demo.sh", "scripts/test.sh", ".ci/run"])
def test_scripts_parse(root: Path, script: str):
    assert subprocess.run(["bash", "-n", str(root / script)]).returncode == 0
    assert os.access(root / script, os.X_OK)


def test_wheel_holds_all_of_both_packages(root: Path, tmp_path: Path):
    pytest.importorskip("hatchling", reason="the test extra brings hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=root, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    sources = {p for package in ("ddtree_jax", "convert") for p in (root / package).rglob("*") if p.is_file()}
    wanted = {p.relative_to(root).as_posix() for p in sources if "__pycache__" not in p.parts}
    assert {"ddtree_jax/text.py", "convert/__init__.py"} <= wanted
    assert wanted <= held
    others = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "LICENSE", "NOTICE"}
    assert {Path(name).name for name in held - wanted} == others
