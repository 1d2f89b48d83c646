"""Builds the wheel: maturin makes the extension module, this adds the `nativeprof` command.

The command is the real program, not a script that lets Python call the library: `setcap` and `sudo` give privileges to a
file, which must not be an interpreter that runs anything; Ctrl-C reaches it alone; and it starts without an interpreter.
"""

import argparse
import os
import shutil
import subprocess
from pathlib import Path

import maturin

# The hooks that a build front end requests.
from maturin import (  # noqa: F401
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

# The directory of pyproject.toml, in which a front end calls. In a source distribution that is the top.
HERE = Path.cwd()
WORKSPACE = HERE if (HERE / "Cargo.lock").exists() else HERE.parent


def _features(config_settings):
    """Cargo's features that maturin is to build with: `--config-settings build-args="--features ..."` of pip."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-F", "--features", action="append", default=[])
    options, _ = parser.parse_known_args(maturin.get_maturin_pep517_args(config_settings))
    return [f"--features={features}" for features in options.features]


def _place_command(config_settings):
    manifest = WORKSPACE / "Cargo.toml"
    cargo = os.environ.get("CARGO", "cargo")
    # Both packages, though one is built, and maturin's features: so all that they share is the same when maturin builds
    # the other, and nothing is compiled twice.
    packages = ["--package", "nativeprof", "--package", "nativeprof-python"]
    subprocess.run(
        [
            *[cargo, "build", "--release", "--manifest-path", manifest, *packages, "--bin", "nativeprof"],
            *_features(config_settings),
        ],
        check=True,
    )
    target = Path(os.environ.get("CARGO_TARGET_DIR", WORKSPACE / "target"))
    scripts = HERE / "data" / "scripts"
    scripts.mkdir(parents=True, exist_ok=True)
    command = scripts / "nativeprof"
    command.unlink(missing_ok=True)
    # Not its extended attributes: the one that cargo made may have been given capabilities.
    shutil.copyfile(target / "release" / "nativeprof", command)
    command.chmod(0o755)
    if shutil.which("strip"):
        subprocess.run(["strip", command], check=True)


def build_sdist(sdist_directory, config_settings=None):
    # maturin wants it, also where nothing was built.
    (HERE / "data").mkdir(exist_ok=True)
    return maturin.build_sdist(sdist_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _place_command(config_settings)
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _place_command(config_settings)
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)
