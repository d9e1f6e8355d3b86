"""All links inside the pages work: those of the checkout, and those of `make reference`."""

from __future__ import annotations

import html.parser
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
import spillway_kv
from daemon_process import ROOT
from google.protobuf import descriptor_pb2
from spillway_kv import _proto

if not (ROOT / "scripts/reference").exists():
    pytest.skip("no checkout here, only what a bundle has of it", allow_module_level=True)

OUTSIDE = ("http://", "https://", "mailto:", "data:")


def pages() -> list[Path]:
    """The Markdown files that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return [ROOT / name for name in listed if (ROOT / name).exists()]


def prose(text: str) -> str:
    """The text without code, because links in code do not count."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(`+)(?:(?!\1).)+?\1(?!`)", "", text, flags=re.DOTALL)


def anchors(text: str) -> set[str]:
    """The anchors of headings, as Markdown viewers name them."""
    found: set[str] = set()
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        base = name = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        count = 0
        while name in found:
            count += 1
            name = f"{base}-{count}"
        found.add(name)
    return found | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))


def links(text: str) -> Iterator[str]:
    """The targets of the links and pictures of a page."""
    text = prose(text)
    yield from re.findall(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)", text)
    yield from re.findall(r"^\[[^\]]+\]: +(\S+)", text, re.MULTILINE)
    yield from re.findall(r'(?:href|src)="([^"]+)"', text)


def test_links_of_the_checkout() -> None:
    dead = []
    count = 0
    for page in pages():
        for link in links(page.read_text()):
            if link.startswith(OUTSIDE):
                continue
            count += 1
            path, _, anchor = unquote(link).partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists():
                dead.append(f"{page.relative_to(ROOT)}: {link}")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
                dead.append(f"{page.relative_to(ROOT)}: {link}, whose page has no such heading")
    assert dead == []
    assert count > 300


def test_anchors_are_as_pages_are_shown() -> None:
    text = "# Two words\n\n## `code` & [a link](there.md), twice\n\n## A b\n\n## A b\n"
    assert anchors(text) == {"two-words", "code--a-link-twice", "a-b", "a-b-1"}
    assert list(links("[a](b.md#c) `[not](this)` ![d](e.png)")) == ["b.md#c", "e.png"]


class Page(html.parser.HTMLParser):
    """The link targets of an HTML page, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes the targets and anchors of a tag."""
        for name, value in attrs:
            if value is None:
                continue
            if name in ("href", "src") and tag in ("a", "link", "script", "img"):
                self.links.append(value)
            if name == "id":
                self.names.append(value)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The pages of `make reference`."""
    folder = tmp_path_factory.mktemp("made") / "reference"
    subprocess.run(
        [sys.executable, "-B", ROOT / "scripts/reference", folder], check=True, capture_output=True
    )
    return {path: Page(path.read_text()) for path in folder.rglob("*.html")}


def test_links_of_the_reference(reference: dict[Path, Page]) -> None:
    dead = []
    for path, page in reference.items():
        for link in page.links:
            if link.startswith(OUTSIDE):
                continue
            where, _, anchor = unquote(link).partition("#")
            target = (path.parent / where).resolve() if where else path
            if target not in reference and not target.exists():
                dead.append(f"{path.name}: {link}")
            elif anchor and anchor not in reference[target].names:
                dead.append(f"{path.name}: {link}, whose page has no such name")
    assert dead == []
    (index,) = (page for path, page in reference.items() if path.parent.name == "reference")
    assert len(index.links) > 20


def described() -> Iterator[descriptor_pb2.FileDescriptorProto]:
    """The files of the API, from the package's descriptors."""
    for module in sorted(Path(str(_proto.__file__)).parent.glob("*_pb2.py")):
        name = f"spillway_kv._proto.{module.stem}"
        __import__(name)
        file = descriptor_pb2.FileDescriptorProto()
        sys.modules[name].DESCRIPTOR.CopyToProto(file)
        yield file


def test_the_reference_has_the_whole_api(reference: dict[Path, Page]) -> None:
    names = {
        name for path, page in reference.items() if path.parent.name == "api" for name in page.names
    }
    wanted = set()

    def add(message: descriptor_pb2.DescriptorProto, name: str) -> None:
        wanted.update({name, *(f"{name}.{field.name}" for field in message.field)})
        for inner in message.nested_type:
            add(inner, f"{name}.{inner.name}")
        for enum in message.enum_type:
            wanted.update(f"{name}.{enum.name}.{value.name}" for value in enum.value)

    for file in described():
        for message in file.message_type:
            add(message, message.name)
        for service in file.service:
            wanted.update(f"{service.name}.{method.name}" for method in service.method)
        for enum in file.enum_type:
            wanted.update(f"{enum.name}.{value.name}" for value in enum.value)
    assert len(wanted) > 300
    assert wanted - names == set()


def test_the_reference_has_what_the_package_exports(reference: dict[Path, Page]) -> None:
    (page,) = (page for path, page in reference.items() if path.name == "spillway_kv.html")
    assert set(spillway_kv.__all__) - set(page.names) == set()
