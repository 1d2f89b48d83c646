"""The package as it is installed: its version, its types, and the command it carries."""

import os
import subprocess
import sys
from importlib import metadata, resources

import nativeprof


def test_version_is_that_of_the_wheel():
    assert nativeprof.__version__ == metadata.version("nativeprof")


def test_types_come_with_it():
    files = {file.name for file in resources.files(nativeprof).iterdir()}
    assert {"py.typed", "_native.pyi"} <= files


def test_the_command_is_a_program_of_its_own():
    command = os.path.join(os.path.dirname(sys.executable), "nativeprof")
    with open(command, "rb") as file:
        assert file.read(4) == b"\x7fELF", "setcap and sudo must not give rights to an interpreter"
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"nativeprof {nativeprof.__version__}\n"
