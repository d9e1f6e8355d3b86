"""`python -m chaos`: injects faults and reports their effects.

Kills processes, exhausts resources, stops or slows processes, and sends randomly changed messages.
All acknowledged data must still be there, and every answer must be right. Otherwise the exit status
is 1.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from spillway_kv.lab import serving

from chaos import kills, mutations, shortages
from chaos.contents import Tally

ROOT = Path(__file__).resolve().parents[2]


def main(
    seed: Annotated[int, typer.Option()] = 0,
    daemon_kills: Annotated[int, typer.Option()] = 200,
    client_kills: Annotated[int, typer.Option()] = 200,
    runner_kills: Annotated[int, typer.Option()] = 100,
    rounds: Annotated[int, typer.Option(help="of each shortage")] = 20,
    messages: Annotated[int, typer.Option(help="changed, to each family of calls")] = 100_000,
    mutated: Annotated[
        Path | None, typer.Option(help="the daemon for those, such as one under ASan")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="a JSON file")] = None,
) -> None:
    """Injects faults and reports their effects."""
    binary = serving.find_binary(ROOT)
    serving.prefer_library(binary)
    total = Tally()
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="spillway-chaos-") as name:
        folder = Path(name)
        scenarios: dict[str, Callable[[np.random.Generator], Tally]] = {
            "daemon kills": lambda r: kills.kill_daemons(binary, folder, daemon_kills, r),
            "client kills": lambda r: kills.kill_clients(binary, folder, client_kills, r),
            "runner kills": lambda r: kills.kill_runners(runner_kills, r),
            "limits": lambda _: shortages.run_out(binary, folder, rounds),
            "descriptors": lambda _: shortages.few_descriptors(binary, folder, rounds),
            "slow ones": lambda r: shortages.slow_ones(binary, folder, rounds, r),
            "mutations": lambda r: mutations.mutate_messages(
                mutated or binary, folder, messages, r
            ),
        }
        for number, (what, run) in enumerate(scenarios.items()):
            begin = time.monotonic()
            found = run(np.random.default_rng([seed, number]))
            seconds[what] = time.monotonic() - begin
            total.add(found)
            faults = ", ".join(f"{count:,} {kind}" for kind, count in found.faults.items())
            print(
                f"{what}: {faults}; {found.checked_rows:,} rows checked, {found.lost_rows} lost, "
                f"{len(found.wrong_answers)} wrong answers, worst recovery "
                f"{found.worst_recovery_s:.2f} s, in {seconds[what]:.0f} s",
                flush=True,
            )
            for wrong in found.wrong_answers[:10]:
                print(f"  {wrong}", flush=True)
    print(
        f"faults injected: {sum(total.faults.values()):,}\n"
        f"acknowledged rows lost: {total.lost_rows}\n"
        f"wrong answers: {len(total.wrong_answers)}\n"
        f"worst recovery: {total.worst_recovery_s:.2f} s"
    )
    if output is not None:
        record = {
            "command": f"python -m chaos --seed {seed} --daemon-kills {daemon_kills} "
            f"--client-kills {client_kills} --runner-kills {runner_kills} --rounds {rounds} "
            f"--messages {messages}",
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
            "mutated_daemon": "release" if mutated is None else "under ASan and UBSan",
            "faults": total.faults,
            "checked_rows": total.checked_rows,
            "lost_rows": total.lost_rows,
            "wrong_answers": total.wrong_answers,
            "worst_recovery_s": round(total.worst_recovery_s, 3),
            "seconds": {what: round(value, 1) for what, value in seconds.items()},
        }
        output.write_text(json.dumps(record, indent=1) + "\n")
    if total.lost_rows or total.wrong_answers:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
