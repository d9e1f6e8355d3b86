"""Builds the package; its messages are generated from the API's .proto files.

`python setup.py build_proto` only does this, for an editable install whose .proto files
have changed.

A wheel is pure Python unless SPILLWAY_LIBRARY_FILE names a libspillway.so.1. Then the wheel
contains this file and is for the platform on which it is built. auditwheel adds the libraries that
it needs (scripts/wheels.sh). If SPILLWAY_SHARE names a folder with man pages and completions, the
wheel contains them too.
"""

import os
import re
import shutil
import tempfile
from importlib import resources
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PROTO = ROOT / "proto"
OUT = HERE / "spillway_kv" / "_proto"
LIBRARY = os.environ.get("SPILLWAY_LIBRARY_FILE")
SHARE = Path(os.environ.get("SPILLWAY_SHARE", "/none"))
# A source distribution has its own VERSION file.
VERSION = HERE / "VERSION" if (HERE / "VERSION").exists() else ROOT / "VERSION"

IMPORT = re.compile(r"^from spillway\.v1 import ", re.MULTILINE)
MODULE = re.compile(r"(BuildTopDescriptorsAndMessages\(DESCRIPTOR, ')spillway\.v1\.")


class BuildProto(Command):
    """Generates spillway_kv/_proto: messages and .pyi files."""

    description = "generate the messages"
    user_options = []

    def initialize_options(self):
        """Has no options."""

    def finalize_options(self):
        """Has no options."""

    def run(self):
        sources = sorted((PROTO / "spillway" / "v1").glob("*.proto"))
        if not sources:
            # A source distribution carries the generated files instead.
            if (OUT / "__init__.py").exists():
                return
            raise FileNotFoundError(f"no .proto files in {PROTO / 'spillway' / 'v1'}")
        from grpc_tools import protoc

        well_known = resources.files("grpc_tools") / "_proto"
        with tempfile.TemporaryDirectory() as scratch:
            code = protoc.main(
                [
                    "protoc",
                    f"-I{PROTO}",
                    f"-I{well_known}",
                    f"--python_out={scratch}",
                    f"--pyi_out={scratch}",
                    *map(str, sources),
                ]
            )
            if code != 0:
                raise RuntimeError(f"protoc ended with {code}")
            OUT.mkdir(exist_ok=True)
            for stale in OUT.glob("*.py*"):
                if stale.is_file():
                    stale.unlink()
            for made in sorted(Path(scratch, "spillway", "v1").iterdir()):
                # protoc derives the import from the proto package, but the messages are in
                # spillway_kv._proto.
                text = IMPORT.sub("from spillway_kv._proto import ", made.read_text())
                text = MODULE.sub(r"\1spillway_kv._proto.", text)
                (OUT / made.name).write_text(text)
        (OUT / "__init__.py").write_text('"""Generated from proto/spillway/v1."""\n')


# Folder with the licences of the contents of an unpacked archive, beside its lib/.
LICENSES = "share/doc/spillway/licenses"


class BuildPy(build_py):
    """Generates the messages before Python files are collected, and adds libspillway."""

    def run(self):
        if LIBRARY and not Path(LIBRARY).is_file():
            raise FileNotFoundError(f"SPILLWAY_LIBRARY_FILE names {LIBRARY}, which is no file")
        self.run_command("build_proto")
        # The packages were listed before spillway_kv._proto existed.
        if "spillway_kv._proto" not in self.packages:
            self.packages.append("spillway_kv._proto")
        made = Path(self.build_lib) / "spillway_kv"
        if not self.editable_mode:
            # Files of an earlier build would go into the wheel too.
            shutil.rmtree(made, ignore_errors=True)
        super().run()
        if LIBRARY and not self.editable_mode:
            (made / "_lib").mkdir()
            shutil.copy(LIBRARY, made / "_lib/libspillway.so.1")
            licenses = Path(LIBRARY).resolve().parent.parent / LICENSES
            if licenses.is_dir():
                shutil.copytree(licenses, made / "_lib/licenses")


class BdistWheel(bdist_wheel):
    """Tags a wheel with only its platform, because libspillway works with any Python."""

    def get_tag(self):
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


class Contents(Distribution):
    """Marks the wheel as platform-specific if it contains libspillway."""

    def has_ext_modules(self):
        return bool(LIBRARY)


class Sdist(sdist):
    """Adds the generated messages and the version to a source distribution."""

    def run(self):
        self.run_command("build_proto")
        super().run()

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        shutil.copy(VERSION, base_dir)


setup(
    version=VERSION.read_text().strip(),
    distclass=Contents,
    data_files=[
        (f"share/{file.parent.relative_to(SHARE)}", [os.path.relpath(file, HERE)])
        for file in sorted(SHARE.rglob("*"))
        if file.is_file()
    ],
    cmdclass={
        "bdist_wheel": BdistWheel,
        "build_proto": BuildProto,
        "build_py": BuildPy,
        "sdist": Sdist,
    },
)
