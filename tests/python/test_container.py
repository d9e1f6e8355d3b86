"""The Containerfile, the package and the Kubernetes manifest use the same names."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
import yaml
from daemon_process import ROOT
from dockerfile_parse import DockerfileParser

FILE = ROOT / "cmake/packaging/Containerfile"
if not FILE.exists():
    pytest.skip("no checkout here, only what a bundle has of it", allow_module_level=True)


def instructions() -> list[tuple[str, str]]:
    """The instructions of all stages, each with its value."""
    with FILE.open("rb") as file:
        parser = DockerfileParser(fileobj=file)
        return [
            (step["instruction"], step["value"])
            for step in parser.structure
            if step["instruction"] != "COMMENT"
        ]


def of_the_image() -> list[tuple[str, str]]:
    """The instructions of the last stage."""
    steps = instructions()
    begin = max(i for i, (name, _) in enumerate(steps) if name == "FROM")
    return steps[begin + 1 :]


def value(instruction: str) -> str:
    """The value of an instruction that the image has exactly once."""
    (found,) = [value for name, value in of_the_image() if name == instruction]
    return found


def pairs(instruction: str) -> dict[str, str]:
    """The NAME=VALUE pairs of an instruction."""
    words = shlex.split(value(instruction))
    return dict(word.split("=", 1) for word in words)


def manifest() -> Any:
    return yaml.safe_load((ROOT / "docs/operations/kubernetes/deployment.yaml").read_text())


def pod() -> Any:
    return manifest()["spec"]["template"]["spec"]


def options() -> dict[str, str]:
    """The options of the daemon in the manifest."""
    return {
        name: rest
        for name, _, rest in (
            argument.partition("=") for argument in pod()["containers"][0]["args"]
        )
    }


def mounted(path: str) -> bool:
    """Whether a volume of the manifest's daemon contains this path."""
    return any(
        path.startswith(f"{m['mountPath']}/") for m in pod()["containers"][0]["volumeMounts"]
    )


def package_listen() -> str:
    """Where a daemon with the settings of the Debian package listens."""
    packaging = (ROOT / "cmake/packaging.cmake").read_text()
    (found,) = re.findall(r'set\(listen "listen = \\"(.*?)\\""\)', packaging)
    return str(found)


def test_the_user_is_one_everywhere() -> None:
    user, group = value("USER").split(":")
    security = pod()["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"]) == (int(user), int(group))
    assert security["fsGroup"] == int(group)
    assert security["runAsNonRoot"]
    assert f"usermod --uid {user} spillway" in value("RUN")
    assert f"groupmod --gid {group} spillway" in value("RUN")
    page = (ROOT / "docs/operations.md").read_text()
    assert f"install -d -o {user} -g {group} " in page


def test_the_program_is_the_packages() -> None:
    entry = json.loads(value("ENTRYPOINT"))
    packaging = (ROOT / "cmake/packaging.cmake").read_text()
    assert f'set(command "{entry[0]} {entry[1]} ${{config}}")' in packaging
    assert f"set(config {entry[2]})" in packaging
    assert not [value for name, value in of_the_image() if name == "CMD"]
    # The manifest adds arguments and does not replace the command.
    assert "command" not in pod()["containers"][0]


def test_the_tool_finds_the_daemon() -> None:
    environment = pairs("ENV")
    assert environment["SPILLWAY_TARGET"] == package_listen()
    for container in pod()["containers"]:
        (target,) = [v["value"] for v in container["env"] if v["name"] == "SPILLWAY_TARGET"]
        assert target == options()["--listen"]
    assert mounted(options()["--listen"].removeprefix("unix:"))
    assert mounted(options()["--arena-directory"])
    (check,) = re.findall(r"CMD (\[.*\])", value("HEALTHCHECK"))
    assert json.loads(check)[0] == "/usr/bin/spillway"
    assert json.loads(check)[-1] == "status"


def test_folders_are_the_users() -> None:
    (made,) = re.findall(r"install -d -o spillway -g spillway -m 0750 (.*)", value("RUN"))
    environment = pairs("ENV")
    needed = [package_listen().removeprefix("unix:").rpartition("/")[0]]
    needed += [environment["STATE_DIRECTORY"], environment["CUDA_CACHE_PATH"]]
    assert made.split() == needed


def test_ports_and_probes() -> None:
    daemon = pod()["containers"][0]
    (port,) = daemon["ports"]
    assert port["containerPort"] == int(value("EXPOSE"))
    assert options()["--http-listen"].endswith(f":{port['containerPort']}")
    annotations = manifest()["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == value("EXPOSE")
    server = (ROOT / "daemon/http/answers.cc").read_text()
    paths = [annotations["prometheus.io/path"]]
    for probe in ("livenessProbe", "readinessProbe"):
        assert daemon[probe]["httpGet"]["port"] == port["name"]
        paths.append(daemon[probe]["httpGet"]["path"])
    assert paths == ["/metrics", "/healthz", "/readyz"]
    for path in paths:
        assert f'"{path}"' in server


def test_a_stop_is_a_drain() -> None:
    assert value("STOPSIGNAL") == "SIGTERM"
    (grace,) = re.findall(
        r"^# grace_seconds = (\d+)", (ROOT / "cmake/packaging/spillwayd.toml.in").read_text(), re.M
    )
    assert pod()["terminationGracePeriodSeconds"] > int(grace)


def test_the_label_is_the_version() -> None:
    version = (ROOT / "VERSION").read_text().strip()
    assert pairs("LABEL")["org.opencontainers.image.version"] == version


def test_what_the_stages_build_from_is_in_reach() -> None:
    """The build context has all copied files, although .dockerignore leaves out most of build/."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored.index("/build") < ignored.index("!/build/package")
    sources = [shlex.split(v)[-2] for name, v in instructions() if name == "COPY"]
    assert sources == ["scripts/setup.sh", ".", "build/package/spillway_*.deb"]
    names = {shlex.split(v)[-1] for name, v in instructions() if name == "FROM" and " AS " in v}
    assert {"tools", "built", "made", "package"} == names
