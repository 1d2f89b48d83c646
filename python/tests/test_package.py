"""The package as it is installed: its version, its types, and the command it carries."""

import os
import re
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import nativeprof


def test_version_is_that_of_the_wheel():
    assert nativeprof.__version__ == metadata.version("nativeprof")


def test_types_come_with_it():
    files = {file.name for file in resources.files(nativeprof).iterdir()}
    assert {"py.typed", "_native.pyi"} <= files


def test_the_command_is_a_program_of_its_own():
    command = os.path.join(os.path.dirname(sys.executable), "nativeprof")
    with open(command, "rb") as file:
        assert file.read(4) == b"\x7fELF", "setcap and sudo must not give privileges to an interpreter"
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"nativeprof {nativeprof.__version__}\n"


def test_the_examples_of_the_readme_work_as_printed(tmp_path):
    """Isolated, with nothing installed but the wheel: what is not of the standard library is nowhere to be found."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert examples
    installed = Path(nativeprof.__file__).parents[1]
    (tmp_path / "alone").mkdir()
    for name in ("nativeprof", "stacktrace"):
        if (installed / name).exists():
            (tmp_path / "alone" / name).symlink_to(installed / name)
    printed = ""
    for example in examples:
        # A file, whose lines can be read.
        (tmp_path / "example.py").write_text(example, encoding="utf-8")
        alone = {**os.environ, "PYTHONPATH": str(tmp_path / "alone"), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-S", "example.py"]
        done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout, "each of them prints something"
        printed += done.stdout
    assert "work 100.0%" in printed and "FUNCTION  WHERE" in printed, printed
