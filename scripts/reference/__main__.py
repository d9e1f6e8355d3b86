"""Makes the reference of the API and of the Python package: python scripts/reference FOLDER

The API's pages are made of the comments in proto/, those of Python of the docstrings, by pdoc.
"""

from __future__ import annotations

import argparse
import shutil
import warnings
from pathlib import Path

import api
import pdoc
import pdoc.render

# The public modules.
MODULES = ["spillway_kv", "spillway_kv.transformers", "spillway_kv.torch", "spillway_kv.cluster"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="is made anew")
    folder: Path = parser.parse_args().folder
    shutil.rmtree(folder, ignore_errors=True)
    files = api.read()
    api.write(files, folder / "api")
    # pdoc shows unions that name torch as they are written, so this warning does not matter.
    warnings.filterwarnings("ignore", "Error parsing type annotation")
    templates = Path(__file__).with_name("pdoc")
    pdoc.render.configure(docformat="google", search=False, template_directory=templates)
    pdoc.pdoc(*MODULES, output_directory=folder / "python")
    (folder / "index.html").write_text(api.index(files, MODULES))
    print(f"{folder}/index.html")


if __name__ == "__main__":
    main()
