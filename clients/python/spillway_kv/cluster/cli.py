"""The command `spillway-cluster`."""

from __future__ import annotations

import sys
from enum import Enum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from spillway_kv.errors import SpillwayError

_NAMESPACE = "spillway"
_GIB = 1 << 30

app = typer.Typer(
    help="Runs Spillway daemons on the nodes of a Ray cluster.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Address = Annotated[
    str, typer.Option(help="Address of the Ray cluster; auto: the cluster of this node.")
]
Namespace = Annotated[str, typer.Option(help="Ray namespace; each cluster of daemons has its own.")]


class Strategy(str, Enum):
    """How daemons are placed on nodes."""

    spread = "spread"
    strict_spread = "strict-spread"
    pack = "pack"
    strict_pack = "strict-pack"


class Listen(str, Enum):
    """Where daemons listen."""

    tcp = "tcp"
    unix = "unix"


@app.command()
def up(
    daemons: Annotated[int, typer.Option(help="Number of daemons to start.")] = 1,
    strategy: Annotated[
        Strategy,
        typer.Option(
            help="spread: one daemon per node if possible; pack: on few nodes. The strict ones "
            "fail if this is not possible."
        ),
    ] = Strategy.spread,
    cpus: Annotated[float, typer.Option(help="Cores, and worker threads, of each daemon.")] = 1,
    gpus: Annotated[float, typer.Option(help="GPUs of each daemon; 0: it runs on the CPU.")] = 0,
    memory_limit: Annotated[
        str,
        typer.Option(
            help="Host memory of each daemon, such as 64GiB; empty: three quarters of the node's."
        ),
    ] = "",
    listen: Annotated[
        Listen,
        typer.Option(
            help="tcp: on the node's address, and on a socket for clients of the same node; unix: "
            "only on the socket."
        ),
    ] = Listen.tcp,
    allow_remote: Annotated[
        bool,
        typer.Option(
            "--allow-remote",
            help="Allow addresses other than loopback. Everybody who can reach the address may use "
            "the daemon, unless --config requires tokens or certificates.",
        ),
    ] = False,
    config: Annotated[
        str, typer.Option(help="File with settings of the daemons, on every node.")
    ] = "",
    token_file: Annotated[
        str, typer.Option(help="File, on every node, with the token for the daemons.")
    ] = "",
    binary: Annotated[str, typer.Option(help="The daemon's program file; empty: spillwayd.")] = "",
    state_folder: Annotated[
        str, typer.Option(help="Folder for logs and sockets, on every node.")
    ] = "",
    arena_folder: Annotated[
        str,
        typer.Option(
            help="Folder on tmpfs in which rows outlive their daemon; empty: they do not."
        ),
    ] = "/dev/shm",
    timeout: Annotated[
        float, typer.Option(help="Seconds that Ray may need to find free resources.")
    ] = 180,
    address: Address = "auto",
    namespace: Namespace = _NAMESPACE,
) -> None:
    """Starts daemons on the nodes, and the directory that knows which daemon has what."""
    from spillway_kv.cluster import deploy  # noqa: PLC0415  (Ray takes a second)
    from spillway_kv.cluster.settings import Settings  # noqa: PLC0415

    settings = Settings(
        daemon_count=daemons,
        strategy=strategy.name.upper(),  # type: ignore[arg-type]
        cpus=cpus,
        gpus=gpus,
        memory_limit=memory_limit,
        listen=listen.value,
        allow_remote=allow_remote,
        config=config,
        token_file=token_file,
        binary=binary,
        state_folder=state_folder,
        arena_folder=arena_folder,
    )
    deploy.join(address)
    console = Console(stderr=True)
    deploy.up(settings, namespace, timeout=timeout, told=console.print)
    _show(deploy.status(namespace))
    suffix = "" if namespace == _NAMESPACE else namespace
    console.print(f'spillway_kv.connect("ray:{suffix}") connects to them.')


@app.command()
def status(address: Address = "auto", namespace: Namespace = _NAMESPACE) -> None:
    """Shows the daemons and how full they are."""
    from spillway_kv.cluster import deploy  # noqa: PLC0415

    deploy.join(address)
    _show(deploy.status(namespace))


@app.command()
def drain(
    daemon: Annotated[str, typer.Argument(help="Name of the daemon, or id of its Ray node.")],
    own_only: Annotated[
        bool,
        typer.Option(
            "--own-only",
            help="If daemons require tokens: move only the sequences of the nodes' own token. "
            "Those of other tokens are lost with the daemon.",
        ),
    ] = False,
    address: Address = "auto",
    namespace: Namespace = _NAMESPACE,
) -> None:
    """Moves a daemon's sequences to the other daemons while they are in use, and ends it."""
    from spillway_kv.cluster import deploy  # noqa: PLC0415

    deploy.join(address)
    drained = deploy.drain(daemon, namespace, own_only=own_only)
    table = Table("sequence", "to", "tokens", "sealed for, ms")
    for part, (target, copied) in sorted(drained.moves.items()):
        table.add_row(
            part,
            target,
            str(copied.token_count),
            f"{1e3 * copied.sealed_seconds:.0f}",
        )
    console = Console()
    console.print(table)
    console.print(f"{len(drained.moves)} sequences moved, {len(drained.gone)} deleted meanwhile")


@app.command()
def down(address: Address = "auto", namespace: Namespace = _NAMESPACE) -> None:
    """Ends all daemons and the directory. Their rows are lost."""
    from spillway_kv.cluster import deploy  # noqa: PLC0415

    deploy.join(address)
    deploy.down(namespace)


def _show(state: Any) -> None:
    table = Table("daemon", "state", "node", "address", "memory, GiB", "sequences", "restarts")
    for each in state.daemons:
        table.add_row(
            each.name,
            each.state if not each.reason else f"{each.state}: {each.reason}",
            each.node[:12],
            each.target,
            f"{each.memory_used_bytes / _GIB:.1f} of {each.memory_limit_bytes / _GIB:.1f}",
            str(each.sequence_count),
            str(each.restart_count),
        )
    console = Console()
    console.print(table)
    for dealt in state.models:
        parts = f", {dealt.part_count} parts" if dealt.part_count > 1 else ""
        console.print(f"{dealt.model.name}: {dealt.model.layer_count} layers{parts}")


def main() -> None:
    """Runs the command line. An error is printed as one line, without a traceback."""
    try:
        app()
    except (SpillwayError, ValueError, OSError) as error:
        print(f"spillway-cluster: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
